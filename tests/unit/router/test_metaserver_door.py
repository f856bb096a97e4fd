# SPDX-License-Identifier: Apache-2.0
"""One answer for each request, and none for anything else, whatever is on the wire: the metaserver and the sidecar."""

from __future__ import annotations

import inspect
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, BinaryIO

import httpx
import pytest

from unit.router.cluster import FakeCluster, cluster, data, until
from unit.router.command import running
from unit.router.fake_engine import words
from vllm_ascend_pd.router import answering, connection, intake, server

BODY = b'{"model": "fake", "prompt": "mine", "max_tokens": 3}'
SECOND = b'{"model": "fake", "prompt": "second", "max_tokens": 3}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
NEXT = POST + b"content-length: %d\r\n\r\n" % len(SECOND) + SECOND
MINE, THEN = "".join(words("mine", 3)), "".join(words("second", 3))
# What the JDK's HttpClient sends by itself with every POST over cleartext.
JDK = (
    b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: %d\r\nHost: 127.0.0.1:8000\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    b"Upgrade: h2c\r\nUser-Agent: Java-http-client/17.0.9\r\nContent-Type: application/json\r\n\r\n" % len(BODY)
)
UPGRADES = {
    "h2c of the JDK": JDK,
    "websocket as nginx passes it": POST + LENGTH + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    "anything": POST + LENGTH + b"connection: upgrade\r\nupgrade: something/7\r\n\r\n",
    "two protocols": POST + LENGTH + b"connection: upgrade\r\nupgrade: h2c, websocket\r\n\r\n",
    "empty": POST + LENGTH + b"connection: upgrade\r\nupgrade:\r\n\r\n",
    "not of the connection": POST + LENGTH + b"upgrade: h2c\r\n\r\n",
    "in chunks": POST + b"transfer-encoding: chunked\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
}


@dataclass
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes
    informed: list[int] = field(default_factory=list)  # statuses of the interim answers before it

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["text"])


class RawClient:
    """A client that writes any bytes, and takes the answers apart by itself."""

    def __init__(self, port: int) -> None:
        self.socket, self._other = (socket.create_connection(("127.0.0.1", port), 30) for _ in range(2))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file: BinaryIO = self.socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self.socket.close()
        self._other.close()

    def send(self, *pieces: bytes) -> None:
        """Write the pieces; each is read by the server before the next is written."""
        for piece in pieces:
            self.socket.sendall(piece)
            self.taken()

    def taken(self) -> None:
        """Return once the server has read what was sent, as it has answered what came later."""
        for _ in range(2):
            self._other.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert self._other.recv(1000).startswith(b"HTTP/1.1 200 ")

    def answer(self, asked: str = "POST") -> RawAnswer | None:
        """Return the next answer; None at the end of the connection."""
        informed: list[int] = []
        while True:
            try:
                line = self._file.readline()
            except ConnectionResetError:
                return None
            if not line:
                return None
            assert line.startswith(b"HTTP/1."), line
            status, headers = int(line.split()[1]), dict(self._headers())
            if status >= 200:
                break
            informed.append(status)
        if asked == "HEAD" or status in (204, 304):
            return RawAnswer(status, headers, b"", informed)
        return RawAnswer(status, headers, b"".join(self._body(headers)), informed)

    def answers(self) -> list[RawAnswer]:
        """Return all answers until the server closes the connection."""
        return list(iter(self.answer, None))

    def _headers(self) -> Iterator[tuple[str, str]]:
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            yield name.lower(), value.strip()

    def _body(self, headers: dict[str, str]) -> Iterator[bytes]:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self._file.readline(), 16):
                yield self._file.read(size)
                assert self._file.readline() == b"\r\n"
            assert self._file.readline() == b"\r\n"
        elif "content-length" in headers:
            yield self._file.read(int(headers["content-length"]))
        else:
            yield self._file.read()


@contextmanager
def calling(c: FakeCluster) -> Iterator[RawClient]:
    client = RawClient(c.served.port)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module", params=["metaserver", "sidecar", "command"])
