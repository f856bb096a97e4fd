# SPDX-License-Identifier: Apache-2.0
"""Representations of a transfer, a writer, a push, a staging slot and an instance, for a debugger or a failing test."""

from __future__ import annotations

import numpy as np
import torch

from unit.protocol.kit import (
    END,
    FIRST,
    ONE,
    PUSH,
    TWO,
    D,
    OpenReceiver,
    T,
    begin,
    claim_of,
    opened,
    order,
    ready,
    receiver,
    reservation,
    sender,
)
from vllm_ascend_pd.metadata import PushStart
from vllm_ascend_pd.prefill.worker.core.push import Push, Share
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.regroup.core.staging import StagingSlot
from vllm_ascend_pd.router.core.decisions import Circuit, CircuitPolicy, Evidence, Role
from vllm_ascend_pd.router.core.prefixes import Prompts
from vllm_ascend_pd.router.fleet import Instance
from vllm_ascend_pd.shared.http_session import Origin


def leased() -> OpenReceiver:
    r = receiver()
    r.bind(0.0, T, FIRST, END, 300.0)
    r.gate_open(0.0, T)
    r.message(0.0, "p1", begin(ONE, seq=3))
    return r


def test_a_failure_reads_as_its_code_and_what_is_known() -> None:
    assert str(Failure("PD-XFER-003", "a write failed")) == "PD-XFER-003 a write failed"


def test_a_transfer_shows_its_state_its_tokens_and_its_writers() -> None:
    r = receiver()
    r.bind(0.0, T, FIRST, END, 300.0)
    assert repr(r.rules.transfers[T]) == "<Transfer decode-1/7/uuid-7 gated, tokens [0, 40)>"
    r = leased()
    assert repr(r.rules.transfers[T]) == (
        "<Transfer decode-1/7/uuid-7 open, tokens [0, 40), push-1: P0.0 leased, P0.1 awaited>"
    )
    r.cancel(0.1, T, Failure("PD-XFER-002", "left"))
    assert repr(r.rules.transfers[T]) == (
        "<Transfer decode-1/7/uuid-7 fencing, tokens [0, 40), push-1: P0.0 leased, P0.1 awaited, "
        "failed: PD-XFER-002 left>"
    )


def test_a_writer_tells_what_it_was_granted_and_how_long_it_is_waited_for() -> None:
    writers = leased().rules.transfers[T].writers
    assert repr(writers[TWO]) == "<Writer P0.1 awaited>"
    assert repr(writers[ONE]) == "<Writer P0.0 leased, asked 3 of prefill-P0.0, lapses at 20.0, held until 60.1>"


def test_a_push_and_its_pairs_tell_how_far_they_are() -> None:
    s = sender()
    s.open(0.0, order((0, 1)))
    push = opened(s)
    assert repr(push) == "<Push push-1 of decode-1/7/uuid-7; D0 ask, D1 ask>"
    assert repr(push.pairs[0]) == "<Pair push-1 to D0 at d0: ask, units: 0 pending, 0 out, 0 covered>"
    s.offer(0.0, opened(s), 0, "first", 10)
    s.message(0.0, "d0", ready())
    claim = claim_of(s, 0.0)
    s.offer(0.0, opened(s), 0, "second", 10)
    assert repr(push.pairs[0]) == "<Pair push-1 to D0 at d0: push until 14.97, units: 1 pending, 1 out, 0 covered>"
    s.seal(0.0, opened(s))
    s.abort(0.0, opened(s), Failure("PD-XFER-002", "left"))
    assert repr(push) == (
        "<Push push-1 of decode-1/7/uuid-7, sealed, failed: PD-XFER-002 left; D0 drain 1 out, D1 closed>"
    )
    s.wrote(0.0, claim, True)
    assert repr(push.pairs[0]).endswith("0 out, 0 covered; sends FAILED, not acknowledged>")


def test_a_staging_slot_shows_its_destination_and_its_readers() -> None:
    slot = StagingSlot(3, "d0:4711", torch.zeros(1024, dtype=torch.uint8), users=2)
    assert repr(slot) == f"<StagingSlot 3 for d0:4711, 1024 bytes at {slot.address:#x}, read by 2>"


def test_a_workers_push_tells_what_it_holds_and_how_its_pairs_are() -> None:
    push = Push.of(PushStart("r", PUSH, reservation(D, END)), D, (), (), order().destinations)
    assert repr(push) == "<Push push-1 of decode-1/7/uuid-7, 0 blocks; goes nowhere>"
    push.tables[0].extend(np.arange(3, dtype=np.int32))
    sender().open(0.0, push)
    push.paused = True
    push.owed.add(Share(1, 1, [push], {0: Endpoint("d0", 4711)}, {0: False}))
    assert repr(push) == "<Push push-1 of decode-1/7/uuid-7, 3 blocks, owes 1, paused; D0 ask>"


def test_an_instance_tells_whether_it_serves_and_what_broke_last() -> None:
    origin = Origin("http", "10.0.0.2", 8100)
    instance = Instance(origin.netloc, Role.PREFILL, origin, 1.0, "flag", Circuit(CircuitPolicy()), Prompts(0))
    assert repr(instance) == "<prefill 10.0.0.2:8100 starting>"
    instance.circuit.record(0.0, Evidence.PROBE_OK, 0.5)
    instance.answered, instance.load, instance.requests, instance.served = True, 120.0, 2, 7
    instance.broke, instance.last_error = 1, "no connection"
    assert repr(instance) == (
        "<prefill 10.0.0.2:8100 ready, 120 tokens in 2 requests, served 7, broke 1: no connection>"
    )
