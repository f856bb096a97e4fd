# SPDX-License-Identifier: Apache-2.0
"""Stress test: engines that answer in every order and at every speed, some of which fail in every way; clients of all
kinds.

All is drawn by seed, each request's part as it arrives. Half of the engines are sound: they must never be blamed,
whatever the others do. Each client gets one right answer or one true error, and nothing is left at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from unit.router.cluster import FakeCluster, cluster, until
from unit.router.fake_engine import EngineBehaviour, FakeEngine, words
from vllm_ascend_pd.router import exchange, resuming
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, CircuitState
from vllm_ascend_pd.shared.backoff import Backoff

ANSWER_TIMEOUT_S = 120.0  # of a client: a later answer counts as missing
CLIENTS = 24  # at a time
FAULT = 0.25  # share of requests that fail on a faulty engine
FROZEN = (
    *(0.0,) * 6,
    0.3,
    60.0,
)  # delays in s of a faulty engine's answers to probes
ERROR_STATUSES = frozenset({429, 500, 502, 503, 504})
P_FAULTS: tuple[dict[str, Any], ...] = (
    *({"push": False}, {"breaks_after_push": True}, {"refuses_push": "PD-META-005"}, {"half": True}, {"hang": True}),
    *({"status": 500}, {"status": 503}, {"ends": True}, {"push": False, "half": True}, {"empty": True}),
)
D_FAULTS: tuple[dict[str, Any], ...] = (
    *({"status": 500}, {"status": 503}, {"empty": True}, {"break_after": 0}, {"break_after": 1}, {"half": True}),
    *({"drops_after": 0}, {"drops_after": 2}, {"fails_after_load": True}, {"ends": True}, {"hang": True}),
    *({"deaf": True}, {"odd_report": True}),
)


def moods(rng: random.Random, faults: tuple[dict[str, Any], ...]) -> Callable[[], EngineBehaviour]:
    def speed(most: float) -> float:
        return rng.choice((0.0, 0.0, rng.random() * most))

    def mood() -> EngineBehaviour:
        fault = rng.choice(faults) if faults and rng.random() < FAULT else {}
        return EngineBehaviour(
            prefill_s=speed(0.05),
            after_push_s=speed(0.2),
            before_post_s=speed(0.02),
            before_first_s=speed(0.1),
            gap_s=speed(0.005),
            report_s=speed(0.2),
            recompute_s=speed(0.02),
            cut_s=speed(0.02),
            health_s=rng.choice(FROZEN) if faults else speed(0.2),
            policy=rng.choice(("recompute", "fail")),
            **fault,
        )

    return mood


class StormClients:
    """The clients. `said` counts their answers; `wrong` holds answers that no client may get."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.url, self.rng = url, rng
        self.said: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._at_once = asyncio.Semaphore(CLIENTS)

    async def come(self, count: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits
        ) as http:
            await asyncio.gather(*(self._one(http) for _ in range(count)))

    async def _one(self, http: httpx.AsyncClient) -> None:
        async with self._at_once:
            rng = self.rng
            chat, stream, leaves = rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.1
            prompt: Any = f"prompt {rng.random()} " + "x" * rng.choice((0, 10, 5000))
            prompt = [{"role": "user", "content": prompt}] if chat else prompt
            count = rng.randrange(1, 6)
            body = {"model": "fake", "stream": stream, "messages" if chat else "prompt": prompt, "max_tokens": count}
            if chat:
                body["max_completion_tokens"] = body.pop("max_tokens")
            if not stream:
                body["n"] = rng.choice((1, 1, 2))
            asking = asyncio.ensure_future(http.post(f"/v1/{'chat/' if chat else ''}completions", json=body))
            done, _ = await asyncio.wait({asking}, timeout=rng.random() * 0.1 if leaves else ANSWER_TIMEOUT_S)
            if not done:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self._note("left" if leaves else "no answer", wrong=not leaves, answer="nothing came")
                return
            try:
                answer = asking.result()
            except httpx.HTTPError as problem:
                self._note("cut", True, repr(problem))
                return
            said = "".join(words(prompt, count))
            verdict = of_stream(answer, said) if stream else of_whole(answer, [said] * int(body.get("n", 1)))
            self._note(verdict, verdict == "wrong", f"{body['stream']=} {answer.status_code} {answer.text[-600:]}")

    def _note(self, verdict: str, wrong: bool, answer: str) -> None:
        self.said[verdict] += 1
        if wrong:
            self.wrong.append(answer)


