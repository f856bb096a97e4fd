# SPDX-License-Identifier: Apache-2.0
"""The metaserver with hostile callers and engines: bounded in memory and time, and never made to give false answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from vllm_ascend_pd.decode.scheduler.core import answers
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import app, connection, instances_file, intake, passing, server
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import CircuitPolicy
from vllm_ascend_pd.router.exchange import AsgiSend
from vllm_ascend_pd.router.fleet import Fleet
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.gate import ConnectionGate, Places
from vllm_ascend_pd.router.keys import ClientKeys
from vllm_ascend_pd.router.relay import send_answer
from vllm_ascend_pd.router.reserve import Heartbeats, Reservations
from vllm_ascend_pd.router.settings import Settings, read_token
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.http_session import Origin

LOOPBACK = "127.0.0.1"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def served(answer: connection.Handle, connections: int = 100) -> AsyncIterator[int]:
    """Start the metaserver's own HTTP server before a handler."""
    made = connection.FrontDoor(answer, Places(connections))
    gate = ConnectionGate(made.serve, made.places, first_byte_s=connection.HEAD_S)
    listening = server.listen(LOOPBACK, 0)
    gate.open(listening)
    try:
        yield listening.getsockname()[1]
    finally:
        gate.close()
        listening.close()
        await made.shutdown(0.1)


