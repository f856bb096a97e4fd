# SPDX-License-Identifier: Apache-2.0
"""The decision whether P ranks regroup for a D geometry, by the length of the spans that they would write otherwise.

It is made per D geometry from the reservation alone, so that every rank and every step agree.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from vllm_ascend_pd.geometry.images import Segments, slot_spans, starts
from vllm_ascend_pd.geometry.layout import FRACTAL_PACKING, CacheGeometry
from vllm_ascend_pd.geometry.pairing import exchanged, no_exchange_reason
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.geometry.shard import contributors

MIN_SPAN = 16 << 10
SHORT_SPAN = 4 << 10


class Decision(msgspec.Struct, frozen=True):
    """Choice of a push mode, and the numbers behind it.

    `direct_span` and `regroup_span` are mean bytes per descriptor over a full D block, for the P and D ranks with the
    shortest direct spans.
    """

    regroup: bool
    direct_span: int
    regroup_span: int
    why: str

    @property
    def mode(self) -> str:
        """Name of the mode, as the plan digest contains it."""
        return "regroup" if self.regroup else "direct"


@lru_cache(maxsize=256)
def decide(p: CacheGeometry, d: CacheGeometry, mode: str = "auto", min_span: int = MIN_SPAN) -> Decision:
    """Decide for all layers of a push at once: regroup if that pays for any of the kinds that can be exchanged.

    Kinds that cannot be exchanged are pushed directly in either case. `mode` and `min_span` are the configured values
    of `regroup` and `regroup_min_span`.
    """
    decisions = [_decide(pair.p, pair.d, mode, min_span) for pair in exchanged(p, d)]
    if not decisions:
        return Decision(False, 0, 0, no_exchange_reason(p, d) or "no rank has heads that another lacks")
    return next((one for one in decisions if one.regroup), decisions[0])


def _decide(p: CacheGeometry, d: CacheGeometry, mode: str, min_span: int) -> Decision:
    direct, regrouped = min(
        (_direct_span(p, d, rank, d_rank), _regroup_span(d, d_rank)) for rank, d_rank in _distinct(p, d)
    )
    if p.packing == FRACTAL_PACKING:
        return Decision(True, direct, regrouped, "decode's int8 is made in the staging slots, whatever is configured")
    if mode != "auto":
        return Decision(mode == "always", direct, regrouped, f"configured: {mode}")
    if direct >= min_span:
        return Decision(False, direct, regrouped, f"direct spans of {direct} bytes are long enough ({min_span})")
    wanted = 2 if direct < SHORT_SPAN else 4
    gain = f"regroup makes spans of {direct} bytes {regrouped / direct:.1f} times as long ({wanted} wanted)"
    return Decision(regrouped >= wanted * direct, direct, regrouped, gain)


def _distinct(p: CacheGeometry, d: CacheGeometry) -> list[tuple[int, int]]:
    """Return one pair (P rank, D rank) for each way in which their common heads lie among the heads of either rank.

    Nothing else determines the spans. So even with a thousand ranks on either side only a few pairs have to be planned.
    """
    pairs: dict[tuple[int, ...], tuple[int, int]] = {}
    for d_rank in range(d.tp_size):
        wanted = d.head_range(d_rank)
        for rank in contributors(p, d, d_rank):
            heads = p.head_range(rank)
            first, stop = max(heads.start, wanted.start), min(heads.stop, wanted.stop)
            way = (stop - first, first - heads.start, len(heads), first - wanted.start, len(wanted))
            pairs.setdefault(way, (rank, d_rank))
    return list(pairs.values())


def _block(p: CacheGeometry, d: CacheGeometry) -> Job:
    """Return a job of one full D block whose source blocks are not neighbours."""
    sources = np.arange(-(-d.block_size // p.block_size), dtype=np.int32) * 2
    return Job(d, 0, 0, d.block_size, sources, np.zeros(1, dtype=np.int32))


def _direct_span(p: CacheGeometry, d: CacheGeometry, rank: int, d_rank: int) -> int:
    regions = StepPlanner(p, rank).whole(_block(p, d), d_rank)
    return sum(spans.nbytes for spans in regions) // sum(len(spans) for spans in regions)


def _regroup_span(d: CacheGeometry, d_rank: int) -> int:
    job = _block(d, d)
    one = np.array([d.block_size], dtype=np.int64)
    segments = Segments((job,), one - one, one)
    heads = len(d.head_range(d_rank))
    begin, _ = starts(d, segments, heads, one - one, one - one)
    regions = [spans for spans, _ in slot_spans(d, segments, begin, heads)]
    return sum(spans.nbytes for spans in regions) // sum(len(spans) for spans in regions)
