# SPDX-License-Identifier: Apache-2.0
"""Engines that never answer open requests, and close no connection.

One that shuts down: seen on a real one that got a request at the moment in which its scheduler ended. Its HTTP
server then waits for that request without limit, and so would the client. One that is frozen, or whose host is gone:
it sends nothing at all.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from unit.router.cluster import FakeCluster, cluster, events, streamed, texts, until
from unit.router.fake_engine import FakeEngine, words
from vllm_ascend_pd.router.core.decisions import CircuitState, RetryPolicy

PROMPT = "a prompt"
FROZEN = {"unreachable_s": 0.5, "probe_timeout_s": 0.3}


def state(c: FakeCluster, engine: FakeEngine) -> CircuitState:
    instance = c.worker.fleet.get(engine.address)
    assert instance is not None
    return instance.circuit.state


def test_a_prefill_that_will_never_come_is_given_up() -> None:
    with cluster(refusing_s=0.3) as c, ThreadPoolExecutor(1) as client:
        p, d = c.prefill[0], c.decode[0]
        p.behaviour.hang = True
        asking = client.submit(c.complete, PROMPT)
        until(p.generations)
        p.served.shut()
        answer = asking.result(20)
        assert answer.status_code == 200 and texts(answer) == ["".join(words(PROMPT, 3))]
        assert d.local_prefills == 1 and d.outcomes[-1].kind == "failed"


def test_a_stream_that_will_never_go_on_ends_with_an_error() -> None:
    with cluster(refusing_s=0.3) as c, ThreadPoolExecutor(1) as client:
        d = c.decode[0]
        d.behaviour.gap_s = 600.0
        asking = client.submit(c.complete, PROMPT, stream=True)
        until(lambda: any(e.committed for e in c.worker.front.journal.exchanges))
        d.served.shut()
        said = events(asking.result(20))
        assert "error" in said[-2] and said[-1] == "[DONE]"


def test_a_stream_that_goes_on_meanwhile_is_whole() -> None:
    with cluster(refusing_s=3.0) as c, ThreadPoolExecutor(1) as client:
        d = c.decode[0]
        d.behaviour.gap_s = 0.25
        asking = client.submit(c.complete, PROMPT, stream=True, max_tokens=16)
        until(lambda: any(e.committed for e in c.worker.front.journal.exchanges))
        d.served.shut()
        assert streamed(asking.result(20)) == "".join(words(PROMPT, 16))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_frozen_engine_has_is_done_by_another(role: str) -> None:
    with cluster(prefill=2, decode=2, **FROZEN) as c, ThreadPoolExecutor(1) as client:
        pair = c.prefill if role == "prefill" else c.decode
        for engine in c.decode:
            engine.behaviour.recompute_s = 60.0  # exceeds the test's time: no D may compute by itself
        for engine in pair:
            engine.behaviour.hold = True
        asking = client.submit(c.complete, PROMPT)
        until(lambda: any(engine.generations() for engine in pair))
        frozen, other = sorted(pair, key=lambda engine: -len(engine.generations()))
        frozen.behaviour.frozen, other.behaviour.hold = True, False
        answer = asking.result(20)
        assert answer.status_code == 200 and texts(answer) == ["".join(words(PROMPT, 3))]
        assert state(c, frozen) is CircuitState.UNREACHABLE
        assert len(frozen.generations()) == 1 and other.generations()
        frozen.behaviour.frozen = frozen.behaviour.hold = False


def test_an_engine_that_thaws_finishes_what_it_has() -> None:
    with cluster(unreachable_s=1.5, probe_timeout_s=0.3) as c, ThreadPoolExecutor(1) as client:
        d = c.decode[0]
        d.behaviour.hold = True
        asking = client.submit(c.complete, PROMPT)
        until(d.generations)
        d.behaviour.frozen = True
        until(lambda: state(c, d) is CircuitState.UNREACHABLE)
        d.behaviour.frozen = False
        until(lambda: state(c, d) is CircuitState.CLOSED)
        end = time.monotonic() + 2.5  # longer than the limit for a vanished engine
        until(lambda: time.monotonic() > end)
        d.behaviour.hold = False
        answer = asking.result(20)
        assert answer.status_code == 200 and texts(answer) == ["".join(words(PROMPT, 3))]
        assert len(d.generations()) == 1


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
def test_a_comment_is_no_answer_yet(kept: bool) -> None:
    """D's keep-alive comes while the request waits for its turn there: D may fail yet, and will ask for a prefill."""
    asked = {"prompt": [1, 2, 3], "stream": True, **({"temperature": 0} if kept else {})}
    with cluster(decode=2) as c, ThreadPoolExecutor(1) as client:
        for engine in c.decode:
            engine.behaviour.hold, engine.behaviour.keep_alive_s, engine.behaviour.speaks = True, 0.02, kept
        asking = client.submit(c.complete, **asked)
        until(lambda: any(engine.generations() for engine in c.decode))
        time.sleep(0.3)  # more than some comments
        (exchange,) = c.worker.front.journal.exchanges
        assert not exchange.committed
        first = next(engine for engine in c.decode if engine.generations())
        first.served.kill()
        until(lambda: all(engine.generations() for engine in c.decode))
        for engine in c.decode:
            engine.behaviour.hold = False
        assert streamed(asking.result()) and [leg["prompt"] for leg in c.legs()] == [[1, 2, 3]]
        assert not any(engine.local_prefills for engine in c.decode)


def test_a_d_that_only_writes_comments_is_given_up_in_time() -> None:
    with cluster(first_byte_timeout_s=0.5, retry=RetryPolicy(attempts=1)) as c:
        c.decode[0].behaviour.hold, c.decode[0].behaviour.keep_alive_s = True, 0.02
        answer = c.complete(PROMPT, stream=True)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "PD-META-007"


def test_a_stream_that_breaks_after_its_comments_is_no_answer() -> None:
    with cluster(retry=RetryPolicy(attempts=1)) as c, ThreadPoolExecutor(1) as client:
        d = c.decode[0].behaviour
        d.hold, d.keep_alive_s, d.break_after = True, 0.02, 0
        asking = client.submit(c.complete, PROMPT, stream=True)
        until(c.decode[0].generations)
        time.sleep(0.3)  # more than some comments
        d.hold = False
        assert asking.result().status_code == 502