@asynccontextmanager
async def door(
    reader: intake.Intake | None = None,
    max_bytes: int = 1 << 20,
    *,
    cut: list[str] | None = None,
    hold: list[int] | None = None,
    connections: int = 100,
) -> AsyncIterator[int]:
    """Start the metaserver's own HTTP protocol before a handler that reads a body and answers its length. `cut`:
    requests whose body was cut off. `hold`: while it is not empty, no request is answered."""
    taken = reader or intake.Intake()
    cut = [] if cut is None else cut
    hold = hold or []
    trailers: list[bytes] = []

    async def answer(asked: intake.CallerRequest, send: AsgiSend) -> None:
        with taken.body(asked) as counted:
            try:
                body = await counted.read(max_bytes)
            except intake.CallerLeft:
                cut.append(asked.path)
                return
            except intake.NotTaken as refused:
                await send_answer(send, refused.answer)
                return
            trailers.extend(name for name, _ in asked.headers if name == b"x-trailer")
            while hold:
                await asyncio.sleep(0.01)
            head = [(b"content-length", b"%d" % len(str(len(body))))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": str(len(body)).encode()})

    async with served(answer, connections) as port:
        yield port
    assert not trailers, "a trailer is no header"


async def talk(port: int, data: bytes, *, timeout_s: float = 5.0) -> bytes:
    """Send bytes; return what comes back until the other side closes or answers."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(65536), timeout_s)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_an_ordinary_request_gets_through() -> None:
    async with door() as port:
        assert (await talk(port, HEAD + b"content-length: 5\r\n\r\nhello")).endswith(b"\r\n\r\n5")
        chunks = b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
        assert (await talk(port, HEAD + chunks)).endswith(b"\r\n\r\n7")


async def test_the_head_of_an_answer_leaves_with_its_body_or_without_one() -> None:
    async with door() as port:
        whole = await talk(port, HEAD + b"content-length: 2\r\n\r\nhi")  # of one read
        assert whole.startswith(b"HTTP/1.1 200 OK\r\n") and whole.endswith(b"\r\n\r\n2")
    async with door() as port:  # no body follows the head of an answer to HEAD
        asked = HEAD.replace(b"POST", b"HEAD") + b"content-length: 0\r\n\r\n"
        said = await talk(port, asked)
        assert b"\r\ncontent-length: 1\r\n" in said and said.endswith(b"\r\n\r\n")
        asked = HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        assert (await talk(port, asked)).endswith(b"100 Continue\r\n\r\n")


@pytest.mark.parametrize(
    "start",
    [b"GET /", HEAD + b"x: ", HEAD + b"x", HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: "],
    ids=["an address", "a header", "a header's name", "a trailer"],
)
async def test_a_head_without_an_end_is_cut_off(start: bytes) -> None:
    async with door() as port:
        _, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(start)
        sent = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while sent < 64 << 20:
                writer.write(b"a" * 65536)
                sent += 65536
                await writer.drain()
                await asyncio.sleep(0)
        assert sent < 32 << 20, "most of it waits in the kernel's buffers"
        writer.close()
        assert (await talk(port, HEAD + b"content-length: 2\r\n\r\nhi")).endswith(b"2")


@pytest.mark.parametrize("data", [b"", b"GET / HT"], ids=["silence", "half a head"])
async def test_a_client_that_does_not_ask_is_not_waited_for(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    async with door() as port:
        assert await talk(port, data) == b""


async def test_a_second_head_is_waited_for_as_long_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    async with door() as port:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        for _ in range(3):
            writer.write(HEAD + b"content-length: 1\r\n\r\n1")
            assert b"200 OK" in await asyncio.wait_for(reader.read(65536), 5)
            await asyncio.sleep(0.2)
        writer.write(b"GET / HT")
        assert await asyncio.wait_for(reader.read(65536), 5) == b""
        writer.close()


async def test_a_connection_that_is_kept_may_be_idle_for_longer_than_a_head_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(asked: intake.CallerRequest, send: AsgiSend) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    async with served(refuse) as port:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        for _ in range(2):
            writer.write(HEAD + b"content-length: 1\r\n\r\n")
            assert b" 204 " in await asyncio.wait_for(reader.read(65536), 5)
            writer.write(b"1")  # a body that nobody reads, and no head
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(65536), 0.5)
        writer.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "half-closed"])
def test_an_end_that_comes_with_the_request_is_told_from_a_caller_that_has_gone(make_loop: Any, closed: bool) -> None:
    """Both are there before the server reads."""

    async def run() -> None:
        gone = asyncio.Event()

        async def answer(asked: intake.CallerRequest, send: AsgiSend) -> None:
            tell = gone.set
            asked.connection.watch(tell)
            if closed:
                await gone.wait()
            asked.connection.unwatch(tell)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        loop = asyncio.get_running_loop()
        async with served(answer) as port:
            with socket.create_connection((LOOPBACK, port)) as caller:
                caller.sendall(HEAD + b"content-length: 2\r\n\r\nhi")  # the server runs on this very thread
                caller.shutdown(socket.SHUT_WR)
                if closed:
                    caller.close()
                    await asyncio.wait_for(gone.wait(), 10)
                else:
                    said = await loop.run_in_executor(None, caller.makefile("rb").read)
                    assert b"HTTP/1.1 204 " in said and not gone.is_set()

    loop = make_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


@pytest.mark.parametrize("late", [False, True], ids=["before its head", "behind its head"])
async def test_an_answer_that_fails_after_a_sign_of_life_is_one_error_or_the_end(late: bool) -> None:
    """The sign is the first byte of the head, or all of the head."""

    async def answer(asked: intake.CallerRequest, send: AsgiSend) -> None:
        if late:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        failing.set()
        await fail.wait()
        raise RuntimeError("as planned")

    failing, fail = asyncio.Event(), asyncio.Event()
    async with served(answer) as port:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(HEAD + b"content-length: 2\r\n\r\nhi")
        await asyncio.wait_for(failing.wait(), 10)
        writer.write_eof()
        said = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n" if late else b"H"), 10)
        fail.set()
        said += await asyncio.wait_for(reader.read(), 10)
        assert said.startswith(b"HTTP/1.1 200 OK\r\n" if late else b"HTTP/1.1 500 Internal Server Error\r\n")
        assert said.count(b"HTTP") == 1 and late != (b"PD-META-041" in said)
        writer.close()


async def test_a_bad_chunk_in_a_later_read_gets_one_answer_and_the_end() -> None:
    """aiohttp's parser does not tell the handler, so it is that of a body which does not come."""
    async with door(intake.Intake(stall_s=0.2)) as port:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).endswith(b"100 Continue\r\n\r\n")
        writer.write(b"zz\r\n" + HEAD + b"content-length: 1\r\n\r\n1")
        said = await asyncio.wait_for(reader.read(), 10)
        assert said.startswith(b"HTTP/1.1 408 ") and said.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize("start", [b"", b"some"], ids=["nothing of it", "its beginning"])
@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"], ids=["sent", "announced"])
async def test_a_body_that_does_not_come_is_not_waited_for(start: bytes, expects: bytes) -> None:
    async with door(intake.Intake(stall_s=0.2)) as port:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(HEAD + b"content-length: 1\r\n\r\n1")
        assert b"200 OK" in await asyncio.wait_for(reader.read(65536), 5)
        writer.write(HEAD + expects + b"content-length: 100\r\n\r\n" + start)
        assert b" 408 " in await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_a_body_too_large_is_refused_while_it_comes() -> None:
    async with door(max_bytes=1000) as port:
        for size in (
            b"content-length: 5000\r\n\r\n" + b"a" * 5000,
            b"transfer-encoding: chunked\r\n\r\n7d0\r\n" + b"a" * 2000,
        ):
            assert b" 413 " in await talk(port, HEAD + size)


