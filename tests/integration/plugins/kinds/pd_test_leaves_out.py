# SPDX-License-Identifier: Apache-2.0
"""Planted faults: a P that does not push the part named by PD_TEST_LEAVES_OUT.

`group 1` is the layers of a group, `block` the first block of each window and each state, `section heads` that section
of all states, `layer 1` all but a byte of each component of that layer. Block tables and P's own answers stay right, so
only what is compared with them shows the fault.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.metadata import PushSlice
from vllm_ascend_pd.prefill.worker.core import batches
from vllm_ascend_pd.prefill.worker.core.planning import PushPlans
from vllm_ascend_pd.prefill.worker.core.push import Push

_KIND, _, _WHICH = os.environ.get("PD_TEST_LEAVES_OUT", "").partition(" ")
_leaving = PushPlans._leaving
_spans_of = batches.spans_of


def _leaving_less(self: Any, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
    lo, hi = _leaving(self, push, pairing, push_slice)
    pair = push.pairings[pairing]
    if _KIND == "group" and pair.p.group_index == int(_WHICH):
        return hi, hi
    if _KIND == "section" and any(name.endswith(f"/{_WHICH}") for name in pair.layers):
        return hi, hi
    if _KIND == "block" and pair.p.group.partial:
        lo = max(lo, push.firsts[pairing] + pair.d.block_size)
    return min(lo, hi), hi


def _shortened(push: Push, claim: Any, *where: Any) -> list[Any]:
    """Return the claim's spans, of the layer that is left out one byte of each component: a claim may not be empty."""
    spans = _spans_of(push, claim, *where)
    if _KIND != "layer" or batches.unit_of(claim).layer != int(_WHICH):
        return spans
    return [type(one)(one.src[:1], one.dst[:1], np.minimum(one.size[:1], 1)) for one in spans]


class LeavingConnector(AscendPushConnector):
    """Connector for --kv-transfer-config. The import of this class changes what all of the process pushes."""

    PushPlans._leaving = _leaving_less  # type: ignore[method-assign]
    batches.spans_of = _shortened  # type: ignore[assignment]
