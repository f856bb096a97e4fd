# SPDX-License-Identifier: Apache-2.0
"""D's leg: the request goes out, and D's answer goes to the client as it arrives.

The head waits for the first event of the body: until then the client has seen nothing, another attempt can be made, and
D may still ask for its prefill. Comments are no events; those before the first one are dropped. Later pieces are only
searched for signs that D ended the request early. The metaserver's own answers are sent from here too (`refuse`,
`send_answer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from functools import partial
from typing import Any

import msgspec

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.observe.trace import emit
from vllm_ascend_pd.protocol.continuing import REPORT
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import SaidByEngine, said_in
from vllm_ascend_pd.router import resuming
from vllm_ascend_pd.router.core import bodies, pieces
from vllm_ascend_pd.router.core.blocks import LAST_EVENTS, OPENINGS, TOKENS_EVENT
from vllm_ascend_pd.router.core.decisions import Evidence
from vllm_ascend_pd.router.core.ends import LegEnd, ShutDown, StreamBroke, decode_failed, known_failure
from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.router.core.resume import Cut, without_ids
from vllm_ascend_pd.router.core.stored import home_of
from vllm_ascend_pd.router.exchange import AsgiSend, Attempt, AttemptFailed, HttpExchange
from vllm_ascend_pd.router.faults import Answer, brief, error_frame, fault, known, status_of
from vllm_ascend_pd.router.fleet import Instance
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.shared import SHUTDOWN, Shared
from vllm_ascend_pd.router.upstream import Reply, listed
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.core.gathered import Payload, cut, length
from vllm_ascend_pd.shared.http_session import Headers

log = logging.getLogger(__name__)
OWN_HEADERS = frozenset(
    b"connection keep-alive transfer-encoding content-length date server x-request-id proxy-connection".split()
)
_WHOLE_ANSWER_BYTES = 256 << 20
_ERROR_BYTES = 1 << 20
_ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
# What a stream begins with before D has computed anything. Two expressions: what begins with a literal is found fast.
_ROLE = re.compile(rb'"delta":\s*\{"role":\s*"assistant",\s*"content":\s*""')
# What D itself says of a failure comes behind the tokens that end in it; it breaks a response's stream off.
_FAILED = re.compile(re.escape(TOKENS_EVENT) + rb'[^\n]*"finish_reason":"error"')
_OPENING = re.compile(rb"event: (?:%b)\n|%b" % (b"|".join(map(re.escape, OPENINGS)), _FAILED.pattern))
_LAST_EVENTS = (b"data: [DONE]", *(b"event: %b\n" % name for name in (*LAST_EVENTS, b"error")))
_COMPLETED = b"event: response.completed\ndata: "
# vLLM's keep-alive while a request waits for its turn. Passed on before the answer, it would commit to this D.
_COMMENTS = re.compile(rb"^(?::[^\n]*\n)+\n", re.MULTILINE)
# vLLM answers 200 to a request that it ends itself, for example to a new one while it shuts down. The quotes are not
# escaped, so no model's text can contain this.
_ABORTED = re.compile(
    rb'"finish_reason"\s*:\s*"abort"|"message_delta"\s*,\s*"delta"\s*:\s*\{\s*"stop_reason"\s*:\s*null'
)
# vllm-ascend's recompute scheduler ends a request that finds no block as if it were complete; only this field shows it.
DROPPED = re.compile(rb'"stop_(?:reason|sequence)"\s*:\s*"recomputed"')
_CUT_SHORT = re.compile(rb"%b|%b" % (_ABORTED.pattern, DROPPED.pattern))
_PARAMS = b'"kv_transfer_params"'
_SAID_NOTHING = SaidByEngine()
_CUTS = {
    Cut.DROPPED: (LegEnd.DROPPED, resuming.LACKED_BLOCKS),
    Cut.ABORTED: (LegEnd.ENDED, resuming.broke_off("it is shutting down")),
}
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*([0-9]{1,9})')
_COUNT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*([0-9]{1,9})')
_LIMIT = "--first-byte-timeout; a stream has no limit behind its first byte"
_HELD_BYTES = 1 << 20  # of an incomplete event that are held back
_LAST_BYTES = 16 << 20  # of a response's, of which the last has the whole answer
OWN_MARK = b"x-ascend-pd-metaserver"  # on a metaserver's requests and health answers: it must not pass for an engine
# vLLM's stream of a request that it ends before the first token: only the end, and the usage if that was asked for.
# Before 0.32 the stream of a completion whose request failed then, as by its load, is the same.
_NOTHING = re.compile(rb'data: (\[DONE\]|\{[^\n]*"choices":\s*\[\])')


async def decode(shared: Shared, attempt: Attempt, params: dict[str, Any] | None, headers: Headers) -> None:
    """Send the request to D and relay its answer. Raise AttemptFailed as long as the client has seen nothing."""
    exchange = attempt.exchange
    sent = time.monotonic()
    reply, first = await _open(shared, attempt, params, headers)
    with contextlib.closing(reply):
        attempt.leg.check()  # the answer commits to this D from here on
        now = time.monotonic()
        METRICS.leg_seconds.labels("decode").observe(now - sent)
        emit("meta.first_byte", ticket=attempt.ticket, decode=attempt.decode.name)
        exchange.stage("first byte")
        streams = exchange.request.stream and reply.status == 200
        if streams and not exchange.streaming and isinstance(first, bytes) and _lacks_ids(exchange, first):
            resuming.let_go(shared, exchange)
            exchange.unkept = "its D returns no token ids"
        kept = exchange.kept
        if exchange.streaming and not streams:
            raise _no_rest(shared, attempt, reply.status)
        opens = streams and isinstance(first, bytes) and not _first_said(first)  # it is long, and only that has come
        # Else D may still post: for other copies, after a tool that it runs, or as it only says what it was given.
        may_post = attempt.repeats or exchange.request.asks_again or opens
        attempt.answers = exchange.request.copies == 1 and not may_post
        if streams and kept is not None and not kept.gave_up:
            exchange.release()  # what is kept is counted there
        elif attempt.answers and (streams or exchange.route != bodies.RESPONSES):  # which repeats its request
            exchange.forget_prompt()
        if exchange.streaming and kept is not None and isinstance(first, bytes):
            await resuming.relay(shared, attempt, kept, reply, first)
            exchange.stage("end")
            return
        METRICS.ttft.labels(exchange.route).observe(now - exchange.started)
        exchange.committed, exchange.status = True, reply.status
        head = client_head(reply.headers, attempt.decode, exchange.request_id)
        try:
            if streams and kept is not None and isinstance(first, bytes):
                exchange.streaming = True
                await exchange.send({"type": "http.response.start", "status": 200, "headers": head})
                await resuming.relay(shared, attempt, kept, reply, first)
            elif isinstance(first, bytes) and streams:
                await _stream(shared, attempt, reply, head, first)
            else:
                await send_whole(exchange.send, reply.status, head, first)
        except asyncio.CancelledError:
            if not exchange.said_all:  # else it has left with the last event, as openai's client does
                raise
        exchange.stage("end")
        _learn(shared, attempt)


def _lacks_ids(exchange: HttpExchange, first: bytes) -> bool:
    """Return whether D was asked for token ids between its events, and begins without."""
    kept = exchange.kept
    return kept is not None and kept.reports and not _first_said(first).startswith(TOKENS_EVENT)


def _learn(shared: Shared, attempt: Attempt) -> None:
    """Take in the length of a whole answer, of which nothing was refused or missing."""
    request, leg = attempt.exchange.request, attempt.leg
    if leg.end is LegEnd.SERVED and leg.came and attempt.exchange.pinned is None:
        shared.fleet.answered(request.model, request.stream, leg.came / request.copies, request.limit)


async def _open(
    shared: Shared, attempt: Attempt, params: dict[str, Any] | None, headers: Headers
) -> tuple[Reply, Payload]:
    """Return D's reply, and the first piece of a stream or any other answer as a whole. Raise AttemptFailed."""
    exchange, timeout = attempt.exchange, shared.settings.first_byte_timeout_s
    home = home_of(attempt.decode.name, shared.settings.engine_token)
    if exchange.kept is not None and exchange.kept.reports and not exchange.kept.gave_up:
        params = {**(params or {}), REPORT: True}
    body = bodies.for_decode(exchange.request, params, home)
    try:
        origin, route = attempt.decode.origin, exchange.request.route.encode()
        reply = await attempt.leg.attach(shared.upstream.ask(origin, "POST", route, headers, body, timeout)).head()
    except UpstreamError as problem:
        raise _broken(shared, attempt, problem) from problem
    opened = False
    try:
        first = await _first(shared, attempt, reply, timeout)
        opened = True
    except UpstreamError as problem:
        raise _broken(shared, attempt, problem, begun=reply.status == 200) from problem
    finally:
        if not opened:
            reply.close()
    if reply.status != 200 or not attempt.repeats:
        computed = reply.status == 200 or exchange.request.follows is None  # else D may only not have that response
        shared.leg_over(attempt.leg, LegEnd.SERVED, Evidence.SERVED if computed else None)
    return reply, first


