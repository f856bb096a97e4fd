# SPDX-License-Identifier: Apache-2.0
"""D's client for the metaserver, against real HTTP servers with and without faults."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from unit.kits.watching import until
from unit.router.fake_engine import ServedApp, read_body
from vllm_ascend_pd.config import MetaserverConfig
from vllm_ascend_pd.decode.scheduler import metaserver as client_module
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome, origin
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.continuing import MAX_ANSWER_BYTES, MAX_TOKENS, AnswerWanted
from vllm_ascend_pd.protocol.reports import LoadReport
from vllm_ascend_pd.shared.loop import LoopThread


class Scripted:
    """A metaserver that answers each POST by the next step of its script, and then always by the last one."""

    def __init__(self, *script: Callable[[Any], Any]) -> None:
        self.script = list(script)
        self.posts: list[dict[str, Any]] = []
        self.open = 0
        self.closed_by_client = 0
        self.served = ServedApp(self._app, "scripted")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.posts.append(json.loads(await read_body(receive)))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        work, left = asyncio.ensure_future(step(send)), asyncio.ensure_future(receive())
        self.open += 1
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        self.open -= 1
        self.closed_by_client += not work.done()
        left.cancel()
        work.cancel()
        for result in await asyncio.gather(work, left, return_exceptions=True):
            if isinstance(result, ConnectionAbortedError):
                raise result


def lines(*events: dict[str, Any] | float, tear: bool = False) -> Callable[[Any], Any]:
    """A streamed answer; numbers are pauses."""

    async def step(send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]}
        )
        for event in events:
            if isinstance(event, int | float):
                await asyncio.sleep(event)
            else:
                await send(
                    {"type": "http.response.body", "body": json.dumps(event).encode() + b"\n", "more_body": True}
                )
        if tear:
            raise ConnectionAbortedError
        await send({"type": "http.response.body", "body": b""})

    return step


def status(code: int, body: bytes = b"", *headers: tuple[bytes, bytes]) -> Callable[[Any], Any]:
    async def step(send: Any) -> None:
        kind = (b"content-type", b"application/json")
        await send({"type": "http.response.start", "status": code, "headers": [kind, *headers]})
        await send({"type": "http.response.body", "body": body})

    return step


WELL = lines({"event": "accepted", "prefill": "p:1"}, {"event": "heartbeat"}, {"event": "prefilled"})


class CollectedOutcomes:
    """Collect outcomes, and the names of the threads that report them."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Any, Outcome]] = []
        self.threads: set[str] = set()
        self.changed = threading.Condition()

    def __call__(self, key: Any, outcome: Outcome) -> None:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            self.outcomes.append((key, outcome))
            self.changed.notify_all()

    def final(self, key: Any, timeout: float = 20) -> Outcome:
        with self.changed:
            assert self.changed.wait_for(lambda: self.finals(key), timeout), f"no outcome for {key}"
            (only,) = self.finals(key)
            return only

    def finals(self, key: Any) -> list[Outcome]:
        return [o for k, o in self.outcomes if k == key and o.final]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("client-loop")
    yield thread
    thread.stop()


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    made: list[Scripted] = []

    def make(*script: Callable[[Any], Any]) -> Scripted:
        made.append(Scripted(*script))
        return made[-1]

    yield make
    for server in made:
        server.served.stop()


def client(loop: LoopThread, collected: CollectedOutcomes, *urls: str, **config: Any) -> MetaserverClient:
    return MetaserverClient(MetaserverConfig(metaserver_urls=urls, **config), loop, collected)


def test_accepted_then_prefilled_comes_on_the_loop_thread(loop: LoopThread, scripted: Callable[..., Scripted]) -> None:
    server, collected = scripted(WELL), CollectedOutcomes()
    mine = client(loop, collected, server.served.url)
    mine.reserve("k", server.served.url, {"ticket": "t"}, 10)
    assert collected.final("k").kind == "prefilled"
    assert [o.kind for _, o in collected.outcomes] == ["accepted", "prefilled"]
    assert collected.outcomes[0][1].prefill == "p:1"
    assert collected.threads == {"client-loop"}
    assert server.posts == [{"ticket": "t"}] and mine.open_count() == 0


def test_a_body_is_made_on_the_loop_thread_once_and_gets_an_outcome_if_it_cannot_be(
    loop: LoopThread, scripted: Callable[..., Scripted]
) -> None:
    server, collected, made = scripted(status(503), WELL), CollectedOutcomes(), []

    def body() -> dict[str, Any]:
        made.append(threading.current_thread().name)
        return {"ticket": "t"}

    def none() -> dict[str, Any]:
        raise ValueError("no body")

    mine = client(loop, collected, server.served.url)
    mine.reserve("k", server.served.url, body, 10)
    assert collected.final("k").kind == "prefilled" and made == ["client-loop"]
    assert server.posts == [{"ticket": "t"}, {"ticket": "t"}]
    mine.reserve("none", server.served.url, none, 10)
    assert collected.final("none").kind == "failed" and mine.open_count() == 0


