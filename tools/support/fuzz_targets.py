# SPDX-License-Identifier: Apache-2.0
"""Targets of tools/fuzz.py: decoders of the side channel, the doctor, reservations, HTTP, NDJSON and the doorbell.

A target classifies an input: "refused" (the decoder's own error), "read" (unsigned and well-formed, and processed by
the state machine behind the decoder), "unchanged" (the mutation changed nothing), or "accepted" (something forged was
believed), which must never happen.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from vllm_ascend_pd.channel.connection import Connection
from vllm_ascend_pd.channel.frames import (
    FRAME_BYTES,
    GREETING_BYTES,
    OF_SCHEDULERS,
    Goodbye,
    Hello,
    Leaving,
    Proof,
    Splitter,
    clear_frame,
    decode_clear,
    decode_guarded,
    guarded_frame,
)
from vllm_ascend_pd.channel.listener import Listener
from vllm_ascend_pd.cli.checkup import pair as doctors
from vllm_ascend_pd.cli.checkup.line import Broken as LineBroken
from vllm_ascend_pd.cli.checkup.line import Line
from vllm_ascend_pd.cli.checkup.pair import Facts, ReadResult, WriteResult, differences
from vllm_ascend_pd.config import RegroupConfig, Timers
from vllm_ascend_pd.decode.scheduler.core import answers
from vllm_ascend_pd.decode.scheduler.core.offers import Offers
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import StepPlanner, plan_digest
from vllm_ascend_pd.metadata import PushStart
from vllm_ascend_pd.prefill.scheduler.bootstrap import answer
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.worker.core.orders import OrderBook
from vllm_ascend_pd.prefill.worker.core.push import BlockTable
from vllm_ascend_pd.protocol.agreement import contributor_pairs
from vllm_ascend_pd.protocol.auth import Greeting, Secrets, Session, SessionKey, encode, seal, seal_source, unseal
from vllm_ascend_pd.protocol.dialects import Meet, read_meet
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Contributor, Endpoint, TransferId
from vllm_ascend_pd.protocol.layouts import EngineLayout, contributors_digest, layout_hash, written
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Meeting, Offer, Source, SourceId, Unwanted, Waits
from vllm_ascend_pd.protocol.messages import (
    Ack,
    Begin,
    Cancel,
    Done,
    Failed,
    LayoutRequest,
    Memory,
    Message,
    Ready,
    Refused,
    Renew,
    Reservation,
)
from vllm_ascend_pd.protocol.push import Destination, PushRecord, Sender
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.router import reserve
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, Role
from vllm_ascend_pd.router.core.ends import PrefillFailed
from vllm_ascend_pd.router.fleet import Fleet, parse_spec
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.intake import NotTaken
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared import http_session
from vllm_ascend_pd.shared.core.failures import UpstreamError
from vllm_ascend_pd.shared.core.gathered import Payload
from vllm_ascend_pd.shared.wake import Doorbell

Run = Callable[[bytes], str]
REFUSED, READ, UNCHANGED, ACCEPTED = "refused", "read", "unchanged", "accepted"

SECRETS = Secrets(b"the secret of the fuzzer, 32 bytes", b"an older one, which is valid still")
MODEL = "model"
REGION = Region("kv", 4096, 1024, 64, 64)
LAYERS = ("layer.0", "layer.1")
P = CacheGeometry(16, 4, 2, "bf16", "k|v", (REGION,), (LAYERS,))
D = CacheGeometry(16, 4, 1, "bf16", "k|v", (REGION,), (LAYERS,))
LAYOUT = written(EngineLayout(MODEL, P))
ME, OTHER = Contributor(0, 0), Contributor(0, 1)
TRANSFER = TransferId("decode-1", 7, "uuid-7")
ENDPOINTS = (Endpoint("127.0.0.1", 4711),)
QUIET_S = 40.0
RESERVATION = Reservation(
    version=PROTOCOL_VERSION,
    transfer=TRANSFER,
    model=MODEL,
    first=0,
    end=40,
    blocks=(np.array([3, 4, 5], dtype="<i4").tobytes(),),
    geometry=D,
    endpoints=ENDPOINTS,
    deadline_s=300.0,
    prompt_length=40,
    prompt_hash="hash",
)


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """A decoder with its examples. `start` makes the function that takes inputs, anew for every few hundred of them."""

    name: str
    what: str
    weight: int
    examples: Callable[[], list[bytes]]
    start: Callable[[], Run]
    shape: ExampleShape | None = None


@dataclass(frozen=True, slots=True)
class ExampleShape:
    """Decomposition of an example: one value deep inside can be changed while the rest stays well-formed."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    skip: int = 0  # bytes before the encoded value


