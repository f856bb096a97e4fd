# SPDX-License-Identifier: Apache-2.0
"""Simulated P's and D's behind the metaserver: by seed they answer, refuse, break, hang and restart, at any speed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from simulation.front.speech import AnswerOptions, Speaker, speak
from simulation.front.typed_speech import RESPONSES, TYPED, TypedSpeaker, options_of
from simulation.front.wire import ClientCall, EngineConnection, EngineRequest, FrontNetwork
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.protocol.continuing import ROUTE, AnswerWanted, read_so_far
from vllm_ascend_pd.protocol.reports import LoadReport, PushReport, params_of
from vllm_ascend_pd.protocol.versions import fingerprint
from vllm_ascend_pd.router.named import HEADER
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import HttpFailure, post_again

SETTLE_S = 15.0  # of D: how long KV may be missing after P's good answer
RESERVE_S = 600.0
PRINTS = {model: fingerprint(model) for model in ("m", "n")}
P_FAULTS = ("silent", "breaks after push", "refuses to push", "half", "hangs", "500", "503", "ends", "empty", "breaks")
D_FAULTS = ("500", "503", "empty", "breaks", "breaks later", "half", "drops", "drops later", "fails after load", "ends", "hangs")  # fmt: skip
LATER = ("breaks later", "drops later", "fails later", "ends later", "hangs later")  # in a stream
DEAF = "PD-XFER-003"  # code of a deaf D's loads
TOLD_S = 10.0  # until a worker has surely taken in D's report
UNNAMED = "asked though it was not named"
ROOM = 3400  # tokens that the model holds in all
BACKOFF = Backoff(first_s=0.05, longest_s=2.0)


def words(prompt: object, count: int) -> list[str]:
    """Return the right answer to a prompt."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    return [f" {digest[2 * i : 2 * i + 2]}" for i in range(count)]


def ids_of(prompt: object) -> list[int]:
    """Return D's tokens of a prompt, for a P that must get token ids."""
    return list(json.dumps(prompt).encode())


@dataclass
class EngineFaults:
    """Faults of an engine. A sound engine is only slow."""

    sound: bool = True
    mute: bool = False  # as P: none of its pushes ever arrives, although its answers are good
    deaf: bool = False  # as D: none of its loads succeeds, although its answers are good
    refuses: bool = False  # as D: takes no request
    fault: float = 0.0  # probability for each request
    cut: float = 0.0  # probability for each connection that it breaks at some byte
    slow_s: float = 0.05
    probe_s: float = 0.01
    older: bool = False  # as D: does not ask for the answer with which a request goes on
    dated: bool = False  # as D: when it asks, its prompt is another one
    policy: str = "recompute"
    model: str = "m"

    @property
    def print(self) -> str:
        return PRINTS[self.model]


@dataclass(eq=False)
class Load:
    """One transfer at D."""

    transfer: str
    prompt: object
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    received_from: str = ""
    right: bool = True
    failed: str = ""
    refused: str = ""  # the P whose KV a deaf D could not load