def test_each_post_is_a_stage_of_its_transfer(loop: LoopThread, scripted: Callable[..., Scripted]) -> None:
    server, collected = scripted(status(503), WELL), CollectedOutcomes()
    stages: list[tuple[str, Any]] = []
    unsubscribe = trace.subscribe(lambda stage, facts: stages.append((stage, dict(facts))))
    try:
        client(loop, collected, server.served.url).reserve("t/1", server.served.url, {}, 10)
        assert collected.final("t/1").kind == "prefilled"
    finally:
        unsubscribe()
    assert stages == [("posted", {"transfer": "t/1", "attempt": n}) for n in (1, 2)]


def test_a_failure_carries_the_servers_code_and_words(loop: LoopThread, scripted: Callable[..., Scripted]) -> None:
    server, collected = (
        scripted(lines({"event": "failed", "code": "PD-META-006", "detail": "P is gone"})),
        CollectedOutcomes(),
    )
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 10)
    outcome = collected.final("k")
    assert (outcome.kind, outcome.failure.code, outcome.failure.detail) == ("failed", "PD-META-006", "P is gone")


@pytest.mark.parametrize("body", [b"", b"null", b'{"message": "prefilled"}'])
def test_a_plain_answer_at_the_end_is_accepted(loop: LoopThread, scripted: Any, body: bytes) -> None:
    server, collected = scripted(status(200, body)), CollectedOutcomes()
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 10)
    assert collected.final("k").kind == "prefilled"


def test_an_answer_so_far_is_asked_for(loop: LoopThread, scripted: Any) -> None:
    """Beside reservations that hold all connections; and again, if it was surely not executed."""
    said = b'{"tokens": [1, 20, 300]}'
    server, collected = scripted(lines(30), status(503), status(200, said)), CollectedOutcomes()
    mine = client(loop, collected, server.served.url, metaserver_max_connections=1)
    mine.reserve("p", server.served.url, {}, 20)
    while not server.open:
        time.sleep(0.01)
    mine.ask("k", server.served.url, AnswerWanted("t", "h"), 20)
    outcome = collected.final("k")
    assert (outcome.kind, outcome.tokens) == ("told", (1, 20, 300))
    assert server.posts == [{}, {"ticket": "t", "prompt": "h"}, {"ticket": "t", "prompt": "h"}]
    assert mine.counters["question_repeated"] == 1 and not mine.counters["reservation_repeated"]


def test_no_question_waits_for_reports_or_finds_the_queue_full(loop: LoopThread, scripted: Any) -> None:
    """Where a router takes no reports, and where so many reservations wait that no more are taken."""
    mute, told = scripted(lines(30)), scripted(status(200, b'{"tokens": [1]}'))
    collected = CollectedOutcomes()
    urls = mute.served.url, told.served.url
    mine = client(loop, collected, *urls, metaserver_max_connections=1, metaserver_max_queue=0)
    for _ in range(40):
        mine.report(mute.served.url, REPORT)
    until(lambda: mute.open == client_module._SHORT_AT_ONCE, "all that may be under way")
    mine.reserve("p", mute.served.url, {}, 20)
    for key in range(3):
        mine.ask(key, told.served.url, AnswerWanted("t", "h"), 20)
    assert [collected.final(key).tokens for key in range(3)] == [(1,)] * 3
    mine.ask("open", mute.served.url, AnswerWanted("t", "h"), 20)
    mine.forget("p")
    mine.reserve("next", mute.served.url, {}, 20)
    mine.reserve("one more", mute.served.url, {}, 20)
    assert collected.final("one more").failure.code == "PD-META-004"
    assert not collected.finals("next"), "a question takes a reservation's place"


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (status(404), "PD-META-003"),
        (status(409), "PD-META-003"),
        (status(200, b'{"tokens": [-1]}'), "PD-META-002"),
        (status(200, b'{"tokens": [true]}'), "PD-META-002"),
        (status(200, b'{"tokens": "no"}'), "PD-META-002"),
        (status(200, b"[]"), "PD-META-002"),
        (status(200, json.dumps({"tokens": [0] * (MAX_TOKENS + 1)}).encode()), "PD-META-002"),
        (status(200, b" " * (MAX_ANSWER_BYTES + 1)), "PD-META-002"),
    ],
    ids=["unknown", "other prompt", "negative", "no number", "text", "list", "many", "long"],
)
def test_what_is_no_answer_so_far_fails_once(loop: LoopThread, scripted: Any, step: Any, code: str) -> None:
    server, collected = scripted(step), CollectedOutcomes()
    client(loop, collected, server.served.url).ask("k", server.served.url, AnswerWanted("t", "h"), 20)
    assert collected.final("k").failure.code == code and len(server.posts) == 1


