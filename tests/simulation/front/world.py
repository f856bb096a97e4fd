# SPDX-License-Identifier: Apache-2.0
"""One seed: workers of a metaserver, engines, clients, and the promises that must hold.

1. A client gets one right answer or one error that says why, within its bound.
2. No engine is blamed for another's failure: one that is only slow never counts as broken.
3. A working pair becomes ready within a bound, and its proof holds as long as both live; one without KV never does,
   and no proof outlives an engine once its next life has been heard of.
4. Nothing stays behind: no leg, ticket, place, load or task.
5. What a D has finished is not computed again.
6. A stream goes on when its D dies, as long as there is another that takes requests and asks for the answer so far.
7. A model that a D has listed is not unknown.
8. Where requests name their P's, no other is asked.
9. A D whose loads fail loads for no client, once that is known and as long as another D loads.
10. What all D's refuse is refused by none twice.
11. A D gets the answer so far of its own request alone, and only behind the same prompt; asked again, the same one.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from simulation.front.clock import Deadlock, VirtualLoop, simulated
from simulation.front.engines import ROOM, UNNAMED, EngineFaults, FrontDecode, FrontEngine, FrontPrefill, ids_of, words
from simulation.front.speech import right_stream, understood
from simulation.front.typed_speech import RESPONSES, TYPED, typed_verdict
from simulation.front.wire import ClientCall, FrontNetwork
from simulation.world import Violation
from vllm_ascend_pd.router import admin
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, CircuitState, Role
from vllm_ascend_pd.router.hub import REPORT_EVERY_S, Hub
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.named import HEADER
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.shared.backoff import Backoff

BOUND_S = 400.0  # for a client: attempts, each with its timeouts
READY_S = 50.0  # for a working pair, once no faults happen any more
ERROR_STATUSES = frozenset({429, 500, 502, 503, 504})
P_PORT, D_PORT, OWN_PORT = 9000, 9100, 8000


class LinkedHub(Hub):
    """Workers in one process. Their reports travel as text, as over the supervisor's lines."""

    def __init__(self, worker: int, hubs: list[LinkedHub]) -> None:
        super().__init__(worker)
        self.hubs = hubs

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            line = msgspec.json.encode({"worker": self.worker, "report": self._report(False)})
            for hub in self.hubs:
                hub._receive(msgspec.json.decode(line))

    async def perform(self, operation: admin.Operation) -> None:
        for hub in self.hubs:
            admin.apply(hub._fleet, operation)


@dataclass
class SeedPlan:
    """The decisions of a seed before anything happens."""

    prefills: list[EngineFaults]
    decodes: list[EngineFaults]
    workers: int
    requests: int
    gap_s: float
    slowest_s: float  # of the network
    restarts_s: float  # mean time between two deaths of ailing engines; 0: none
    admin_s: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Return whether a sound D can always continue another's stream: no P fails, and no operator drains it."""
        return (
            all(kind.sound for kind in self.prefills) and not self.admin_s and self.settings.get("resume_tokens", 1) > 0
        )


