# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/field.md: vllm-ascend's tested P/D configurations, and which of them start with this connector.

Started by scripts/field.sh; tools/support/field.py decides for each whether it starts.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tools.support import bases, sdist, small
from tools.support.bases import UNNAMED, Base
from tools.support.models import ROOT
from tools.support.pages import Marks
from vllm_ascend_pd.errors import PdError

if TYPE_CHECKING:
    from tools.support.field import FieldVerdict, Known

PINNED, BEFORE = sdist.VLLM_ASCEND, sdist.OLDER
FOLDER = "tests/e2e"
PAGE = ROOT / "docs" / "field.md"
MARKS = Marks.of("scripts/field.sh")
STARTS = "would start"
FIRST = "yes"  # D begins with P's token


def verdicts(texts: Mapping[str, str], known: Known) -> list[FieldVerdict]:
    """Return the verdicts of all files with a producer, sorted by name."""
    from tools.support.field import verdict  # imports vLLM, which takes seconds that --help need not wait for

    by_name = {}
    for path, text in sorted(texts.items()):
        if path.endswith(".yaml") and "kv_producer" in text:
            if (name := name_of(PurePosixPath(path))) in by_name:
                raise ValueError(f"two configurations are called {name}")
            by_name[name] = verdict(name, text, known)
    return list(by_name.values())


def name_of(path: PurePosixPath) -> str:
    """Return a configuration's name: its file's, behind the folder that says when it runs, or whose model it has."""
    return f"{path.parts[0] if path.parts[0] != 'cases' else path.parent.name}/{path.stem}"


def tables(results: Sequence[FieldVerdict], base: Base = UNNAMED, source: str = "") -> str:
    """Return the page's tables. `source`: vllm-ascend's code, in which the switches must stand."""
    configurations = _configurations(results, small.sets(base.minor))
    parts = [_summary(results, base), _reasons(results), configurations, _unknown(results), _switches(results, source)]
    return "\n\n".join(part for part in parts if part)


def shorter(results: Sequence[FieldVerdict], base: Base) -> str:
    """Return what the page has of the release before."""
    names, sets = ["configuration", "P and D", "with P's token", "in small"], small.sets(base.minor)
    lines = [f"### vllm-ascend {base.version}", "", _counts(results, base), ""]
    lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for each in results:
        refused = _cell((*each.refusals("P"), *each.refusals("D"))) or (each.pair if not each.both else STARTS)
        lines.append(f"| {' | '.join([each.name, refused, *_shown(each, sets)])} |")
    return "\n".join(lines)


def _summary(results: Sequence[FieldVerdict], base: Base) -> str:
    return _counts(results, base, "**")


def _counts(results: Sequence[FieldVerdict], base: Base, strong: str = "") -> str:
    both = [each for each in results if each.both]
    alone = {side: sum(each.starts(side) for each in results) for side in ("P", "D")}
    in_small = [small.stands(each.needs, small.sets(base.minor)) for each in both]
    shown = [sets for sets in in_small if sets.startswith("`")]
    sentences = [
        f"vllm-ascend {base.version} with vLLM {base.vllm}: {strong}P and D would start in {len(both)} of {len(results)} "
        f"configurations.{strong}",
        f"P would start in {alone['P']}, D in {alone['D']}.",
        f"In {sum(not each.no_first for each in both)} D begins with P's first token.",
        f"In small, sets of engines have the kinds of cache and the draft of {len(shown)};",
        f"of {sum(';' not in sets for sets in shown)} one set has all modes too.",
    ]
    return textwrap.fill(" ".join(sentences), 120, break_on_hyphens=False)


def words(refused: PdError) -> str:
    """Return a refusal for a table: the code, and what is refused."""
    return f"{refused.code} {_what(refused)}"


def _what(refused: PdError) -> str:
    """Return what is refused; of a layer's layout not the sizes, which each configuration has of its own."""
    sentence = refused.sentence.partition(": ")[0] if "layer" in refused.values else refused.sentence
    return str(refused.values.get("feature") or sentence).replace("|", "/")


