# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the scales of an indexer's int8 keys, which are a component of their own, beside these keys.

PD_TEST_SCALES names one: `left out`, or `of the block before`. Keys and latents beside them are pushed correctly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from pd_test_tuples import TupleConnector

from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.geometry.layout import is_index
from vllm_ascend_pd.metadata import PushSlice
from vllm_ascend_pd.prefill.worker.core.planning import PushPlans

_WHAT = os.environ.get("PD_TEST_SCALES", "")
_SCALE = 1  # index in (key, scale)
_plan = PushPlans._plan


def _wrong(spans: Spans, stride: int) -> Spans:
    if _WHAT == "left out":
        return Spans(spans.src[:0], spans.dst[:0], spans.size[:0])
    return Spans(spans.src - stride, spans.dst, spans.size)


def _planned(self: Any, now: float, number: int, slices: Iterable[PushSlice]) -> Any:
    planned = _plan(self, now, number, slices)
    for push in planned.direct:
        for index, pair in enumerate(push.pairings):
            plan = push.plans.get((number, index))
            if plan is None or not any(map(is_index, pair.layers)):
                continue
            stride = pair.p.regions[_SCALE].block_stride
            for rank, spans in plan.by_rank.items():
                plan.by_rank[rank] = (*spans[:_SCALE], _wrong(spans[_SCALE], stride))
    return planned


class ScalesConnector(TupleConnector):
    """Connector named in P's --kv-transfer-config, whose import changes what this process pushes."""

    PushPlans._plan = _planned  # type: ignore[method-assign]
