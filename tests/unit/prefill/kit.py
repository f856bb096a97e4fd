# SPDX-License-Identifier: Apache-2.0
"""D's cache and its reservations, as P's books are given them."""

from __future__ import annotations

from typing import Any

import msgspec

from unit.geometry.kit import geometry
from unit.protocol import kit as rig
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Reservation

BLOCK = 4
D = geometry("token", heads=2, tp=2, block=BLOCK)


def reservation(tokens: int = 10, first: int = 0, n: int = 1, **changes: Any) -> Reservation:
    made = rig.reservation(D, tokens, first, transfer=TransferId("d", n, f"u{n}"), model="m")
    return msgspec.structs.replace(made, **changes)