async def test_all_bodies_together_are_bounded_and_what_is_read_is_given_back() -> None:
    taken = intake.Intake(short=100_000)
    async with door(taken) as port:
        callers = [await asyncio.open_connection(LOOPBACK, port) for _ in range(3)]
        for _, writer in callers:
            writer.write(HEAD + b"content-length: 50000\r\n\r\n" + b"a" * 40_000)
            await writer.drain()
        while not taken.short.waiting:
            await asyncio.sleep(0.005)
        assert taken.held_bytes == 100_000
        for reader, writer in callers:  # the last one has room as soon as another one is answered
            writer.write(b"a" * 10_000)
            assert b"50000" in await asyncio.wait_for(reader.read(65536), 5)
        assert taken.held_bytes == 0
        for _, writer in callers:
            writer.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_a_client_that_reads_nothing_is_not_served_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_UNREAD_S", 0.5)
    ended = asyncio.Event()

    async def answer(asked: intake.CallerRequest, send: AsgiSend) -> None:
        left: list[bool] = []
        asked.connection.watch(lambda: left.append(True))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left:
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
        ended.set()

    loop = asyncio.get_running_loop()
    async with served(answer) as port:
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.run_in_executor(None, lazy.connect, (LOOPBACK, port))
            lazy.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 20)


# -- what engines and D's metaserver answer


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nx: ",
        b"HTTP/1.1 200 OK\r\nx",
        b"HTTP/1.1 200 O",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["a header", "a header's name", "the reason", "a trailer", "a chunk's extension"],
)
async def test_an_answer_whose_head_has_no_end_is_broken_off(start: bytes) -> None:
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.read(100)
        writer.write(start)
        try:
            while served < 64 << 20:
                writer.write(b"a" * 65536)
                served += 65536
                await writer.drain()
        except ConnectionError:
            pass

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    upstream = Upstream(5.0, 30.0)
    origin = Origin("http", LOOPBACK, server.sockets[0].getsockname()[1])
    with pytest.raises(UpstreamError, match=r"does not end|more than") as broken:
        async with upstream.ask(origin, "GET", b"/", [], b"", 30.0) as reply:
            await reply.rest(1 << 20)
    assert broken.value.failure is HttpFailure.BROKEN and served < 32 << 20
    await upstream.close()
    server.close()


@pytest.mark.parametrize("answer", [b"[" * 60_000, b'{"a":' * 10_000, b'{"event":' + b"1" * 5000 + b"}"])
def test_an_answer_nested_without_end_is_a_bad_answer(answer: bytes) -> None:
    with pytest.raises(answers.BadAnswer):
        answers.outcome(answer)
    assert answers.reason(answer) == answer[:200].decode()


def test_what_an_answer_says_can_be_logged_and_sent_on() -> None:
    """JSON can hold half of a surrogate pair; UTF-8 and msgpack cannot, and CANCEL carries this text."""
    line = b'{"event": "failed", "code": "PD-META-006", "detail": "bad \\ud800 words"}'
    outcome = answers.outcome(line)
    assert outcome is not None and outcome.failure is not None
    assert msgspec.msgpack.encode(outcome.failure) and "bad" in outcome.failure.detail
    accepted = answers.outcome(b'{"event": "accepted", "prefill": "\\udfff"}')
    assert accepted is not None and accepted.prefill.encode()
    assert answers.reason(b'{"error": {"message": "\\udfff"}}').encode()


@pytest.mark.parametrize("code", ["PD-XXX-999", "x" * 10_000, 7, None, [], {}, ["PD-META-006"], True])
def test_a_code_outside_the_catalogue_does_not_become_the_label_of_a_metric(code: object) -> None:
    outcome = answers.outcome(json.dumps({"event": "failed", "code": code}).encode())
    assert outcome is not None and outcome.failure is not None and outcome.failure.code == "PD-META-006"


# -- what clients send