def c(request: pytest.FixtureRequest) -> Any:
    """A worker in this process, on asyncio's loop; a sidecar; the command, with the loop that it has, uvloop's."""
    if request.param == "command":
        with running() as r:
            yield SimpleNamespace(served=SimpleNamespace(port=r.http.base_url.port), decode=[r.decode])
        return
    beside: dict[str, Any] = {"sidecar": True, "prefill_allowed": ("127.0.0.1",), "prefill": 0}
    with cluster(**(beside if request.param == "sidecar" else {})) as c:
        yield c


def framed(head: bytes, body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if b"chunked" in head else body


def answered(client: RawClient) -> None:
    """Require the right answer to the first request, then that to the second or the end, and no third."""
    first = client.answer()
    assert first is not None and first.status == 200, first and first.body
    assert first.text == MINE
    second = client.answer()
    if second is None:
        assert first.headers["connection"] == "close"
        return
    assert second.status == 200 and second.text == THEN
    client.socket.shutdown(socket.SHUT_WR)
    assert client.answers() == []


@pytest.mark.parametrize("head", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("together", [True, False], ids=["in one write", "the head alone"])
def test_an_upgrade_that_is_not_taken_is_an_ordinary_request(c: FakeCluster, head: bytes, together: bool) -> None:
    body = framed(head, BODY)
    with calling(c) as client:
        client.send(*([head + body + NEXT] if together else [head, body, NEXT]))
        answered(client)


@pytest.mark.parametrize("kind", ["h2c of the JDK", "in chunks"])
def test_a_body_behind_an_upgrade_may_be_cut_anywhere(c: FakeCluster, kind: str) -> None:
    head = UPGRADES[kind]
    body = framed(head, BODY)
    for at in range(1, len(body)):
        with calling(c) as client:
            client.send(head, body[:at], body[at:] + NEXT)
            answered(client)


def test_a_body_behind_an_upgrade_is_never_a_request(c: FakeCluster) -> None:
    """The hole: what followed the head of an upgrade was the next request of the connection."""
    hidden = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    head = POST + b"content-length: %d\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" % len(hidden)
    with calling(c) as client:
        client.send(head, hidden, NEXT)
        first, *others = client.answers()
        assert first.status == 400 and all("choices" in json.loads(other.body) for other in others)


CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
NO_HTTP = {
    "length and chunks": POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "chunks and length": POST + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": POST + LENGTH + b"content-length: 1\r\n\r\n" + BODY,
    "the same length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": POST + b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + BODY,
    "a length with a sign": POST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a length in hexadecimal": POST + b"content-length: 0x10\r\n\r\n" + BODY,
    "an endless length": POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "identity": POST + b"transfer-encoding: identity\r\n\r\n" + BODY,
    "chunked, then identity": POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "an unknown coding": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "a folded line": POST + b"x: a\r\n b: c\r\n" + LENGTH + b"\r\n" + BODY,
    "line ends without CR": (POST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "a CR without LF": POST + b"x: a\rb: c\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL": POST + b"x: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "a space before the colon": POST + b"content-length : %d\r\n\r\n" % len(BODY) + BODY,
    "a name with a space": POST + b"x y: z\r\n" + LENGTH + b"\r\n" + BODY,
    "no name": POST + b": z\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"\r\n" + BODY,
    "two hosts": POST + b"host: y\r\n" + LENGTH + b"\r\n" + BODY,
    "a bad size of a chunk": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "a chunk that is longer than it says": POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
    "no method": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no target": b"POST HTTP/1.1\r\nhost: x\r\n\r\n",
    "a target of two words": b"POST /v1/completions x HTTP/1.1\r\nhost: x\r\n\r\n",
    "no host in the address": b"GET http://[::1/ HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
def test_what_can_be_read_in_two_ways_gets_one_error_and_the_end(c: FakeCluster, sent: bytes) -> None:
    for end in (False, True):
        with calling(c) as client:
            client.socket.sendall(sent + NEXT)
            if end:
                client.socket.shutdown(socket.SHUT_WR)
            client.taken()
            (answer,) = client.answers()
            assert 400 <= answer.status < 500 and answer.headers["connection"] == "close"
            error = json.loads(answer.body)["error"]
            assert error["code"].startswith("PD-META-0") and "it cannot be parsed" not in error["message"], (
                "it says why"
            )


ORDINARY = {
    "chunks": POST + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "small chunks": POST
    + b"transfer-encoding: Chunked\r\n\r\n"
    + b"".join(b"01\r\n%c\r\n" % byte for byte in BODY)
    + b"000\r\n\r\n",
    "extensions of chunks": POST
    + b"transfer-encoding: chunked\r\n\r\n%x;a=b;c\r\n" % len(BODY)
    + BODY
    + b"\r\n0;d\r\n\r\n",
    "trailers": POST
    + b"transfer-encoding: chunked\r\n\r\n"
    + CHUNKS[:-2]
    + b"x-prefiller-host-port: 1.2.3.4:5\r\n\r\n",
    "an address with a host": POST.replace(b" /v1", b" http://elsewhere/v1") + LENGTH + b"\r\n" + BODY,
    "empty lines before": b"\r\n\r\n" + POST + LENGTH + b"\r\n" + BODY,
    "white space around values": POST + b"x:\ty \t\r\ncontent-length:  %d \r\n\r\n" % len(BODY) + BODY,
}


@pytest.mark.parametrize("sent", ORDINARY.values(), ids=ORDINARY)
def test_what_is_unusual_is_answered_rightly_and_so_is_what_follows(c: FakeCluster, sent: bytes) -> None:
    for cut in (len(sent), sent.index(b"\r\n\r\n", 4) + 4, len(sent) - 1):
        with calling(c) as client:
            client.send(sent[:cut], sent[cut:] + NEXT)
            answered(client)


def test_pipelined_requests_are_answered_in_their_order(c: FakeCluster) -> None:
    prompts = [f"number {i}" for i in range(40)]  # more than aiohttp keeps at a time
    bodies = [json.dumps({"model": "fake", "prompt": prompt, "max_tokens": 2}).encode() for prompt in prompts]
    with calling(c) as client:
        client.send(b"".join(POST + b"content-length: %d\r\n\r\n" % len(body) + body for body in bodies))
        client.socket.shutdown(socket.SHUT_WR)
        assert [answer.text for answer in client.answers()] == ["".join(words(prompt, 2)) for prompt in prompts]


def test_more_than_is_kept_waits_behind_a_request_and_is_not_lost(c: FakeCluster) -> None:
    padded = NEXT.replace(b"host: x", b"host: x\r\nx-padding: " + b"a" * 200_000)
    c.decode[0].behaviour.hold = True
    try:
        with calling(c) as client:
            writing = threading.Thread(
                target=client.socket.sendall, args=(POST + LENGTH + b"\r\n" + BODY + padded * 12,)
            )
            writing.start()
            until(lambda: c.decode[0].running)
            c.decode[0].behaviour.hold = False
            first, *others = [client.answer() for _ in range(13)]
            writing.join()
            assert first is not None and first.text == MINE
            assert [other.text for other in others if other is not None] == [THEN] * 12
    finally:
        c.decode[0].behaviour.hold = False


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"], ids=["closing", "kept alive"])
def test_a_client_of_http_1_0_gets_no_chunks(c: FakeCluster, stream: bool, keep: bytes) -> None:
    body = json.dumps({"model": "fake", "prompt": "mine", "max_tokens": 3, "stream": stream}).encode()
    asked = POST.replace(b"/1.1", b"/1.0") + b"%bcontent-length: %d\r\n\r\n" % (keep, len(body)) + body
    with calling(c) as client:
        client.send(asked)
        first = client.answer()
        assert first is not None and "transfer-encoding" not in first.headers and not first.informed
        if stream:
            pieces = [json.loads(piece)["choices"][0]["text"] for piece in data(first.body)[:-1]]
            assert "".join(pieces) == MINE and first.headers["connection"] == "close"
        elif keep:
            assert first.text == MINE and first.headers["connection"] == "keep-alive"
            client.send(asked)
            second = client.answer()
            assert second is not None and second.text == MINE
            return
        assert client.answers() == []


@pytest.mark.parametrize(
    "expected", [b"100-continue", b"100-Continue", b"else, 100-CONTINUE"], ids=["curl", "jdk", "list"]
)
def test_a_body_that_is_announced_is_asked_for(c: FakeCluster, expected: bytes) -> None:
    """The JDK's client writes a capital C: the words of this header have no case."""
    announced = POST + LENGTH + b"Expect: %b\r\n\r\n" % expected
    with calling(c) as client:
        client.send(announced)
        assert client.socket.recv(100, socket.MSG_PEEK) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(BODY)
        answer = client.answer()
        assert answer is not None and answer.text == MINE and answer.informed == [100]
        client.send(announced + BODY)  # it did not wait
        answer = client.answer()
        assert answer is not None and answer.text == MINE


def test_an_answer_without_a_body_ends_with_its_head(c: FakeCluster) -> None:
    with calling(c) as client:
        for path in (b"/health", b"/v1/models", b"/nowhere"):
            client.send(b"HEAD %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            answer = client.answer("HEAD")
            assert answer is not None and "transfer-encoding" not in answer.headers
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = client.answer()
        assert answer is not None and answer.status == 200 and "server" not in answer.headers


def test_a_tunnel_is_not_made(c: FakeCluster) -> None:
    with calling(c) as client:
        client.send(b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: elsewhere:443\r\n\r\n" + NEXT)
        (answer,) = client.answers()
        assert answer.status in (404, 405)


# -- callers that send no more, and callers that have gone


def posted(version: bytes) -> bytes:
    return POST.replace(b"1.1", version)


def counted(c: FakeCluster, series: str) -> float:
    """Return the sum of the metaserver's counters whose names and labels match."""
    page = httpx.get(f"http://127.0.0.1:{c.served.port}/metrics", trust_env=False, timeout=30).text
    return sum(map(float, re.findall(rf"^ascend_pd_metaserver_{series} (\S+)$", page, re.MULTILINE)))


def left(c: FakeCluster) -> float:
    """Return how many callers the metaserver has seen leave."""
    return counted(c, "client_left_total")


def served(c: FakeCluster) -> float:
    """Return how many completions were answered with 200."""
    return counted(c, r'requests_total\{route="/v1/completions",status="200"\}')


@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_caller_that_sends_no_more_gets_its_answer_and_the_end(c: FakeCluster, stream: bool, version: bytes) -> None:
    d = c.decode[0]
    body = json.dumps({"model": "fake", "prompt": "mine", "max_tokens": 3, "stream": stream}).encode()
    for wait in (False, True):
        before, d.behaviour.hold = len(d.seen), wait
        with calling(c) as client:
            client.socket.sendall(posted(version) + b"content-length: %d\r\n\r\n" % len(body) + body)
            if wait:
                until(lambda: len(d.generations()) and d.running)
            client.socket.shutdown(socket.SHUT_WR)
            if wait:
                client.taken()
                d.behaviour.hold = False
            (answer,) = client.answers()
            said = (
                answer.text
                if not stream
                else "".join(json.loads(piece)["choices"][0]["text"] for piece in data(answer.body)[:-1])
            )
            assert said == MINE and not any(seen.aborted for seen in d.seen[before:])
            assert not answer.informed, "some clients know no interim answers"


@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "while it is computed"])
def test_a_caller_that_has_gone_is_noticed_before_there_is_an_answer(
    c: FakeCluster, waits: bool, stream: bool, version: bytes
) -> None:
    """Closed is not half-closed: the engine must not compute for nobody."""
    d = c.decode[0]
    before, noticed, d.behaviour.hold = len(d.generations()), left(c), True
    try:
        body = json.dumps({"model": "fake", "prompt": "gone", "max_tokens": 3, "stream": stream}).encode()
        with calling(c) as client:
            client.socket.sendall(posted(version) + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: not waits or len(d.generations()) > before)
        until(lambda: left(c) == noticed + 1)
        until(lambda: all(seen.aborted for seen in d.generations()[before:]))
    finally:
        d.behaviour.hold = False


@pytest.mark.parametrize("kept", [False, True], ids=["any", "greedy"])
def test_a_caller_that_goes_with_the_last_event_was_served(c: FakeCluster, kept: bool) -> None:
    """openai's client closes once it has read the last event: a stream that was served whole was not left."""
    d = c.decode[0]
    noticed, d.behaviour.lingers = left(c), True
    fields = {"model": "fake", "prompt": "mine", "max_tokens": 3, "stream": True} | ({"temperature": 0} if kept else {})
    body, before = json.dumps(fields).encode(), served(c)
    try:
        with calling(c) as client:
            client.socket.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            said = b""
            while b"data: [DONE]" not in said:
                said += client.socket.recv(4096)
        until(lambda: served(c) > before)
        assert left(c) == noticed
    finally:
        d.behaviour.lingers = False


def test_a_caller_that_has_gone_is_noticed_between_two_events(c: FakeCluster) -> None:
    d = c.decode[0]
    d.behaviour.paused = True
    try:
        body = b'{"model": "fake", "prompt": "gone", "max_tokens": 3, "stream": true}'
        with calling(c) as client:
            client.socket.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            client.socket.recv(10)
            client.socket.recv(100_000)  # unread data would make the system reset the connection by itself
        until(lambda: d.generations()[-1].aborted)
    finally:
        d.behaviour.paused = False


@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["HTTP/1.1", "HTTP/1.0"])
def test_a_caller_that_has_gone_is_noticed_by_the_next_event(c: FakeCluster, version: bytes) -> None:
    """HTTP/1.0 has no chunks, so there nothing can be sent in between."""
    d = c.decode[0]
    d.behaviour.paused, noticed = True, left(c)
    try:
        body = b'{"model": "fake", "prompt": "gone", "max_tokens": 5000, "stream": true}'
        with calling(c) as client:
            client.socket.sendall(posted(version) + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert client.socket.recv(100_000)
            client.taken()
        d.behaviour.paused, d.behaviour.gap_s = False, 0.01
        until(lambda: d.generations()[-1].aborted)
        until(lambda: left(c) == noticed + 1)
    finally:
        d.behaviour.paused, d.behaviour.gap_s = False, 0.0


@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["HTTP/1.1", "HTTP/1.0"])
def test_a_stream_goes_on_for_a_caller_that_sends_no_more(c: FakeCluster, version: bytes) -> None:
    d = c.decode[0]
    d.behaviour.paused = True
    try:
        body = b'{"model": "fake", "prompt": "mine", "max_tokens": 3, "stream": true}'
        with calling(c) as client:
            client.send(posted(version) + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert client.socket.recv(10, socket.MSG_PEEK)
            client.socket.shutdown(socket.SHUT_WR)
            client.taken()
            d.behaviour.paused = False
            (answer,) = client.answers()
            pieces = [json.loads(piece)["choices"][0]["text"] for piece in data(answer.body)[:-1]]
            assert "".join(pieces) == MINE and not d.generations()[-1].aborted
    finally:
        d.behaviour.paused = False


def test_only_public_names_of_the_http_server_are_used() -> None:
    """A private one could mean another thing in its next release."""
    for module in (answering, connection, intake, server):
        assert not re.findall(r"(?<!self)(?<!super\(\))\._[a-z]\w*", inspect.getsource(module)), module
    for ours in (connection.CallerConnection, connection.FrontDoor, answering.Answering):
        theirs = {name for base in ours.__mro__[1:] for name in (*vars(base), *getattr(base, "__slots__", ()))}
        made = re.findall(r"(?:self\.|def )(_[a-z]\w*)", inspect.getsource(ours))
        assert not theirs.intersection(made), ours