def test_a_long_answer_so_far_is_taken(loop: LoopThread, scripted: Any) -> None:
    tokens = [(1 << 31) - 1 - index for index in range(MAX_TOKENS)]
    server, collected = scripted(status(200, json.dumps({"tokens": tokens}).encode())), CollectedOutcomes()
    client(loop, collected, server.served.url).ask("k", server.served.url, AnswerWanted("t", "h"), 20)
    assert collected.final("k").tokens == tuple(tokens)


@pytest.mark.parametrize("code", [429, 503])
def test_what_was_refused_is_posted_again(loop: LoopThread, scripted: Any, code: int) -> None:
    server, collected = scripted(status(code, b"", (b"retry-after", b"0")), status(code), WELL), CollectedOutcomes()
    mine = client(loop, collected, server.served.url)
    mine.reserve("k", server.served.url, {}, 20)
    assert collected.final("k").kind == "prefilled"
    assert len(server.posts) == 3 and mine.counters["reservation_repeated"] == 2


@pytest.mark.parametrize("code", [400, 404, 409, 500, 502, 504])
def test_what_may_have_been_executed_is_not_posted_again(loop: LoopThread, scripted: Any, code: int) -> None:
    server, collected = scripted(status(code, b'{"error": {"message": "why"}}')), CollectedOutcomes()
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 20)
    outcome = collected.final("k")
    assert (
        outcome.failure.code == "PD-META-003"
        and "why" in outcome.failure.detail
        and str(code) in outcome.failure.detail
    )
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    "step",
    [
        lines({"event": "accepted"}, tear=True),
        lines({"event": "accepted"}),
        lines({"event": "x" * 100_000}),
        status(200, b"{"),
    ],
)
def test_an_answer_that_breaks_off_fails_once_and_is_not_posted_again(
    loop: LoopThread, scripted: Any, step: Any
) -> None:
    server, collected = scripted(step), CollectedOutcomes()
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 20)
    assert collected.final("k").failure.code == "PD-META-002"
    assert len(server.posts) == 1