MSGPACK = ExampleShape(msgspec.msgpack.decode, msgspec.msgpack.encode)
ENVELOPE = ExampleShape(msgspec.msgpack.decode, msgspec.msgpack.encode, skip=4)
JSON = ExampleShape(json.loads, lambda value: json.dumps(value).encode())


# -- the side channel


def _said(contributor: Contributor = ME, seq: int = 1) -> dict[str, Any]:
    return {
        "transfer": TRANSFER,
        "push": "push-1",
        "p_incarnation": "prefill-1",
        "d_incarnation": "decode-1",
        "contributor": contributor,
        "d_rank": 0,
        "seq": seq,
    }


def _begin() -> Begin:
    return Begin(
        **_said(),
        layout=layout_hash(LAYOUT),
        layout_bytes=LAYOUT,
        contributors=contributors_digest(contributor_pairs(P, D, 0)),
        plan_digest=plan_digest(P, D, 0, 40, "direct"),
        quiet_s=QUIET_S,
    )


def messages() -> list[Message]:
    addresses = Memory("session-1", (10,), ((1 << 20,), (2 << 20,)))
    digest = plan_digest(P, D, 0, 40, "direct")
    return [
        _begin(),
        Ready(**_said(), lease_s=15.0, memory="hash", addresses=addresses),
        Renew(**_said(seq=2)),
        LayoutRequest(**_said()),
        Refused(**_said(), failure=Failure("PD-XFER-005", "over: of what")),
        Done(**_said(seq=2), bytes=(4096,), plan_digest=digest, checksums=((0, 0, 1 << 63),)),
        Failed(**_said(seq=2), quiescent=True, failure=Failure("PD-XFER-003", "why")),
        Cancel(**_said(), failure=Failure("PD-XFER-001", "why")),
        Ack(**_said(), kind="done"),
    ]


def _frames() -> list[bytes]:
    session = _sessions()[0]
    hello = Hello(PROTOCOL_VERSION, "prefill-1", b"n" * 32, True, "P0")
    said = [Proof(), *messages(), Leaving(True)]
    stream = clear_frame(hello) + b"".join(guarded_frame(session, message) for message in said)
    return [stream, clear_frame(Goodbye("PD-SEC-003", "no")), clear_frame(hello) * 3]


def _greetings() -> list[bytes]:
    return [frame[5:] for frame in (clear_frame(Hello(1, "p", b"n" * 32, True, "P0")), clear_frame(Goodbye("x", "y")))]


def _splitter() -> Run:
    def run(data: bytes) -> str:
        splitter = Splitter(GREETING_BYTES if len(data) % 2 else FRAME_BYTES)
        step = len(data) // 7 + 1
        try:
            for at in range(0, len(data), step):
                for _, payload in splitter.feed(data[at : at + step]):
                    if len(payload) > splitter.limit:
                        raise AssertionError("a frame beyond the limit")
                if len(splitter._buffer) > splitter.limit + step + 4:
                    raise AssertionError("more is kept than the limit")
        except RemoteProtocolError:
            return REFUSED
        return READ

    return run


def _greeting() -> Run:
    def run(data: bytes) -> str:
        try:
            decode_clear(memoryview(data))
        except RemoteProtocolError:
            return REFUSED
        return READ

    return run


def _machines() -> Run:
    """Feed well-formed messages to both state machines, in every state they get into: neither may raise."""
    now = 0.0
    receiver = _receiver()
    sender = _sender()

    def run(data: bytes) -> str:
        nonlocal now
        now += 0.05
        try:
            message = decode_guarded(data)
        except RemoteProtocolError:
            return REFUSED
        if isinstance(message, Message):
            receiver.message(now, "peer", message)
            sender.message(now, ENDPOINTS[0], message)
            receiver.tick(now)
            sender.tick(now)
            if receiver.parked_count() > 4096 or receiver.record_count() > 1 or sender.record_count() > 1:
                raise AssertionError("a machine keeps what unproven peers say")
        return READ

    return run