@pytest.mark.parametrize("forged", ["x", 7, ["do_remote_decode"], {"do_remote_decode": True}])
def test_parameters_do_not_come_in_by_the_side_door(forged: object) -> None:
    """vLLM copies the entries of vllm_xargs to the place of kv_transfer_params."""
    body = {"prompt": "p", "vllm_xargs": {"kv_transfer_params": forged, "mine": 1}}
    request = bodies.parse(bodies.COMPLETIONS, json.dumps(body).encode())
    for made in (bodies.for_decode(request, None), bodies.for_prefill(request, {"m": 1}, None)[1],
                 bodies.for_prefill(request, {"m": 1}, msgspec.Raw(b"[1,2]"))[1]):  # fmt: skip
        assert json.loads(made)["vllm_xargs"] == {"mine": 1}
    assert json.loads(bodies.stripped(json.dumps(body).encode())) == {
        "prompt": "p",
        "vllm_xargs": {"mine": 1},
    }
    assert json.loads(bodies.stripped(json.dumps([body]).encode())) == [{"prompt": "p", "vllm_xargs": {"mine": 1}}]


@pytest.mark.parametrize("xargs", [None, 1, "x", [], [1], {}, {"a": "b"}])
def test_other_extra_arguments_are_the_engines_to_judge(xargs: object) -> None:
    request = bodies.parse(bodies.CHAT, json.dumps({"messages": [], "vllm_xargs": xargs}).encode())
    assert json.loads(bodies.for_decode(request, None))["vllm_xargs"] == xargs


def test_a_prompt_nested_deeply_costs_no_more_than_its_length() -> None:
    for depth in (3, 100, 400):
        body = b'{"prompt":' + b"[" * depth + b'"' + b"a" * 1000 + b'"' + b"]" * depth + b"}"
        assert bodies.parse(bodies.COMPLETIONS, body).copies == 1


@pytest.mark.parametrize("prompt", [["a", [1, 2]], [[1], "b" * 8], [[[1, 2]], 3], [{}], [None, 2]])
def test_lists_of_anything_are_measured_without_an_error(prompt: object) -> None:
    request = bodies.parse(bodies.COMPLETIONS, json.dumps({"prompt": prompt}).encode())
    assert request.prefill_tokens >= 1


