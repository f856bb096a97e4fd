# SPDX-License-Identifier: Apache-2.0
"""Totals over the outputs of many runs of scripts/simulate.sh, one file for each run.

Usage: `python -m simulation.sums FILE…`
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

_SEEDS = re.compile(r"^(\d+) seeds, (\d+) transfers, (\d+) events")
_COUNT = re.compile(r"^ +(\d+)  (\S.*)$")
_ENDS = re.compile(r"(\d+) (ended well|failed and fenced|died with their D|writes landed|revocations|exchanges)")


def summed(texts: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Return totals and faults. A run that was cut off before its end does not count."""
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for text in texts:
        tail = text if "\nviolations: " in text else ""
        for line in tail.splitlines():
            match = _SEEDS.match(line)
            if match:
                total += Counter({"seeds": int(match[1]), "transfers": int(match[2]), "events": int(match[3])})
            for count, what in _ENDS.findall(line):
                total[what] += int(count)
            if line.startswith("violations: "):
                total["runs"] += 1
                total["violations"] += int(line.split()[1])
        part = tail.partition("faults injected\n")[2].partition("why pushes")[0]
        for line in part.splitlines():
            match = _COUNT.match(line)
            if match:
                faults[match[2]] += int(match[1])
    return total, faults


def main(files: list[str]) -> int:
    total, faults = summed([Path(file).read_text() for file in files])
    print(
        f"{total['runs']} runs, {total['seeds']} seeds, {total['transfers']} transfers, {total['violations']} violations"
    )
    for what in (
        "ended well",
        "failed and fenced",
        "died with their D",
        "writes landed",
        "revocations",
        "exchanges",
        "events",
    ):
        print(f"  {total[what]:10d}  {what}")
    print("faults injected")
    for kind, number in sorted(faults.items()):
        print(f"  {number:10d}  {kind}")
    return 1 if total["violations"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
