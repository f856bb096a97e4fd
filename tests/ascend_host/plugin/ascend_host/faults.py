# SPDX-License-Identifier: Apache-2.0
"""Planted faults: waits for events that the package leaves out on order, to show that they are needed.

computed    P, direct: the writer's wait for a layer's event before it writes
hold        P, exchange: the side stream's wait for the model's stream
staged      P, exchange: the writer's wait for the event after the exchange
gate        D: the wait for a step's event before P may write into that step's blocks
"""

from __future__ import annotations

import dataclasses
from typing import Any


class _Past:
    """An event that counts as reached."""

    def done(self) -> bool:
        return True


def plant(forgotten: str) -> None:
    if not forgotten:
        return
    {"computed": _computed, "hold": _hold, "staged": _staged, "gate": _gate}[forgotten]()


def _computed() -> None:
    from vllm_ascend_pd.prefill.writer import Computed

    _forget_of(Computed)


def _staged() -> None:
    from vllm_ascend_pd.prefill.core.exchanges import Staged

    _forget_of(Staged)


def _forget_of(kind: type) -> None:
    from vllm_ascend_pd.prefill.writer import Writer

    put = Writer.put

    def forgetful(self: Writer, item: Any) -> None:
        put(self, dataclasses.replace(item, event=_Past()) if isinstance(item, kind) else item)

    Writer.put = forgetful  # type: ignore[method-assign]


def _hold() -> None:
    from vllm_ascend_pd.device.npu import _StreamEvent

    _StreamEvent.hold = lambda self, stream: None  # type: ignore[method-assign]


def _gate() -> None:
    from vllm_ascend_pd.decode.core.loads import Loads

    step = Loads.step

    def forgetful(self: Loads, now: float, order: Any, gate: Any) -> None:
        step(self, now, order, _Past() if gate is not None else None)

    Loads.step = forgetful  # type: ignore[method-assign]
