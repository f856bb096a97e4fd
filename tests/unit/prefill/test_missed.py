# SPDX-License-Identifier: Apache-2.0
"""Layers that found no staging slot: what an exchange still owes, what is asked for again, and when it is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from vllm_ascend_pd.prefill.worker.core.exchanges import MAX_CATCH_UPS, Exchanges, Run
from vllm_ascend_pd.prefill.worker.core.push import Share, Unit
from vllm_ascend_pd.protocol.identity import Endpoint

LAYERS = 6


def push_of(name: str) -> Any:
    """Stand-in for a push, with the fields that `Exchanges` uses."""
    return SimpleNamespace(name=name, owed=set())


def of_layers(count: int, destination: Endpoint) -> tuple[dict[int, Endpoint], dict[int, bool]]:
    """Return the destination of each layer, and that no layer is exchanged yet."""
    return dict.fromkeys(range(count), destination), dict.fromkeys(range(count), False)


class MissedShares(RuleBasedStateMachine):
    """Shares not yet exchanged, compared with plain sets of (share, layer) by state."""

    shares = Bundle("shares")

    def __init__(self) -> None:
        super().__init__()
        self.pushes = {name: push_of(name) for name in "abc"}
        self.exchanges = Exchanges(cast("Any", None), LAYERS, cast("Any", None), cast("Any", None))
        self.owed: dict[Share, set[str]] = {}
        self.here: set[tuple[Share, int]] = set()
        self.coming: set[tuple[Share, int]] = set()
        self.waiting: set[tuple[Share, int]] = set()
        self.asked: set[Unit] = set()
        self.room = False
        self.exchanges.staging = cast("Any", self)

    def take(self, destination: Hashable, nbytes: int) -> object:
        """Stand-in for the staging's method."""
        return object() if self.room else None

    @rule(target=shares, step=st.integers(1, 2), slot=st.integers(0, 1), names=st.sets(st.sampled_from("abc")))
    def plan(self, step: int, slot: int, names: set[str]) -> Share:
        wanting = [self.pushes[name] for name in sorted(names)]
        share = Share(step, 1, wanting, *of_layers(LAYERS, Endpoint("d", slot)))
        for push in wanting:
            push.owed.add(share)
        self.owed[share] = names
        return share

    @rule(share=shares, layer=st.integers(0, LAYERS - 1), room=st.booleans())
    def run(self, share: Share, layer: int, room: bool) -> None:
        """Run an exchange, in whichever step it was ordered."""
        self.room = room
        part = SimpleNamespace(shares=[share], plan=SimpleNamespace(slots=[SimpleNamespace(nbytes=1)]))
        made = Run(share.unit(layer), cast("Any", part))
        slot = self.exchanges.slot(made, 0)
        self.exchanges.made(made)
        self.asked.discard(share.unit(layer))
        assert (slot is not None) <= bool(self.owed[share]), "a slot for what no push wants"
        at = share, layer
        if not self.owed[share] or at in self.here | self.coming:
            assert slot is None, "fetched twice"
        elif slot is None:
            self.waiting.add(at)
        else:
            self.waiting.discard(at)
            self.coming.add(at)

    @rule()
    def arrive(self) -> None:
        for share, layer in self.coming:
            self.exchanges.arrived(share, layer)
        self.here |= self.coming
        self.coming.clear()

    @rule(name=st.sampled_from("abc"))
    def forget(self, name: str) -> None:
        self.exchanges.forget(self.pushes[name])
        for names in self.owed.values():
            names.discard(name)
        self.waiting = {at for at in self.waiting if self.owed[at[0]]}

    @rule(step=st.integers(1, 2))
    def forget_step(self, step: int) -> None:
        self.exchanges.missed.forget_step(step)
        self.asked = {unit for unit in self.asked if unit.step != step}

    @rule(room=st.lists(st.integers(0, 3), min_size=2, max_size=2), max_units=st.integers(1, 40))
    def wanted(self, room: list[int], max_units: int) -> None:
        requested = self.exchanges.missed.wanted(lambda endpoint: room[endpoint.port], max_units)  # type: ignore[attr-defined]
        assert len(requested) == len(set(requested)) <= max_units
        waiting = {
            slot: {share.unit(layer) for share, layer in self.waiting if share.destinations[layer].port == slot}
            for slot in (0, 1)
        }
        for unit in requested:
            assert unit not in self.asked, "asked for twice"
            assert any(unit in units and room[slot] for slot, units in waiting.items())
        for slot, units in waiting.items():
            if room[slot] > len(units) and max_units == 40:
                left = units - self.asked - set(requested)
                assert not left or len(requested) == max_units, "there was room, and none was asked for"
        self.asked.update(requested)

    @invariant()
    def agrees(self) -> None:
        assert len(self.exchanges.missed) == len(self.waiting)
        for name, push in self.pushes.items():
            theirs = {share for share, names in self.owed.items() if name in names}
            lacking = {share for share in theirs if any((share, layer) not in self.here for layer in range(LAYERS))}
            assert push.owed == lacking


TestMissedShares = MissedShares.TestCase


def test_thousands_of_missed_exchanges_cost_no_more_per_question() -> None:
    """A destination that is stalled for minutes leaves tens of thousands behind: no query iterates over them."""
    exchanges = Exchanges(cast("Any", None), 80, cast("Any", None), cast("Any", None))
    missed, one = exchanges.missed, push_of("one")
    for step in range(500):
        share = Share(step, 1, [one], *of_layers(80, Endpoint("stalled", 1)))
        one.owed.add(share)
        for layer in range(80):
            missed.miss(share, layer)
    missed.miss(Share(999, 1, [push_of("another")], *of_layers(1, Endpoint("well", 1))), 0)
    asked: list[str] = []

    def room(destination: object) -> int:
        assert isinstance(destination, Endpoint)
        asked.append(destination.host)
        return 4 if destination.host == "well" else 0

    assert missed.wanted(room, 64) == [Unit(999, 0, 1)]
    assert sorted(asked) == ["stalled", "well"]
    exchanges.forget(one)
    assert len(missed) == 1


@pytest.mark.parametrize(("waits", "times"), [(True, 2), (False, 1)])
def test_more_is_asked_for_than_has_room_where_an_exchange_can_wait(waits: bool, times: int) -> None:
    staging: Any = SimpleNamespace(waits=waits, room={"d": 3}.__getitem__)
    exchanges = Exchanges(cast("Any", None), LAYERS, staging, cast("Any", None))
    asked: list[tuple[int, int]] = []

    def wanted(room: Callable[[str], int], most: int) -> list[Unit]:
        asked.append((room("d"), most))
        return []

    exchanges.missed = cast("Any", SimpleNamespace(wanted=wanted))
    assert exchanges.wanted() == [] and asked == [(3 * times, MAX_CATCH_UPS)]
