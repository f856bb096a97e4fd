# SPDX-License-Identifier: Apache-2.0
"""Staging: a fixed number of slots, a quota for each destination, and no growth, even with slots of failed writes."""

from __future__ import annotations

import ctypes
import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from unit.kits.watching import running, until
from unit.regroup.common import EngineCache, RegroupDecodeSite, config
from unit.regroup.prefill import FailingTransport, engine
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.prefill.worker.core.push import SlotShare, Unit
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.core.register import PushSite
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.core.staging import SLOT_TIMEOUT_S, Staging, StagingSlot
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import Write

QUOTA, DESTINATIONS, SIZE = 2, 3, 64


def staging() -> Staging:
    return Staging(torch.zeros(SIZE * QUOTA * DESTINATIONS, dtype=torch.uint8), SIZE, QUOTA, waits=False)


class Slots(RuleBasedStateMachine):
    """Staging compared with a count of the slots of each destination."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.staging = staging()
        self.taken: dict[int, str] = {}

    @rule(target=slots, destination=st.sampled_from("abcde"))
    def take(self, destination: str) -> StagingSlot | None:
        room = self.staging.room(destination)
        slot = self.staging.take(destination, SIZE)
        assert (slot is not None) == (room > 0)
        if slot is not None:
            assert slot.number not in self.taken, "one slot was given twice"
            self.taken[slot.number] = destination
        return slot

    @rule(slot=consumes(slots))
    def release(self, slot: StagingSlot | None) -> None:
        if slot is not None:
            del self.taken[slot.number]
            self.staging.release(slot)

    @invariant()
    def counts(self) -> None:
        assert self.staging.taken == len(self.taken)
        for destination in set(self.taken.values()):
            assert list(self.taken.values()).count(destination) <= QUOTA
        assert len(self.taken) <= QUOTA * DESTINATIONS

    @invariant()
    def others_keep_their_quota(self) -> None:
        """Check that the third destination keeps its quota, whatever two others do."""
        if set(self.taken.values()) <= {"a", "b"}:
            assert self.staging.room("c") == QUOTA

    def teardown(self) -> None:
        """Check that all slots are free in the end, no more and no fewer than at the start."""
        for number, destination in self.taken.items():
            memory = self.staging.sample
            self.staging.release(StagingSlot(number, destination, memory))
        free_slots = [self.staging.take(destination, SIZE) for destination in "vwxyz" for _ in range(QUOTA)]
        numbers = [slot.number for slot in free_slots if slot is not None]
        assert len(numbers) == len(set(numbers)) == QUOTA * DESTINATIONS


TestSlots = Slots.TestCase


def test_slots_do_not_overlap_and_lie_in_what_is_registered() -> None:
    made = staging()
    address, length = made.region
    slots = [made.take(destination, SIZE) for destination in "aabbcc"]
    spans = sorted((slot.address, slot.address + len(slot.memory)) for slot in slots if slot is not None)
    assert len(spans) == 6
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[0][0] >= address
    assert spans[-1][1] <= address + length


def test_what_does_not_fit_a_slot_is_a_bug_and_says_so() -> None:
    with pytest.raises(LocalProtocolError, match="65 bytes"):
        staging().take("a", SIZE + 1)


def test_a_destination_that_takes_slot_after_slot_ends_with_its_own_share() -> None:
    made = staging()
    slots = []
    while (slot := made.take("bad", SIZE)) is not None:
        slots.append(slot)
    assert len(slots) == made.taken == QUOTA
    assert [made.room(destination) for destination in ("good", "fine")] == [QUOTA, QUOTA]
    made.release(slots[0])
    assert made.room("bad") == 1


UNIT = Unit(1, 0, 1)


def holding(made: Staging, *names: str) -> Pushes:
    """Make pushes that hold shares of one slot."""
    slot, no_geometry = made.take("a", SIZE), cast("Any", None)
    assert slot is not None
    core = Pushes(config(), PushSite("p", Contributor(0, 0), "m"), no_geometry, (), made)
    spans = Spans(*(np.array([size], dtype=np.int64) for size in (0, 0, 8)))
    for name in names:
        pair = SimpleNamespace(coverage=SimpleNamespace(out={}))
        push = SimpleNamespace(name=name, slot_shares={(0, UNIT): SlotShare(slot, (spans,), None)}, pairs={0: pair})
        core.records[name] = push  # type: ignore[assignment]
        slot.users += 1
    return core


def test_a_slot_goes_back_with_the_last_of_its_shares() -> None:
    made = staging()
    core = holding(made, "one", "two", "three")
    one, two, three = core.records.values()
    core.drop(one, 0, UNIT)
    core.drop(one, 0, UNIT)
    core.let_go(two)
    assert made.taken == 1
    three.pairs[0].coverage.out[UNIT] = 8
    core.let_go(three)
    assert made.taken == 1, "it is being written"
    core.drop(three, 0, UNIT)
    assert made.taken == 0
    assert not any(push.slot_shares for push in core.records.values())


def waited(made: Staging, now: float) -> float:
    """Take a slot for "slow" like the exchange's thread; return the time at which it was refused."""
    while (left := made.wait_left(now, "slow")) > 0:
        now += left
    assert made.take("slow", SIZE) is None
    return now