def _receiver() -> Receiver:
    addresses = Memory("session-1", (10,), ((1 << 20,), (2 << 20,)))
    made = Receiver(
        incarnation="decode-1",
        rank=0,
        model=MODEL,
        geometry=D,
        addresses=addresses,
        timers=Timers(),
        quiet_s=QUIET_S,
        verify=False,
    )
    made.bind(0.0, TRANSFER, 0, 40, 300.0)
    made.gate_open(0.0, TRANSFER)
    return made


def _sender() -> Sender:
    made = Sender(incarnation="prefill-1", contributor=ME, timers=Timers(), quiet_s=QUIET_S)
    made.describe(MODEL, P)
    to = Destination(
        0,
        ENDPOINTS[0],
        contributor_pairs(P, D, 0),
        plan_digest(P, D, 0, 40, "direct"),
        (len(D.regions),) * len(D.layers),
    )
    made.open(0.0, PushRecord(name="push-1", transfer=TRANSFER, deadline_s=300.0, destinations=(to,)))
    return made


def _sessions() -> tuple[Session, Session]:
    """Return the dialer's and the listener's session of one connection."""
    key = SessionKey.derive(SECRETS.current, Greeting(b"n" * 32, "prefill-1"), Greeting(b"m" * 32, "decode-1"))
    return Session(key, as_dialer=True), Session(key, as_dialer=False)


def _signed() -> list[bytes]:
    dialer = _sessions()[0]
    return [dialer.protect(encode(message)) for message in messages()]


def _verifier() -> Run:
    valid = set(_signed())
    listener = _sessions()[1]

    def run(data: bytes) -> str:
        try:
            listener.open(data)
        except RemoteProtocolError:
            return REFUSED
        return UNCHANGED if data in valid else ACCEPTED

    return run


class _Wire(asyncio.Transport):
    """Transport without a socket, which discards what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _NoSocket() if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    abort = close


class _NoSocket:
    family = 2

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname


def _listener() -> Run:
    """Feed a whole listener with a secret: a mutated recording never counts as a message or as a process."""
    heard: list[Any] = []
    listener = Listener(
        host="",
        port=0,
        incarnation="decode-1",
        secrets=SECRETS,
        on_message=lambda peer, message: heard.append(message),
        on_gone=heard.append,
        on_back=heard.append,
        count=lambda reason: None,
    )
    loop = asyncio.new_event_loop()
    listener._loop = loop
    listener._warn = lambda *_: None  # type: ignore[assignment]

    def run(data: bytes) -> str:
        connection: Connection = listener._accept()
        connection.connection_made(_Wire())
        step = len(data) // 3 + 1
        for at in range(0, len(data), step):
            connection.data_received(data[at : at + step])
        refused = connection.ending
        connection.connection_lost(None)
        if listener.callers or listener._by_incarnation:
            raise AssertionError("a connection that ended is remembered")
        return ACCEPTED if heard else REFUSED if refused else READ

    return run


# -- the doctor


class _Socket:
    """Socket that reads the input as the other doctor's messages, and discards what is sent."""

    def __init__(self, data: bytes) -> None:
        step = len(data) // 3 + 1
        self._pieces = [data[at : at + step] for at in range(0, len(data), step)]

    def recv(self, _: int) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def sendall(self, _: bytes) -> None:
        pass

    def settimeout(self, _: float) -> None:
        pass


def _consultation() -> list[bytes]:
    hello = clear_frame(Hello(PROTOCOL_VERSION, "doctor-1", b"n" * 32, False, "vllm-ascend-pd doctor"))
    facts = Facts("0.1.0", "tcp", "mooncake 0.3", "0.32.0", "2.13.0", "little", "x86_64", 1.7e9, D)
    said = (
        Proof(),
        facts,
        doctors.ScratchMemory("127.0.0.1:4711", 1 << 40),
        WriteResult("", "0" * 64, 0.01),
        ReadResult("0" * 64),
    )
    bodies = [b"\x02" + msgspec.msgpack.encode(each) for each in said]
    stream = hello + b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    return [stream, clear_frame(Goodbye("PD-SEC-003", "no")), _frames()[0]]


