# SPDX-License-Identifier: Apache-2.0
"""Run rows of the matrix (a mode of P and D, tests that show it), or write their results into docs/matrix.md.

The page's other tables, and the READMEs' table of combinations, are made of tools/support/matrix.py.

Each row is a pytest run of its own with a record in out/matrix, so that an interrupted run can continue: without names
all rows run that have no good record of this commit. A row without a record of this commit keeps its result on the
page. What CI's share of the rows takes is read from a report of a run of CI (--in-ci).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType

from tools.parts import ROOT, commit, pytest_run
from tools.support.matrix import COMBINATIONS, HOW, NOT_RUN, PAIRS, REFUSED, ROWS, MatrixRow, Shown
from tools.support.pages import Marks

PAGE = ROOT / "docs" / "matrix.md"
MARKS = Marks.of("scripts/matrix.sh")
IN_ENGLISH, IN_CHINESE = ("combination", "direct", "regrouped"), ("组合", "直接推送", "重组后推送")
# The columns of the page's table of runs, by their names there.
RESULT, COMPARED, MINUTES, IN_CI = "result", "answers, tokens compared (at least)", "minutes", "in CI, minutes there"
VLLM, COMMIT = "vLLM", "commit"  # of the result
HEAD = ("row", "mode", VLLM, "how", RESULT, COMPARED, MINUTES, IN_CI, COMMIT)
DEADLINE_S = 7200.0
_TOKENS = re.compile(r": (\d+) answers, (\d+) tokens compared")


@dataclass(frozen=True)
class RowResult:
    row: str
    words: str  # from pytest: "9 passed"
    good: bool
    answers: int
    tokens: int
    minutes: float
    commit: str


def read(row: MatrixRow, output: str, code: int, seconds: float, at: str) -> RowResult:
    """Return the result of a row from pytest's output."""
    last = [
        line for line in output.splitlines() if " in " in line and re.search(r"\d+ (passed|failed|error|skipped)", line)
    ]
    words = (
        re.sub(r", \d+ (warnings?|deselected)", "", last[-1].strip("= ").split(" in ")[0])
        if last
        else f"exit code {code}"
    )
    counts = [(int(a), int(t)) for a, t in _TOKENS.findall(output)]
    answers, tokens = max(counts, default=(0, 0))
    good = code == 0 and "passed" in words  # a skipped test has shown nothing
    return RowResult(row.name, words, good, answers, tokens, round(seconds / 60, 1), at)


def run(row: MatrixRow, folder: Path, at: str) -> RowResult:
    """Run one row to its end; its output is kept beside its record."""
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{row.name}.log"
    code = pytest_run(("-m", "", *row.tests), log, DEADLINE_S)
    output = log.read_text(errors="replace")
    result = read(row, output, code, time.monotonic() - begun, at)
    (folder / f"{row.name}.json").write_text(json.dumps(asdict(result), indent=1))
    return result