async def _first(shared: Shared, attempt: Attempt, reply: Reply, timeout_s: float) -> Payload:
    first: bytes | memoryview
    if LegEnd.of(reply.status) is not LegEnd.SERVED:
        raise await _refused(shared, attempt, reply.status, await reply.rest(_ERROR_BYTES, timeout_s), reply.headers)
    said = b""
    if reply.status != 200 or not attempt.exchange.request.stream:
        first = await reply.whole(_WHOLE_ANSWER_BYTES, timeout_s)
        attempt.leg.take(await shared.aside.run(_tokens_of, first))
    else:
        first, end = b"", time.monotonic() + timeout_s
        try:
            while len(first) <= _HELD_BYTES and not said and (more := await reply.read(_left(end))):
                first = _COMMENTS.sub(b"", first + more)
                said = _first_said(first)
        except UpstreamError as broken:
            if _FAILED.search(first) is None:
                raise
            raise await _refused(shared, attempt, 500, b"", []) from broken
    if reply.status == 200 and isinstance(first, bytes) and not first.strip():
        raise UpstreamError(HttpFailure.EMPTY, "its answer was empty")
    if said.startswith(_ERROR_EVENTS):
        # vLLM sends a stream's status 200 and role before the request has run; this is the failure that came after.
        body = said.partition(b"data: ")[2].split(b"\n", 1)[0].strip()
        status = status_of(body)
        if LegEnd.of(status) is not LegEnd.SERVED:
            raise await _refused(shared, attempt, status, body, [])
        if attempt.exchange.streaming:
            raise _no_rest(shared, attempt, status)
        # Else the error is the client's own, as vLLM also validates parameters this late: it is the answer.
    if reply.status != 200:
        return first
    stripped: Payload = first
    streams, kept = attempt.exchange.request.stream, attempt.exchange.kept
    # What a kept stream says before D ends it counts, also where both came at once: another D goes on behind it.
    goes_on = streams and kept is not None and not kept.gave_up
    cut_short = await shared.aside.run(partial(_cut_short, attempt.exchange), said or first if goes_on else first)
    said_in_it: SaidByEngine | None = None
    if said.startswith(_COMPLETED):  # all of a response's stream, of which nothing is out
        cut_short = _until_cut(shared, attempt, said)[1]
    if not streams:
        hides_ids = kept is not None and not kept.asked_ids
        stripped, said_in_it = await shared.aside.run(partial(stripped_of, hides_ids=hides_ids), first)
        cut_short = cut_short or _unreported(attempt, said_in_it)
    if cut_short is Cut.DROPPED:
        shared.leg_over(attempt.leg, LegEnd.DROPPED)
        if kept is not None and not streams:
            has_more = await shared.aside.run(kept.take_whole, first)
            resuming.count(shared, attempt.exchange, kept)
            if has_more:
                raise StreamBroke(HttpFailure.DROPPED, resuming.LACKED_BLOCKS)
        code = resuming.LACKED_BLOCKS.code
        raise AttemptFailed(HttpFailure.DROPPED, known(503, code, 2), Failure(code, "dropped for lack of blocks"))
    if cut_short is not None or _NOTHING.match(said):
        why = "it is shutting down" if cut_short is not None else "it said nothing, so it is shutting down or failed"
        answer = fault(503, f"The decode instance ended the request: {why}.", "PD-META-007")
        raise await _refused(shared, attempt, 503, answer.body, [])
    if said_in_it is not None and said_in_it.pd_load is not None:
        shared.loaded(said_in_it.pd_load)
    return stripped


