# SPDX-License-Identifier: Apache-2.0
"""Whether a BEGIN is what D expects: version, model, cache geometry, contributors, plan. Differences are told field
by field, with both values."""

from __future__ import annotations

from functools import lru_cache

from vllm_ascend_pd.geometry.layout import MAX_LAYERS, CacheGeometry
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.geometry.plan import plan_digest
from vllm_ascend_pd.geometry.shard import contributors, shared_stages
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Begin
from vllm_ascend_pd.protocol.timing import MAX_QUIET_S
from vllm_ascend_pd.protocol.versions import OURS

PLAN_MODES = ("direct", "regroup")


def contributor_pairs(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> tuple[Contributor, ...]:
    """The P workers that write to `d_rank`, over all pipeline stages that share a layer with D.

    A D rank that would receive nothing still hears of the transfer: from P's leader rank.
    """
    ranks = contributors(p, d, d_rank)
    found = tuple(Contributor(stage, rank) for stage in shared_stages(p, d) for rank in ranks)
    return found or (Contributor(0, 0),)


def differences(begin: Begin, model: str, d: CacheGeometry, d_rank: int, first: int, end: int) -> list[str]:
    """What speaks against this BEGIN, one sentence per field; empty if nothing does."""
    found: list[str] = []
    refusal = OURS.refusal(begin.version, begin.needs)
    if refusal is not None:
        return [f"{refusal.sentence} {refusal.remedy}"]
    _compare(found, "model", begin.model, model)
    if begin.quiet_s > MAX_QUIET_S:
        found.append(f"quiet time: prefill {begin.quiet_s:g}, decode at most {MAX_QUIET_S:g}")
    layers = sum(map(len, begin.geometry.stages))
    if layers > MAX_LAYERS:
        return [*found, f"layers: prefill {layers}, decode accepts at most {MAX_LAYERS}"]
    found.extend(_mismatches(begin.geometry, d))
    if not found:
        # Only now: shares and plans of caches that do not fit each other mean nothing.
        pairs = _pairs(begin.geometry, d, d_rank)
        if begin.contributors != pairs:  # a message can hold very many: only the beginning is told
            _compare(found, "contributors", _set(begin.contributors[: len(pairs) + 8]), _set(pairs))
        digests = [_digest(begin.geometry, d, first, end, mode) for mode in PLAN_MODES]
        if begin.plan_digest not in digests:
            found.append(f"plan: prefill {begin.plan_digest}, decode {' or '.join(digests)}")
    return found


def _compare(found: list[str], field: str, prefill: object, decode: object) -> None:
    if prefill != decode:
        found.append(f"{field}: prefill {prefill}, decode {decode}")


def _set(contributors: tuple[Contributor, ...]) -> str:
    return " ".join(map(str, contributors))


@lru_cache(maxsize=64)
def _mismatches(p: CacheGeometry, d: CacheGeometry) -> tuple[str, ...]:
    return tuple(map(str, mismatches(p, d)))


@lru_cache(maxsize=1024)
def _pairs(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> tuple[Contributor, ...]:
    return contributor_pairs(p, d, d_rank)


@lru_cache(maxsize=4096)
def _digest(p: CacheGeometry, d: CacheGeometry, first: int, end: int, mode: str) -> str:
    return plan_digest(p, d, first, end, mode)
