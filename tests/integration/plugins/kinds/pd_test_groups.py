# SPDX-License-Identifier: Apache-2.0
"""Planted faults: a P that does not push the part named by PD_TEST_LEAVES_OUT.

`group 1` is the layers of a group, `block` the first block of each window, `section heads` these parts of all states,
`layer 1` all but a byte of that layer. The tables of a request stay right, and so do P's own answers.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.metadata import PushSlice
from vllm_ascend_pd.prefill.core import pushes
from vllm_ascend_pd.prefill.core.push import Push
from vllm_ascend_pd.prefill.core.pushes import Pushes

_WHAT, _, _NUMBER = os.environ.get("PD_TEST_LEAVES_OUT", "").partition(" ")
_leaving = Pushes._leaving
_spans_of = pushes.spans_of


def _left(self: Any, push: Push, pairing: int, piece: PushSlice) -> tuple[int, int]:
    lo, hi = _leaving(self, push, pairing, piece)
    pair = push.pairings[pairing]
    if _WHAT == "group" and pair.p.group == int(_NUMBER):
        return hi, hi
    if _WHAT == "section" and any(name.endswith(f"/{_NUMBER}") for name in pair.layers):
        return hi, hi
    if _WHAT == "block" and pair.p.own.partial:
        lo = max(lo, push.firsts[pairing] + pair.d.block_size)
    return min(lo, hi), hi


def _shortened(push: Push, claim: Any, *where: Any) -> list[Any]:
    """Return the claim's spans, of one layer only the first byte of each component's first: a claim is never empty."""
    spans = _spans_of(push, claim, *where)
    if _WHAT != "layer" or pushes.unit_of(claim).layer != int(_NUMBER):
        return spans
    return [type(one)(one.src[:1], one.dst[:1], np.minimum(one.size[:1], 1)) for one in spans]


class LeavingConnector(AscendPushConnector):
    """Connector named in --kv-transfer-config, whose import changes what this process pushes."""

    Pushes._leaving = _left  # type: ignore[method-assign]
    pushes.spans_of = _shortened  # type: ignore[assignment]