def _tokens_of(answer: Buffer) -> int:
    """Return how many tokens a whole answer has. What is deeper in it may be the client's own, as a tool's schema."""
    try:
        usage = _COUNT.search(memoryview(bodies.fields_of(answer).get("usage", b"")))
    except bodies.BodyError:
        return 0
    return int(usage[1]) if usage is not None else 0


def _unreported(attempt: Attempt, said: SaidByEngine | None) -> Cut | None:
    """Return how D itself ended a request early, as its report or the lack of it says at the end of an answer.

    Every other end of a request whose KV D asked for has a report, but for a stop string, which vLLM finds behind the
    engine. Only a response does not show it otherwise.
    """
    if said is not None and said.pd_dropped:
        return Cut.DROPPED
    lacks = said is _SAID_NOTHING and attempt.transfers and not attempt.exchange.has_stop
    return Cut.ABORTED if lacks and attempt.exchange.route == bodies.RESPONSES else None


def stripped_of(answer: Buffer, *, hides_ids: bool = False) -> tuple[Payload, SaidByEngine | None]:
    """Return a whole answer without `kv_transfer_params`, perhaps without token ids, and what D says in the former."""
    if hides_ids:
        answer = without_ids(bytes(answer))
    if not pieces.holds(answer, lambda part: _PARAMS in part):
        return answer, None
    try:
        fields = bodies.fields_of(answer)
    except bodies.BodyError:
        return answer, None  # no object, so it has no such field
    if (params := fields.get(bodies.TRANSFER_PARAMS)) is None:
        return answer, None
    if bytes(memoryview(params)[:5]) == b"null":
        return answer, _SAID_NOTHING  # as vLLM writes it without a connector
    said = SaidByEngine()
    try:
        said = said_in(msgspec.json.encode({bodies.TRANSFER_PARAMS: params}))
    except bodies.UNREADABLE as problem:  # another version's: ignored, and not for the client
        log.warning("a decode engine's report is not understood: %s", problem)
    fields[bodies.TRANSFER_PARAMS] = msgspec.Raw(b"null")
    return bodies.object_of(fields, len(answer)), said


