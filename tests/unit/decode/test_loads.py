# SPDX-License-Identifier: Apache-2.0
"""D's loads as one machine: an error with one transfer ends that one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from unit.kits.watching import parsed
from unit.protocol.kit import ADDRESSES, D_INCARNATION, MODEL, D
from vllm_ascend_pd.decode.worker.core.loads import Loads
from vllm_ascend_pd.decode.worker.role import DecodeWorker
from vllm_ascend_pd.metadata import Bind, DecodeStep, LoadCancel, LoadEnd
from vllm_ascend_pd.protocol.actions import Action
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.states import ReservationState
from vllm_ascend_pd.roles import EndedRequests

BAD, GOOD = (TransferId(D_INCARNATION, number, f"uuid-{number}") for number in (1, 2))


class BrokenAtEnd(Receiver):
    """A machine that fails where it should drop a record."""

    def load_over(self, now: float, transfer: TransferId) -> list[Action]:
        if transfer == BAD:
            raise RuntimeError("planted")
        return super().load_over(now, transfer)


class BrokenLoads(Loads):
    receiver_type = BrokenAtEnd


def bind(transfer: TransferId) -> Bind:
    return Bind(str(transfer), transfer, 0, 40, (np.arange(3, dtype=np.int32),), 60.0, (1,))


def test_a_record_that_cannot_be_dropped_stops_nothing_else_of_the_step() -> None:
    loads = BrokenLoads(parsed({}, None), 0, 0, MODEL, D, lambda: ADDRESSES, verify=False)
    loads.step(1.0, DecodeStep((bind(BAD), bind(GOOD)), incarnation=D_INCARNATION, geometry=D), None)
    loads.step(
        2.0,
        DecodeStep(cancels=tuple(LoadCancel(transfer, Failure("PD-XFER-001", "")) for transfer in (BAD, GOOD))),
        None,
    )
    assert [report.request_id for report in loads.take_reports()] == [str(BAD), str(GOOD)]
    loads.step(3.0, DecodeStep(overs=(BAD, GOOD)), None)
    assert not loads.take_reports(), "both had been reported"
    assert loads.record_count() == 1, "the record that could not be dropped"
    assert loads._machine.state(GOOD) is ReservationState.OVER


def test_a_worker_names_the_blocks_of_loads_that_failed() -> None:
    """vLLM computes them again, where it does so by block."""
    failed = LoadEnd("bad", Failure("PD-XFER-001", ""), "p.1", blocks=(7, 9))
    anything: Any = SimpleNamespace(int8_scales={})
    worker = DecodeWorker(anything, anything, anything, 0, 0)
    worker.runtime = SimpleNamespace(take_reports=lambda: [failed, LoadEnd("good", None, "p.2")])  # type: ignore[assignment]
    assert worker.ended(()) == EndedRequests(
        received=frozenset(("bad", "good")), failed=frozenset(("bad",)), invalid_blocks=frozenset((7, 9))
    )