def _cell(refusals: Iterable[PdError]) -> str:
    """Return all refusals, each code once."""
    by_code: dict[str, list[str]] = {}
    for refused in refusals:
        by_code.setdefault(refused.code, []).append(_what(refused))
    return "; ".join(f"{code} {'; '.join(details)}" for code, details in by_code.items())


def _reasons(results: Sequence[FieldVerdict]) -> str:
    """Return the refusals' counts.

    The first is what an engine raises; lifting one helps only where it is the only one.
    """
    first: dict[str, Counter[str]] = {side: Counter() for side in ("P", "D")}
    anywhere: Counter[str] = Counter()
    only: Counter[str] = Counter()
    for each in results:
        reasons = set()
        for side in ("P", "D"):
            texts = [words(refused) for refused in each.refusals(side)]
            first[side].update(texts[:1])
            reasons.update(texts)
        if each.starts("P") and each.starts("D") and not each.both:
            reasons.add(each.pair)
        anywhere.update(reasons)
        if len(reasons) == 1:
            only.update(reasons)
    rows = sorted(anywhere, key=lambda reason: (-anywhere[reason], reason))
    return "\n".join(
        [
            "| reason | configurations that have it | P says it first | D says it first | it alone stands in the way |",
            "|---|--:|--:|--:|--:|",
            *(f"| {r} | {anywhere[r]} | {first['P'][r]} | {first['D'][r]} | {only[r]} |" for r in rows),
        ]
    )


def _configurations(results: Iterable[FieldVerdict], sets: Mapping[str, small.Needs]) -> str:
    names = ["configuration", "model", "P: TP × DP", "P", "D: TP × DP", "D", "the pair", "with P's token", "in small"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for each in results:
        cells = [each.name, each.model]
        for side, engines in (("P", each.p), ("D", each.d)):
            cells.append(", ".join(dict.fromkeys(f"{engine.tp} × {engine.dp}" for engine in engines)))
            beside = {f"beside {name}, which is not judged" for engine in engines for name in engine.beside}
            stated = _cell(each.refusals(side)) or (STARTS if engines else "none")
            cells.append("; ".join([stated, *sorted(beside)]))
        lines.append(f"| {' | '.join([*cells, each.pair or '–', *_shown(each, sets)])} |")
    return "\n".join(lines)


def _shown(each: FieldVerdict, sets: Mapping[str, small.Needs]) -> tuple[str, str]:
    """Return whether D begins with P's token, or why not, and the sets that stand for a configuration."""
    return (each.no_first or FIRST, small.stands(each.needs, sets)) if each.both else ("–", "–")


def _unknown(results: Iterable[FieldVerdict]) -> str:
    count: Counter[str] = Counter()
    for each in results:
        count.update({flag for engine in (*each.p, *each.d) for flag in engine.unknown})
    left = ", ".join(f"`{flag}` ({number})" for flag, number in sorted(count.items()))
    return (
        f"Flags that vLLM's parser here does not know or take, left out (in how many configurations): {left or 'none'}."
    )


def is_read(switch: str, source: str) -> bool:
    """Return whether vllm-ascend's code reads a switch where it stands, in the environment or --additional-config."""
    if switch.startswith(small.ITS):
        return f'"{switch}"' in source
    first, *inner = switch.split(".")
    read = rf'additional_config(?: or \{{\}}\))?(\.get\(|\[|,)\s*"{first}"|"{first}" in additional_config'
    # From 0.30 on the configuration is a dataclass, with the switches as its fields.
    fields = {name for name in (first, *inner) if re.search(rf"^    {name}: ", source, re.MULTILINE)}
    outer = first in fields or re.search(read, source) is not None
    return outer and all(name in fields or f'"{name}"' in source for name in inner)


def _switches(results: Iterable[FieldVerdict], source: str) -> str:
    count: Counter[str] = Counter()
    covered = small.covered()
    for each in results:
        count.update({switch for engine in (*each.p, *each.d) for switch in engine.switches - covered})
    unread = {name for name in count if source and not is_read(name, source)}
    listed = sorted(count.items(), key=lambda one: (-one[1], one[0]))
    nowhere = ", ".join(f"`{name}` ({number})" for name, number in listed if name in unread) or "none"
    last = f"Switches that this vllm-ascend does not read where they stand (in how many configurations): {nowhere}."
    return "\n".join(
        [
            "Switches of vllm-ascend that admission does not look at, and that no set of engines has:",
            "",
            "| switch | configurations in which it is on |",
            "|---|--:|",
            *(f"| `{name}` | {number} |" for name, number in listed if name not in unread),
            "",
            textwrap.fill(last, 120, break_on_hyphens=False),
        ]
    )


def starting(text: str) -> set[str]:
    """Return the configurations of a printed table whose P and D would start, those of the release before too."""
    rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("|")]
    main = {row[0] for row in rows if len(row) == 9 and not row[6].startswith("PD-") and _start(row[3], row[5])}
    return main | {f"{BEFORE.version}: {row[0]}" for row in rows if len(row) == 4 and _start(row[1])}