def draw(rng: random.Random, requests: int = 150) -> SeedPlan:
    faulty = rng.random() < 0.8
    slow = rng.choice((0.01, 0.1, 1.0))

    models = rng.choice((("m",), ("m",), ("m",), ("m", "n")))

    def kinds(role: str) -> Iterator[EngineFaults]:
        for i in range(rng.randint(1, 4)):
            sound = i == 0 or not faulty
            yield EngineFaults(
                sound=sound,
                mute=role == "prefill" and not sound and rng.random() < 0.15,
                fault=0.0 if sound else rng.choice((0.05, 0.3, 0.6)),
                slow_s=slow * rng.choice((0.3, 1.0, 3.0)),
                probe_s=rng.choice((0.01, 0.5, 4.0 if not sound else 1.5)),
                policy=rng.choice(("recompute", "fail")),
                model=models[i % len(models)],
            )

    prefills, decodes = list(kinds("prefill")), list(kinds("decode"))
    sidecar = rng.random() < 0.12
    plan = SeedPlan(
        prefills=prefills,
        decodes=[rng.choice(decodes)] if sidecar else decodes,
        workers=1 if sidecar else rng.choice((1, 1, 2, 3)),
        requests=rng.choice((requests,) * 9 + (0,)),  # without clients only canaries find results
        gap_s=rng.choice((0.005, 0.05, 0.5)),
        slowest_s=rng.choice((0.001, 0.01, 0.1)),
        restarts_s=rng.choice((0.0, 3.0, 20.0)) if faulty else 0.0,
        admin_s=rng.choice((0.0, 0.0, 5.0)),
        settings={
            "prefill_timeout_s": 20.0,
            "first_byte_timeout_s": 60.0,
            "idle_timeout_s": 30.0,
            "without_prefill": rng.choice(("local", "refuse")),
            "prefix_tokens": rng.choice((0, 40, 500_000)),
            "decode_alone": rng.choice((0, 0, 0, 5)),
            "circuit": CircuitPolicy(wedged=Backoff(rng.choice((0.5, 5.0)), 30.0, floor=0.8)),
            "sidecar": sidecar,
            "prefill_allowed": ("127.0.0.0/8",),
        },
    )
    for kind in decodes:  # drawn last, so that all else stays what it was
        kind.deaf = not kind.sound and rng.random() < 0.3
        kind.older, kind.dated = (not kind.sound and rng.random() < 0.15 for _ in range(2))
    return plan


def cut(rng: random.Random, plan: SeedPlan) -> SeedPlan:
    """Return the plan with connections of ailing engines that break at some byte, either way."""
    for kind in {id(kind): kind for kind in (*plan.prefills, *plan.decodes)}.values():
        drawn = rng.choice((0.0, 0.1, 0.3))
        kind.cut = 0.0 if kind.sound else drawn
    return plan