class FrontEngine:
    """An engine. `apps` are the metaserver's workers by the address sent to D."""

    faults: tuple[str, ...] = ()

    def __init__(
        self, name: str, port: int, kind: EngineFaults, rng: random.Random, network: FrontNetwork, apps: dict[str, Any]
    ) -> None:
        self.name, self.port, self.kind, self.rng, self.network, self.apps = name, port, kind, rng, network, apps
        self.alive = True
        self.lives = 0
        self.connections: dict[EngineConnection, None] = {}  # in order, so that a seed replays
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.counts: dict[str, int] = {}
        network.servers[port] = self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.lives}"

    def speed(self) -> float:
        return self.rng.choice((0.0, 0.001, self.rng.random() * self.kind.slow_s))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # -- life and death

    async def accept(self) -> bool:
        return self.alive

    def cuts(self) -> float:
        return self.kind.cut

    def was_cut(self) -> None:
        self.count("cut")

    def connected(self, connection: EngineConnection) -> None:
        if not self.alive:
            connection.transport.abort()
            return
        connection.handle = self.handle
        connection.gone = lambda gone: self.connections.pop(gone, None)
        self.connections[connection] = None

    def kill(self) -> None:
        self.alive = False
        self.count("killed")
        for connection in tuple(self.connections):
            connection.transport.abort()
            if connection.task is not None:
                connection.task.cancel()
        for task in tuple(self.tasks):
            task.cancel()

    def restart(self) -> None:
        self.lives += 1
        self.alive = True

    def spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))

    # -- requests

    async def handle(self, request: EngineRequest) -> None:
        if request.path == "/health":
            await asyncio.sleep(self.rng.random() * self.kind.probe_s)
            request.whole(200, b"")
        elif request.path == "/v1/models":
            cards = [{"id": self.kind.model, "max_model_len": ROOM}]
            request.whole(200, json.dumps({"object": "list", "data": cards}).encode())
        else:
            fault = self.rng.choice(self.faults) if self.rng.random() < self.kind.fault else ""
            if fault:
                self.count(fault)
            body = json.loads(request.body)
            if body["model"] != self.kind.model:
                request.whole(404, error(404))
                return
            await self.generate(request, body, fault)

    async def generate(self, request: EngineRequest, body: dict[str, Any], fault: str) -> None:
        raise NotImplementedError

    async def stumble(self, request: EngineRequest, body: dict[str, Any], fault: str) -> bool:
        """Fail before any work is done."""
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault in ("500", "503"):
            request.whole(int(fault), error(int(fault)))
        elif fault == "breaks":
            request.tear()
        elif fault == "empty":
            request.whole(200, b"")
        elif fault == "ends" and request.path in TYPED and body.get("stream"):
            speaker = TypedSpeaker(request.path, body, [], "ends")
            request.begin()
            request.piece(speaker.opening() + speaker.tokens([], "abort") + speaker.end())
            request.end()
        elif fault == "ends":
            said = {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}
            if body.get("stream"):
                request.begin()
                request.piece(b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n")
                request.end()
            else:
                request.whole(200, json.dumps(said).encode())
        else:
            return False
        return True


class FrontPrefill(FrontEngine):
    faults = P_FAULTS

    def __init__(self, *args: Any, decodes: dict[str, FrontDecode], **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._decodes = decodes

    async def generate(self, request: EngineRequest, body: dict[str, Any], fault: str) -> None:
        if "seed" in body:  # like a sampler that failed at it
            self.kill()
            self.restart()
            return
        named = request.headers.get(HEADER.decode())
        if named is not None and self.address not in named.split(", "):
            self.count(UNNAMED)
        sealed = json.loads(base64.b64decode(body["kv_transfer_params"]["reservation"]))
        decode, transfer = self._decodes[sealed["decode"]], sealed["transfer"]
        pushed = False
        try:
            await asyncio.sleep(self.speed())
            if await self.stumble(request, body, fault):
                return
            prompt = next(body[name] for name in ("messages", "input", "prompt") if name in body)
            pushes = not self.kind.mute and fault not in ("silent", "refuses to push")
            if pushes and self.rng.random() < 0.5:  # D may answer before P, or long after
                await decode.kv(transfer, self.incarnation, prompt, self.network.delay())
                pushed = True
            elif pushes:
                decode.spawn(decode.kv(transfer, self.incarnation, prompt, self.speed()), "push")
                pushed = True
            await asyncio.sleep(self.speed())
            if fault == "breaks after push":
                request.tear()
                return
            code = "PD-META-005" if fault == "refuses to push" else ""
            params = params_of(PushReport(self.incarnation, code, "not mine" if code else "", self.kind.print))
            answer = {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
            said = json.dumps(answer | {"kv_transfer_params": params}).encode()
            if fault == "half":
                request.tear(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said[: len(said) // 2]))
            else:
                request.whole(200, said)
        except asyncio.CancelledError:
            if self.alive and not pushed:  # P drains, and reports it over the side channel
                decode.failed(transfer, "PD-XFER-002")
            raise


class FrontDecode(FrontEngine):
    faults = D_FAULTS + LATER[2:]

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.loads: dict[str, Load] = {}
        self.finished: list[str] = []  # ids of requests whose whole answer left this engine with its KV received
        self.asked: list[str] = []
        self.spoken: dict[str, list[list[int]]] = {}  # by request, tokens of the streams that it began
        self.unlike: set[str] = set()  # requests of which it cannot go on with another D's answer, or no other with its
        self.odd: list[str] = []  # of what the metaserver answered to questions for answers so far
        self._dice = random.Random(f"samples/{self.name}/{self.rng.random()}")
        self._asks = random.Random(f"questions/{self.name}/{self._dice.random()}")
        self.refused: dict[str, int] = {}  # how often, by request
        self.asked_in_vain = 0  # most P's from which this deaf D had reported failed loads when a client's came
        self._reported: dict[tuple[str, int, str], float] = {}  # since when, by worker, life and P: a new life may load
        self._count = 0

    # -- what comes over the wire

    async def kv(self, transfer: str, prefill: str, prompt: object, delay: float) -> None:
        await asyncio.sleep(delay)
        load = self.loads.get(transfer)
        if load is not None and self.kind.deaf and self.alive:
            load.refused = prefill.split(".")[0]
            self.failed(transfer, DEAF)
        if load is not None and not load.failed and self.alive:
            load.received_from, load.right = prefill, prompt in (load.prompt, ids_of(load.prompt))
            load.arrived.set()

    def failed(self, transfer: str, code: str) -> None:
        load = self.loads.get(transfer)
        if load is not None and not load.received_from and not load.failed:
            if code == DEAF:
                self.count("deaf")
            load.failed = code
            load.arrived.set()

    # -- requests

    async def generate(self, request: EngineRequest, body: dict[str, Any], fault: str) -> None:
        request_id, came = request.headers["x-request-id"], asyncio.get_running_loop().time()
        self.asked.append(request_id)
        await asyncio.sleep(self.speed())
        if self.kind.refuses:
            fault, self.refused[request_id] = "503", self.refused.get(request_id, 0) + 1
        if await self.stumble(request, body, fault):
            return
        prompts = _prompts(body)
        params = body.get("kv_transfer_params") or {}
        loads: list[Load] = []
        given: list[int] = []
        if params.get("continue"):
            if self.kind.dated:
                self.unlike.add(request_id)
            given = await self._so_far(params, ids_of(prompts[0]))
            if not given and body.get("temperature"):
                self.unlike.add(request_id)
        if params.get("do_remote_prefill"):
            wanted = [prompt for prompt in prompts for _ in range(body.get("n") or 1)]
            if given:
                wanted = [ids_of(prompts[0]) + given[:-1]]
            loads = await asyncio.gather(*(self._load(prompt, params) for prompt in wanted))
            self._note_deaf(params["metaserver"], loads, came, client=not request_id.startswith("canary"))
            if any(load.failed for load in loads) and self.kind.policy == "fail":
                request.whole(500, error(500)) if not body.get("stream") else self._speak_and_fail(request, body)
                return
        if fault == "fails after load":
            request.whole(500, error(500))
            return
        await asyncio.sleep(self.speed())
        right = all(load.right for load in loads)
        whole = await self._answer(request, body, prompts, loads if params else [], right, fault, given)
        if whole and not request.connection.transport.closed and not any(load.failed for load in loads):
            self.finished.append(request_id)

    def _note_deaf(self, worker: str, loads: list[Load], came: float, client: bool) -> None:
        refused = {load.refused for load in loads if load.failed == DEAF}
        if refused and client:
            told = [by for by, since in self._reported.items() if since + TOLD_S < came]
            known = sum(by[:2] == (worker, self.lives) for by in told)
            self.asked_in_vain = max(self.asked_in_vain, known)
        for name in refused:
            self._reported.setdefault((worker, self.lives, name), asyncio.get_running_loop().time())

    def _speak_and_fail(self, request: EngineRequest, body: dict[str, Any]) -> None:
        """Fail after vLLM's status 200 and the opening of the stream."""
        request.begin()
        if request.path in TYPED:
            speaker = TypedSpeaker(request.path, body, [], "failed")
            request.piece(speaker.opening() + speaker.tokens([], "error") + speaker.failed())
            (request.tear if request.path == RESPONSES else request.end)()
            return
        if "messages" in body:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            request.piece(_event({"id": "x", "choices": [role]}))
        request.piece(b"data: " + error(500) + b"\n\ndata: [DONE]\n\n")
        request.end()

    async def _answer(
        self,
        request: EngineRequest,
        body: dict[str, Any],
        prompts: list[object],
        loads: list[Load],
        right: bool,
        fault: str,
        given: list[int],
    ) -> bool:
        """Answer, and return whether all of it has left."""
        chat, stream = "messages" in body, body.get("stream")
        count = body.get("max_completion_tokens" if chat else "max_tokens") or 3
        if not stream:
            await asyncio.sleep(self.speed())
            right = right and given == list(range(1, len(given) + 1))
            texts = ["".join(words(p, count)) if right else "WRONG" for p in prompts for _ in range(body.get("n") or 1)]
            choices = [
                {"index": i, "finish_reason": "length", **({"message": {"content": t}} if chat else {"text": t})}
                for i, t in enumerate(texts)
            ]
            if body.get("return_token_ids"):
                tokens = list(range(1, count + 1))
                choices[0] |= {"token_ids": tokens, "prompt_token_ids": ids_of(prompts[0])}
                if fault == "drops later":
                    choices[0]["token_ids"] = tokens[: self.rng.randrange(len(given), count + 1)]
            if fault in ("drops", "drops later"):
                choices[0] |= {"finish_reason": "stop", "stop_reason": "recomputed"}
            answer: dict[str, Any] = {"id": "x", "choices": choices, "kv_transfer_params": None}
            if loads:
                answer["kv_transfer_params"] = params_of(self._report(loads[-1], body["kv_transfer_params"]))
            said = json.dumps(answer).encode()
            if fault in ("half", "breaks later"):
                request.tear(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said[: len(said) // 2]))
                return False
            request.whole(200, said)
            return fault not in ("drops", "drops later")
        params = params_of(self._report(loads[-1], body["kv_transfer_params"])) if loads else None
        return await self._speak(request, body, prompts[0] if right else "WRONG", fault, given, params)

    async def _speak(
        self,
        request: EngineRequest,
        body: dict[str, Any],
        prompt: object,
        fault: str,
        given: list[int],
        params: dict[str, Any] | None,
    ) -> bool:
        """Stream the answer, and return whether all of it has left."""
        request.begin()
        ids = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else ids_of(prompt)
        speaker, typed = self._speaker(request, body, ids, given, params is not None), request.path in TYPED
        if opening := speaker.opening():
            request.piece(opening)
        dice = self._dice if body.get("temperature") else None
        options = (options_of if typed else AnswerOptions.of)(body, ROOM - len(ids))
        tokens, number = list(speak(ids, options, given, dice)), 0
        self.spoken.setdefault(request.headers["x-request-id"], []).append([one.token for one in tokens])
        later = self.rng.randrange(1, len(tokens) + 1)
        while tokens:
            if (fault in ("drops", "half") and not number) or (fault in LATER and number >= later):
                await self._stumble_in_stream(request, speaker, fault)
                return False
            some = self.rng.choice((1, 1, 1, 1, 2))
            said = speaker.event(tokens[:some])
            del tokens[:some]
            number += some
            cut = self.rng.randrange(len(said) or 1) if self.rng.random() < 0.1 else 0
            for piece in filter(None, (said[:cut], said[cut:])):
                request.piece(piece)
                await asyncio.sleep(self.speed() / 4)
        if fault in LATER:  # all tokens are out, and its end is not
            await self._stumble_in_stream(request, speaker, fault)
            return False
        request.piece(speaker.end(params) if isinstance(speaker, TypedSpeaker) else speaker.end())
        if not self.kind.sound and random.Random(f"torn/{self.incarnation}/{self._count}").random() < 0.05:
            request.tear()  # it dies after the whole answer
        else:
            request.end()
        return True

    def _speaker(
        self, request: EngineRequest, body: dict[str, Any], ids: list[int], given: list[int], loaded: bool
    ) -> Speaker | TypedSpeaker:
        """Return the writer of an answer. Of an older D's response that had no transfer nothing shows how it ended."""
        self._count += 1
        name = f"{self.incarnation}/{self._count}"
        if request.path in TYPED:
            if silent := self.kind.older and loaded:
                self.unlike.add(request.headers["x-request-id"])
            return TypedSpeaker(request.path, body, ids, name, reports=not silent)
        return Speaker(body, ids, name, len(given))

    async def _stumble_in_stream(self, request: EngineRequest, speaker: Speaker | TypedSpeaker, fault: str) -> None:
        if fault == "hangs later":
            await asyncio.Event().wait()
        if fault in ("half", "breaks later"):
            request.tear()
            return
        if isinstance(speaker, TypedSpeaker):
            said = self._ended_halfway(speaker, fault)
        elif fault in ("drops", "drops later"):
            last = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "recomputed"}
            said = _event({"id": "x", "choices": [last]}) + b"data: [DONE]\n\n"
        elif fault == "ends later":
            said = _event({"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}) + speaker.end()
        else:
            said = b"data: " + error(500) + b"\n\ndata: [DONE]\n\n"
        for piece in (said[:30], said[30:]):
            request.piece(piece)
            await asyncio.sleep(self.speed())
        (request.tear if request.path == RESPONSES and fault == "fails later" else request.end)()

    def _ended_halfway(self, speaker: TypedSpeaker, fault: str) -> bytes:
        """Return what follows as if the answer were whole; of a call's beginning a parser makes text."""
        if fault in ("drops", "drops later"):
            return speaker.tokens([], "stop", "recomputed") + speaker.flushed() + speaker.end({"pd_dropped": True})
        if fault == "ends later":
            return speaker.tokens([], "abort") + speaker.flushed() + speaker.end()
        return speaker.tokens([], "error") + speaker.failed()

    # -- loads

    async def _so_far(self, params: dict[str, Any], ids: list[int]) -> list[int]:
        """Ask for the answer with which a request goes on; without one it begins anew."""
        app, asks = self.apps[params["metaserver"]], self._asks
        prompt = prompt_hash([*ids, self.lives] if self.kind.dated else ids)
        if self.kind.older or asks.random() < 0.05:
            return []
        answers = []
        for ticket in [params["ticket"]] * asks.choice((1, 1, 2)) + ["of none"]:
            call = ClientCall(app, ROUTE, msgspec.json.encode(AnswerWanted(ticket, prompt)), []).start()
            while not call.done:
                await call.more()
            answers.append((call.status, call.body))
            await asyncio.sleep(self.speed())
        *ours, none = answers
        statuses = [status for status, _ in ours]
        self.odd += [str(none)] if none[0] != 404 else []
        self.odd += [f"answered two ways: {ours}"] if len(set(ours)) > 1 and 404 not in statuses else []
        self.odd += ["gave tokens to another prompt"] if self.kind.dated and 200 in statuses else []
        return read_so_far(ours[0][1]).tokens if statuses[0] == 200 else []

    def _report(self, load: Load, params: dict[str, Any]) -> LoadReport:
        failed = bool(load.failed)
        return LoadReport(
            load.transfer, params["ticket"], self.incarnation, 0 if failed else 7, 7 if failed else 0,
            load.failed, load.received_from, self.kind.print,
        )  # fmt: skip

    async def _load(self, prompt: object, params: dict[str, Any]) -> Load:
        self._count += 1
        load = Load(f"{self.incarnation}/{self._count}", prompt)
        self.loads[load.transfer] = load
        sealed = json.dumps({"transfer": load.transfer, "decode": self.name}).encode()
        posted = {
            "ticket": params["ticket"], "transfer": load.transfer, "decode": self.incarnation, "fingerprint": self.kind.print,
            "reservation": base64.b64encode(sealed).decode(),
        }  # fmt: skip
        if params.get("send_tokens"):
            ids = isinstance(prompt, list) and isinstance(prompt[0], int)
            posted["prompt_token_ids"] = prompt if ids else ids_of(prompt)
        await asyncio.sleep(self.speed())
        app = self.apps[params["metaserver"]]
        self.spawn(self._call(app, json.dumps(posted).encode(), load), "D's post")
        try:
            await load.arrived.wait()
        finally:
            del self.loads[load.transfer]  # fenced: later writes have no effect
            load.failed = load.failed or ("" if load.received_from else "PD-XFER-002")
        self.spawn(self._tell(app, self._report(load, params)), "D's report")
        return load

    async def _call(self, app: Any, body: bytes, load: Load) -> None:
        """Post one reservation as D's client does, repeating what was certainly not executed."""
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + RESERVE_S, 0
        while not load.failed and not load.received_from:
            attempt += 1
            call = ClientCall(app, "/v1/metaserver", body, [(b"content-type", b"application/json")]).start()
            try:
                outcome = await self._follow(call, load)
            finally:
                call.leave()
            if outcome == "prefilled":
                await asyncio.sleep(SETTLE_S)
                self.failed(load.transfer, "PD-XFER-001")
                return
            if call.status != 503 or (delay := post_again(HttpFailure.REFUSED, attempt, end - loop.time(), None, self.rng.random(), BACKOFF)) is None:  # fmt: skip
                self.failed(load.transfer, outcome)
                return
            await asyncio.sleep(delay)

    async def _follow(self, call: ClientCall, load: Load) -> str:
        """Return `prefilled`, or the code of the failure. A complete load ends it too, while P still finishes."""
        while True:
            lines = call.body.split(b"\n")
            for line in lines[:-1]:
                said = msgspec.json.decode(line)
                if said.get("event") == "prefilled":
                    return "prefilled"
                if said.get("event") == "failed":
                    return str(said["code"])
            if call.done or call.status >= 400:
                return "PD-META-003"
            if load.failed:
                return load.failed
            waiting = asyncio.ensure_future(call.more())
            watching = asyncio.ensure_future(load.arrived.wait() if not load.received_from else asyncio.Event().wait())
            try:
                await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                watching.cancel()

    async def _tell(self, app: Any, report: LoadReport) -> None:
        await asyncio.sleep(self.rng.choice((0.0, self.rng.random())))  # it may be overtaken by the answer
        for _ in range(self.rng.choice((1, 1, 2))):
            call = ClientCall(app, "/v1/metaserver/loads", msgspec.json.encode(report), []).start()
            while not call.done:
                await call.more()


def error(status: int) -> bytes:
    return json.dumps({"error": {"message": "as the seed has it", "type": "x", "code": status}}).encode()


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def _prompts(body: dict[str, Any]) -> list[object]:
    for name in ("messages", "input"):
        if name in body:
            return [body[name]]
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
