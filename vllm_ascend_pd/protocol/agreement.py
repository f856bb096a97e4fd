# SPDX-License-Identifier: Apache-2.0
"""Comparison of a BEGIN with what D expects: version, model, cache geometry, contributors, plan.

Differences are listed field by field, with both values.
"""

from __future__ import annotations

from functools import lru_cache

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.geometry.pairing import contributors
from vllm_ascend_pd.geometry.plan import plan_digest
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.layouts import EngineLayout, contributors_digest
from vllm_ascend_pd.protocol.messages import Begin
from vllm_ascend_pd.protocol.timing import MAX_QUIET_S
from vllm_ascend_pd.protocol.versions import OURS

PLAN_MODES = ("direct", "regroup")


@lru_cache(maxsize=1024)
def contributor_pairs(p: CacheGeometry, d: CacheGeometry, worker: int) -> tuple[Contributor, ...]:
    """Return the P workers that write to D's `worker`: of all pipeline stages that share a layer with its own."""
    return tuple(Contributor(stage, rank) for stage, rank in contributors(p, d, worker))


def differences(
    begin: Begin, theirs: EngineLayout | PdError, model: str, d: CacheGeometry, worker: int, first: int, end: int
) -> list[str]:
    """Return how a BEGIN differs from what `worker` of D expects, one sentence per field; empty if it does not.

    `theirs` is P's layout, or the error why it cannot be used. `d` is D's geometry.
    """
    unlike: list[str] = []
    refusal = OURS.refusal(begin.version, begin.needs)
    if refusal is not None:
        return [f"{refusal.sentence} {refusal.remedy}"]
    if isinstance(theirs, PdError):
        return [f"{theirs.sentence} {theirs.remedy}"]
    _compare(unlike, "model", theirs.model, model)
    if begin.quiet_s > MAX_QUIET_S:
        unlike.append(f"quiet time: prefill {begin.quiet_s:g}, decode at most {MAX_QUIET_S:g}")
    unlike.extend(_mismatches(theirs.geometry, d))
    if not unlike:
        # Only if the caches fit each other: else shares and plans have no meaning.
        pairs = contributor_pairs(theirs.geometry, d, worker)
        if begin.contributors != contributors_digest(pairs):
            unlike.append(f"contributors: prefill {begin.contributors}, decode {_set(pairs)}")
        if begin.contributor not in pairs:
            unlike.append(f"contributor: {begin.contributor} is not in the set")
        digests = [_digest(theirs.geometry, d, first, end, mode) for mode in PLAN_MODES]
        if begin.plan_digest not in digests:
            unlike.append(f"plan: prefill {begin.plan_digest}, decode {' or '.join(digests)}")
    return unlike


def _compare(unlike: list[str], field: str, prefill: object, decode: object) -> None:
    if prefill != decode:
        unlike.append(f"{field}: prefill {prefill}, decode {decode}")


def _set(contributors: tuple[Contributor, ...]) -> str:
    return " ".join(map(str, contributors))


@lru_cache(maxsize=64)
def _mismatches(p: CacheGeometry, d: CacheGeometry) -> tuple[str, ...]:
    return tuple(map(str, mismatches(p, d)))


@lru_cache(maxsize=4096)
def _digest(p: CacheGeometry, d: CacheGeometry, first: int, end: int, mode: str) -> str:
    return plan_digest(p, d, first, end, mode)
