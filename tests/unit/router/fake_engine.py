# SPDX-License-Identifier: Apache-2.0
"""Fake engine behind a real HTTP server on 127.0.0.1: vLLM's OpenAI API, streaming included.

As a D it asks the metaserver for its prefill with the package's own client, one reservation per prompt and choice.
As a P it "pushes" what the reservation names, which D then finds. Its output depends on the prompt alone, so a test
can tell a right answer from a wrong one. `ServedApp` runs any ASGI application on a thread of its own and can kill it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import socket
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn
from simulation.front.speech import AnswerOptions, Speaker, speak

from unit.router import fake_protocols
from unit.router.fake_protocols import ABORT, MESSAGES, OTHERS, RECOMPUTED, RESPONSES, WELL
from vllm_ascend_pd.config import MetaserverConfig
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import LoadReport, PushReport, params_of
from vllm_ascend_pd.protocol.versions import fingerprint, may_pair
from vllm_ascend_pd.shared.loop import LoopThread

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ServedApp:
    """An ASGI application on a port of 127.0.0.1, on its own loop thread."""

    def __init__(
        self,
        app: Any,
        name: str,
        port: int = 0,
    ) -> None:
        self.loop = LoopThread(name)
        self._app = app
        self._server: uvicorn.Server | None = None
        self.port = port
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        listening = socket.socket(proto=socket.IPPROTO_TCP)  # proto given, else asyncio leaves Nagle's algorithm on
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        listening.listen(1024)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            interface="asgi3",
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._serving = self.loop.submit(self._server.serve(sockets=[listening]))
        self.loop.call(self._until_started(), 10)

    async def _until_started(self) -> None:
        while self._server is not None and not self._server.started:
            await asyncio.sleep(0.005)

    def shut(self) -> None:
        """Begin to shut down like an engine's HTTP server: close idle connections, take no new ones, go on with open
        requests."""
        if self._server is not None:
            self.loop.call(self._shut(self._server), 10)

    async def _shut(self, server: uvicorn.Server) -> None:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()

    def kill(self) -> None:
        """End as after a SIGKILL: every connection and the port are gone at once."""
        server, self._server = self._server, None
        if server is not None:
            self.loop.call(self._kill(server), 10)

    async def _kill(self, server: uvicorn.Server) -> None:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.force_exit = server.should_exit = True
        await asyncio.wrap_future(self._serving)

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            self._serving.result(10)
        self.loop.stop()


@dataclass
class SeenRequest:
    """One request that reached the engine."""

    route: str
    headers: dict[str, str]
    body: Any
    aborted: bool = False
    finished: bool = False


@dataclass
class EngineBehaviour:
    """Behaviour of the engine; a test may change it at any time."""

    tokens: int = 3
    before_first_s: float = 0.0
    hold: bool = False  # no answer until the test resets it
    gap_s: float = 0.0
    keep_alive_s: float = 0.0  # as D: how often a stream that waits for its turn (`hold`) has a comment; 0: never
    paused: bool = False  # a stream stops after its next piece until the test resets it
    pause_after: int = 0  # with `paused`: after so many pieces
    prefill_s: float = 0.0
    status: int = 200  # status of answers, if not 200
    said: bytes = b""  # body of errors, if not of vLLM's form
    key: str = ""  # 401 to whoever does not bring it, as with vLLM's --api-key; empty: all are served
    wedged: bool = False  # 500 to completions; still lists its models
    empty: bool = False  # 200 with an empty body
    stream_error: int | str = 0  # code of the error that is all of a stream; 0: none
    break_after: int | None = None  # pieces sent before the connection is closed
    hang: bool = False  # never answers
    moved: bool = False  # 307 to another path of the same engine
    frozen: bool = False  # accepts connections and never answers, not even /health
    policy: str = "recompute"  # as D: result of a failed load ("recompute" or "fail")
    before_post_s: float = 0.0  # as D: delay before it reserves
    recompute_s: float = 0.0  # as D: duration of a local prefill
    late_choice: bool = False  # as D: the last choice's prefill is requested after the first byte
    posts_ids: bool = True  # as D: a prompt with media has more than ids, which it does not post
    deaf: bool = False  # as D: keeps its posts open although its request has ended
    health: int = 200
    health_s: float = 0.0  # delay of an answer to a probe
    push: bool = True  # as P: the KV really arrives
    ends: bool = False  # 200, no token, finish_reason "abort", as from a vLLM that shuts down
    ends_unsaid: bool = False  # with `ends`: a stream has only its end, as vLLM's if cut off before the first token
    refuses_push: str = ""  # as P: answers with status 200, but reports with this code that it did not push
    after_push_s: float = 0.0  # as P: from the KV's arrival to its own answer, which is not guaranteed to come later
    hold_after_push: bool = False  # as P: the KV arrives, but no answer until the test resets it
    refuses_after_push: bool = False  # as P: the KV arrives, then 503
    breaks_after_push: bool = False  # as P: the KV arrives, then the connection breaks
    settle_s: float = 0.1  # as D: how long KV may be missing after P's answer with status 200
    loads_fail: str = ""  # as D: code by which each load fails although the KV has arrived; empty: none does
    loads_fail_from: str = ""  # with `loads_fail`: only loads from the P of this incarnation
    reports: bool = True  # as D: posts its load reports; whole answers carry them in any case
    report_s: float = 0.0  # as D: from the end of a load to its report
    odd_report: bool = False  # as D: reports in the format of another version
    fails_after_load: bool = False  # as D: 500 of its own, although the KV arrived
    cut_s: float = 0.0  # as D: between the two pieces of an event
    half: bool = False  # a whole answer is cut off in the middle
    torn_at_end: bool = False  # a stream's connection breaks after its last piece
    lingers: bool = False  # a stream's body does not end after its last event, until the test resets it
    speaks: bool = False  # as D: streams have token ids, and a request that begins with another's tokens continues it
    drops_after: int | None = (
        None  # as D: ends a request after so many tokens, as vllm-ascend's recompute scheduler does
    )


_MOOD: ContextVar[EngineBehaviour | None] = ContextVar("mood", default=None)
PUSHED: dict[str, str] = {}  # engine that pushed, by transfer whose KV has arrived


def words(prompt: object, count: int) -> list[str]:
    """Return the right answer to a prompt."""
    seed = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    return [f" {seed[4 * i : 4 * i + 4]}" for i in range(count)]


def ids_of(prompt: object) -> list[int]:
    """Return the token ids that a fake D makes of a prompt: bytes of JSON."""
    return list(json.dumps(prompt).encode())


class FakeEngine:
    def __init__(self, name: str = "engine", port: int = 0, metaservers: tuple[str, ...] = ()) -> None:
        self.usual = EngineBehaviour()
        self.mood: Callable[[], EngineBehaviour] | None = None  # draws the behaviour of each request
        self.seen: list[SeenRequest] = []
        self.running = 0
        self.outcomes: list[Outcome] = []
        self.local_prefills = 0
        self.incarnation = uuid.uuid4().hex[:16]
        self.fingerprint = fingerprint("fake")
        self.models: tuple[str, ...] = ("fake",)
        self.sends_first = False  # as P: reports its first tokens
        self.responses: dict[str, dict[str, Any]] = {}  # stored ones, by their id
        self.conversations: dict[str, object] = {}  # their prompts
        self._loads: dict[str, LoadReport] = {}  # the last report by ticket
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self.served = ServedApp(self._app, name, port)
        self.metaservers(*metaservers)

    def metaservers(self, *urls: str, **more: Any) -> None:
        """Set the allow-list of D's client, and more of its configuration."""
        config = MetaserverConfig(metaserver_urls=tuple(url.rstrip("/") for url in urls), **more)
        self._client = MetaserverClient(config, self.served.loop, self._outcome)

    @property
    def behaviour(self) -> EngineBehaviour:
        """Behaviour for the current request; tests read and change the default."""
        return _MOOD.get() or self.usual

    @property
    def address(self) -> str:
        return self.served.address

    def generations(self) -> list[SeenRequest]:
        return [s for s in self.seen if s.route.endswith("completions") or s.route in OTHERS]

    def stop(self) -> None:
        self.served.loop.call(self._client.close(), 10)
        self.served.stop()

    def failed(self, code: str) -> bool:
        """Return whether this was the newest word of the metaserver."""
        failure = self.outcomes[-1].failure if self.outcomes else None
        return failure is not None and failure.code == code

    def _outcome(self, key: Any, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        waiting = self._waiting.get(key)
        if outcome.final and waiting is not None and not waiting.done():
            waiting.set_result(outcome)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        parsed = json.loads(body) if body[:1] in (b"{", b"[") else None
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        seen = SeenRequest(scope["path"], headers, parsed)
        while self.behaviour.frozen:
            await asyncio.sleep(0.01)
        if scope["path"] == "/health":
            behaviour = self.behaviour if self.mood is None else self.mood()
            await asyncio.sleep(behaviour.health_s)
            await _answer(send, behaviour.health, b"")
            return
        if self.mood is not None:
            _MOOD.set(self.mood())
        if "x-request-id" in headers or scope["path"] != "/v1/models":  # else it is a probe of the metaserver
            self.seen.append(seen)
        if scope["method"] == "OPTIONS":
            await _answer(send, 200, b"OK")
            return
        work = asyncio.ensure_future(self._serve(seen, send))
        left = asyncio.ensure_future(_left(receive))
        self.running += 1
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                seen.finished = True
            else:
                seen.aborted = True
        finally:
            self.running -= 1
            left.cancel()
            work.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _serve(self, seen: SeenRequest, send: Send) -> None:
        if self.behaviour.hang:
            await asyncio.Event().wait()
        if self.behaviour.key and seen.headers.get("authorization") != f"Bearer {self.behaviour.key}":
            await _answer(send, 401, _error(401, "Unauthorized"))
        elif self.behaviour.wedged and seen.route != "/v1/models":
            await _answer(send, 500, self.behaviour.said or _error(500, "wedged"))
        elif self.behaviour.status != 200:
            await _answer(send, self.behaviour.status, _error(self.behaviour.status, "as set"))
        elif self.behaviour.empty:
            await _answer(send, 200, b"")
        elif self.behaviour.moved:
            where = [(b"location", f"{self.served.url}/v1/elsewhere?a=b".encode())]
            await send({"type": "http.response.start", "status": 307, "headers": where})
            await send({"type": "http.response.body", "body": b""})
        elif seen.route == "/v1/models":
            cards = [{"id": name, "object": "model"} for name in self.models]
            await _answer(send, 200, json.dumps({"object": "list", "data": cards}).encode())
        elif seen.route.startswith(RESPONSES + "/"):
            response = self.responses.get(seen.route.split("/")[3])
            await _answer(
                send, *(404, _error(404, "not found")) if response is None else (200, json.dumps(response).encode())
            )
        elif not seen.route.endswith("completions") and seen.route not in OTHERS:
            await self._until_released()
            if (seen.body or {}).get("stream"):
                await self._stream(seen, send)
                return
            await _answer(send, 200, json.dumps({"route": seen.route, "body": seen.body}).encode())
        elif seen.body.get("model", "fake") not in self.models:
            await _answer(send, 404, _error(404, "The model does not exist."))
        elif seen.body.get("previous_response_id", "") not in ("", None, *self.conversations):
            await _answer(send, 404, _error(404, "Response not found."))
        else:
            await self._generate(seen, send)

    def _refusal(self, params: dict[str, Any]) -> str:
        """As P: code for not pushing, for instance if the model is another one; empty if it pushes."""
        theirs = reservation_of(params).get("fingerprint", "")
        return self.behaviour.refuses_push or ("" if may_pair(self.fingerprint, theirs) else "PD-GEO-001")

    async def _until_released(self) -> None:
        while self.behaviour.hold:
            await asyncio.sleep(0.01)

    async def _generate(self, seen: SeenRequest, send: Send) -> None:
        if seen.route in OTHERS and seen.body.get("previous_response_id"):
            prompt = [self.conversations[seen.body["previous_response_id"]], seen.body["input"]]
            seen = replace(seen, body={**seen.body, "input": prompt})
        if self.behaviour.ends and seen.route not in OTHERS:
            said = json.dumps({"id": "fake", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}).encode()
            if seen.body.get("stream"):
                await _head(send, 200, b"text/event-stream")
                if "chat" in seen.route:  # as vLLM does: the role comes first, in a piece of its own
                    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    await _piece(send, b"data: " + json.dumps({"id": "fake", "choices": [role]}).encode() + b"\n\n")
                    await asyncio.sleep(0.1)
                events = b"" if self.behaviour.ends_unsaid else b"data: " + said + b"\n\n"
                if (seen.body.get("stream_options") or {}).get("include_usage"):
                    events += b'data: {"id": "fake", "choices": [], "usage": {"completion_tokens": 0}}\n\n'
                await _piece(send, events + b"data: [DONE]\n\n", last=True)
            else:
                await _answer(send, 200, said)
            return
        if self.behaviour.stream_error and seen.body.get("stream"):
            await self._fail_stream(seen, send, self.behaviour.stream_error)
            return
        params = seen.body.get("kv_transfer_params") or {}
        if self.behaviour.keep_alive_s and seen.body.get("stream"):
            await self._keep_alive(send)
        if params.get("do_remote_decode"):
            await asyncio.sleep(self.behaviour.prefill_s)
            await self._until_released()
            if self.behaviour.push and not self._refusal(params):
                PUSHED[reservation_of(params)["transfer"]] = self.incarnation
            await asyncio.sleep(self.behaviour.after_push_s)
            while self.behaviour.hold_after_push:
                await asyncio.sleep(0.01)
            if self.behaviour.refuses_after_push:
                await _answer(send, 503, _error(503, "as set"))
                return
            if self.behaviour.breaks_after_push:
                raise ConnectionAbortedError("as set")
        elif params.get("do_remote_prefill") and not (self._repeats(seen) or await self._prefilled(seen.body, params)):
            if seen.body.get("stream"):
                await self._fail_stream(seen, send, 500)
            else:
                await _answer(send, 500, _error(500, "Internal server error"))
            return
        await asyncio.sleep(self.behaviour.before_first_s)
        await self._until_released()
        if params.get("do_remote_prefill") and self.behaviour.fails_after_load:
            await _answer(send, 500, _error(500, "out of memory"))
            return
        await (self._stream if seen.body.get("stream") else self._whole)(seen, send)

    async def _keep_alive(self, send: Send) -> None:
        """Write comments while the request waits, as vLLM's --sse-keep-alive-interval does."""
        await _head(send, 200, b"text/event-stream; charset=utf-8")
        while self.behaviour.hold:
            await asyncio.sleep(self.behaviour.keep_alive_s)
            for part in (b": keep-", b"alive\n\n"):  # TCP may split data anywhere
                await _piece(send, part)

    async def _fail_stream(self, seen: SeenRequest, send: Send, code: int | str) -> None:
        """Fail as vLLM does once a stream's status is out: the first event but a chat's role is the error."""
        await _head(send, 200, b"text/event-stream")
        if seen.route in OTHERS:
            empty = fake_protocols.whole(seen.route, seen.body, "x", [])
            await _piece(send, fake_protocols.events(seen.route, [], empty)[0])
            if seen.route == MESSAGES:  # a response's stream only breaks
                quoted = (
                    f"2 errors [type=missing, input_value={{'error': {{'message': 'as...': None, 'code': {code}}}}}, x"
                )
                failed = {"type": "error", "error": {"type": "internal_error", "message": quoted}}
                await _piece(send, fake_protocols.event(failed), last=True)
                return
            raise ConnectionAbortedError("as set")
        if "chat" in seen.route:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await _piece(send, b"data: " + json.dumps({"id": "fake", "choices": [role]}).encode() + b"\n\n")
        await _piece(send, b"data: " + _error(code, "as set") + b"\n\ndata: [DONE]\n\n", last=True)

    async def _prefilled(self, body: dict[str, Any], params: dict[str, Any]) -> bool:
        """As D: reserve for every prompt and choice, and wait for all. False: the request fails."""
        wanted = [prompt for prompt in _prompts(body) for _ in range(body.get("n") or 1)]
        now = wanted[:-1] if self.behaviour.late_choice else wanted
        outcomes = await asyncio.gather(*(self._reserve(prompt, params) for prompt in now))
        failed = [o for o in outcomes if o is not None and o.kind == "failed"]
        if not failed:
            return True
        self.local_prefills += 1
        await asyncio.sleep(self.behaviour.recompute_s)
        return self.behaviour.policy == "recompute"

    async def _reserve(self, prompt: object, params: dict[str, Any]) -> Outcome:
        transfer = f"d/{uuid.uuid4().hex}"
        sealed = json.dumps({"transfer": transfer, "fingerprint": self.fingerprint}).encode()
        envelope = base64.b64encode(sealed).decode()
        body: dict[str, Any] = {"ticket": params["ticket"], "transfer": transfer, "reservation": envelope}
        body |= {"decode": self.incarnation, "fingerprint": self.fingerprint}
        if params.get("send_tokens") and self.behaviour.posts_ids:
            body["prompt_token_ids"] = ids_of(prompt)
        self._waiting[transfer] = asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.behaviour.before_post_s)
        self._client.reserve(transfer, params["metaserver"], body, 60.0)
        well = False
        try:
            outcome = await self._loaded(transfer)
            well = outcome.kind != "failed"
        finally:
            if not well and not self.behaviour.deaf:  # the call of a good load ends by itself when P finishes
                self._client.forget(transfer)
            del self._waiting[transfer]
        self._tell(transfer, params, outcome)
        return outcome

    async def _loaded(self, transfer: str) -> Outcome:
        """Wait for the end of a load: the KV has arrived, whatever P answered; or it failed; or P has answered with
        status 200 and the KV is still missing after `settle_s`."""
        waiting, missing_since = self._waiting[transfer], None
        while transfer not in PUSHED:
            now = asyncio.get_running_loop().time()
            if waiting.done() and waiting.result().kind == "failed":
                return waiting.result()
            if waiting.done():
                missing_since = missing_since or now
                if now - missing_since > self.behaviour.settle_s:
                    return Outcome("failed", Failure("PD-XFER-001", "the KV did not arrive"))
            await asyncio.sleep(0.002)
        if self.behaviour.loads_fail and self.behaviour.loads_fail_from in ("", PUSHED[transfer]):
            return Outcome("failed", Failure(self.behaviour.loads_fail, "as set"))
        return Outcome("prefilled")

    def _tell(self, transfer: str, params: dict[str, Any], outcome: Outcome) -> None:
        failed, why = outcome.failure is not None, outcome.failure or Failure("")
        report = LoadReport(
            *(transfer, params["ticket"], self.incarnation, 0 if failed else 7, 7 if failed else 0),
            *(why.code, PUSHED.get(transfer, ""), self.fingerprint),
            detail=why.detail,
        )
        self._loads[report.ticket] = report
        if self.behaviour.reports:
            loop = asyncio.get_running_loop()
            loop.call_later(self.behaviour.report_s, self._client.report, params["metaserver"], report)

    def _other(self, seen: SeenRequest, count: int) -> tuple[dict[str, Any], list[str]]:
        """Return the answer to a response's or message's request, which is kept if it is a response, and its words."""
        body, (prompt,) = seen.body, _prompts(seen.body)
        cut, end = self.behaviour.drops_after, ABORT if self.behaviour.ends else WELL
        said = words(prompt, count if cut is None else cut) if end is WELL else []
        name = body.get("request_id") or f"resp_{uuid.uuid4().hex}"
        answer = fake_protocols.whole(seen.route, body, name, said, RECOMPUTED if cut is not None else end)
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            answer["kv_transfer_params"] = params_of(PushReport(self.incarnation, fingerprint=self.fingerprint))
        elif seen.route == RESPONSES and end is WELL:
            load = self._loads.get(params.get("ticket", ""))
            # vLLM finds a stop string behind the engine core, which says nothing then.
            answer["kv_transfer_params"] = params_of(load) if load is not None and not body.get("stop") else None
            if cut is not None:
                answer["kv_transfer_params"] = {"pd_dropped": True}
            self.responses[name], self.conversations[name] = answer, [prompt, *said]
        elif seen.route == MESSAGES and (load := self._loads.get(params.get("ticket", ""))) is not None:
            answer["kv_transfer_params"] = params_of(load)
        return answer, said

    async def _whole(self, seen: SeenRequest, send: Send) -> None:
        if seen.route in OTHERS:
            whole, texts = self._other(seen, _limit(seen.body) or self.behaviour.tokens)
            await asyncio.sleep(self.behaviour.gap_s * len(texts))
            await _answer(send, 200, json.dumps(whole).encode())
            return
        chat = "chat" in seen.route
        count = seen.body.get("max_completion_tokens" if chat else "max_tokens") or self.behaviour.tokens
        texts = ["".join(words(p, count)) for p in _prompts(seen.body) for _ in range(seen.body.get("n") or 1)]
        choices = [
            {"index": i, "finish_reason": "length", **({"message": {"content": t}} if chat else {"text": t})}
            for i, t in enumerate(texts)
        ]
        await asyncio.sleep(self.behaviour.gap_s * count)
        usage = {"completion_tokens": count * len(choices)}
        answer: dict[str, Any] = {"id": "fake", "model": "fake", "choices": choices, "usage": usage}
        params = seen.body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            refused = self._refusal(params)
            detail = "not mine" if refused else ""
            answer["kv_transfer_params"] = params_of(
                PushReport(self.incarnation, refused, detail, self.fingerprint, sends_first=self.sends_first)
            )
        elif (report := self._loads.get(params.get("ticket", ""))) is not None:
            answer["kv_transfer_params"] = {"pd_load": {"odd": 1}} if self.behaviour.odd_report else params_of(report)
        if self.behaviour.drops_after is not None:
            choices[0] |= {"finish_reason": "stop", "stop_reason": "recomputed"}
        said = json.dumps(answer).encode()
        if self.behaviour.half:
            await _head(send, 200, b"application/json", len(said))
            await _piece(send, said[: len(said) // 2])
            raise ConnectionAbortedError("as set")
        await _answer(send, 200, said)

    async def _speech(self, seen: SeenRequest, send: Send) -> None:
        prompt = _prompts(seen.body)[0]
        ids = prompt if isinstance(prompt, list) else list(json.dumps(prompt).encode())
        params = seen.body.get("kv_transfer_params") or {}
        given = await _so_far(params, ids) if params.get("continue") else []
        speaker = Speaker(seen.body, ids, self.incarnation, len(given))
        if not self.behaviour.keep_alive_s:
            await _head(send, 200, b"text/event-stream; charset=utf-8")
        dice = random.Random(self.incarnation) if seen.body.get("temperature") else None
        repeats = self._repeats(seen)
        for i, said in enumerate(speak(ids, AnswerOptions.of(seen.body), given, dice), -len(given)):
            if i == 0 and repeats and not await self._prefilled(seen.body, params):
                await _piece(
                    send, b"data: " + _error(500, "Internal server error") + b"\n\ndata: [DONE]\n\n", last=True
                )
                return
            if i == self.behaviour.break_after:
                raise ConnectionAbortedError("as set")
            if i == self.behaviour.drops_after:
                await self._drop(send)
                return
            await _piece(send, speaker.event([said]))
            await asyncio.sleep(self.behaviour.gap_s)
        await self._finish(send, speaker.end())

    async def _stream(self, seen: SeenRequest, send: Send) -> None:
        if self.behaviour.speaks:
            await self._speech(seen, send)
            return
        if seen.route in OTHERS:
            await self._other_stream(seen, send)
            return
        chat = "chat" in seen.route
        count = seen.body.get("max_completion_tokens" if chat else "max_tokens") or self.behaviour.tokens
        if not self.behaviour.keep_alive_s:
            await _head(send, 200, b"text/event-stream; charset=utf-8")
        for i, word in enumerate(words(_prompts(seen.body)[0], count)):
            if i == self.behaviour.break_after:
                raise ConnectionAbortedError("as set")
            if i == self.behaviour.drops_after:
                await self._drop(send)
                return
            choice = {"index": 0, **({"delta": {"content": word}} if chat else {"text": word})}
            await _piece(send, b"data: " + json.dumps({"id": "fake", "choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(self.behaviour.gap_s)
            while self.behaviour.paused and i >= self.behaviour.pause_after:
                await asyncio.sleep(0.01)
        if self.behaviour.late_choice and "ticket" in (seen.body.get("kv_transfer_params") or {}):
            await self._reserve(_prompts(seen.body)[-1], seen.body["kv_transfer_params"])
        await self._finish(send, b"data: [DONE]\n\n")

    async def _other_stream(self, seen: SeenRequest, send: Send) -> None:
        answer, said = self._other(seen, _limit(seen.body) or self.behaviour.tokens)
        await _head(send, 200, b"text/event-stream; charset=utf-8")
        first, *rest, last = fake_protocols.events(seen.route, said, answer)
        await _piece(send, first)
        for i, one in enumerate(rest):
            if i == self.behaviour.break_after:
                raise ConnectionAbortedError("as set")
            await _piece(send, one)
            await asyncio.sleep(self.behaviour.gap_s)
            while self.behaviour.paused and i >= self.behaviour.pause_after:
                await asyncio.sleep(0.01)
        if self.behaviour.late_choice and (params := seen.body.get("kv_transfer_params")):
            await self._reserve(_prompts(seen.body)[-1], params)
            answer["kv_transfer_params"] = params_of(self._loads[params["ticket"]])
            last = fake_protocols.events(seen.route, said, answer)[-1]
        await self._finish(send, last)

    def _repeats(self, seen: SeenRequest) -> bool:
        """Return whether a stream begins with given tokens: those are said before their KV is loaded."""
        goes_on = (seen.body.get("kv_transfer_params") or {}).get("continue") is True
        return self.behaviour.speaks and goes_on and bool(seen.body.get("stream"))

    async def _drop(self, send: Send) -> None:
        last = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "recomputed"}
        dropped = b"data: " + json.dumps({"id": "fake", "choices": [last]}).encode() + b"\n\ndata: [DONE]\n\n"
        await _piece(send, dropped[:40])  # TCP may split data anywhere
        await asyncio.sleep(self.behaviour.cut_s)
        await _piece(send, dropped[40:], last=True)

    async def _finish(self, send: Send, said: bytes) -> None:
        await _piece(send, said, last=not (self.behaviour.torn_at_end or self.behaviour.lingers))
        if self.behaviour.lingers:
            while self.behaviour.lingers:
                await asyncio.sleep(0.01)
            await _piece(send, b"", last=True)
        if self.behaviour.torn_at_end:
            await asyncio.sleep(0.05)
            raise ConnectionAbortedError("as set")


async def _so_far(params: dict[str, Any], ids: list[int]) -> list[int]:
    """As D: ask for the answer so far."""
    wanted = {"ticket": params["ticket"], "prompt": prompt_hash(ids)}
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        answer = await http.post(f"{params['metaserver']}/v1/metaserver/answer", json=wanted)
    return list(answer.json()["tokens"]) if answer.status_code == 200 else []


def reservation_of(params: dict[str, Any]) -> dict[str, Any]:
    """Decode the reservation of a fake D."""
    return dict(json.loads(base64.b64decode(params["reservation"])))


def _limit(body: dict[str, Any]) -> int:
    return int(body.get("max_output_tokens") or body.get("max_tokens") or 0)


def _prompts(body: dict[str, Any]) -> list[object]:
    for name in ("messages", "input"):
        if name in body:
            return [body[name]]
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


async def read_body(receive: Receive) -> bytes:
    """Read a request's whole body, as an ASGI application."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(status: int | str, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "Fake", "param": None, "code": status}}).encode()


async def _head(send: Send, status: int, kind: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _piece(send: Send, piece: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": not last})


async def _answer(send: Send, status: int, body: bytes) -> None:
    await _head(send, status, b"application/json", len(body))
    await _piece(send, body, last=True)
