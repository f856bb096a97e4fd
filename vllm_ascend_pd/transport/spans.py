# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on memory ranges before a transfer engine gets them: merge and bounds check. Vectorised, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.errors import PdError

Ints: TypeAlias = npt.NDArray[np.int64]
SpanArrays: TypeAlias = tuple[Ints, Ints, Ints]  # source, destination, size


def merge_regions(regions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort (address, length) pairs and merge those that touch or overlap. Raise PD-WIRE-002 for an impossible one."""
    merged: list[tuple[int, int]] = []
    for address, length in sorted(regions):
        if address <= 0 or length <= 0:
            raise PdError("PD-WIRE-002", rc="an impossible range", length=length, address=address)
        if merged and address <= merged[-1][0] + merged[-1][1]:
            first, so_far = merged[-1]
            merged[-1] = (first, max(so_far, address + length - first))
        else:
            merged.append((address, length))
    return merged


class Bounds:
    """Bounds of writes: the registered regions of one side. `side` names it in errors."""

    def __init__(self, regions: Sequence[tuple[int, int]], side: str) -> None:
        merged = merge_regions(regions)
        self._starts = np.array([address for address, _ in merged], dtype=np.int64)
        self._ends = np.array([address + length for address, length in merged], dtype=np.int64)
        self._side = side

    def check(self, address: npt.ArrayLike, size: npt.ArrayLike) -> None:
        """Raise PD-WIRE-003 for the first span that is empty or not wholly inside one region."""
        at, length = np.asarray(address, dtype=np.int64), np.asarray(size, dtype=np.int64)
        inside = self._inside(at, length)
        if not inside.all():
            worst = int(np.argmin(inside))
            raise PdError("PD-WIRE-003", length=int(length[worst]), address=int(at[worst]), side=self._side)

    def _inside(self, at: Ints, length: Ints) -> npt.NDArray[np.bool_]:
        if not len(self._starts):
            return np.zeros(len(at), dtype=np.bool_)
        region = np.searchsorted(self._starts, at, side="right") - 1
        room = self._ends[np.maximum(region, 0)] - at  # cannot overflow: both are addresses
        inside: npt.NDArray[np.bool_] = (region >= 0) & (length > 0) & (length <= room)
        return inside


def merge_runs(src: Ints, dst: Ints, size: Ints) -> SpanArrays:
    """Return the same bytes in fewer spans: sorted by destination, merged where both sides continue."""
    if len(dst) > 1 and bool((np.diff(dst) < 0).any()):
        order = np.argsort(dst, kind="stable")
        src, dst, size = src[order], dst[order], size[order]
    continues = (src[1:] == src[:-1] + size[:-1]) & (dst[1:] == dst[:-1] + size[:-1])
    if not continues.any():
        return src, dst, size
    heads = np.flatnonzero(np.concatenate(([True], ~continues)))
    return src[heads], dst[heads], np.add.reduceat(size, heads)


def as_spans(src: npt.ArrayLike, dst: npt.ArrayLike, size: npt.ArrayLike) -> SpanArrays:
    """Return three int64 vectors of one length. Raise ValueError for anything else, which is the caller's bug."""
    one, two, three = (np.ascontiguousarray(side, dtype=np.int64) for side in (src, dst, size))
    if not one.ndim == two.ndim == three.ndim == 1 or not len(one) == len(two) == len(three):
        raise ValueError(f"spans of {one.shape}, {two.shape} and {three.shape} do not belong together")
    return one, two, three