def _until_cut(shared: Shared, attempt: Attempt, piece: bytes) -> tuple[bytes, Cut | None]:
    """Return events for the client, up to one by which D itself ends the request early, and how it does."""
    exchange = attempt.exchange
    if exchange.route != bodies.RESPONSES:
        if not exchange.stops_at_recomputed and dropped(piece):
            return up_to(DROPPED, piece), Cut.DROPPED
        if (b'"abort"' in piece or b'"message_delta"' in piece) and aborted(piece):
            return up_to(_ABORTED, piece), Cut.ABORTED
        return piece, None
    before, completed, event = piece.partition(_COMPLETED)  # the last one, which has the whole answer
    try:
        fields = bodies.fields_of(event) if completed else {}
    except bodies.BodyError:
        return piece, None
    if "response" not in fields:
        return piece, None
    answer, said = stripped_of(memoryview(fields["response"]))
    if (cut_short := _unreported(attempt, said)) is not None:
        return before, cut_short
    if said is not None and said.pd_load is not None:
        shared.loaded(said.pd_load)
    fields["response"] = msgspec.Raw(b"".join(cut(answer)))
    return before + completed + msgspec.json.encode(fields) + b"\n\n", None


def _left(end: float) -> float:
    """Return the time until `end`, which comments do not put off. Raise UpstreamError if it is over."""
    left = end - time.monotonic()
    if left <= 0:
        raise UpstreamError(HttpFailure.TIMEOUT, "no answer in time")
    return left


def _first_said(stream: bytes) -> bytes:
    """Return the first complete event of a stream; empty if there is none yet, as TCP may cut inside an event.

    The role at the beginning of a chat's stream does not count: the next event is on its way.
    """
    events = stream.split(b"\n\n")[:-1]
    return next(
        (event for event in events if event.strip() and not (_ROLE.search(event) or _OPENING.match(event))), b""
    )


def _cut_short(exchange: HttpExchange, answer: Buffer) -> Cut | None:
    """Return how D itself ended a request early, as its answer says, or what has come of it.

    In a whole message the input of a tool is JSON of the model's, so only the outermost level counts. A response shows
    it nowhere but in what the connector adds.
    """
    may_be_dropped = not exchange.stops_at_recomputed
    reported = isinstance(answer, bytes) and answer.startswith(TOKENS_EVENT)
    if exchange.route == bodies.RESPONSES and not reported:
        return None
    if exchange.route == bodies.MESSAGES and not exchange.request.stream:
        try:
            fields = bodies.fields_of(answer)
        except bodies.BodyError:
            return None
        if may_be_dropped and bodies.small(fields, "stop_sequence") == "recomputed":
            return Cut.DROPPED
        return None if "stop_reason" in fields else Cut.ABORTED
    if not pieces.holds(answer, _CUT_SHORT.search if may_be_dropped else aborted):
        return None
    return Cut.DROPPED if may_be_dropped and pieces.holds(answer, dropped) else Cut.ABORTED


