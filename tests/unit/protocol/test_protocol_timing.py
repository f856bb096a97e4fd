# SPDX-License-Identifier: Apache-2.0
"""The formulas of the timers, and the clock that does not count time in which the process was stopped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.config import PushConfig, Timers
from vllm_ascend_pd.protocol.timing import (
    DRIFT,
    OBSERVED_GAP_S,
    WAKE_S,
    Agenda,
    Repetition,
    RunningClock,
    authority_until,
    landed_s,
    lapse_s,
    settled_s,
)

seconds = st.floats(0.01, 1000, allow_nan=False)
rates = st.floats(1 - DRIFT, 1 + DRIFT)


def test_the_defaults_give_the_documented_times() -> None:
    t, quiet = Timers(), PushConfig().quiet_s
    assert quiet == 40
    assert lapse_s(t.lease_s, t.margin_s) == pytest.approx(20, rel=0.003)
    assert landed_s(t.lease_s, quiet, t.margin_s) == pytest.approx(60, rel=0.003)
    assert authority_until(100.0, t.lease_s) == pytest.approx(115, rel=0.003)
    assert settled_s(quiet) == pytest.approx(40, rel=0.003)


@given(lease=seconds, margin=seconds, quiet=seconds, asked=seconds, travel=st.floats(0, 100), p=rates, d=rates)
def test_authority_ends_before_the_lease_lapses_however_the_clocks_drift(
    lease: float, margin: float, quiet: float, asked: float, travel: float, p: float, d: float
) -> None:
    """All in true time: P asks at `asked`, D answers `travel` later."""
    authority_over = asked + (authority_until(0.0, lease)) / p
    answered = asked + travel
    assert authority_over <= asked + lease * (1 + 1e-9)
    assert authority_over <= answered + lapse_s(lease, margin) / d
    assert authority_over + quiet <= answered + landed_s(lease, quiet, margin) / d + 1e-9


@given(quiet=seconds, rate=rates)
def test_a_write_is_settled_no_sooner_than_the_transport_promises_however_the_clock_drifts(
    quiet: float, rate: float
) -> None:
    assert settled_s(quiet) / rate >= quiet


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=50))
def test_the_running_clock_counts_at_most_a_second_of_every_gap(gaps: list[float]) -> None:
    clock, now, expected = RunningClock(), 1000.0, 0.0
    clock.observe(now)
    for gap in gaps:
        before, now = now, now + gap
        assert clock.observe(now) == (now - before > OBSERVED_GAP_S)
        expected += min(now - before, OBSERVED_GAP_S)
    assert clock.seconds == pytest.approx(expected)


def test_the_running_clock_ignores_a_time_that_was_passed_already() -> None:
    clock = RunningClock()
    for now in (10.0, 10.5, 10.2, 10.6):
        clock.observe(now)
    assert clock.seconds == pytest.approx(0.6)


def test_something_due_on_the_running_clock_is_looked_at_in_time_and_often_enough() -> None:
    clock = RunningClock()
    clock.observe(5.0)
    assert clock.wake(0.3) == pytest.approx(5.3)
    assert clock.wake(100.0) == pytest.approx(5.0 + WAKE_S)
    assert WAKE_S < OBSERVED_GAP_S


def test_backoff_doubles_up_to_its_bound_and_starts_over_after_an_answer() -> None:
    backoff = Repetition(0.0, 0.2, 2.0)
    gaps, now = [], 0.0
    for _ in range(6):
        gaps.append(round(backoff.at - now, 3))
        now = backoff.at
        backoff.sent(now)
    assert gaps == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    backoff.rest(100.0)
    assert backoff.at == 100.0
    backoff.sent(100.0)
    assert backoff.at == pytest.approx(100.2)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 30))),
        st.tuples(st.just("due"), st.integers(0, 30)),
    ),
    max_size=200,
)


@settings(max_examples=200)
@given(operations)
def test_the_agenda_agrees_with_a_plain_dictionary(steps: list[tuple[object, ...]]) -> None:
    agenda: Agenda[int] = Agenda()
    plain: dict[int, int] = {}
    for step in steps:
        if step[0] == "set":
            _, key, at = step
            agenda.set(key, at)  # type: ignore[arg-type]
            if at is None:
                plain.pop(key, None)  # type: ignore[call-overload]
            else:
                plain[key] = at  # type: ignore[index, assignment]
        else:
            due = agenda.due(step[1])  # type: ignore[arg-type]
            assert sorted(due) == sorted(key for key, at in plain.items() if at <= step[1])  # type: ignore[operator]
            assert [plain[key] for key in due] == sorted(plain[key] for key in due)
            for key in due:
                del plain[key]
        assert len(agenda) == len(plain)
        assert agenda.next() == min(plain.values(), default=None)


def test_the_agenda_does_not_grow_with_every_move() -> None:
    agenda: Agenda[str] = Agenda()
    for at in range(10_000):
        agenda.set("one", float(10_000 - at))
        agenda.next()
    assert len(agenda._heap) <= 100
    for _ in range(1000):
        agenda.set("one", 1.0)
        agenda.set("one", 2.0)
    assert len(agenda._heap) <= 100
