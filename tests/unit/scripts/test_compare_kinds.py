# SPDX-License-Identifier: Apache-2.0
"""tools/compare_kinds.py: a kind that ran with all connectors gets a new line, any other keeps the page's."""

from __future__ import annotations

import re
from pathlib import Path

from tools import compare_kinds
from tools.compare_kinds import CASES, CONNECTORS, MARKS, one_line, refusal, table
from tools.support.process import ProcessDied

ONE, OTHER, THIRD = list(CASES)[:3]


def test_the_page_takes_what_ran_and_keeps_the_rest() -> None:
    kept = f"| {CASES[OTHER].title} | right | **wrong** | refused | 1111111 |"
    page = f"before\n{MARKS.begin}\n| an older head |\n|---|\n| {CASES[ONE].title} | a | b | c | 1111111 |\n{kept}\n{MARKS.end}\nafter\n"
    results = {f"{ONE} {name}": f"right with {name}" for name in CONNECTORS}
    results |= {f"{OTHER} ours": "right", f"{THIRD} ours": "right"}  # two cells of these are missing
    made = MARKS.filled(page, table(results, page, "2222222"))
    head, rule, *lines = MARKS.split(made)[1].splitlines()
    assert head.count("|") == rule.count("|") == len(CONNECTORS) + 3
    assert lines == [
        f"| {CASES[ONE].title} | right with ours | right with nixl | right with mooncake | 2222222 |",
        kept,
    ]
    assert made.startswith(f"before\n{MARKS.begin}\n") and made.endswith(f"\n{MARKS.end}\nafter\n")
    assert MARKS.filled(made, table({}, made, "3333333")) == made


def test_the_page_has_a_line_for_each_kind_and_a_commit_in_each() -> None:
    lines = MARKS.split(compare_kinds.PAGE.read_text())[1].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [case.title for case in CASES.values()]
    assert all(re.search(r"\| [0-9a-f]{7,12} \|$", line) for line in lines), lines


def test_an_error_does_not_break_the_table() -> None:
    assert one_line("one | two\n  three") == "one / two three"


def test_the_reason_of_a_refused_start_is_the_first_exception_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "d.log"
    warned = "(APIServer pid=1) WARNING 11-25 [x.py:2] this can cause errors like `OSError: [Errno 24] Too many open files`.\n"
    log.write_text(f"{warned}(APIServer pid=1) builtins.RuntimeError: first | one\nValueError: its consequence\n")
    assert refusal(ProcessDied(f"d died; the end of {log}:\n...")) == "RuntimeError: first / one"
    invalid = "(APIServer pid=1) pydantic_core._core.ValidationError: 1 validation error for VllmConfig\n"
    invalid += "(APIServer pid=1)   Assertion failed, P's TP must be larger. [type=assertion_error, input_value=ArgsKwargs()]\n"
    log.write_text(warned + invalid)
    assert refusal(ProcessDied(f"d died; the end of {log}:\n...")) == "ValidationError: P's TP must be larger."
    log.write_text(warned)
    assert refusal(ProcessDied(f"d died; the end of {log}:\nnothing else")).startswith("d died; the end of")