def _doctor() -> Run:
    """Feed both sides of the doctor's conversation.

    Without a secret the input is compared; with one it is not believed.
    """
    ours = Facts("0.1.0", "tcp", "", "", "", "little", "x86_64", 0.0, P)

    def run(data: bytes) -> str:
        calling, asked = Line(_Socket(data)), Line(_Socket(data))  # type: ignore[arg-type]
        try:
            asked.greet_as_listener(SECRETS)
            return ACCEPTED
        except LineBroken:
            pass
        try:
            calling.greet_as_dialer(None)
            for check in differences(ours, calling.receive(Facts, 1.0)):
                check.says.encode()
            for kind in (doctors.ScratchMemory, WriteResult, ReadResult):
                calling.receive(kind, 1.0)
        except LineBroken:
            return REFUSED
        return READ

    return run


# -- reservations


def _sealed() -> list[bytes]:
    return [seal(RESERVATION, SECRETS), seal(RESERVATION, None)]


def _unsealer() -> Run:
    valid = seal(RESERVATION, SECRETS)

    def run(data: bytes) -> str:
        try:
            unseal(data, SECRETS)
        except RemoteProtocolError:
            return REFUSED
        return UNCHANGED if data == valid else ACCEPTED

    return run


SOURCE = Source(PROTOCOL_VERSION, SourceId("p", 1, "u"), Endpoint("127.0.0.1", 5600), 40, "hash", 120.0)


def _sources() -> list[bytes]:
    return [seal_source(msgspec.structs.replace(SOURCE, prompt_length=n), SECRETS) for n in (40, 41)]


def _source_reader() -> Run:
    """Feed a source as a client may send it: no address is dialled that is not allowed, with or without a secret."""
    valid = _sources()

    def run(data: bytes) -> str:
        params = {"source": base64.b64encode(data).decode()}
        for secrets in (SECRETS, None):
            meet = read_meet(params, "cmpl-x-0-aaaaaaaa", (40, "hash"), ("10.0.0.1",), secrets)
            if isinstance(meet, Meet) and not (secrets is not None and data == valid[0]):
                return READ if meet.listener.host == "10.0.0.1" else ACCEPTED
        return UNCHANGED if data in valid else REFUSED

    return run


def _rendezvous() -> list[bytes]:
    transfer = RESERVATION.transfer
    offers = [Offer(transfer, b"sealed", SOURCE.source), Offer(transfer, b"sealed", meets="name")]
    others = [Waits(transfer), Bound(transfer, "push", ended=True), Gone(transfer, Failure("PD-XFER-002", "why"))]
    unwanted = [Unwanted("d", SOURCE.source), Unwanted("d", meets="name")]
    return [msgspec.msgpack.encode(message) for message in (*offers, *others, *unwanted)]


def _schedulers() -> Run:
    """Feed a scheduler's messages to the books of both sides."""
    book = PushBook("p", model=MODEL, geometry=P)
    offers, now = Offers(Timers()), 0.0
    prompt = RESERVATION.prompt_length, RESERVATION.prompt_hash

    def run(data: bytes) -> str:
        nonlocal now
        now += 1.0
        try:
            message = decode_guarded(data)
        except RemoteProtocolError:
            return REFUSED
        if not isinstance(message, OF_SCHEDULERS):
            return REFUSED
        book.take(now, NewRequest(f"request-{now}", prompt, f"push-{now}", meets="name", uuid="u"))
        offers.offer(now, SOURCE.listens, Offer(RESERVATION.transfer, b"sealed", meets="name"))
        if isinstance(message, Offer):
            book.offer(now, "d", message, msgspec.structs.replace(RESERVATION, transfer=message.transfer))
        elif isinstance(message, Unwanted):
            book.unwanted(message.source, message.meets)
        elif isinstance(message, Gone):
            book.withdrawn("d", message.transfer)
        if isinstance(message, Meeting):
            offers.message(now, SOURCE.listens, message)
        book.tick(now)
        offers.tick(now)
        book.finished(now, f"request-{now}", holds_blocks=True, well=False, why="")
        book.take_messages()
        offers.take_effects()
        return READ

    return run