def _start(*cells: str) -> bool:
    return all(cell.startswith(STARTS) for cell in cells)


def lost(between: str, printed: str) -> list[str]:
    """Return the configurations that would start according to the page, and no longer do."""
    gone = sorted(starting(between) - starting(printed))
    return [f"{name} would start, says the page, and no longer does" for name in gone]


def compare(between: str, printed: str) -> list[str]:
    """Return the differences of a page from the printed tables."""
    wrong = lost(between, printed)
    if not wrong and between != printed:
        wrong = ["the page is not what is printed now: scripts/field.sh --write, and say why in the change"]
    return wrong


def _distributions(given: Sequence[Path]) -> list[Path]:
    """Return the pinned distributions: a given file by its name, else from the index."""
    pins = {pin.file: pin for pin in (PINNED, BEFORE)}
    if stray := [path for path in given if path.name not in pins]:
        raise sdist.NotThePinned(f"{stray[0]} is not called as a pinned distribution: {', '.join(pins)}")
    given_files = {path.name: sdist.checked(pins[path.name], path) for path in given}
    return [given_files.get(name) or sdist.ensure(pin) for name, pin in pins.items()]


def judged(pin: sdist.Pin, path: Path) -> tuple[list[FieldVerdict], Base, str]:
    """Return the verdicts of a release's configurations, the release, and its code."""
    from tools.support.field import known_models

    texts = sdist.read(path, "", (".py", ".yaml", bases.RECIPE))
    base = Base.of(pin.version, texts)
    results = verdicts(sdist.under(texts, FOLDER), replace(known_models(), base=base))
    return results, base, "\n".join(sdist.under(texts, bases.FOLDER).values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/field.sh",
        description="Reads the P/D configurations in vllm-ascend's source distribution (two pinned ones; fetched by pip into "
        ".cache, 36 MB, once), puts this connector in the place of theirs, and prints for each engine whether it would start, or the "
        "code and the reasons for which this package's admission refuses it. Nothing is started.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--write", action="store_true", help="write the tables into docs/field.md; exit code 1 when a start is lost"
    )
    how.add_argument("--check", action="store_true", help="exit code 1 when a start is lost, or docs/field.md differs")
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", action="append", default=[], help="a downloaded copy of a distribution"
    )
    args = parser.parse_args(arguments)
    try:
        paths = _distributions(args.sdist)
    except (sdist.Unreachable, sdist.NotThePinned, OSError) as problem:
        print(f"field: {problem}", file=sys.stderr)
        return 2
    (newest, base, source), (before, older, _) = (
        judged(pin, path) for pin, path in zip((PINNED, BEFORE), paths, strict=True)
    )
    printed = tables(newest, base, source) + "\n\n" + shorter(before, older) + "\n"
    if not args.write and not args.check:
        print(printed, end="")
        return 0
    page = PAGE.read_text()
    between = MARKS.split(page)[1]
    if args.write:
        PAGE.write_text(MARKS.filled(page, printed.splitlines()))
    wrong = lost(between, printed) if args.write else compare(between, printed)
    for line in wrong:
        print(f"field: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    logging.getLogger("vllm_ascend_pd").setLevel(logging.ERROR)  # ignored keys are described in docs/migration.md
    sys.exit(main())