def of_whole(answer: httpx.Response, right: list[str]) -> str:
    fields = answer.json()
    if answer.status_code != 200:
        return "error" if answer.status_code in ERROR_STATUSES and fields["error"]["message"] else "wrong"
    if fields.get("kv_transfer_params") is not None:
        return "wrong"
    choices = fields["choices"]
    got = [c["text"] if "text" in c else c["message"]["content"] for c in choices]
    return "right" if got == right and all(c["finish_reason"] == "length" for c in choices) else "wrong"


def of_stream(answer: httpx.Response, right: str) -> str:
    if answer.status_code != 200:
        return of_whole(answer, [])
    *pieces, done = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    got, errors = "", 0
    for piece in map(json.loads, pieces):
        if errors or done != "[DONE]":
            return "wrong"  # something after the error, or no end
        if "error" in piece:
            errors += 1
            continue
        (choice,) = piece["choices"]
        got += choice["text"] if "text" in choice else choice["delta"]["content"]
        if "finish_reason" in choice and choice["finish_reason"] is not None:
            return "wrong"  # the fake engine's right streams have none
    if errors:
        return "broken off" if right.startswith(got) else "wrong"
    return "right" if got == right and done == "[DONE]" else "wrong"


async def restarts(engines: list[FakeEngine], rng: random.Random) -> None:
    """Kill faulty engines and restart them with another incarnation meanwhile."""
    while True:
        await asyncio.sleep(rng.random())
        engine = rng.choice(engines)
        await asyncio.to_thread(engine.served.kill)
        engine.incarnation = uuid.UUID(int=rng.getrandbits(128)).hex[:16]
        await asyncio.sleep(rng.random() * 0.3)
        await asyncio.to_thread(engine.served.start)


def nothing_left(c: FakeCluster) -> bool:
    front = c.worker.front
    return not (
        front.journal.exchanges
        or front.journal.tickets
        or any(i.requests or i.load or i.circuit.state is CircuitState.TRIAL for i in c.worker.fleet)
        or front.journal._past
        or c.worker.heartbeats.open
        or any(gate.keeper.running or gate.keeper.waiting for gate in (front.turnstile, front.canaries, front.polls))
        or c.served.loop.call(_tasks(), 10)
    )


async def _tasks() -> list[str]:
    """Return tasks of single requests. Permanent tasks of a worker have other names."""
    of_requests = ("restart of", "heartbeat")
    return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith(of_requests)]


def storm(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(resuming, "REPORT_OF_LOAD_S", 30.0)  # a report may be late on a loaded machine
    monkeypatch.setattr(exchange, "PAST_S", 5.0)
    settings: dict[str, Any] = {
        "probe_timeout_s": 2.0,
        "connect_timeout_s": 30.0,
        "prefill_timeout_s": 12.0,  # all of it is one process: beside other load a sound engine may need three
        "first_byte_timeout_s": 20.0,
        "idle_timeout_s": 20.0,
        "refusing_s": 1.0,
        "circuit": CircuitPolicy(wedged=Backoff(0.05, 0.5, floor=0.8)),
    }
    with cluster(prefill=4, decode=4, canary=True, **settings) as c:
        engines = [*c.prefill, *c.decode]
        sound, ailing = engines[::2], engines[1::2]
        for engine in engines:
            faults = () if engine in sound else P_FAULTS if engine in c.prefill else D_FAULTS
            engine.mood = moods(random.Random(rng.random()), faults)
        clients = StormClients(c.served.url, rng)

        async def all_of_it() -> None:
            chaos = asyncio.create_task(restarts(ailing, random.Random(rng.random())))
            try:
                await clients.come(count)
            finally:
                chaos.cancel()
                await asyncio.gather(chaos, return_exceptions=True)

        asyncio.run(all_of_it())
        where = f"seed {seed}: {dict(clients.said)}"
        assert not clients.wrong, f"{where}: {clients.wrong[:3]}"
        assert clients.said.total() == count and clients.said["right"] > count / 2, where
        blamed = {i.name: (i.broke, i.last_error) for i in c.worker.fleet if i.broke}
        troubles = [trouble for trouble in c.worker.front.journal.troubles if trouble["instance"] in blamed]
        assert not {e.address for e in sound} & set(blamed), f"{where}: {blamed}, of late {troubles}"
        assert blamed, f"{where}: the ailing ones failed unnoticed"
        for engine in ailing:
            engine.mood = None
            if engine.served._server is None:
                engine.served.start()
        until(lambda: nothing_left(c), 60)
        until(lambda: c.http.get("/readiness").status_code == 200, 60)
        until(lambda: not any(i.circuit.open for i in c.worker.fleet) or c.complete().status_code != 200, 60)
        assert c.complete("after it").status_code == 200


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (1, 2))])
def test_a_storm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storm(seed, 600, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_long_storm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storm(seed, 3000, monkeypatch)