def aborted(answer: bytes) -> bool:
    """Return whether an engine's 200 says that it has ended the request by itself."""
    return _ABORTED.search(answer) is not None


def dropped(answer: bytes) -> bool:
    """Return whether D says that it has ended the request halfway, for lack of blocks, and wants it sent again."""
    return DROPPED.search(answer) is not None


async def _refused(shared: Shared, attempt: Attempt, status: int, body: bytes, headers: Headers) -> AttemptFailed:
    """Return the failure for D's error, whose body the client gets if no other attempt is made."""
    instance = attempt.decode
    kept = [(name, value) for name, value in headers if name == b"retry-after"]
    passed = (
        Answer(status, body, kept)
        if body.strip()
        else fault(status, "The decode instance gave no reason.", "PD-META-007")
    )
    said = brief(status, body)
    end, noted = LegEnd.of(status), decode_failed(said)
    if end is LegEnd.REFUSED:
        attempt.leg.refused()
        return AttemptFailed(HttpFailure.REFUSED, passed, noted)
    await attempt.wait_reported(attempt.explained, resuming.REPORT_OF_LOAD_S)
    shared.accuse(attempt, said)
    if attempt.load_failed:
        attempt.leg.end = LegEnd.NO_PREFILL
        return AttemptFailed(HttpFailure.PREFILL, passed, noted)
    attempt.leg.end = end
    words = body[:200].decode(errors="replace")
    log.warning("request %s: %s answered %d: %s", attempt.exchange.request_id, instance.name, status, words)
    return AttemptFailed(HttpFailure.SERVER, passed, noted)


def _no_rest(shared: Shared, attempt: Attempt, status: int) -> AttemptFailed:
    """Return the failure for a D that finds an error in the request for the rest of a stream, which no client wrote."""
    shared.leg_over(attempt.leg, LegEnd.REFUSED)
    answer = fault(502, f"The decode instance answered {status}.", "PD-META-007")
    return AttemptFailed(HttpFailure.SERVER, answer, decode_failed(f"answered {status}"))


def _broken(shared: Shared, attempt: Attempt, problem: UpstreamError, begun: bool = False) -> AttemptFailed:
    is_response = attempt.exchange.route == bodies.RESPONSES and attempt.exchange.request.stream
    if not attempt.exchange.request.stream and shared.is_late(attempt.leg, problem):
        late = UpstreamError(
            problem.failure, f"no whole answer within {shared.settings.first_byte_timeout_s:g} s ({_LIMIT})"
        )
        return AttemptFailed(problem.failure, no_answer(late), decode_failed(problem.why), final=True)
    if problem.failure is HttpFailure.TIMEOUT and attempt.posts:  # P has not answered, so D may only wait for it
        attempt.leg.end = LegEnd.NO_PREFILL
    elif begun and is_response and problem.failure is HttpFailure.BROKEN and not attempt.transfers:
        # vLLM breaks off a response's stream so for a parameter that it refuses, which says nothing of D.
        attempt.leg.end = LegEnd.BROKE
        problem = UpstreamError(problem.failure, f"{problem.why}; without stream it may say why")
    else:
        shared.leg_broke(attempt.leg, problem)
    return AttemptFailed(problem.failure, no_answer(problem), decode_failed(problem.why))


def no_answer(problem: UpstreamError) -> Answer:
    """Return what the client gets if no D has answered."""
    status = {HttpFailure.TIMEOUT: 504, HttpFailure.CONNECT: 503, HttpFailure.OURS: 503}.get(problem.failure, 502)
    return fault(
        status, f"The decode instance could not answer: {problem.why}.", "PD-META-007", 2 if status == 503 else None
    )