def test_a_metaserver_that_comes_up_late_is_still_reached(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(WELL), CollectedOutcomes()
    server.served.kill()
    mine = client(loop, collected, server.served.url)
    mine.reserve("k", server.served.url, {}, 20)
    while not mine.counters["reservation_repeated"]:
        time.sleep(0.01)
    server.served.start()
    assert collected.final("k").kind == "prefilled"


def test_a_metaserver_that_is_not_there_fails_within_the_deadline(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(WELL), CollectedOutcomes()
    server.served.kill()
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 0.5)
    assert collected.final("k", 5).failure.code in ("PD-META-002", "PD-XFER-001")


def test_silence_of_three_heartbeats_fails(loop: LoopThread, scripted: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_ascend_pd.decode.scheduler.metaserver.HEARTBEAT_S", 0.1)
    heard = lines({"event": "heartbeat"}, 0.15, {"event": "heartbeat"}, 0.15, {"event": "heartbeat"}, 30)
    server, collected = scripted(heard), CollectedOutcomes()
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 60)
    assert "ReadTimeout" in collected.final("k", 10).failure.detail


def test_the_deadline_ends_a_call_that_beats_for_ever(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(lines(*([{"event": "heartbeat"}, 0.05] * 1000))), CollectedOutcomes()
    client(loop, collected, server.served.url).reserve("k", server.served.url, {}, 0.4)
    assert collected.final("k", 10).failure.code == "PD-XFER-001"


def test_forget_closes_the_call_and_tells_nothing_more(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(lines({"event": "accepted"}, 30)), CollectedOutcomes()
    mine = client(loop, collected, server.served.url)
    mine.reserve("k", server.served.url, {}, 60)
    while not collected.outcomes:
        time.sleep(0.01)
    mine.forget("k")
    mine.forget("k")
    while not server.closed_by_client:
        time.sleep(0.01)
    assert mine.open_count() == 0 and [o.kind for _, o in collected.outcomes] == ["accepted"]


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:1", "https://127.0.0.1:{port}", "http://localhost:{port}", "http://127.0.0.1:{port}/x"),
        *("http://127.0.0.1:{port}@evil", "http://u@127.0.0.1:{port}", "ftp://127.0.0.1:{port}", "", "http://[", "file:///etc/passwd"),
        "http://127.0.0.1:99999",
    ],
)  # fmt: skip
def test_only_the_allow_list_is_called(loop: LoopThread, scripted: Any, url: str) -> None:
    server, collected = scripted(WELL), CollectedOutcomes()
    mine = client(loop, collected, server.served.url)
    mine.reserve("k", url.format(port=server.served.port), {}, 5)
    assert collected.final("k").failure.code == "PD-META-001"
    assert not server.posts


def test_an_empty_allow_list_allows_nothing(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(WELL), CollectedOutcomes()
    client(loop, collected).reserve("k", server.served.url, {}, 5)
    assert collected.final("k").failure.code == "PD-META-001"


def test_origin_knows_default_ports() -> None:
    assert origin("http://h") == origin("http://H:80/") != origin("https://h")


def test_more_than_connections_and_queue_fails_at_once(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(lines({"event": "accepted"}, 30)), CollectedOutcomes()
    mine = client(loop, collected, server.served.url, metaserver_max_connections=2, metaserver_max_queue=3)
    for key in range(6):
        mine.reserve(key, server.served.url, {}, 60)
    assert collected.final(5).failure.code == "PD-META-004"
    while server.open < 2:
        time.sleep(0.01)
    assert mine.open_count() == 5 and server.open == 2


def test_a_forgotten_call_makes_room_for_one_that_waits(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(lines({"event": "accepted"}, 30), WELL), CollectedOutcomes()
    mine = client(loop, collected, server.served.url, metaserver_max_connections=1)
    mine.reserve("first", server.served.url, {}, 60)
    while not server.open:
        time.sleep(0.01)
    mine.reserve("second", server.served.url, {}, 60)
    mine.forget("first")
    assert collected.final("second").kind == "prefilled"


def test_closing_ends_every_open_call(loop: LoopThread, scripted: Any) -> None:
    server, collected = scripted(lines({"event": "accepted"}, 30)), CollectedOutcomes()
    mine = client(loop, collected, server.served.url)
    for key in range(5):
        mine.reserve(key, server.served.url, {}, 60)
    loop.call(mine.close(), 10)
    mine.reserve("late", server.served.url, {}, 60)
    assert {collected.final(key).failure.code for key in (*range(5), "late")} == {"PD-XFER-002"}
    assert mine.open_count() == 0


def test_a_key_that_is_open_cannot_be_reserved_again(loop: LoopThread, scripted: Any) -> None:
    server = scripted(lines({"event": "accepted"}, 30))
    mine = client(loop, CollectedOutcomes(), server.served.url)
    mine.reserve("k", server.served.url, {}, 60)
    with pytest.raises(ValueError, match="already open"):
        mine.reserve("k", server.served.url, {}, 60)
    loop.call(mine.close(), 10)


REPORT = LoadReport("d/1/u", "ticket", "d" * 16, received=7, prefill="p" * 16)


def until_reported(mine: MetaserverClient) -> None:
    deadline = time.monotonic() + 20
    while mine._reporting:
        assert time.monotonic() < deadline, mine.counters
        time.sleep(0.005)


@pytest.mark.parametrize(("code", "lost"), [(204, 0), (404, 0), (500, 1)])
def test_a_report_is_posted_once_whatever_is_answered(loop: LoopThread, scripted: Any, code: int, lost: int) -> None:
    server = scripted(status(code))
    mine = client(loop, CollectedOutcomes(), server.served.url)
    mine.report(server.served.url, REPORT)
    until_reported(mine)
    assert server.posts == [json.loads(msgspec.json.encode(REPORT))]
    assert mine.counters["report_lost"] == lost
    loop.call(mine.close(), 10)


def test_a_report_goes_only_where_reservations_may_and_only_while_the_engine_runs(
    loop: LoopThread, scripted: Any
) -> None:
    server, other = scripted(status(204)), scripted(status(204))
    mine = client(loop, CollectedOutcomes(), server.served.url)
    mine.report(other.served.url, REPORT)
    mine.report(server.served.url, REPORT)
    until_reported(mine)
    loop.call(mine.close(), 10)
    mine.report(server.served.url, REPORT)
    assert (len(other.posts), len(server.posts)) == (0, 1)


def test_reports_that_are_not_taken_are_bounded_and_counted(loop: LoopThread, scripted: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(client_module, "_MAX_REPORTS", 20)
    server = scripted(lines(30))
    mine = client(loop, CollectedOutcomes(), server.served.url)
    for _ in range(50):
        mine.report(server.served.url, REPORT)
    assert mine.counters["report_lost"] == 30
    loop.call(mine.close(), 10)
    assert mine.counters["report_lost"] == 50 and not mine._reports, "closing ends those under way too"
