# SPDX-License-Identifier: Apache-2.0
"""Check that host memory is mapped. Mooncake silently registers unmapped addresses, and crashes when they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_ascend_pd.errors import PdError


def check_mapped(regions: Sequence[tuple[int, int]], maps: Path = Path("/proc/self/maps")) -> None:
    """Raise PD-WIRE-002 for the first region that is not wholly mapped. Without the file `maps` nothing is checked."""
    if not maps.exists():
        return
    mapped = _ranges(maps.read_text().splitlines())
    for address, length in regions:
        if not _covered(address, address + length, mapped):
            raise PdError("PD-WIRE-002", rc="memory that is not mapped", length=length, address=address)


def _ranges(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Return the readable ranges in address order."""
    ranges = []
    for line in lines:
        extent, permissions = line.split(maxsplit=2)[:2]
        if permissions.startswith("r"):
            low, _, high = extent.partition("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges


def _covered(low: int, high: int, ranges: Sequence[tuple[int, int]]) -> bool:
    for first, last in ranges:
        if first <= low < last:
            low = last
    return low >= high