def test_a_step_waits_once_for_a_destination_and_not_again_before_it_returned_something() -> None:
    made = Staging(torch.zeros(SIZE * 3, dtype=torch.uint8), SIZE, 1)
    assert made.wait_left(0.0, "slow") == 0.0, "there is one"
    slot = made.take("slow", SIZE)
    assert slot is not None
    assert waited(made, 0.0) == pytest.approx(SLOT_TIMEOUT_S)
    for _ in range(100):
        made.new_step()
        assert waited(made, 1.0) == 1.0, "a step waited again"
    made.release(slot)
    assert made.wait_left(2.0, "slow") == 0.0
    assert made.take("slow", SIZE) is not None
    made.new_step()
    assert waited(made, 2.0) == pytest.approx(2.0 + SLOT_TIMEOUT_S), "it is waited for again"


def test_a_slot_that_comes_back_ends_the_wait_and_leaves_what_is_left_of_it() -> None:
    made = Staging(torch.zeros(SIZE * 3, dtype=torch.uint8), SIZE, 1)
    slot = made.take("slow", SIZE)
    assert slot is not None
    assert made.wait_left(0.0, "slow") == SLOT_TIMEOUT_S
    made.release(slot)
    assert made.wait_left(SLOT_TIMEOUT_S / 2, "slow") == 0.0
    assert made.take("slow", SIZE) is not None
    assert made.wait_left(1.0, "slow") == pytest.approx(SLOT_TIMEOUT_S / 2)


def test_sizes_are_fixed_and_logged_at_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    p = engine(EngineCache(tp=2), push=config(staging_slots=3, staging_destinations=2))
    with running(p):
        [line, _] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("regroup:")]
        assert line.startswith("regroup: 6 staging slots of ")
        assert line.endswith("MiB")
        assert "(3 for each of 2 destinations), 2 buffers of" in line


class LateWire(FailingTransport):
    """Wire whose failed writes go on: their bytes are read and land when the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Write] = []

    def land(self, write: Write) -> WriteState:
        if write.session in self.broken:
            self.late.append(write)
        return super().land(write)

    def source(self) -> list[bytes]:
        """Return the bytes that the late writes would read now."""
        spans = [span for write in self.late for span in zip(write.src.tolist(), write.size.tolist(), strict=True)]
        return [ctypes.string_at(src, size) for src, size in spans]


def test_a_slot_of_a_failed_write_is_used_at_once_and_what_is_read_late_does_no_harm() -> None:
    """It lands in blocks that D keeps for the failed transfer, and nowhere else."""
    wires = [LateWire(), LateWire()]
    push = config(quiet_s=60.0, staging_slots=1, staging_destinations=1)
    p, d = engine(EngineCache(tp=2), push=push, transports=wires), RegroupDecodeSite(EngineCache())
    with running(p, d):
        for wire in wires:
            wire.broken = d.sessions
        lost, other = d.reserve(64), d.reserve(64)
        d.step()
        p.admit(lost)
        p.compute((lost, 64))
        until(lambda: any(wire.late for wire in wires))
        until(lambda: not any(stats["slots_taken"] for stats in p.stats()), "its slot is free")
        before = [wire.source() for wire in wires]
        for wire in wires:
            wire.broken = set()
        p.admit(other)
        p.compute((other, 64))
        assert p.ended(other)
        assert [wire.source() for wire in wires] != before, "no slot was used again: the test shows nothing"
        assert d.ended(lost) is None, "its blocks were free while the write could land"
        for wire in wires:
            for write in wire.late:
                assert wire.land(write) is WriteState.LANDED
        d.check(other)
        assert d.ended(lost) is None, "its blocks were given back while P's T was not over"
