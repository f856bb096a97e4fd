# SPDX-License-Identifier: Apache-2.0
"""Load: what of a request counts at an engine, for how long, and whom the next request goes to because of it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unit.router.cluster import HEAD, FakeCluster, cluster, until
from vllm_ascend_pd.router.core import bodies, media
from vllm_ascend_pd.router.core.decisions import AnswerLengths, CircuitPolicy, Role
from vllm_ascend_pd.router.fleet import Fleet, Instance, parse_spec


def of(c: FakeCluster, decode: int = 0) -> Instance:
    instance = c.worker.fleet.get(c.decode[decode].address)
    assert instance is not None
    return instance


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
                wanted.record("fake", stream, length, 0)
        until(lambda: lengths.means == wanted.means)
        assert lengths.expected("fake", stream, 0) < AnswerLengths.FIRST


# ---- the rules alone


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 5000)), max_size=80), st.integers(0, 5000))
def test_what_is_expected_is_within_what_was_seen_and_below_the_limit(seen: list[tuple[int, int]], limit: int) -> None:
    lengths = AnswerLengths()
    for length, at_most in seen:
        lengths.record("m", True, length, at_most)
    known = [length for length, _ in seen] + [AnswerLengths.FIRST]
    expected = lengths.expected("m", True, limit)
    assert min(*known, limit or max(known)) <= expected <= max(known)
    assert not limit or expected <= limit


def test_the_mean_follows_what_is_seen() -> None:
    lengths = AnswerLengths()
    for _ in range(300):
        lengths.record("m", True, 1000, 0)
    assert lengths.expected("m", True, 0) == pytest.approx(1000, rel=0.01)
    for _ in range(300):
        lengths.record("m", True, 10, 10)
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
    assert set(fleet.answers.means) == {("", True), ("m", True)}


# ---- media


def chat_with(*data: str, text: str = "what is this?", url: str = "data:image/png;base64,") -> bytes:
    pictures = [{"type": "image_url", "image_url": {"url": url + one}} for one in data]
    return json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": text}, *pictures]}]}).encode()


def base64_of(size: int, seed: int = 0) -> str:
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


@pytest.mark.parametrize("size", [1000, 50_000, 65_536, 1 << 20])
def test_a_picture_counts_the_same_whatever_its_size(size: int) -> None:
    picture = base64_of(size)
    one, two = (bodies.parse(bodies.CHAT, chat_with(*([picture] * n))) for n in (1, 2))
    assert two.prefill_tokens - one.prefill_tokens == pytest.approx(media.BYTES / 4, rel=0.05)
    assert one.marks[-1].tokens <= one.prefill_tokens < 1200
    by_address = bodies.parse(bodies.CHAT, chat_with("host/picture.png", url="https://"))
    assert by_address.prefill_tokens == pytest.approx(one.prefill_tokens, abs=20)


@pytest.mark.parametrize("write", [str, lambda data: data.replace("/", "\\/"), lambda data: data.replace("A", "A\\n")])
def test_pictures_are_told_apart_however_they_are_written(write: Callable[[str], str]) -> None:
    def first(seed: int) -> bytes:
        said = chat_with("PICTURE").replace(b"PICTURE", write(base64_of(300_000, seed)).encode())
        request = bodies.parse(bodies.CHAT, said)
        assert request.prefill_tokens < 1200
        return request.marks[0].digest

    assert first(1) == first(1) != first(2)


@given(
    st.lists(st.tuples(st.sampled_from('", '), st.integers(0, 3000)), max_size=40),
    st.integers(0, 70_000),
)
def test_media_are_the_same_wherever_the_slices_end(words: list[tuple[str, int]], before: int) -> None:
    """Long words count as media if they begin a value, or follow its comma; all else stays as it is."""
    text = " " * before + "".join(mark + "A" * length for mark, length in words) + '"'
    measured = media.measured(memoryview(text.encode()))
    expected, at = b"", 0
    for word in re.finditer(rb'[",](A{1024,})', text.encode()):
        digest = hashlib.blake2b(word[1]).hexdigest().encode() * (media.BYTES // 128)
        expected, at = expected + text.encode()[at : word.start(1)] + digest, word.end(1)
    assert measured == expected + text.encode()[at:]


def test_a_picture_weighs_no_more_at_p_than_a_long_question() -> None:
    with cluster(prefill=2) as c:
        for engine in c.prefill:
            engine.behaviour.hold = True
        prompts = [chat_with(base64_of(1 << 20)), *(chat_with(text=f"{i} " * 1000) for i in range(12))]
        with ThreadPoolExecutor(len(prompts)) as clients:
            for i, body in enumerate(prompts):
                clients.submit(c.http.post, "/v1/chat/completions", content=body)
                until(lambda i=i: len(c.legs()) == i + 1)
            for engine in c.prefill:
                engine.behaviour.hold = False
        assert sorted(len(p.generations()) for p in c.prefill) in ([5, 8], [6, 7])


def test_a_picture_leaves_the_memory_of_prefixes_as_it_is() -> None:
    with cluster(prefix_tokens=20_000) as c:
        c.complete(HEAD)
        assert c.http.post("/v1/chat/completions", content=chat_with(base64_of(1 << 20))).status_code == 200
        known = c.worker.fleet.get(c.prefill[0].address)
        assert known is not None
        marks = bodies.parse(bodies.COMPLETIONS, json.dumps({"model": "fake", "prompt": HEAD}).encode()).marks
        assert known.cached_tokens(marks) == marks[-1].tokens and known.prompts.tokens < 3000