def recorded(row: MatrixRow, folder: Path, at: str) -> RowResult | None:
    """Return the row's recorded result on this commit."""
    try:
        result = RowResult(**json.loads((folder / f"{row.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return result if result.commit == at else None


def in_ci(report: Path) -> dict[str, float]:
    """Return the minutes of CI's tests of each row from pytest's report (--junitxml) of a run of CI.

    A row has none if one of these tests did not pass there.
    """
    minutes: dict[str, float] = {}
    cases = {
        (case.get("classname"), case.get("name")): case for case in xml.etree.ElementTree.parse(report).iter("testcase")
    }
    for row in ROWS:
        if row.ci in ("all", "one"):
            of_row = [cases.get(name) for name in _selected_by_ci(row)]
            if of_row and all(case is not None and not len(case) for case in of_row):
                seconds = sum(float(case.get("time", 0)) for case in of_row if case is not None)
                minutes[row.name] = max(0.1, round(seconds / 60, 1))
    return minutes


def _selected_by_ci(row: MatrixRow) -> list[tuple[str, str]]:
    """Return which of a row's tests CI selects, each as the class and name of a report."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", *row.tests)
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout
    names = []
    for line in listed.splitlines():
        path, *classes = line.partition("[")[0].split("::")
        if classes:
            scope = ".".join((path.removesuffix(".py").replace("/", "."), *classes[:-1]))
            names.append((scope, line[line.partition("[")[0].rindex("::") + 2 :]))
    return names


def cells(result: RowResult | None) -> dict[str, str]:
    """Return what a result has in its columns."""
    if result is None:
        return {RESULT: "has not run", COMPARED: "–", MINUTES: "–", COMMIT: "–"}
    return {
        RESULT: result.words if result.good else f"**{result.words}**",
        COMPARED: f"{result.answers}, {result.tokens}" if result.answers else "–",
        MINUTES: f"{result.minutes:g}",
        COMMIT: result.commit,
    }


def share(row: MatrixRow, minutes: Mapping[str, float], before: str) -> str:
    """Return which of a row's tests CI runs, and their minutes there: `before` is what the page has."""
    if row.name in minutes:
        return f"{row.ci}, {minutes[row.name]:g}"
    return before if before.startswith(f"{row.ci}, ") else row.ci


def known(page: str) -> dict[str, dict[str, str]]:
    """Return the cells of the page's rows, by row and by column."""
    rows: dict[str, dict[str, str]] = {}
    for line in page.splitlines():
        if line.startswith("| ") and len(words := line.strip().strip("|").split(" | ")) == len(HEAD):
            name, *_ = words = [word.strip() for word in words]
            rows[name.strip("`")] = dict(zip(HEAD, words, strict=True))
    return rows


def table(page: str, folder: Path, at: str, minutes: Mapping[str, float]) -> str:
    """Return the table of runs as it belongs between the page's marks."""
    before = known(page)
    lines = []
    for row in ROWS:
        result, old = recorded(row, folder, at), before.get(row.name, {})
        line = {"row": f"`{row.name}`", "mode": row.mode, VLLM: row.vllm, "how": row.how, **cells(result)}
        if old and not result:
            line |= {name: old[name] for name in (VLLM, RESULT, COMPARED, MINUTES, COMMIT)}
        line[IN_CI] = share(row, minutes, old.get(IN_CI, ""))
        lines.append(tuple(line[name] for name in HEAD))
    return lines_of(HEAD, lines)


def written(page: str, folder: Path, at: str, minutes: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return the page with what is recorded of this commit, and with the minutes of CI's tests by row."""
    return MARKS.filled(page, [table(page, folder, at, minutes)])


def lines_of(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    first, *rest = ("| " + " | ".join(cells) + " |" for cells in (head, *lines))
    return "\n".join((first, "|" + "---|" * len(head), *rest))


def engine_sets(row: MatrixRow) -> list[str]:
    """Return the sets of engines under vllm-ascend that a row's words (pytest -k) select."""
    from tools.support import from_tests  # imports vLLM, which runs of rows do not need

    titles = [engines.title for engines in from_tests.engine_sets()]
    words = row.tests[2]

    def selected(title: str) -> bool:
        said = re.sub(r"\w+", lambda word: word[0] if word[0] in ("and", "or", "not") else str(word[0] in title), words)
        return bool(eval(said))  # True, False, and, or, not, brackets

    return [title for title in titles if selected(title)]


def with_sections(page: str) -> str:
    """Return the page with its tables that follow from the source alone: combinations, sets of engines, refusals."""
    from tools.support import can, from_tests, shapes  # import vLLM, which runs of rows do not need

    def shown(one: Shown) -> str:
        return f"{one.how}: {one.what}" if one.what else one.how

    rows = dict(zip(ascii_lowercase, (row for row in ROWS if row.tests[0] == PAIRS), strict=False))
    letters = {title: letter for letter, row in rows.items() for title in engine_sets(row)}
    asked = {str(engines): (engines, names) for engines, names in from_tests.asked_sets()}
    ran = {title: releases(known(page), rows[letters[title]], one.release) for title, (one, _) in asked.items()}
    made = {
        "can I": lines_of(*can.table(asked, ran)),
        "combinations": lines_of(
            (*IN_ENGLISH, "rows"),
            [(one.english, shown(one.direct), shown(one.regrouped), _quoted(one.rows) or "–") for one in COMBINATIONS],
        ),
        "sets": lines_of(
            ("", "row", "sets of engines"),
            [(letter, f"`{row.name}`", _quoted(engine_sets(row))) for letter, row in rows.items()],
        ),
        "shapes": lines_of(*shapes.grid(from_tests.engine_sets(), letters)),
        "refused": lines_of(("refused", "why"), [(one.mode, one.why) for one in REFUSED]),
        "not run": lines_of(("not run", "why"), NOT_RUN.items()),
    }
    for name, lines in made.items():
        page = section(name).filled(page, [lines])
    return page


def releases(lines: Mapping[str, Mapping[str, str]], row: MatrixRow, today: str) -> tuple[str, ...]:
    """Return with which releases (0.30) a set of a row has run well, by the page's lines. `own`: the set's today."""
    line = lines.get(row.name, {})
    if not re.match(r"\d+ passed", line.get(RESULT, "")):
        return ()
    ran_with = tuple(".".join(one.split(".")[:2]) for one in line[VLLM].split(", "))
    return (today,) if today in ran_with else ran_with


def section(name: str) -> Marks:
    """Return the marks around a table that follows from the source alone."""
    return Marks(
        f"<!-- scripts/matrix.sh --write, {name}: begin -->", f"<!-- scripts/matrix.sh --write, {name}: end -->"
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def readmes() -> dict[Path, str]:
    """Return each README with its new table."""
    english = [(one.english, one.direct.how, one.regrouped.how) for one in COMBINATIONS]
    chinese = [(one.chinese, HOW[one.direct.how], HOW[one.regrouped.how]) for one in COMBINATIONS]
    made = {ROOT / "README.md": lines_of(IN_ENGLISH, english), ROOT / "README.zh-CN.md": lines_of(IN_CHINESE, chinese)}
    return {path: MARKS.filled(path.read_text(), [lines]) for path, lines in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/matrix.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", nargs="*", help="run only these, even if they were good; default: all")
    parser.add_argument("--list", action="store_true", help="print the rows and their records on this commit")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/matrix.md from the records, and the READMEs' tables, and run nothing",
    )
    parser.add_argument(
        "--in-ci",
        type=Path,
        metavar="REPORT",
        help="as --write, with the minutes of CI's tests from a report of scripts/test.sh --ci --junitxml REPORT",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "matrix", help=argparse.SUPPRESS)
    args = parser.parse_args()
    by_name, at = {row.name: row for row in ROWS}, commit(ROOT)
    if strange := [name for name in args.row if name not in by_name]:
        parser.error(f"no such row: {', '.join(strange)}; --list names them")
    if args.in_ci is not None and not args.in_ci.is_file():
        parser.error(f"there is no {args.in_ci}: scripts/test.sh --ci --junitxml {args.in_ci} makes it")
    if args.write or args.in_ci is not None:
        minutes = {} if args.in_ci is None else in_ci(args.in_ci)
        PAGE.write_text(with_sections(written(PAGE.read_text(), args.out, at, minutes)))
        for path, text in readmes().items():
            path.write_text(text)
        return 0
    if args.list:
        for row in ROWS:
            result = recorded(row, args.out, at)
            print(f"{row.name:24} {row.mode[:60]:60} {result.words if result is not None else 'has not run here'}")
        return 0
    bad = 0
    for row in [by_name[name] for name in args.row] or ROWS:
        result = recorded(row, args.out, at)
        if not args.row and result is not None and result.good:
            continue
        print(f"{row.name} … ", end="", flush=True)
        result = run(row, args.out, at)
        bad += not result.good
        print(f"{result.words}, {result.minutes:g} min", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
