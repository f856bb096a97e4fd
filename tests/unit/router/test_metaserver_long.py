# SPDX-License-Identifier: Apache-2.0
"""Long bodies: read on one thread beside the loop, within bounds of memory, and sent on as they came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import StreamReader

from unit.router.cluster import cluster, texts
from unit.router.fake_engine import ids_of
from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.router import reserve
from vllm_ascend_pd.router.app import RESERVATIONS, WorkerProcess
from vllm_ascend_pd.router.aside import AT_ONCE, Aside
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.router.intake import CallerRequest
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.shared.core import gathered

LONG = 3_000_000
HOSTILE = {
    "a text": b'{"prompt": "' + b"x" * LONG + b'"}',
    "escapes": b'{"prompt": "' + b'\\"' * (LONG // 2) + b'"}',
    "backslashes": b'{"prompt": "' + b"\\\\" * (LONG // 2) + b'"}',
    "token ids": b'{"prompt": [' + b"12345," * (LONG // 6) + b"1]}",
    "prompts": b'{"prompt": [' + b'"a",' * (LONG // 4) + b'"z"]}',
    "lists": b'{"prompt": "x", "a": [' + b"[]," * (LONG // 3) + b"1]}",
    "white space": b'{"prompt": ' + b" " * LONG + b'"x"}',
    "a number": b'{"prompt": "x", "a": [' + b"1" * LONG + b"]}",
    "a long name": b'{"prompt": "x", "' + b"a" * LONG + b'": 1}',
    "many names": b"{" + b",".join(b'"%x": 1' % i for i in range(LONG // 11)) + b"}",
    "extra arguments": b'{"prompt": "x", "vllm_xargs": {"a": [' + b'"b",' * (LONG // 4) + b"1]}}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_is_made_of_a_long_body_is_what_came(body: bytes) -> None:
    try:
        request = bodies.parse(bodies.COMPLETIONS, body)
    except bodies.BodyError as problem:
        assert "name" in str(problem) and "name" in next(kind for kind in HOSTILE if HOSTILE[kind] is body)
        return
    for made in (bodies.for_decode(request, {"t": 1}), bodies.for_prefill(request, {"t": 1}, None)[1]):
        sent = b"".join(gathered.cut(made))
        assert gathered.length(made) == len(sent)
        if body is not HOSTILE["a number"]:  # too long for Python's own reader
            expected = json.loads(body)
            assert {key: json.loads(sent)[key] for key in expected} == expected
            assert json.loads(sent)["kv_transfer_params"] == {"t": 1}


@pytest.mark.parametrize("count", [bodies.MAX_NAMES, bodies.MAX_NAMES + 1])
@pytest.mark.parametrize("padding", [0, LONG], ids=["short", "long"])
def test_the_names_of_a_body_are_bounded(count: int, padding: int) -> None:
    body = json.dumps({"prompt": "x" * padding} | {f"{i}": 1 for i in range(count - 1)}).encode()
    if count > bodies.MAX_NAMES:
        with pytest.raises(bodies.BodyError, match="more than 256 names"):
            bodies.parse(bodies.COMPLETIONS, body)
    else:
        assert len(bodies.parse(bodies.COMPLETIONS, body).fields) == count


def test_very_many_names_are_refused_with_a_code() -> None:
    with cluster() as c:
        answer = c.http.post("/v1/completions", content=HOSTILE["many names"])
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "PD-META-012"
        assert "256 names" in answer.json()["error"]["message"]


def test_a_long_prompt_is_served_whole() -> None:
    prompt = 'a "quoted" \\ text ' * 200_000
    with cluster() as c:
        answer = c.complete(prompt)
        assert answer.status_code == 200 and texts(answer) == texts(c.complete(prompt))
        assert c.legs()[0]["prompt"] == ids_of(prompt) and c.decode[0].generations()[0].body["prompt"] == prompt
        assert c.decode[0].local_prefills == 0


class CountingServer(asyncio.Protocol):
    """Server that counts what it receives, and answers when all of it has come, with as many bytes."""

    came = 0

    def __init__(self, size: int) -> None:
        self.size, self.head = size, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.head += data[: 4096 - len(self.head)]
        self.came += len(data)
        if self.came >= self.size:
            answer = b'{"choices": ["' + b"y" * self.size + b'"], "kv_transfer_params": {"other": 1}}'
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)


class Coming:
    """A client's or D's request on its way to a worker, and the answer that it gets."""

    def __init__(self, path: str, body: bytes) -> None:
        self.got, self.written, self.gone = bytearray(), [0], lambda: None
        connection: Any = SimpleNamespace(watch=self._watch, unwatch=lambda gone: None, gone=False)
        self._body, loop = body, asyncio.get_running_loop()
        protocol: Any = SimpleNamespace(resume_reading=lambda **_: None, connected=True)
        self._content = StreamReader(protocol, 2 * len(body), loop=loop)
        self.asked = CallerRequest("POST", path, path.encode(), [], "", self._content, connection)

    def _watch(self, gone: Any) -> None:
        self.gone = gone

    async def send(self, message: Any) -> None:
        self.got.extend(message.get("body", b""))
        self.written.append(len(message.get("body", b"")))

    async def arrive(self) -> None:
        for at in range(0, len(self._body), 65536):
            self._content.feed_data(self._body[at : at + 65536])
            await asyncio.sleep(0)
        self._content.feed_eof()


@contextlib.asynccontextmanager
async def worker_before(size: int) -> AsyncIterator[WorkerProcess]:
    """Run a worker's requests over an engine that answers when so many bytes have come."""
    engine = await asyncio.get_running_loop().create_server(lambda: CountingServer(size), "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    worker = WorkerProcess(Settings(decode=(f"127.0.0.1:{port}",), canary=False), "http://127.0.0.1:1")
    async with worker.standing():
        yield worker
    engine.close()


def threads_of_long_texts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("long texts")]