class FrontWorld:
    def __init__(self, seed: int, plan: SeedPlan, loop: VirtualLoop) -> None:
        self.seed, self.plan, self.loop = seed, plan, loop
        self.rng = random.Random(f"front/{seed}")
        cuts = random.Random(f"where it is cut/{seed}")
        self.network = FrontNetwork(loop, random.Random(f"network/{seed}"), plan.slowest_s, cuts)
        self.apps: dict[str, Any] = {}
        self.said: Counter[str] = Counter()
        self.problems: list[str] = []
        self.decodes: dict[str, FrontDecode] = {}
        self.prefills: list[FrontPrefill] = []
        for i, kind in enumerate(plan.decodes):
            rng = random.Random(f"d{i}/{seed}")
            self.decodes[f"d{i}"] = FrontDecode(f"d{i}", D_PORT + i, kind, rng, self.network, self.apps)
        for i, kind in enumerate(plan.prefills):
            rng = random.Random(f"p{i}/{seed}")
            self.prefills.append(
                FrontPrefill(f"p{i}", P_PORT + i, kind, rng, self.network, self.apps, decodes=self.decodes)
            )
        self.engines: list[FrontEngine] = [*self.prefills, *self.decodes.values()]
        self._by_address = {engine.address: engine for engine in self.engines}
        hubs: list[LinkedHub] = []
        self.workers: list[WorkerProcess] = []
        self._standing: list[Any] = []
        for i in range(plan.workers):
            hubs.append(LinkedHub(i, hubs))
            url = f"http://127.0.0.1:{OWN_PORT + i}"
            settings = Settings(
                port=OWN_PORT,
                prefill=() if plan.settings["sidecar"] else tuple(e.address for e in self.prefills),
                decode=tuple(e.address for e in self.decodes.values()),
                **plan.settings,
            )
            worker = WorkerProcess(settings, url, hubs[-1])
            self.workers.append(worker)
            self.apps[url] = worker.answer

    # -- the run

    async def run(self) -> None:
        for worker in self.workers:
            context = worker.standing()
            await context.__aenter__()
            self._standing.append(context)
        standing = asyncio.all_tasks()
        chaos = [self.loop.create_task(work) for work in (self._restarts(), self._administers())]
        watch = self.loop.create_task(self._watch())
        await asyncio.sleep(self.rng.random() * 2.0)
        await self._clients()
        for task in chaos:
            task.cancel()
        for worker in self.workers:
            for instance in worker.fleet:
                instance.draining = False
        for engine in self.engines:
            engine.kind.fault, engine.kind.cut, engine.kind.refuses = 0.0, 0.0, False
            if not engine.alive:
                engine.restart()
        await self._until(self._ready, READY_S, "promise 3: a pair that works is not ready")
        for worker in self.workers:  # otherwise some canary may be running at each look
            worker.front.settings = replace(worker.front.settings, canary=False)
        await self._until(self._nothing_left, 200.0, "promise 4: something is left")
        watch.cancel()
        await asyncio.sleep(1.0)
        self._check_end(standing | {asyncio.current_task(), watch, *chaos})
        for context in self._standing:
            await context.__aexit__(None, None, None)

    async def _until(self, promise: Callable[[], str], max_s: float, otherwise: str) -> None:
        end = self.loop.now + max_s
        while problem := promise():
            if self.loop.now > end:
                raise Violation(f"{otherwise}: {problem}")
            await asyncio.sleep(0.25)

    async def _restarts(self) -> None:
        ailing = [engine for engine in self.engines if not engine.kind.sound]
        while self.plan.restarts_s and ailing:
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.restarts_s))
            engine = self.rng.choice(ailing)
            if engine.alive:
                engine.kill()
                await asyncio.sleep(self.rng.choice((0.0, 0.1, 5.0)))
                engine.restart()

    async def _administers(self) -> None:
        """Drain and resume engines, as an operator does."""
        while self.plan.admin_s:
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.admin_s))
            name = self.rng.choice(self.engines).address
            for draining in (True, False):
                for worker in self.workers:
                    instance = worker.fleet.get(name)
                    if instance is not None:
                        instance.draining = draining
                await asyncio.sleep(self.rng.random() * 3)

    # -- clients

    async def _clients(self) -> None:
        tasks = []
        for _ in range(self.plan.requests):
            tasks.append(self.loop.create_task(self._client(random.Random(self.rng.random()))))
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.gap_s))
        await asyncio.gather(*tasks)

    async def _client(self, rng: random.Random) -> None:
        chat, stream = rng.random() < 0.4, rng.random() < 0.6
        prompt: Any = "h" * rng.choice((0, 0, 0, 1100)) + f"{rng.random()} " + "x" * rng.choice((0, 10, 2000))
        if chat:
            prompt = [{"role": "user", "content": prompt}]
        elif not stream and rng.random() < 0.15:
            prompt = [prompt, prompt + "y"]
        count, copies = rng.randrange(1, 6), 1 if stream else rng.choice((1, 1, 1, 2))
        limit = "max_completion_tokens" if chat else "max_tokens"
        model = rng.choice([engine.kind.model for engine in self.decodes.values()])
        body = {"model": model, "stream": stream, "messages" if chat else "prompt": prompt, limit: count, "n": copies}
        if rng.random() < 0.1:
            body["seed"] = 7
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if stream:
            _draw_stream(body, rng)
        if stream and chat and rng.random() < 0.5:
            path, body = _as_typed(body, rng)
        worker = rng.choice(self.workers)
        listed = [instance.name for instance in worker.fleet.of(Role.DECODE) if model in (instance.cards or ())]
        has_p = worker.fleet.usable(Role.PREFILL, lambda one: model in (one.cards or ()))
        app = self.apps[worker.front.own_url]
        name = f"{rng.getrandbits(64):x}"
        headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
        if self.plan.settings["sidecar"]:
            named = [engine.address for engine in self.prefills if engine.kind.model == model]
            headers.append((HEADER, ", ".join(rng.sample(named, rng.randint(0, len(named)))).encode()))
        call = ClientCall(app, path, json.dumps(body).encode(), headers).start()
        timeout_s = rng.expovariate(1.0) if rng.random() < 0.1 else BOUND_S
        end = self.loop.now + timeout_s
        while not call.done and self.loop.now < end:
            try:
                await asyncio.wait_for(call.more(), end - self.loop.now)
            except asyncio.TimeoutError:
                break
        if not call.done:
            call.leave()
            self.said["left"] += 1
            if timeout_s == BOUND_S:
                self.problems.append(f"promise 1: no answer within {BOUND_S:g} s")
            return
        prompts = prompt if isinstance(prompt, list) and not chat else [prompt]
        right = ["".join(words(p, count)) for p in prompts for _ in range(copies)]
        if stream and call.status == 200:
            spoken = [tokens for decode in self.decodes.values() for tokens in decode.spoken.get(name, ())]
            verdict = _of_stream(call, path, body, ids_of(prompt), spoken if body.get("temperature") else [[]])
            # A router that did not know d0 or a P when the stream began may have had no other.
            first = self.decodes["d0"]
            lasts = self.plan.goes_on and first.kind.sound and first.address in listed and has_p
            if verdict == "broken off" and lasts and not any(name in d.unlike for d in self.decodes.values()):
                self.problems.append(f"promise 6: a stream broke that could go on: {call.body[-400:]!r}")
        else:
            verdict = _of_whole(call, right)
        self.said[verdict] += 1
        if call.status == 404 and listed:
            self.problems.append(f"promise 7: {model} is unknown, although a D has listed it")
        if verdict == "wrong":
            self.problems.append(f"promise 1: {call.status} {call.body[-400:]!r} for {right}")

    # -- what must hold

    async def _watch(self) -> None:
        """Check promises 2 and 3 at every moment."""
        once: list[set[tuple[str, str]]] = [set() for _ in self.workers]
        while not self.problems:
            for worker, proven in zip(self.workers, once, strict=True):
                self.problems += self._wrongly_proven(worker, proven)
                for instance in worker.fleet:
                    engine = self._by_address[instance.name]
                    if engine.counts.get(UNNAMED):
                        self.problems.append(f"promise 8: {engine.name} is asked by requests that do not name it")
                    if engine.kind.sound and instance.broke:
                        self.problems.append(f"promise 2: sound {engine.name} is blamed: {instance.last_error}")
            self.problems += self._asked_in_vain()
            self.problems += [f"promise 11: {what}" for decode in self.decodes.values() for what in decode.odd]
            if all(decode.kind.refuses for decode in self.decodes.values()):
                for decode in self.decodes.values():
                    if twice := [one for one, times in decode.refused.items() if times > 1]:
                        self.problems.append(f"promise 10: {decode.name} refuses {twice[0]} again")
            await asyncio.sleep(0.25)

    def _asked_in_vain(self) -> Iterator[str]:
        if self.plan.admin_s or not all(prefill.kind.sound for prefill in self.prefills):
            return  # then no other D may load either
        loading = {d.kind.model for d in self.decodes.values() if d.kind.sound and not d.kind.deaf}
        for decode in self.decodes.values():
            partners = sum(prefill.kind.model == decode.kind.model for prefill in self.prefills)
            if decode.asked_in_vain >= min(2, partners) > 0 and decode.kind.model in loading:
                yield f"promise 9: {decode.name} is asked, although its loads fail"

    def _wrongly_proven(self, worker: WorkerProcess, once: set[tuple[str, str]]) -> Iterator[str]:
        """Yield wrong proofs. `once` are the pairs of sound engines that were proven before."""
        proofs = worker.fleet.proven()
        for proof in proofs:
            prefill, decode = self._by_address[proof.prefill], self._by_address[proof.decode]
            if prefill.kind.mute or decode.kind.deaf:
                yield f"promise 3: {prefill.name} to {decode.name} is proven, and nothing moves over it"
            for engine, life in ((prefill, proof.prefill_incarnation), (decode, proof.decode_incarnation)):
                instance = worker.fleet.get(engine.address)
                statements = instance.history.statements if instance is not None else ()
                if life and any(t.incarnation != life and t.at > proof.at for t in statements):
                    yield f"promise 3: a proof of {life} is believed, though {engine.name} has another life"
            if prefill.kind.sound and decode.kind.sound:
                once.add((proof.prefill, proof.decode))
        if void := once - {(proof.prefill, proof.decode) for proof in proofs}:
            yield f"promise 3: the proof of {sorted(void)[0]} is void, though both live on"

    def _ready(self) -> str:
        good = [p for p in self.prefills if not p.kind.mute]
        if not good:
            return ""
        unready = [worker.canary.last_error for worker in self.workers if not worker.canary.ready()]
        return unready[0] if unready else ""

    def _nothing_left(self) -> str:
        for worker in self.workers:
            front = worker.front
            counts = {
                "exchanges": len(front.journal.exchanges),
                "tickets": len(front.journal.tickets),
                "past": len(front.journal._past),
                "requests": sum(i.requests for i in worker.fleet),
                "load": sum(i.load for i in worker.fleet),
                "trials": sum(i.circuit.state is CircuitState.TRIAL for i in worker.fleet),
                "heartbeats": len(worker.heartbeats.open),
                "places": sum(g.keeper.running + g.keeper.waiting for g in (front.turnstile, front.canaries, front.polls)),
                "bytes": worker.intake.held_bytes,
                "calls": max(0, len(worker.upstream._replies) - len(list(worker.fleet))),  # but for the probes
                "kept": front.kept_bytes,
                "canaries": len(worker.canary._in_flight),  # one may have been sent out, and not have begun yet
            }  # fmt: skip
            if left := {name: count for name, count in counts.items() if count}:
                return str(left)
        return ""

    def _check_end(self, standing: set[Any]) -> None:
        always = ("Prober._watch", "FrontEngine.", "HttpSession.send", "ClientRequest.write_bytes", "reach", "Canary._", "create_connection", "VirtualLoop.", "FrontDecode.", "FrontPrefill.", "ClientCall._run", "ClientCall.more", "Event.wait")  # fmt: skip
        works = [getattr(t.get_coro(), "__qualname__", "") for t in asyncio.all_tasks() - standing]
        if left := [work for work in works if not work.startswith(always)]:
            raise Violation(f"promise 4: tasks are left: {left[:5]}")
        finished: Counter[str] = Counter()
        for decode in self.decodes.values():
            finished.update(decode.finished)
        twice = [request for request, count in finished.items() if count > 1]
        if twice:
            raise Violation(f"promise 5: {twice[0]} was finished {finished[twice[0]]} times")
        if self.problems:
            raise Violation(self.problems[0])