@pytest.mark.parametrize("item", [b'"a",', b"[],", b"[1],", b'"a" ,'])
def test_very_many_prompts_are_not_taken_apart(item: bytes) -> None:
    """A body of 64 MiB with one Python object for each prompt would take gigabytes."""
    body = b'{"prompt": [' + item * 2_000_000 + b'"z"]}'
    tracemalloc.start()
    request = bodies.parse(bodies.COMPLETIONS, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert request.shape is bodies.Shape.BATCH and request.copies >= 2 and request.prefill_tokens > 1_000_000
    assert peak < 5 * len(body)


def test_a_long_body_is_never_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 60 MiB takes seconds in which no heartbeat is sent: it is passed on unchanged, or refused."""

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(bodies.json, "loads", read)
    monkeypatch.setattr(bodies.msgspec.json, "decode", read)
    names = (b'"kv_transfer_params"', b'"kv_transfer\\u005fparams"', b'"\\u006Bv_transfer_params"')
    for values in (b"[]," * 3_000_000 + b"1", b'"caf\\u00e9",' * 1_000_000 + b"1"):
        plain = b'{"a": [' + values + b"]}"
        assert bodies.stripped(plain) is plain
        for name in names:
            with pytest.raises(bodies.BodyError, match="leave it out"):
                bodies.stripped(b'{"a": [' + values + b"], " + name + b": 1}")
    utf16 = ('{"kv_transfer_params": 1, "a": "' + "x" * 200_000 + '"}').encode("utf-16")
    for odd, why in ((b'{"a": [' + b"NaN," * 3_000_000 + b"1]}", "no strict JSON"), (utf16, "leave it out")):
        with pytest.raises(bodies.BodyError, match=why):
            bodies.stripped(odd)
    with pytest.raises(bodies.BodyError, match="too deeply"):
        bodies.stripped(b"[" * 3_000_000)
    audio = b"--boundary\r\nkv_transfer_params" + b",[{" * 3_000_000
    assert bodies.stripped(audio) is audio


async def test_a_prompt_is_not_read_before_its_ticket_is_known() -> None:
    front = Front(Settings(), Fleet(CircuitPolicy()), Upstream(1.0, 1.0), "http://metaserver")
    handler = Reservations(front, Heartbeats(2.0))

    async def send(message: Any) -> None:
        raise AssertionError("it is answered as if it were known")

    posted = {"ticket": "invented", "transfer": "t", "reservation": "", "prompt_token_ids": ["no", "ids"]}
    with pytest.raises(intake.NotTaken) as refused:
        await handler.answer(json.dumps(posted).encode(), send)
    assert refused.value.answer.status == 404


async def test_a_body_counts_until_its_exchange_ends() -> None:
    taken, hold = intake.Intake(short=100_000, room_s=0.0), [1]
    async with door(taken, hold=hold) as port:
        served = [asyncio.ensure_future(talk(port, HEAD + b"content-length: 60000\r\n\r\n" + b"a" * 60_000))]
        while taken.held_bytes < 60_000:
            await asyncio.sleep(0.005)
        assert b" 429 " in await talk(port, HEAD + b"content-length: 60000\r\n\r\n" + b"a" * 60_000)
        hold.clear()
        assert b"60000" in await served[0]
        assert b"60000" in await talk(port, HEAD + b"content-length: 60000\r\n\r\n" + b"a" * 60_000)
        assert taken.held_bytes == 0


CUT = {
    "length, nothing": b"content-length: 100\r\n\r\n",
    "length, a part": b'content-length: 100\r\n\r\n{"model": 1}',
    "length, all but one": b"content-length: 100\r\n\r\n" + b"a" * 99,
    "chunks, nothing": b"transfer-encoding: chunked\r\n\r\n",
    "chunks, one": b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "chunks, a part of one": b"transfer-encoding: chunked\r\n\r\n50\r\nhello",
    "chunks, no end": b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
}


@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
@pytest.mark.parametrize("sent", CUT.values(), ids=CUT)
@pytest.mark.parametrize("method", [b"POST", b"DELETE"])
async def test_a_body_that_was_cut_off_is_no_request(method: bytes, sent: bytes, how: str) -> None:
    taken, cut = intake.Intake(), list[str]()
    async with door(taken, cut=cut) as port:
        _reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(HEAD.replace(b"POST", method) + sent)
        await writer.drain()
        if how == "half-closed":
            writer.write_eof()
        elif how == "reset":
            await asyncio.sleep(0.05)  # otherwise the head may be lost too
            writer.transport.abort()
        else:
            writer.close()
        end = asyncio.get_running_loop().time() + 10
        while not cut and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        assert cut == ["/v1/completions"] and taken.held_bytes == 0
        writer.close()


async def test_trailers_are_no_headers() -> None:
    async with door() as port:
        body = b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-trailer: evil\r\n\r\n"
        assert (await talk(port, HEAD + body)).endswith(b"5")


async def test_idle_connections_are_bounded_and_the_oldest_goes() -> None:
    async with door(connections=3) as port:
        idle = [await asyncio.open_connection(LOOPBACK, port) for _ in range(3)]
        for _, writer in idle:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        for reader, _ in idle:
            assert b" 200 " in await asyncio.wait_for(reader.read(65536), 5)
        assert b" 200 " in await talk(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(idle[0][0].read(65536), 5) == b""
        idle[2][1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(idle[2][0].read(65536), 5), "one that came later is still served"
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(
    "path", ["/v1/../x", "/v1/%2e%2e/x", "/v1/./x", "/v1//x", "/v1/..%2fx", "/v1/a\\b", "/v1/x/.."]
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    assert not passing.is_canonical(path.encode())
    assert passing.is_canonical(b"/v1/models/") and passing.is_canonical(b"/v1/models/a.b..c?x=/../y")


@pytest.mark.parametrize("given", [b"x" * 200_000, b"a\nb", b"\xff\xfe", b" \t ", b""])
def test_a_clients_request_id_is_one_short_word(given: bytes) -> None:
    headers, request_id = app.forwarded("POST", [(b"x-request-id", given)], "", ClientKeys(Settings()))
    assert 0 < len(request_id) <= 128 and request_id.isprintable() and " " not in request_id
    assert dict(headers)[b"x-request-id"] == request_id.encode()


@pytest.mark.parametrize("read", [read_token, instances_file.read], ids=["token", "instances"])
def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(read: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        read(str(pipe))


def test_each_name_of_a_connection_header_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new set for each of them, with all earlier ones in it, takes a second for as many as a head can hold."""

    class Names(frozenset[bytes]):
        def union(self, *_: object) -> Any:
            raise AssertionError("all copied for one more")

    monkeypatch.setattr(app, "NOT_FORWARDED", Names(app.NOT_FORWARDED))
    headers = [(b"connection", b"x%d" % i) for i in range(100)] + [(b"x7", b"dropped"), (b"y", b"kept")]
    kept, _ = app.forwarded("POST", headers, "", ClientKeys(Settings()))
    assert (b"y", b"kept") in kept and (b"x7", b"dropped") not in kept