@pytest.mark.parametrize("length", [LONG, AT_ONCE // 8])
async def test_a_long_body_goes_and_is_answered_in_pieces_and_its_thread_ends(length: int) -> None:
    body = b'{"prompt": [' + b'"a",' * (length // 4) + b'"z"]}'
    async with worker_before(len(body)) as worker:
        coming = Coming("/v1/completions", body)
        await asyncio.gather(worker.answer(coming.asked, coming.send), coming.arrive())
        assert bool(threads_of_long_texts()) is (length == LONG)
    answer = json.loads(bytes(coming.got))
    assert answer == {"choices": ["y" * len(body)], "kv_transfer_params": None}
    assert max(coming.written) <= 256 << 10
    assert not threads_of_long_texts()


async def test_where_no_thread_can_be_started_a_long_text_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    aside = Aside()
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert await aside.run(len, bytes(AT_ONCE + 1)) == AT_ONCE + 1
    monkeypatch.undo()
    assert await aside.run(len, bytes(AT_ONCE + 2)) == AT_ONCE + 2
    aside.close()


class HeldRequest:
    """A text that the thread reads until it is told to end."""

    def __init__(self, aside: Aside) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()
        self.task = asyncio.create_task(aside.run(self._read, bytes(AT_ONCE + 1)))

    def _read(self, text: Buffer) -> int:
        self.begun.set()
        assert self.ends.wait(30)
        return len(text)

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 30)


async def until(true: Any) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_body_that_waits_for_the_thread_counts_among_those_in_flight(path: str) -> None:
    body = HOSTILE["token ids"]
    async with worker_before(len(body)) as worker:
        blocker, coming = HeldRequest(worker.front.aside), Coming(path, body)
        await blocker.until_begun()
        answering = asyncio.create_task(worker.answer(coming.asked, coming.send))
        await coming.arrive()
        await until(lambda: worker.front.aside.waiting)
        short = Coming("/v1/completions", b"{")
        await asyncio.gather(worker.answer(short.asked, short.send), short.arrive())
        assert b"PD-META-012" in short.got, "the loop goes on"
        assert worker.intake.held_bytes == len(body) and not coming.got
        blocker.ends.set()
        await answering
        assert coming.got and worker.intake.held_bytes == 0


async def test_a_post_whose_decode_engine_leaves_waits_for_no_thread() -> None:
    async with worker_before(1) as worker:
        blocker, coming = (
            HeldRequest(worker.front.aside),
            Coming(RESERVATIONS, b'{"ticket": "t", "a": [' + b"1," * LONG + b"1]}"),
        )
        await blocker.until_begun()
        answering = asyncio.create_task(worker.answer(coming.asked, coming.send))
        await coming.arrive()
        await until(lambda: worker.front.aside.waiting)
        coming.gone()
        await answering
        assert worker.intake.held_bytes == 0 and not coming.got and not blocker.task.done()
        blocker.ends.set()
        assert await blocker.task == AT_ONCE + 1


# -- the thread


async def test_short_texts_are_read_at_once_and_long_ones_on_one_thread_shortest_first() -> None:
    aside, read, loop = Aside(), list[tuple[int, int]](), threading.get_ident()

    def note(text: Buffer) -> None:
        read.append((len(text) - AT_ONCE, threading.get_ident()))

    blocker = HeldRequest(aside)
    await blocker.until_begun()
    waiting = [asyncio.create_task(aside.run(note, bytes(AT_ONCE + more))) for more in (9, 7, 8, 7)]
    await until(lambda: len(aside.waiting) == 4)
    await aside.run(note, bytes(AT_ONCE))
    assert read == [(0, loop)]
    blocker.ends.set()
    await asyncio.gather(*waiting)
    assert [more for more, _ in read] == [0, 7, 7, 8, 9]
    assert loop not in (others := {where for _, where in read[1:]}) and len(others) == 1
    aside.close()


async def test_a_caller_that_leaves_keeps_no_other_from_its_turn() -> None:
    aside, read = Aside(), list[Buffer]()
    blocker = HeldRequest(aside)
    await blocker.until_begun()
    leaving, staying = (asyncio.create_task(aside.run(read.append, bytes(AT_ONCE + more))) for more in (1, 2))
    await until(lambda: len(aside.waiting) == 2)
    for task in (leaving, blocker.task):
        task.cancel()
    await asyncio.wait((leaving,))
    assert leaving.cancelled() and not blocker.task.done(), "the thread still has its text"
    blocker.ends.set()
    await staying
    assert blocker.task.cancelled() and [len(text) for text in read] == [AT_ONCE + 2]
    aside.close()


async def test_a_caller_that_leaves_at_its_turn_gives_it_up() -> None:
    aside, read = Aside(), list[Buffer]()
    aside._busy = True
    leaving, staying = (asyncio.create_task(aside.run(read.append, bytes(AT_ONCE + more))) for more in (1, 2))
    await until(lambda: len(aside.waiting) == 2)
    aside._busy = False
    aside._pass()
    leaving.cancel()  # its turn has come, and it has not seen that
    await staying
    assert leaving.cancelled() and [len(text) for text in read] == [AT_ONCE + 2]
    aside.close()


async def test_an_error_is_its_own_callers() -> None:
    aside = Aside()

    def broken(_: Buffer) -> None:
        raise bodies.BodyError("as set")

    for _ in range(2):
        with pytest.raises(bodies.BodyError, match="as set"):
            await aside.run(broken, bytes(AT_ONCE + 1))
    assert await aside.run(len, bytes(AT_ONCE + 1)) == AT_ONCE + 1
    aside.close()


# -- what is refused


DEEP = {"brackets": (b"[", b"]"), "objects": (b'{"a":', b"}"), "both": (b'[{"a":', b"}]")}


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kind", DEEP)
def test_what_is_nested_without_end_is_refused_with_a_code(kind: str, closed: bool) -> None:
    opening, closing = DEEP[kind]
    deep = opening * 300_000 + (b"1" + closing * 300_000 if closed else b"")
    with cluster() as c:
        for route, code in (
            ("/v1/completions", "PD-META-012"),
            ("/v1/chat/completions", "PD-META-012"),
            ("/v1/embeddings", "PD-META-012"),
            ("/v1/metaserver", "PD-META-003"),
        ):
            for padding in (b"", b"x" * (AT_ONCE + 1)):
                name = b"messages" if "chat" in route else b"prompt"
                answer = c.http.post(route, content=b'{"user": "' + padding + b'", "' + name + b'": ' + deep + b"}")
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, code), (route, error)
                assert "it is nested too deeply" in error["message"] and CATALOGUE[code].remedy
        assert c.complete("still there").status_code == 200
        assert not [leg for leg in c.decode[0].generations() if leg.body.get("prompt") != "still there"]


@pytest.mark.parametrize("number", [b"9" * LONG, b"1e999999", b"-" + b"1" * 5000, b"0." + b"3" * LONG])
def test_a_huge_number_is_the_engines_to_judge_and_none_here(number: bytes) -> None:
    body = b'{"prompt": "x", "n": ' + number + b', "max_tokens": ' + number + b', "user": "' + b"x" * 70_000 + b'"}'
    request = bodies.parse(bodies.COMPLETIONS, body)
    assert (request.copies, request.limit) == (1, 0)
    sent = b"".join(gathered.cut(bodies.for_decode(request, None)))
    assert sent.count(number) == 2


@pytest.mark.parametrize("number", [b"01", b"-", b"1e", b"1.", b"NaN", b"Infinity", b"0x1"])
def test_a_number_that_is_none_is_refused_in_a_long_body(number: bytes) -> None:
    body = b'{"prompt": "' + b"x" * LONG + b'", "a": [1, ' + number + b"]}"
    with pytest.raises(bodies.BodyError, match="not a JSON object"):
        bodies.parse(bodies.COMPLETIONS, body)
    with pytest.raises(bodies.BodyError, match="no strict JSON"):
        bodies.stripped(body)


def test_half_of_a_pair_is_refused_in_a_long_body() -> None:
    for half in (b"\\ud800", b"\\ud800x", b"\\udc00"):
        body = b'{"prompt": "' + b"x" * LONG + half + b'"}'
        for read in (lambda body: bodies.parse(bodies.COMPLETIONS, body), bodies.stripped):
            with pytest.raises(bodies.BodyError):
                read(body)


@pytest.mark.parametrize("kind", ["many names", "a long name"])
def test_names_of_a_long_body_take_no_memory(kind: str) -> None:
    tracemalloc.start()
    with pytest.raises(bodies.BodyError, match="name"):
        bodies.parse(bodies.COMPLETIONS, HOSTILE[kind])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * LONG


@pytest.mark.parametrize("part", bodies.MEDIA_PARTS)
@pytest.mark.parametrize("form", ["\\u%04x", "\\u%04X"])
def test_parts_are_found_however_their_letters_are_written(part: str, form: str) -> None:
    for written in range(3):
        name = "".join(form % ord(one) if (at + written) % 3 < written else one for at, one in enumerate(part))
        text = json.dumps({"role": "assistant", "content": [{"type": "\x00"}]}).replace("\\u0000", name)
        request = bodies.parse(bodies.CHAT, b'{"messages": [' + text.encode() + b"]}")
        assert json.loads(text)["content"] == [{"type": part}] and request.has_media, name
        assert not bodies.parse(bodies.CHAT, json.dumps({"messages": [{"content": text}]}).encode()).has_media
    whole = "".join(form % ord(one) for one in part)
    for at in range(65_400, 65_540, 7):  # pieces end within it
        body = b'{"messages": ["' + b"x" * at + b'", "' + whole.encode() + b'"]}'
        assert bodies.parse(bodies.CHAT, body).has_media


@pytest.mark.parametrize(
    "ids", [b"[" + b"1," * LONG + b"1]", b"[" + b"1," * LONG + b"[]]", b"[" + b"1 " * LONG + b"]", b'["x"]', b"7"]
)
def test_token_ids_that_d_posts_are_carried_and_not_made(ids: bytes) -> None:
    body = b'{"ticket": "t", "transfer": "x", "reservation": "", "prompt_token_ids": ' + ids + b"}"
    try:
        read = reserve.reading(body, {"t"})
    except (msgspec.DecodeError, bodies.BodyError):
        assert ids[:3] != b"[1," or ids.endswith(b"[]]")
    else:
        assert bytes(read.prompt_token_ids) == ids and read.tokens == LONG + 1
    if b"1 1" not in ids:
        assert reserve.reading(body, ()).tokens == 0, "an unknown ticket's prompt is not looked at"