def _unsigned() -> list[bytes]:
    changed: list[dict[str, Any]] = [
        {"first": 16},
        {"end": 33, "prompt_length": 33},
        {"geometry": msgspec.structs.replace(D, tp_size=2)},
    ]
    return [seal(msgspec.structs.replace(RESERVATION, **each), None) for each in ({}, *changed)]


def _admitted() -> Run:
    """Feed unsigned reservations: a well-formed one must not reach any arithmetic unchecked."""
    book = PushBook(model=MODEL, geometry=P)
    orders = OrderBook(P, P, ME, RegroupConfig(regroup="never"), None)
    planner = StepPlanner(P, 0)
    blocks = np.arange(64, dtype=np.int32)
    number = 0

    def run(data: bytes) -> str:
        nonlocal number
        number += 1
        try:
            r = unseal(data, None)
        except RemoteProtocolError:
            return REFUSED
        name = f"request-{number}"
        if (
            book.take(0.0, NewRequest(name, (RESERVATION.prompt_length, RESERVATION.prompt_hash), f"push-{number}", r))
            is not None
        ):
            return REFUSED
        push, differences = orders.take(PushStart(name, f"push-{number}", r))
        if differences:
            return REFUSED
        push.tables = tuple(BlockTable(blocks, len(blocks)) for _ in push.tables)
        planner.plan([push.job(index, r.first, r.end) for index in range(len(push.pairings))], number)
        if len(push.destinations) > r.geometry.tp_size:
            raise AssertionError("more destinations than ranks")
        book.finished(0.0, name, holds_blocks=False, well=False, why="over")
        book.take_step()
        return READ

    return run


# -- HTTP


def _responses() -> list[bytes]:
    events = b'{"event":"accepted","prefill":"h:1"}\n{"event":"heartbeat"}\n{"event":"prefilled"}\n'
    chunk = b"%x\r\n" % len(events) + events + b"\r\n0\r\n\r\n"
    return [
        b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{"a": [1,2]}',
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n" + chunk,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.0 404 Not Found\r\nserver: x\r\n\r\nnothing here",
        b"HTTP/1.1 204 No Content\r\nconnection: keep-alive\r\n\r\n",
    ]


def _http_client() -> Run:
    """Feed the answer of an engine or metaserver. Every answer ends, and is no longer than what was sent."""
    loop = asyncio.new_event_loop()

    async def answer(wire: http_session.HttpWire) -> bytes:
        message, body = await wire.read()
        while message.code < 200:
            message, body = await wire.read()
        return bytes(await body.read())

    def run(data: bytes) -> str:
        wire, transport = http_session.HttpWire(loop), _Wire()
        wire.connection_made(transport)
        wire.set_response_params(read_timeout=30.0, read_until_eof=True, auto_decompress=False, read_bufsize=1 << 20)
        step = len(data) // 5 + 1
        for at in range(0, len(data), step):
            if not transport.closed:
                wire.data_received(data[at : at + step])
        wire.connection_lost(None)
        try:
            answer(wire).send(None)
        except StopIteration as end:
            if len(end.value) > len(data):
                raise AssertionError("a body of more than was sent") from None
            return READ
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, UpstreamError):
            return REFUSED
        raise AssertionError("an answer without an end")

    return run


def _requests() -> list[bytes]:
    completion = {"model": "m", "prompt": [1, 2, 3], "n": 2, "stream": True, "kv_transfer_params": {"x": 1}}
    chat = {"messages": [{"role": "user", "content": "hä?"}], "vllm_xargs": {"kv_transfer_params": "x"}, "n": 1}
    several = {"prompt": ["one", "two", [1, 2]], "max_tokens": 5, "echo": True, "logprobs": 1}
    return [json.dumps(each, ensure_ascii=False).encode() for each in (completion, chat, several, [completion])]


