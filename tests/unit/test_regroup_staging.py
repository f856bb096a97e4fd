# SPDX-License-Identifier: Apache-2.0
"""Staging: a fixed number of slots, a quota for each destination, quarantine by time, spares, and nothing that grows."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from regroup_kit import Cache, DecodeSite, config
from regroup_prefill import Wire, engine, running
from watching import until

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.prefill.core.push import Piece, Unit
from vllm_ascend_pd.prefill.core.pushes import Pushes, PushSite
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.push import Claim
from vllm_ascend_pd.regroup.staging import PATIENCE_S, Staging, StagingSlot

QUOTA, DESTINATIONS, SPARES, SIZE = 2, 3, 2, 64


def staging() -> Staging:
    memory = torch.zeros(SIZE * (QUOTA * DESTINATIONS + SPARES), dtype=torch.uint8)
    return Staging(memory, SIZE, QUOTA, SPARES, waits=False)


class Slots(RuleBasedStateMachine):
    """Against a count of what each destination holds and of what is in quarantine until when."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.staging = staging()
        self.taken: dict[int, str] = {}
        self.spoiled: dict[int, float] = {}

    @rule(target=slots, destination=st.sampled_from("abcde"))
    def take(self, destination: str) -> StagingSlot | None:
        room = self.staging.room(self.now, destination)
        slot = self.staging.take(self.now, destination, SIZE)
        assert (slot is not None) == (room > 0)
        if slot is not None:
            assert slot.number not in self.taken, "one slot was given twice"
            assert self.spoiled.get(slot.number, 0.0) <= self.now, "it may still be read"
            self.spoiled.pop(slot.number, None)
            self.taken[slot.number] = destination
        return slot

    @rule(slot=consumes(slots))
    def release(self, slot: StagingSlot | None) -> None:
        if slot is not None:
            del self.taken[slot.number]
            self.staging.release(slot)

    @rule(slot=consumes(slots), seconds=st.floats(0.0, 5.0))
    def quarantine(self, slot: StagingSlot | None, seconds: float) -> None:
        if slot is not None:
            del self.taken[slot.number]
            self.spoiled[slot.number] = self.now + seconds
            self.staging.quarantine(slot, self.now + seconds)

    @rule(seconds=st.floats(0.1, 6.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts(self) -> None:
        assert self.staging.taken == len(self.taken)
        self.spoiled = {number: until for number, until in self.spoiled.items() if until > self.now}
        assert self.staging.quarantined(self.now) == len(self.spoiled)
        for destination in set(self.taken.values()):
            assert list(self.taken.values()).count(destination) <= QUOTA
        assert len(self.taken) <= QUOTA * DESTINATIONS

    @invariant()
    def others_keep_their_quota(self) -> None:
        """Two bad destinations, whatever they do, leave the third one its slots."""
        bad = {"a", "b"}
        if set(self.taken.values()) <= bad and not self.fresh_strangers():
            assert self.staging.room(self.now, "c") == QUOTA

    def teardown(self) -> None:
        """Once all is quiet there is as much as at the start, no more and no less."""
        for number, destination in self.taken.items():
            memory = self.staging.sample
            self.staging.release(StagingSlot(number, destination, memory))
        self.now += 100.0
        found = [self.staging.take(self.now, destination, SIZE) for destination in "vwxyz" for _ in range(QUOTA)]
        numbers = [slot.number for slot in found if slot is not None]
        assert len(numbers) == len(set(numbers)) == QUOTA * DESTINATIONS

    def fresh_strangers(self) -> bool:
        """Whether slots in quarantine were spoiled by others than the two."""
        return any(spoiled.destination not in {"a", "b"} for spoiled in self.staging._spoiled)


TestSlots = Slots.TestCase


def test_slots_do_not_overlap_and_lie_in_what_is_registered() -> None:
    made = staging()
    address, length = made.region
    slots = [made.take(0.0, destination, SIZE) for destination in "aabbcc"]
    spans = sorted((slot.address, slot.address + len(slot.memory)) for slot in slots if slot is not None)
    assert len(spans) == 6
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[0][0] >= address
    assert spans[-1][1] <= address + length


def test_what_does_not_fit_a_slot_is_a_bug_and_says_so() -> None:
    with pytest.raises(LocalProtocolError, match="65 bytes"):
        staging().take(0.0, "a", SIZE + 1)


def test_a_destination_that_spoils_slot_after_slot_ends_with_its_own_share() -> None:
    made = staging()
    spoiled = 0
    while (slot := made.take(0.0, "bad", SIZE)) is not None:
        made.quarantine(slot, 40.0)
        spoiled += 1
    assert spoiled == SPARES + QUOTA
    assert [made.room(0.0, destination) for destination in ("good", "fine")] == [QUOTA, QUOTA]
    assert made.room(41.0, "bad") == QUOTA
    assert made.quarantined(41.0) == 0


UNIT = Unit(1, 0, 1)


def holding(made: Staging, *names: str) -> Pushes:
    """One slot, of which each of these pushes holds a piece."""
    slot, no_geometry = made.take(0.0, "a", SIZE), cast("Any", None)
    assert slot is not None
    core = Pushes(config(quiet_s=5.0), PushSite("p", Contributor(0, 0), "m"), no_geometry, (), made)
    spans = Spans(*(np.array([size], dtype=np.int64) for size in (0, 0, 8)))
    for name in names:
        push = SimpleNamespace(name=name, pieces={(0, UNIT): Piece(slot, (spans,), None)})
        core._pushes[name] = push  # type: ignore[assignment]
        slot.users += 1
    return core


def test_a_slot_goes_back_with_the_last_of_its_pieces() -> None:
    made = staging()
    core = holding(made, "one", "two", "three")
    core._written(0.0, Claim("one", 0, UNIT, 0), True)
    core._written(0.0, Claim("one", 0, UNIT, 0), True)
    core._drop_pieces(0.0, core._pushes["two"])
    assert made.taken == 1
    core._written(0.0, Claim("three", 0, UNIT, 0), True)
    assert made.taken == 0
    assert not any(push.pieces for push in core.pushes())


def test_one_failed_write_spoils_a_slot_whoever_shares_it() -> None:
    made = staging()
    core = holding(made, "one", "two")
    core._written(0.0, Claim("one", 0, UNIT, 0), False)
    assert made.quarantined(0.0) == 0, "the other write still needs it"
    core._written(1.0, Claim("two", 0, UNIT, 0), True)
    assert (made.taken, made.quarantined(1.0)) == (0, 1)
    assert made.quarantined(6.5) == 0


def waited(made: Staging, now: float) -> float:
    """Take a slot for "slow" as the exchange's thread does; the time at which it was told that there is none."""
    while (left := made.patience(now, "slow")) > 0:
        now += left
    assert made.take(now, "slow", SIZE) is None
    return now


def test_a_step_waits_once_for_a_destination_and_not_again_before_it_returned_something() -> None:
    made = Staging(torch.zeros(SIZE * 4, dtype=torch.uint8), SIZE, 1, 1)
    assert made.patience(0.0, "slow") == 0.0, "there is one"
    held = made.take(0.0, "slow", SIZE)
    assert held is not None
    assert waited(made, 0.0) == pytest.approx(PATIENCE_S)
    for _ in range(100):
        made.new_step()
        assert waited(made, 1.0) == 1.0, "a step waited again"
    made.release(held)
    assert made.patience(2.0, "slow") == 0.0
    assert made.take(2.0, "slow", SIZE) is not None
    made.new_step()
    assert waited(made, 2.0) == pytest.approx(2.0 + PATIENCE_S), "it deserves patience again"


def test_a_slot_that_comes_back_ends_the_wait_and_leaves_what_is_left_of_it() -> None:
    made = Staging(torch.zeros(SIZE * 4, dtype=torch.uint8), SIZE, 1, 1)
    held = made.take(0.0, "slow", SIZE)
    assert held is not None
    assert made.patience(0.0, "slow") == PATIENCE_S
    made.release(held)
    assert made.patience(PATIENCE_S / 2, "slow") == 0.0
    assert made.take(PATIENCE_S / 2, "slow", SIZE) is not None
    assert made.patience(1.0, "slow") == pytest.approx(PATIENCE_S / 2)


def test_sizes_are_fixed_and_told_at_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    p = engine(Cache(tp=2), push=config(staging_slots=3, staging_destinations=2, staging_spares=1))
    with running(p):
        [line, _] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("regroup:")]
        assert line.startswith("regroup: 7 staging slots of ")
        assert line.endswith("MiB")
        assert "(3 for each of 2 destinations, 1 spares), 2 buffers of" in line


def test_a_failed_write_quarantines_its_slot_until_it_is_quiet() -> None:
    wires = [Wire(), Wire()]
    push = config(quiet_s=0.6, staging_slots=2, staging_spares=1)
    p, one, two = engine(Cache(tp=2), push=push, transports=wires), DecodeSite(Cache()), DecodeSite(Cache())
    with running(p, one, two):
        for wire in wires:
            wire.broken = one.sessions
        lost = one.reserve(64)
        one.step()
        p.admit(lost)
        p.compute((lost, 64))
        until(lambda: any(rank.runtime.stats()["slots_quarantined"] for rank in p.ranks))
        told = [rank.runtime.tally.take() for rank in p.ranks if rank.runtime.missed_exchanges() == []]
        assert any(data is not None and data["levels"].get("staging_quarantined") for data in told)
        well = two.reserve(64)
        two.step()
        p.admit(well)
        p.compute((well, 64))
        assert p.ended(well)
        two.check(well)
        until(lambda: not any(rank.runtime.stats()["slots_quarantined"] for rank in p.ranks), "time pardons them")
        p.finished(lost, well)
        assert p.is_quiet(), str(p.stats())
