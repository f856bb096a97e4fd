# SPDX-License-Identifier: Apache-2.0
"""Long JSON parsed in slices: the result is that of an ordinary reader, and each slice is short."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import StreamReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.router.cluster import cluster, texts
from vllm_ascend_pd.http.core import gathered
from vllm_ascend_pd.router import app, reserve
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.core import bodies, outline
from vllm_ascend_pd.router.intake import CallerRequest
from vllm_ascend_pd.router.keys import ClientKeys
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.turns import Turns

WORDS = st.text(alphabet='ab"\\[]{},:\n\u00e4\u20ac', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
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


def slices(steps: outline.Scan[Any]) -> tuple[object, list[int]]:
    """Run the steps; return the result, and the bytes between two turns."""
    spent: list[int] = []
    while True:
        try:
            spent.append(next(steps))
        except StopIteration as done:
            return done.value, spent
        except (bodies.BodyError, outline.NotJson) as problem:
            return problem, spent


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set slices so short that every token is cut."""
    monkeypatch.setattr(outline, "SLICE", 3)
    monkeypatch.setattr(outline, "_FIRST", 2)
    monkeypatch.setattr(bodies, "SLICE", 0)


@pytest.mark.usefixtures("small")
@settings(suppress_health_check=list(HealthCheck))  # a loaded machine is slow
@given(st.dictionaries(WORDS, VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_members_are_those_that_a_reader_finds(body: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode(errors="replace")
    found = outline.at_once(outline.members(text))
    assert {name: json.loads(bytes(value)) for name, value in found.items()} == json.loads(text)


@pytest.mark.usefixtures("small")
@settings(suppress_health_check=list(HealthCheck))  # a loaded machine is slow
@given(st.text(alphabet='{}[]",:\\ 1tN', max_size=12), VALUES, st.integers(0, 60), st.integers(0, 60))
def test_what_a_reader_takes_is_understood_alike(noise: str, value: Any, at: int, cut: int) -> None:
    """A damaged text is refused, or an ordinary reader refuses it, or both find the same."""
    whole = json.dumps({"a": value, "b": 1})
    text = (whole[:at] + noise + whole[max(at, cut) :]).encode(errors="replace")
    try:
        right = json.loads(text)
    except (ValueError, RecursionError):
        return
    found, _ = slices(outline.members(text))
    if isinstance(found, dict):
        assert {name: json.loads(bytes(each)) for name, each in found.items()} == right
    else:
        assert not isinstance(right, dict) or b"NaN" in text or b"Infinity" in text, found


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_no_part_of_a_body_is_long_between_two_turns(body: bytes) -> None:
    for steps in (bodies.parsing(bodies.COMPLETIONS, body), bodies.stripping(body)):
        _, spent = slices(steps)
        assert max(spent, default=0) <= outline.SLICE


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_is_made_of_a_long_body_is_what_came(body: bytes) -> None:
    request, _ = slices(bodies.parsing(bodies.COMPLETIONS, body))
    if isinstance(request, bodies.BodyError):
        assert "name" in str(request)
        return
    assert isinstance(request, bodies.Request)
    for made in (bodies.for_decode(request, {"t": 1}), bodies.for_prefill(request, {"t": 1}, None)[1]):
        sent = b"".join(gathered.cut(made))
        assert gathered.length(made) == len(sent)
        if body is not HOSTILE["a number"]:  # too long for Python's own reader
            expected = json.loads(body)
            assert {key: json.loads(sent)[key] for key in expected} == expected
            assert json.loads(sent)["kv_transfer_params"] == {"t": 1}


@pytest.mark.parametrize("count", [outline.MAX_MEMBERS, outline.MAX_MEMBERS + 1])
@pytest.mark.parametrize("padding", [0, LONG], ids=["short", "long"])
def test_the_names_of_a_body_are_bounded(count: int, padding: int) -> None:
    body = json.dumps({"prompt": "x" * padding} | {f"{i}": 1 for i in range(count - 1)}).encode()
    if count > outline.MAX_MEMBERS:
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
        assert c.legs()[0]["prompt"] == prompt == c.decode[0].generations()[0].body["prompt"]
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


async def test_others_have_turns_while_a_long_body_comes_goes_and_is_answered() -> None:
    """From a body's last piece to the client's whole answer; one turn reads as much as the system's buffers hold."""
    body = HOSTILE["prompts"]
    loop = asyncio.get_running_loop()
    engine = await loop.create_server(lambda: CountingServer(len(body)), "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    configured = Settings(decode=(f"127.0.0.1:{port}",), canary=False)
    worker = WorkerProcess(configured, "http://127.0.0.1:1")
    turns, got, written = 0, bytearray(), [0]
    done = asyncio.Event()

    async def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        got.extend(message.get("body", b""))
        written.append(len(message.get("body", b"")))

    staying: Any = SimpleNamespace(watch=lambda gone: None, unwatch=lambda gone: None, gone=False)
    content = StreamReader(SimpleNamespace(resume_reading=lambda **_: None, connected=True), 2 * len(body), loop=loop)  # type: ignore[arg-type]
    asked = CallerRequest("POST", "/v1/completions", b"/v1/completions", [], "", content, staying)

    async def arrive() -> None:
        for at in range(0, len(body), 65536):
            content.feed_data(body[at : at + 65536])
            await asyncio.sleep(0)
        content.feed_eof()

    arriving = asyncio.create_task(arrive())
    counting = asyncio.create_task(count())
    await worker.answer(asked, send)
    await arriving
    done.set()
    await counting
    await worker.upstream.close()
    engine.close()
    answer = json.loads(bytes(got))
    assert answer == {"choices": ["y" * len(body)], "kv_transfer_params": None}
    assert max(written) <= 256 << 10
    most = (2 * len(body) + len(got)) / turns
    assert most <= outline.SLICE, f"{most:.0f} bytes a turn"


async def test_long_bodies_take_turns_with_each_other() -> None:
    """Many at once must not prolong a turn to the sum of their steps."""
    turns, loop, turn, of_turn = Turns(), asyncio.get_running_loop(), 0, Counter[int]()

    def count() -> None:
        nonlocal turn, counting
        turn, counting = turn + 1, loop.call_soon(count)

    def steps() -> outline.Scan[int]:
        yield 1
        for _ in range(5):
            of_turn[turn] += 1
            yield 1
        return 7

    counting = loop.call_soon(count)
    assert await asyncio.gather(*(turns.run(steps()) for _ in range(20))) == [7] * 20
    counting.cancel()
    assert sum(of_turn.values()) == 100 and max(of_turn.values()) == 1


@pytest.mark.parametrize("ids", [b"[" + b"1," * LONG + b"1]", b"[" + b"1 " * LONG + b"[]]", b'["x"]', b"7"])
def test_token_ids_that_d_posts_are_carried_and_not_made(ids: bytes) -> None:
    body = b'{"ticket": "t", "transfer": "x", "reservation": "", "prompt_token_ids": ' + ids + b"}"
    steps = reserve.reading(body, {"t"})
    try:
        read = outline.at_once(steps)
    except msgspec.DecodeError:
        assert ids[:3] != b"[1,"
    else:
        assert bytes(read.prompt_token_ids) == ids and read.tokens == LONG + 1
    assert outline.at_once(reserve.reading(body, ())).tokens == 0, "an unknown ticket's prompt is not looked at"


def test_each_name_of_a_connection_header_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new set for each of them, with all earlier ones in it, takes a second for as many as a head can hold."""

    class Names(frozenset[bytes]):
        def union(self, *_: object) -> Any:
            raise AssertionError("all copied for one more")

    monkeypatch.setattr(app, "_NOT_FORWARDED", Names(app._NOT_FORWARDED))
    headers = [(b"connection", b"x%d" % i) for i in range(100)] + [(b"x7", b"dropped"), (b"y", b"kept")]
    kept, _ = app.forwarded("POST", headers, "", ClientKeys(Settings()))
    assert (b"y", b"kept") in kept and (b"x7", b"dropped") not in kept