def _clients() -> Run:
    """Feed a client's body: no engine ever gets transfer parameters from a client."""

    def run(data: bytes) -> str:
        try:
            _free_of_parameters(bodies.stripped(data))
            request = bodies.parse(bodies.COMPLETIONS, data)
        except bodies.BodyError:
            return REFUSED
        _free_of_parameters(bodies.for_decode(request, None))
        mine = {"do_remote_decode": True}
        for route, made in (
            bodies.for_prefill(request, mine, None),
            bodies.for_prefill(request, mine, msgspec.Raw(b"[1]")),
        ):
            try:
                sent = json.loads(_whole(made))
            except (ValueError, RecursionError):
                continue  # contents of a field are the engine's to refuse
            if sent.pop("kv_transfer_params") != mine or not route.startswith("/v1/"):
                raise AssertionError("a prefill with other parameters than ours")
            _free_of_parameters(json.dumps(sent).encode())
        return READ

    return run


def _whole(payload: Payload) -> bytes:
    return b"".join(payload) if isinstance(payload, list) else bytes(payload)


def _free_of_parameters(payload: Payload) -> None:
    """Require that an engine would find no transfer parameters in the payload."""
    try:
        read = json.loads(_whole(payload))
    except (ValueError, RecursionError):
        return
    for place in read if isinstance(read, list) else [read]:
        extra = place.get("vllm_xargs") if isinstance(place, dict) else None
        if any(isinstance(each, dict) and "kv_transfer_params" in each for each in (place, extra)):
            raise AssertionError("a client's transfer parameters got through")


def _heads() -> list[bytes]:
    body = _requests()[0]
    return [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body,
        b"POST /v1/metaserver HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"GET /v1/models?x=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" * 3,
    ]


def _http_server() -> Run:
    """Feed the metaserver's HTTP server: a head is bounded, and garbage closes its connection."""
    from vllm_ascend_pd.router.connection import UNREAD_BYTES, FrontDoor
    from vllm_ascend_pd.router.gate import Place, Places

    loop = asyncio.new_event_loop()

    async def answer(asked: Any, send: Any) -> None:
        """Answer as soon as the head is there: only reading is tested."""
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def feed(data: bytes) -> bool:
        wire, protocol = _Wire(), FrontDoor(answer, Places(1)).serve(Place("", lambda: None))
        protocol.connection_made(wire)
        step = len(data) // 5 + 1
        for at in range(0, len(data), step):
            if not wire.closed:
                protocol.data_received(data[at : at + step])
            if protocol._unread > UNREAD_BYTES + step:
                raise AssertionError("a head without a bound")
            for _ in range(3):  # its tasks go on
                await asyncio.sleep(0)
        refused = wire.closed
        protocol.connection_lost(None)
        return refused

    def run(data: bytes) -> str:
        refused = loop.run_until_complete(feed(data))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        return REFUSED if refused else READ

    return run


def _posts() -> list[bytes]:
    posted = {"ticket": "t", "transfer": "d/1/u", "reservation": "aGFsbG8=", "prompt_token_ids": [1, 2]}
    answer = {
        "choices": [],
        "kv_transfer_params": {"pd_push": {"prefill": "p", "code": "PD-META-005", "detail": "why"}},
    }
    return [json.dumps(each).encode() for each in (posted, answer)]


def _posted() -> Run:
    """Feed the metaserver D's posts and P's answers. No post has a valid ticket here."""
    front = Front(Settings(), Fleet(CircuitPolicy()), Upstream(1.0, 1.0), "http://metaserver")
    handler = reserve.Reservations(front, reserve.Heartbeats(2.0))
    prefill = front.fleet.add(parse_spec(Role.PREFILL, "p:1"), "flag")

    async def send(message: Any) -> None:
        raise AssertionError("it is answered as if its ticket were known")

    def run(data: bytes) -> str:
        try:
            handler.answer(data, send).send(None)
            raise AssertionError("an unknown ticket is waited for")
        except NotTaken as refused:
            if refused.answer.status not in (400, 404):
                raise AssertionError(f"status {refused.answer.status}") from refused
        try:
            reserve._check_push(prefill, data, 0.0)
        except PrefillFailed as failed:
            msgspec.msgpack.encode((failed.noted.code, str(failed)))
            return REFUSED
        return READ

    return run


