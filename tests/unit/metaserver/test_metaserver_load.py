# SPDX-License-Identifier: Apache-2.0
"""Load: what of a request counts at an engine, for how long, and whom the next request goes to because of it."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unit.metaserver.cluster import FakeCluster, cluster, until
from vllm_ascend_pd.metaserver.decisions import AnswerLengths, CircuitPolicy, Role
from vllm_ascend_pd.metaserver.service.fleet import Fleet, Instance, parse_spec


def of(c: FakeCluster, decode: int = 0) -> Instance:
    found = c.worker.fleet.get(c.decode[decode].address)
    assert found is not None
    return found


def test_an_open_chat_with_a_high_limit_counts_as_any_other() -> None:
    with cluster(decode=2) as c, ExitStack() as open_streams:
        for engine in c.decode:
            engine.behaviour.paused = True
        for i in range(21):
            limit = {"max_tokens": 32_000} if i == 0 else {}
            chat = {"messages": [{"role": "user", "content": f"hello {i:02}"}], "stream": True, **limit}
            answer = open_streams.enter_context(c.http.stream("POST", "/v1/chat/completions", json=chat))
            assert answer.status_code == 200
        assert sorted(len(engine.generations()) for engine in c.decode) == [10, 11]
        for engine in c.decode:
            engine.behaviour.paused = False


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
def test_an_answers_load_falls_as_its_tokens_come(kept: bool) -> None:
    with cluster() as c:
        c.decode[0].behaviour.paused, c.decode[0].behaviour.pause_after = True, 79
        asked = {"prompt": "p", "max_tokens": 100, "stream": True, "temperature": 0 if kept else 1}
        with c.http.stream("POST", "/v1/completions", json=asked) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            until(lambda: of(c).load < 40)
            assert of(c).load >= 20, "what may still come counts"
            c.decode[0].behaviour.paused = False
            list(pieces)
        until(lambda: of(c).load == 0)


@pytest.mark.parametrize(("stream", "length"), [(False, 3), (True, 4)], ids=["whole", "stream"])
def test_what_a_models_answers_were_like_is_expected_of_the_next(stream: bool, length: int) -> None:
    """`length`: tokens of a whole answer, events of a stream."""
    with cluster() as c:
        lengths, wanted = c.worker.fleet.answers, AnswerLengths()
        for limit in (None, None, 2, None):  # that of the third ends it early, which says nothing about the next
            answer = c.complete("p", max_tokens=limit, stream=stream)
            assert answer.status_code == 200
            if limit is None:
                wanted.seen("fake", stream, length, 0)
        until(lambda: lengths._means == wanted._means)
        assert lengths.expected("fake", stream, 0) < AnswerLengths.FIRST


# ---- the rules alone


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 5000)), max_size=80), st.integers(0, 5000))
def test_what_is_expected_is_within_what_was_seen_and_below_the_limit(seen: list[tuple[int, int]], limit: int) -> None:
    lengths = AnswerLengths()
    for length, at_most in seen:
        lengths.seen("m", True, length, at_most)
    known = [length for length, _ in seen] + [AnswerLengths.FIRST]
    expected = lengths.expected("m", True, limit)
    assert min(*known, limit or max(known)) <= expected <= max(known)
    assert not limit or expected <= limit


def test_the_mean_follows_what_is_seen() -> None:
    lengths = AnswerLengths()
    for _ in range(300):
        lengths.seen("m", True, 1000, 0)
    assert lengths.expected("m", True, 0) == pytest.approx(1000, rel=0.01)
    for _ in range(300):
        lengths.seen("m", True, 10, 10)
    assert lengths.expected("m", True, 0) == pytest.approx(1000, rel=0.01), "limits say nothing"


@given(st.integers(0, 10_000), st.integers(1, 3000), st.integers(0, 3000), st.lists(st.integers(1, 40), max_size=60))
def test_a_load_falls_and_never_below_what_is_there(prompt: int, answer: int, limit: int, came: list[int]) -> None:
    fleet = Fleet(CircuitPolicy())
    engine = fleet.add(parse_spec(Role.DECODE, "h:1"), "test")
    expected = min(answer, limit or answer)
    with fleet.leg(engine, 7), fleet.leg(engine, prompt, expected, limit) as leg:
        last = engine.load
        assert last == prompt + expected + 7
        for events in came:
            leg.take(events)
            assert prompt + 7 <= engine.load <= last
            last = engine.load
    assert engine.load == 0


def test_a_client_cannot_make_new_models_to_remember() -> None:
    fleet = Fleet(CircuitPolicy())
    engine = fleet.add(parse_spec(Role.DECODE, "h:1"), "test")
    fleet.set_models(engine, {"m": json.dumps({}).encode()})  # type: ignore[dict-item]
    for i in range(100):
        fleet.answered(f"invented {i}", True, 50, 0)
    fleet.answered("m", True, 50, 0)
    assert set(fleet.answers._means) == {("", True), ("m", True)}