def _of_whole(call: ClientCall, right: list[str]) -> str:
    try:
        fields = json.loads(call.body)
    except ValueError:
        return "wrong"
    if call.status != 200:
        return "error" if call.status in (*ERROR_STATUSES, 404) and fields["error"]["message"] else "wrong"
    if fields.get("kv_transfer_params") is not None:
        return "wrong"
    got = [c["text"] if "text" in c else c["message"]["content"] for c in fields["choices"]]
    hidden = not any(c.get("token_ids") or c.get("prompt_token_ids") for c in fields["choices"])  # none has asked
    ended = all(c["finish_reason"] == "length" for c in fields["choices"])
    return "right" if got == right and ended and hidden else "wrong"


def _draw_stream(body: dict[str, Any], rng: random.Random) -> None:
    """Draw longer answers, with all options of a stream."""
    limit = "max_completion_tokens" if "messages" in body else "max_tokens"
    body |= {"temperature": rng.choice((0, 0, 1)), limit: rng.choice((1, 3, 20, 60))}
    if "messages" in body and rng.random() < 0.1:
        body[limit] = None
    if rng.random() < 0.3:
        body |= {
            "stop": rng.choice(([" a b"], " 1 2", ["zzzzzz", " 4 5"])),
            "include_stop_str_in_output": rng.random() < 0.3,
        }
    if rng.random() < 0.2:
        body["min_tokens"] = rng.randrange(20)
    if rng.random() < 0.3:
        body["return_token_ids"] = True
    if rng.random() < 0.4:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
    if rng.random() < 0.2:
        body["logprobs"] = True if "messages" in body else 1
    if "messages" in body and rng.random() < 0.4:
        body["tools"] = [{"type": "function", "function": {"name": "f"}}]


