# SPDX-License-Identifier: Apache-2.0
"""tools/matrix.py: the output of a row's tests becomes its line; a row that has not run keeps its own."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tools import matrix
from tools.matrix import MARKS, RowResult, read, written
from tools.support.from_tests import engine_sets
from tools.support.matrix import COMBINATIONS, HOW, PAIRS, REFUSED, ROWS
from vllm_ascend_pd.admission.cache import GROUPED

PAGE = f"before\n{MARKS.begin}\nan older table\n{MARKS.end}\nafter\n"
RAN = """.tokens: 10 answers, 120 tokens compared, 0 excused
engines: 2 servers started, 73 s in all
1 passed, 14 warnings in 73.46s (0:01:13)
"""


def test_each_row_names_tests_that_are_there_and_the_page_has_each() -> None:
    page = matrix.PAGE.read_text()
    for row in ROWS:
        assert (matrix.ROOT / row.tests[0]).is_file() and f"| `{row.name}` | {row.mode} |" in page, row
    assert len({row.name for row in ROWS}) == len({row.mode for row in ROWS}) == len(ROWS)
    assert all(row.ci in ("all", "one") or row.ci.startswith("no: ") for row in ROWS), "what CI leaves out has a reason"
    slow = re.compile(r"^pytestmark = .*mark\.slow", re.MULTILINE)
    shown = [row for row in ROWS if not row.ci.startswith("no: ")]
    assert not [row.name for row in shown if slow.search((matrix.ROOT / row.tests[0]).read_text())]


def test_each_set_of_engines_under_vllm_ascend_is_in_one_row() -> None:
    titles = [engines.title for engines in engine_sets()]
    listed = [title for row in ROWS if row.tests[0] == PAIRS for title in matrix.engine_sets(row)]
    assert len(titles) > 40
    assert sorted(listed) == sorted(titles)


def test_the_pages_tables_of_the_source_are_as_it_says() -> None:
    page = matrix.PAGE.read_text()
    assert matrix.with_sections(page) == page, "scripts/matrix.sh --write"


def test_the_readmes_tables_are_of_the_same_source() -> None:
    names = {row.name for row in ROWS}
    assert all(names.issuperset(one.rows) for one in COMBINATIONS)
    assert {shown.how for one in COMBINATIONS for shown in (one.direct, one.regrouped)} == HOW.keys()
    for path, text in matrix.readmes().items():
        assert path.read_text() == text, f"{path.name}: scripts/matrix.sh --write"


def features(file: Path) -> set[str]:
    """Return what a file's calls of not_proven name; … stands for what they insert, unless it is a constant's name."""
    constants = {"GROUPED": GROUPED}
    names = set()

    def said(node: ast.expr, variables: dict[str, ast.expr]) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(said(part, variables) for part in node.values)
        inner = node.value if isinstance(node, ast.FormattedValue) else node
        if isinstance(inner, ast.Name) and inner.id in constants:
            return constants[inner.id]
        if isinstance(node, ast.Name) and node.id in variables:
            return said(variables[node.id], {})
        return "…"

    for function in ast.walk(ast.parse(file.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        variables: dict[str, ast.expr] = {}
        nodes = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.Call))]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                variables[node.targets[0].id] = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "not_proven":
                names.add(re.sub("…+", "…", said(node.args[0], variables)))
    return names


def test_each_refusal_in_the_code_has_its_reason_on_the_page_and_no_other() -> None:
    package = matrix.ROOT / "vllm_ascend_pd"
    in_code = set[str]().union(*map(features, package.rglob("*.py")))
    on_page = [feature for one in REFUSED for feature in one.features]
    assert len(in_code) > 40
    assert sorted(on_page) == sorted(in_code)
    assert all(one.why and one.features for one in REFUSED)


def test_what_the_readme_says_of_engines_has_rows_whose_recorded_result_is_good() -> None:
    """Only comparisons with a reference have no row: unit tests, which every run of them repeats."""
    lines = matrix.known(matrix.PAGE.read_text())
    for one in COMBINATIONS:
        of_engines = any(shown.how in ("real pair", "CANN stand-in") for shown in (one.direct, one.regrouped))
        assert bool(one.rows) is of_engines, one.english
        for name in one.rows:
            result, commit = lines[name][matrix.RESULT], lines[name][matrix.COMMIT]
            assert re.fullmatch(r"\d+ passed(, \d+ skipped)?", result), f"{name}: {result}"
            assert re.fullmatch(r"[0-9a-f]{12}", commit), f"{name}: {commit}"


@pytest.mark.parametrize(
    ("result", "vllm", "expected"),
    [
        ("9 passed", "0.23.0", ("0.23",)),
        ("9 passed", "0.23.0, 0.30.0", ("0.30",)),
        ("**1 failed**", "0.30.0", ()),
        ("has not run", "0.30.0", ()),
    ],
)
def test_a_set_ran_with_the_releases_of_its_rows_good_record(result: str, vllm: str, expected: tuple[str, ...]) -> None:
    lines = {ROWS[0].name: {matrix.RESULT: result, matrix.VLLM: vllm}}
    assert matrix.releases(lines, ROWS[0], "0.30") == expected


@pytest.mark.parametrize(
    ("output", "code", "words", "counts"),
    [
        (RAN, 0, "1 passed", (10, 120)),
        ("figure: bf16: 14 answers, 168 tokens compared, 0 excused\n2 failed, 3 passed in 9.1s", 1, "2 failed, 3 passed", (14, 168)),
        ("...gqa 2to1 multi: 15 answers, 1644 tokens compared, 0 excused; all blocks free\n3 passed in 9s", 0, "3 passed", (15, 1644)),
        (".s\n3 skipped in 0.15s\n", 0, "3 skipped", (0, 0)),
        ("Traceback", 124, "exit code 124", (0, 0)),
    ],
)  # fmt: skip
def test_what_a_run_printed_is_read(output: str, code: int, words: str, counts: tuple[int, int]) -> None:
    result = read(ROWS[0], output, code, 90.0, "abc")
    assert (result.words, result.good, result.minutes, (result.answers, result.tokens)) == (
        words,
        "passed" in words and not code,
        1.5,
        counts,
    )


def test_the_page_takes_what_ran_and_keeps_the_rest(tmp_path: Path) -> None:
    first, second = ROWS[:2]
    record = RowResult(first.name, "9 passed", True, 10, 120, 2.5, "abc")
    (tmp_path / f"{first.name}.json").write_text(json.dumps(asdict(record)))
    page = written(PAGE, tmp_path, "abc")
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "an older table" not in page
    assert (
        f"| `{first.name}` | {first.mode} | {first.vllm} | {first.how} | 9 passed | 10, 120 | 2.5 | {first.ci} | abc |"
        in page
    )
    assert f"| `{second.name}` | {second.mode} | {second.vllm} | {second.how} | has not run |" in page
    (tmp_path / f"{first.name}.json").unlink()
    assert written(page, tmp_path, "def") == page, "it has not run here, and keeps what the page says"
    failed = RowResult(first.name, "1 failed", False, 0, 0, 1.0, "def")
    (tmp_path / f"{first.name}.json").write_text(json.dumps(asdict(failed)))
    assert "| **1 failed** | – | 1 |" in written(page, tmp_path, "def")


def test_the_page_has_the_minutes_of_what_ci_runs_of_a_row(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.ci == "one")

    def cell(page: str) -> str:
        return matrix.known(page)[row.name][matrix.IN_CI]

    assert cell(written(PAGE, tmp_path, "abc")) == "one"
    page = written(PAGE, tmp_path, "abc", {row.name: 1.4})
    assert cell(page) == "one, 1.4"
    assert matrix.known(page)[row.name][matrix.RESULT] == "has not run", "a part of a row is no result of the row"
    assert written(page, tmp_path, "def") == page, "kept from the page, as a result is"


def test_minutes_in_ci_are_of_a_report_in_which_all_of_a_rows_tests_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_small.py").write_text(
        "import pytest\n"
        "class TestOne:\n"
        "    @pytest.mark.parametrize('x', ['a::b', 'c'])\n"
        "    def test_it(self, x): pass\n"
        "@pytest.mark.slow\n"
        "def test_slow(): pass\n"
        "def test_skipped(): pytest.skip('no')\n"
    )
    made, skipped = (
        ROWS[0]._replace(name=words, tests=("tests/test_small.py", "-k", words), ci="one")
        for words in ("test_it", "test_skipped")
    )
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "ROWS", (made, skipped))
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--junitxml", str(report), "tests"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    text = report.read_text()
    report.write_text(re.sub(r' time="[^"]*"', ' time="45.0"', text))
    assert matrix.in_ci(report) == {"test_it": 1.5}, "two tests, no row without a result"
