# SPDX-License-Identifier: Apache-2.0
"""Work that is ended from outside: a reason stops its leg, or its caller leaves and its task is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from unit.kits.raw_server import RawServer, says, until
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.router.app import while_connected
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, Role
from vllm_ascend_pd.router.core.ends import RequestOver
from vllm_ascend_pd.router.exchange import AttemptFailed, HttpExchange, RoutedTransfer
from vllm_ascend_pd.router.faults import fault
from vllm_ascend_pd.router.fleet import Fleet, LegInFlight, parse_spec
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.upstream import Reply, Upstream
from vllm_ascend_pd.shared.core.failures import HttpFailure

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
WHY = RequestOver()
WHY_NOT = Failure("PD-META-006", "no prefill")


@asynccontextmanager
async def leg_at(*answer: bytes) -> AsyncIterator[tuple[LegInFlight, RawServer, Callable[[], Reply]]]:
    """A leg at an engine that answers with these bytes, the engine, and the call that the leg makes."""
    server, upstream = await RawServer(says(*answer)).start(), Upstream(5.0, 60.0)
    fleet = Fleet(CircuitPolicy())
    engine = fleet.add(parse_spec(Role.DECODE, f"127.0.0.1:{server.port}"), "a test")
    with fleet.leg(engine, 1) as leg:
        yield leg, server, lambda: leg.attach(upstream.ask(engine.origin, "POST", b"/", [], b"{}", 60.0))
    assert not engine.requests and not engine.load
    await upstream.close()
    server.stop()


async def test_a_leg_that_is_stopped_before_it_begins_sends_nothing() -> None:
    async with leg_at(HEAD + b"hello") as (leg, server, ask):
        leg.stop(WHY)
        with pytest.raises(RequestOver):
            await ask().head()
        assert not server.connections


async def test_who_waits_for_a_head_gets_the_reason() -> None:
    async with leg_at() as (leg, server, ask):
        asking = asyncio.ensure_future(ask().head())
        await until(lambda: server.requests)
        leg.stop(WHY)
        leg.stop(ValueError("another reason"))
        with pytest.raises(RequestOver):
            await asking
        await until(lambda: server.closed == 1)
        with pytest.raises(RequestOver):
            leg.check()


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "busy"])
async def test_who_reads_a_body_gets_the_reason_and_the_engine_sees_the_end(waiting: bool) -> None:
    async with leg_at(HEAD + b"hell") as (leg, server, ask):
        async with ask() as reply:
            assert await reply.read() == b"hell"
            reading = asyncio.ensure_future(reply.read()) if waiting else None
            await asyncio.sleep(0)
            leg.stop(WHY)
            with pytest.raises(RequestOver):
                await (reading or reply.read())
        await until(lambda: server.closed == 1)


async def test_an_answer_that_is_all_here_is_not_stopped() -> None:
    async with leg_at(HEAD + b"hello") as (leg, server, ask):
        for _ in range(2):
            async with ask() as reply:
                assert await reply.rest(100) == b"hello"
                leg.stop(WHY)
                leg.check()
                assert reply.at_end and await reply.read() == b""
        assert server.connections == 1


async def test_a_post_that_is_over_has_no_leg_that_goes_on() -> None:
    async with leg_at() as (leg, server, ask):
        transfer = RoutedTransfer("a transfer")
        transfer.end()
        assert transfer.ended
        transfer = RoutedTransfer("a transfer", leg=leg)
        asking = asyncio.ensure_future(ask().head())
        await until(lambda: server.requests)
        transfer.end()
        with pytest.raises(RequestOver):
            await asking


async def test_an_answer_does_not_commit_whose_leg_was_stopped_while_it_was_examined() -> None:
    """Another attempt takes its place, and the client sees only that one."""

    async def answers(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = b"x" * (1100 << 10) if len(server.requests) == 1 else b"short"
        body = b'data: {"choices": [{"text": "%b"}]}\n\ndata: [DONE]\n\n' % said
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body))
        if len(server.requests) > 1:
            writer.write(b"0\r\n\r\n")

    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    server, upstream, done = await RawServer(answers).start(), Upstream(5.0, 60.0), threading.Event()
    front = Front(Settings(), Fleet(CircuitPolicy()), upstream, "http://metaserver")
    front.fleet.add(parse_spec(Role.DECODE, f"127.0.0.1:{server.port}"), "a test")
    body = b'{"model": "m", "prompt": "p", "stream": true, "temperature": 1}'
    exchange = HttpExchange(bodies.parse(bodies.COMPLETIONS, body), [], "an id", send)
    before = asyncio.ensure_future(front.aside.run(lambda text: done.wait(20), bytes(2 << 20)))
    serving = asyncio.ensure_future(front.serve(exchange))
    await until(lambda: front.aside.waiting)
    assert isinstance(exchange.call, LegInFlight) and not messages
    exchange.call.stop(AttemptFailed(HttpFailure.PREFILL, fault(503, "Prefill failed.", "PD-META-006"), WHY_NOT))
    done.set()
    await asyncio.gather(before, serving)
    said = b"".join(message.get("body", b"") for message in messages)
    assert exchange.number == 2 and b"short" in said and b"xx" not in said
    assert sum(message["type"] == "http.response.start" for message in messages) == 1
    front.aside.close()
    await upstream.close()
    server.stop()


class Asked:
    """A caller's request, of which only the connection counts."""

    def __init__(self) -> None:
        self.connection: Any = self
        self.leave: Callable[[], None] | None = None
        self.ended = False

    async def serving(self) -> asyncio.Task[bool]:
        """Begin long work for this request; it has `ended` a little after it was cancelled."""

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                self.ended = True

        running = asyncio.create_task(while_connected(self, work()))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        return running

    def watch(self, when_gone: Callable[[], None]) -> None:
        self.leave = when_gone

    def unwatch(self, when_gone: Callable[[], None]) -> None:
        assert self.leave is when_gone
        self.leave = None


async def test_work_whose_caller_leaves_is_cancelled_and_has_ended_before_its_request_does() -> None:
    asked = Asked()
    running = await asked.serving()
    assert asked.leave is not None
    asked.leave()
    assert await running and asked.ended and asked.leave is None


async def test_a_server_that_waits_no_longer_cancels_the_work_and_waits_for_its_end() -> None:
    asked = Asked()
    running = await asked.serving()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asked.ended and asked.leave is None


async def test_work_that_ends_by_itself_ends_its_request_with_its_error() -> None:
    async def fails() -> None:
        raise OSError("why")

    assert not await while_connected(Asked(), asyncio.sleep(0))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="why"):
        await while_connected(Asked(), fails())  # type: ignore[arg-type]