def _as_typed(body: dict[str, Any], rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a chat as a response's or a message's request, with its route."""
    path, limit = rng.choice(TYPED), body["max_completion_tokens"] or 60
    names = ("model", "stream", "temperature", "seed", "tools")
    kept: dict[str, Any] = {name: body[name] for name in names if name in body}
    if path == RESPONSES:
        return path, {**kept, "input": body["messages"], "max_output_tokens": limit}
    stop = (
        {"stop_sequences": [body["stop"]] if isinstance(body["stop"], str) else body["stop"]} if "stop" in body else {}
    )
    return path, {**kept, **stop, "messages": body["messages"], "max_tokens": limit}


def _of_stream(call: ClientCall, path: str, body: dict[str, Any], ids: list[int], spoken: list[list[int]]) -> str:
    """Return what became of a stream. `spoken`: what D's have said, if they sample."""
    if path in TYPED:
        verdicts = [typed_verdict(path, body, ids, ROOM, tokens, call.body) for tokens in spoken]
    else:
        verdicts = [_of_one(call, body, ids, tokens) for tokens in spoken]
    return next((verdict for verdict in ("right", "broken off") if verdict in verdicts), "wrong")


def _of_one(call: ClientCall, body: dict[str, Any], ids: list[int], tokens: list[int]) -> str:
    want = understood(right_stream(body, ids, ROOM, tokens))
    try:
        got = understood(call.body)
    except (ValueError, KeyError, TypeError):
        return "wrong"
    if "error" not in got:
        return "right" if got == want else "wrong"
    if not got["error"]["message"] or got["forms"] - want["forms"]:
        return "wrong"
    parts = ("text", "reasoning", "ids", "offsets", "chances")
    calls = all(
        mine.startswith(his)
        for index, call_of in got["tools"].items()
        for mine, his in zip(want["tools"].get(index, ("", "")), call_of, strict=True)
    )
    begins = calls and all(want[part][: len(got[part])] == got[part] for part in parts)
    return "broken off" if begins else "wrong"


@dataclass
class FrontResult:
    seed: int
    violation: str = ""
    said: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    blamed: int = 0
    resumed: int = 0
    seconds: float = 0.0


def run_seed(seed: int, requests: int = 150, plan: SeedPlan | None = None) -> FrontResult:
    """Run one metaserver from its start until nothing happens any more."""
    plan = plan or cut(random.Random(f"cut/{seed}"), draw(random.Random(f"plan/{seed}"), requests))
    result = FrontResult(seed)
    before = _resumed()
    with simulated(seed) as loop:
        world = FrontWorld(seed, plan, loop)
        try:
            loop.run_until_complete(world.run())
        except Violation as violation:
            result.violation = str(violation)
        except Deadlock:
            result.violation = "promise 4: everything waits, and nothing is to happen"
        result.said, result.seconds = world.said, loop.now
        result.blamed = sum(i.broke > 0 for worker in world.workers for i in worker.fleet)
        result.resumed = _resumed() - before
        for engine in world.engines:
            result.faults.update(engine.counts)
    return result


def _resumed() -> int:
    families = METRICS.registry.collect()
    return sum(int(s.value) for f in families for s in f.samples if s.name.endswith("_resumes_total"))