def _lines() -> list[bytes]:
    events = [
        {"event": "accepted", "prefill": "h:1"},
        {"event": "heartbeat"},
        {"event": "failed", "code": "PD-META-006", "detail": "wörds"},
        {"event": "prefilled"},
        {"error": {"message": "why"}},
    ]
    return [
        b"\n".join(json.dumps(event).encode() for event in events) + b"\n",
        *(json.dumps(e).encode() for e in events),
    ]


def _ndjson() -> Run:
    """Feed the metaserver's answer as D reads it: lines, the plain form, the text of an error, a Retry-After."""

    def run(data: bytes) -> str:
        cut, outcomes, refused = answers.Lines(4096), [], False
        step = len(data) // 4 + 1
        try:
            for at in range(0, len(data), step):
                outcomes += [answers.outcome(line) for line in cut.feed(data[at : at + step])]
            outcomes.append(answers.plain(data))
        except answers.BadAnswer:
            refused = True
        if len(cut._rest) > 4096 + step:
            raise AssertionError("a line without a bound")
        for outcome in outcomes:
            if outcome is not None:
                msgspec.msgpack.encode((outcome.kind, outcome.failure, outcome.prefill))
        answers.reason(data).encode()
        answers.seconds(data[:20].decode("latin-1"))
        return REFUSED if refused else READ

    return run


# -- the doorbell


def _doorbell() -> Run:
    rings = 0

    def ring() -> None:
        nonlocal rings
        rings += 1

    bell = Doorbell(ring)

    def run(data: bytes) -> str:
        before = rings
        bell.datagram_received(data, ("127.0.0.1", 1))
        if rings != before + 1:
            raise AssertionError("a datagram does more than ring")
        return READ

    return run


def _queries() -> list[bytes]:
    return [
        f"{verb} {path} HTTP/1.1\r\nHost: p\r\n\r\n".encode() for verb in ("GET", "POST") for path in ("/query", "/")
    ]


def _bootstrap() -> Run:
    """Feed queries to the bootstrap: every answer is complete and contains the one fact there is."""

    def run(data: bytes) -> str:
        head, _, body = answer(data, [SOURCE.listens]).partition(b"\r\n\r\n")
        if f"Content-Length: {len(body)}".encode() not in head:
            raise AssertionError("an answer of another length than it says")
        return READ if msgspec.json.decode(body) else REFUSED

    return run


TARGETS = (
    FuzzTarget("frames", "cutting a stream into frames", 10, _frames, _splitter),
    FuzzTarget("greeting", "greeting and farewell", 8, _greetings, _greeting, MSGPACK),
    FuzzTarget(
        "messages", "messages, into both machines", 14, lambda: [encode(m) for m in messages()], _machines, MSGPACK
    ),
    FuzzTarget("signed", "signed messages", 12, _signed, _verifier),
    FuzzTarget("listener", "a whole listener with a secret", 8, _frames, _listener),
    FuzzTarget("doctor", "the other doctor's words", 6, _consultation, _doctor),
    FuzzTarget("sealed", "sealed reservations", 10, _sealed, _unsealer),
    FuzzTarget("reservation", "unsigned reservations, into P's plan", 8, _unsigned, _admitted, ENVELOPE),
    FuzzTarget("sources", "sealed sources, as a client may send them", 6, _sources, _source_reader),
    FuzzTarget(
        "schedulers", "what schedulers say to each other, into both books", 6, _rendezvous, _schedulers, MSGPACK
    ),
    FuzzTarget("bootstrap", "what routers ask of P", 2, _queries, _bootstrap),
    FuzzTarget("http answers", "the client of engines and metaserver", 8, _responses, _http_client),
    FuzzTarget("http requests", "the metaserver's HTTP server", 4, _heads, _http_server),
    FuzzTarget("bodies", "clients' bodies", 6, _requests, _clients, JSON),
    FuzzTarget("posts", "D's posts and P's answers", 5, _posts, _posted, JSON),
    FuzzTarget("ndjson", "the metaserver's answer to D", 6, _lines, _ndjson),
    FuzzTarget("doorbell", "datagrams", 1, lambda: [b"\0", b""], _doorbell),
)