async def _stream(shared: Shared, attempt: Attempt, reply: Reply, head: Headers, first: bytes) -> None:
    exchange = attempt.exchange
    send = exchange.send
    await send({"type": "http.response.start", "status": 200, "headers": head})
    piece, tail, number = first, bytearray(), 0
    broke: Failure | None = None
    is_response = exchange.route == bodies.RESPONSES
    try:
        while piece and broke is None:
            piece = _whole_events(tail, piece, _LAST_BYTES if is_response else _HELD_BYTES)
            piece, cut_short = _until_cut(shared, attempt, piece)
            number = max((int(one) + 1 for one in _NUMBER.findall(piece)), default=number) if is_response else 0
            if cut_short is not None:
                end, broke = _CUTS[cut_short]
                shared.leg_over(attempt.leg, end)
                tail.clear()
            last = reply.at_end and not tail and broke is None
            if piece:
                attempt.leg.take(piece.count(b"\n\n"))
                await send({"type": "http.response.body", "body": piece, "more_body": not last})
                if last:
                    return
                exchange.said_all = exchange.said_all or has_last_event(piece)
            if broke is None:
                piece = await reply.read()
    except UpstreamError as broken:
        shared.leg_over(attempt.leg, LegEnd.SERVED if exchange.said_all else LegEnd.BROKE, Evidence.BROKE, broken.why)
        broke = None if exchange.said_all else resuming.broke_off(broken.why)
    except ShutDown:
        shared.leg_over(attempt.leg, LegEnd.SERVED if exchange.said_all else LegEnd.CUT)
        broke = None if exchange.said_all else SHUTDOWN
    if tail and broke is None:  # the stream ended without the empty line; after a break half an event would confuse
        await send({"type": "http.response.body", "body": bytes(tail), "more_body": True})
    if broke is not None:
        if broke != SHUTDOWN and exchange.unkept:
            why = known_failure(PdError("PD-META-024", problem=broke.detail, why=exchange.unkept))
            broke = why if broke.code == "PD-META-007" else Failure(broke.code, why.detail)
        shared.stream_broke(exchange, attempt.decode.name, broke)
        end_of_it = error_frame(broke, exchange.route, number)
        await send({"type": "http.response.body", "body": end_of_it, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def has_last_event(piece: bytes) -> bool:
    """Return whether a stream's last event is out: nothing may follow it, however its connection ends."""
    return piece.endswith(b"\n\n") and piece[:-2].rpartition(b"\n\n")[2].startswith(_LAST_EVENTS)


def _whole_events(tail: bytearray, piece: bytes, most: int) -> bytes:
    """Return the complete events. The `tail` may be the beginning of one that must not go out."""
    if not tail and piece.endswith(b"\n\n"):  # nearly always
        return piece
    begin = max(0, len(tail) - 1)  # there is no end before
    tail += piece
    end = len(tail) if tail.endswith(b"\n\n") or len(tail) > most else tail.rfind(b"\n\n", begin) + 2
    whole = bytes(tail[:end]) if end > 1 else b""
    del tail[: len(whole)]
    return whole


def up_to(words: re.Pattern[bytes], stream: bytes) -> bytes:
    """Return the events before the one that matches `words`. No event has an empty line in it."""
    match = words.search(stream)
    return (
        stream[: stream.rfind(b"\n\n", 0, match.start()) + 2] if match and b"\n\n" in stream[: match.start()] else b""
    )


def client_head(headers: Headers, engine: Instance, request_id: str) -> Headers:
    """Return an engine's headers for the client, without those of the connection, and with redirects back to us."""
    named = [value for name, value in headers if name == b"connection"]
    drop = OWN_HEADERS.union(*map(listed, named)) if named else OWN_HEADERS
    head = [
        (name, _from_here(value, engine) if name == b"location" else value)
        for name, value in headers
        if name not in drop
    ]
    head.append((b"x-request-id", request_id.encode("latin-1")))
    return head


def _from_here(location: bytes, engine: Instance) -> bytes:
    """Return a redirect's target without the engine's own address, which would lead the client past the metaserver."""
    engine_url = f"{engine.origin.scheme}://{engine.origin.netloc}/".encode()
    return b"/" + location.removeprefix(engine_url) if location.startswith(engine_url) else location


async def send_whole(send: AsgiSend, status: int, head: Headers, body: Payload) -> None:
    head.append((b"content-length", b"%d" % length(body)))
    await send({"type": "http.response.start", "status": status, "headers": head})
    *before, last = cut(body)
    for piece in before:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": last})


async def refuse(exchange: HttpExchange, answer: Answer) -> None:
    """Send our own or an engine's error to a client that has seen nothing yet."""
    exchange.committed, exchange.status = True, answer.status
    exchange.stage("refused", str(answer.status))
    head = [(b"content-type", answer.content_type), (b"x-request-id", exchange.request_id.encode("latin-1"))]
    await send_whole(exchange.send, answer.status, [*head, *answer.headers], answer.body)


async def send_answer(send: AsgiSend, answer: Answer) -> None:
    await send_whole(send, answer.status, [(b"content-type", answer.content_type), *answer.headers], answer.body)
