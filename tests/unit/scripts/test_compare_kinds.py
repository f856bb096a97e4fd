# SPDX-License-Identifier: Apache-2.0
"""tools/compare_kinds.py: a kind that ran with all connectors gets a new line, any other keeps the page's."""

from __future__ import annotations

import re

from tools import compare_kinds
from tools.compare_kinds import CASES, CONNECTORS, MARKS, table, told

ONE, OTHER, THIRD = list(CASES)[:3]


def test_the_page_takes_what_ran_and_keeps_the_rest() -> None:
    kept = f"| {CASES[OTHER].title} | right | **wrong** | refused | 1111111 |"
    page = f"before\n{MARKS.begin}\n| an older head |\n|---|\n| {CASES[ONE].title} | a | b | c | 1111111 |\n{kept}\n{MARKS.end}\nafter\n"
    found = {f"{ONE} {name}": f"right with {name}" for name in CONNECTORS}
    found |= {f"{OTHER} ours": "right", f"{THIRD} ours": "right"}  # two cells of these are missing
    made = MARKS.filled(page, table(found, page, "2222222"))
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
    assert told("one | two\n  three") == "one / two three"
