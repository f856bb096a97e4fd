# SPDX-License-Identifier: Apache-2.0
"""Readiness: true once KV has really come from a P to a D, in the present incarnations of both.

A canary is a request for one token with a new random prompt. It takes the same way as a client's request, over a given
P and D. The proof is D's report of tokens received (`Front.loaded`), not an answer or the order of answers; a client's
request proves as much. Canaries are sent only for an engine that is in no proven pair. Several are in flight at a time,
so that one that hangs does not delay the proof of others.

To a wedged engine a canary is the trial that can close its circuit: without readiness no client's request may come that
would be one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import MutableMapping
from itertools import product
from typing import Any, NamedTuple

import msgspec

from vllm_ascend_pd.protocol.versions import may_pair
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import CircuitState, Role
from vllm_ascend_pd.router.exchange import HttpExchange
from vllm_ascend_pd.router.fleet import Fits, Instance
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.keys import bearer
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.relay import OWN_MARK
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import UpstreamError
from vllm_ascend_pd.shared.http_session import Headers
from vllm_ascend_pd.shared.within import within

log = logging.getLogger(__name__)

_PROMPT_TOKENS = 192  # more than one block of 128
_TOKEN_IDS = range(3, 256)  # they are in every vocabulary
_CANARY_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.25
_AT_ONCE = 8
_ASKED_FOR_NONE = "it asked for no KV; its log says why, also if it is a prefill engine"
_SHOWN = 4  # instances in one message
_BACKOFF = Backoff(first_s=1.0, longest_s=30.0)

Pair = tuple[str, str]
Lives = tuple[tuple[tuple[str, ...], float], ...]  # of a P and a D: incarnations, last refused connection


class _FailedPair(NamedTuple):
    """Failures of a pair: in which lives, how often, until when it is not tried again, and why."""

    lives: Lives
    times: int
    until: float
    problem: str


def _up(instance: Instance) -> bool:
    """Return whether it serves. A trial shows nothing until it has ended."""
    return instance.answered and not instance.draining and instance.circuit.state is CircuitState.CLOSED


class Canary:
    """Canaries of one worker. `proves`: they prove pairs too, which one worker does for all; circuits are its own."""

    def __init__(self, front: Front, proves: bool = True) -> None:
        self._front = front
        self._proves = proves
        self._in_flight: dict[asyncio.Task[None], Pair] = {}
        self._failed: dict[Pair, _FailedPair] = {}
        self._last_error = "no canary has been answered yet"
        self._prefills_served = False

    # -- what is known

    @property
    def last_error(self) -> str:
        """Why no pair is proven: a role of which no instance serves, or how the last canary failed."""
        for role in Role:
            instances = self._front.fleet.of(role)
            if not any(_up(instance) for instance in instances):
                seen = [
                    f"{i.name} is {i.condition().value}{f' ({i.last_error})' if i.last_error else ''}"
                    for i in instances
                ]
                more = f", and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
                return f"no {role.value} instance is usable: {', '.join(seen[:_SHOWN]) or 'none is named'}{more}"
        return self._last_error

    def proven(self) -> list[Pair]:
        """Return the pairs that are up and over which KV has come, and comes."""
        enough = self._front.settings.circuit.threshold
        up = {(p.name, d.name) for p, d in self._pairs() if not d.loads.broken(p.name, enough)}
        return sorted({(proof.prefill, proof.decode) for proof in self._front.fleet.proven()} & up)

    def ready(self) -> bool:
        if self._front.closing:
            return False
        if self._front.settings.sidecar:
            # Clients' requests show when a failed D works again, and a sidecar that is not ready gets none.
            return any(i.healthy for i in self._front.fleet.of(Role.DECODE))
        if self._front.settings.canary:
            return bool(self.proven())
        # As for a sidecar: nothing but clients' requests closes a circuit.
        return bool(self._pairs(lambda instance: _up(instance) or instance.last_resort()))

    def _pairs(self, serves: Fits = _up) -> list[tuple[Instance, Instance]]:
        """Return all pairs of instances that serve, in random order, without those that are known not to fit."""
        prefills, decodes = ([i for i in self._front.fleet.of(r) if serves(i)] for r in Role)
        pairs = [(p, d) for p, d in product(prefills, decodes) if may_pair(p.fingerprint, d.fingerprint)]
        random.shuffle(pairs)
        return pairs

    # -- canaries in flight

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                if self._proves:
                    METRICS.ready.set(self.ready())
                    self._watch_prefills()
                if self._front.settings.canary and not self._front.closing:
                    self._send_out()
        finally:
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _watch_prefills(self) -> None:
        """Log when the last usable P goes, and when one is back."""
        serves = self._front.fleet.serves(Role.PREFILL)
        if serves != self._prefills_served and not (self._front.settings.sidecar or self._front.closing):
            self._prefills_served = serves
            refuses = self._front.settings.without_prefill == "refuse"
            instead = "clients get 503" if refuses else "decode engines compute the prompts"
            if serves:
                log.info("prefill instances are usable")
            else:
                log.warning("no prefill instance is usable: %s (--without-prefill)", instead)

    def _send_out(self) -> None:
        """Send a canary for each engine that is in no proven pair and has none in flight, if its circuit admits one.

        And for each pair that clients' requests avoid, as loads over it failed.
        """
        if not (self._proves or any(i.circuit.open or i.loads.failed for i in self._front.fleet)):
            return  # most of the time, and all pairs are many
        busy = {name for pair in (*self.proven(), *self._in_flight.values()) for name in pair}
        now = time.monotonic()
        names = {instance.name for instance in self._front.fleet}
        self._failed = {pair: failed for pair, failed in self._failed.items() if names.issuperset(pair)}
        for prefill, decode in self._pairs(lambda instance: instance.answered and instance.usable(now)):
            pair = (prefill.name, decode.name)
            failed = self._failed.get(pair)
            left_alone = failed is not None and now < failed.until and failed.lives == _lives(prefill, decode)
            wedged = {instance.name for instance in (prefill, decode) if instance.circuit.open}
            avoided = bool(decode.loads.failed) and decode.loads.avoids(prefill.name, now)
            if len(self._in_flight) >= _AT_ONCE or left_alone or pair in self._in_flight.values():
                continue
            if set(pair) <= busy and not avoided:
                continue
            if wedged & busy or not (wedged or avoided or self._proves):  # a trial is one request
                continue
            busy.update(pair)
            task = asyncio.create_task(self._fly(prefill, decode), name=f"canary {prefill.name} to {decode.name}")
            self._in_flight[task] = pair
            task.add_done_callback(self._in_flight.pop)

    async def _fly(self, prefill: Instance, decode: Instance) -> None:
        pair, lives = (prefill.name, decode.name), _lives(prefill, decode)
        try:
            problem = await within(_CANARY_TIMEOUT_S, self._try(prefill, decode))
        except asyncio.TimeoutError:
            problem = f"no answer within {_CANARY_TIMEOUT_S:g} s"
        except UpstreamError as failed:
            problem = failed.why
        if not problem:
            self._failed.pop(pair, None)
            log.info("proven: KV comes from %s to %s", *pair)
            return
        before = self._failed.get(pair)
        times = before.times + 1 if before is not None and before.lives == lives else 1
        until = time.monotonic() + _BACKOFF.delay(times, 0.5 + random.random() / 2)
        self._failed[pair] = _FailedPair(lives, times, until, problem)
        message = f"{prefill.name} to {decode.name}: {problem}"
        if before is None or before.problem != problem:  # only a change, not each repetition
            log.warning("not proven: %s", message)
        self._last_error = message

    async def _try(self, prefill: Instance, decode: Instance) -> str:
        """Send a canary and return what went wrong; empty if nothing."""
        headers = self._headers()
        async with self._front.upstream.ask(decode.origin, "GET", b"/v1/models", headers, b"", 10.0) as reply:
            model = _model(await reply.rest(1 << 20, 10.0))
        if not model:
            return f"/v1/models answered {reply.status}, without a model"
        prompt = [random.choice(_TOKEN_IDS) for _ in range(_PROMPT_TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "stream": False}
        answered = list[bytes]()

        async def answer(message: MutableMapping[str, Any]) -> None:
            answered.append(message.get("body", b""))

        exchange = HttpExchange(
            bodies.parse(bodies.COMPLETIONS, msgspec.json.encode(body)),
            headers,
            dict(headers)[b"x-request-id"].decode(),
            answer,
            pinned=(prefill, decode),
        )
        await self._front.serve(exchange)
        failing = prefill.name in decode.loads.failed or "" in decode.loads.failed
        if exchange.status != 200:
            return f"status {exchange.status}: {b''.join(answered)[:300].decode(errors='replace')}"
        if not failing and (prefill.name, decode.name) in self.proven():
            return ""
        details = [detail for name, _, detail in exchange.stages if name == "not loaded"]
        return f"D computed the prompt by itself: {details[-1] if details else _ASKED_FOR_NONE}"

    def _headers(self) -> Headers:
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"canary-" + uuid.uuid4().hex.encode())]
        return [*headers, (OWN_MARK, b"1"), *bearer(self._front.settings.engine_token)]


def _lives(prefill: Instance, decode: Instance) -> Lives:
    """Return the lives that a failure is about, without the times at which they were last asked."""
    return tuple(
        (tuple(word.incarnation for word in known.statements), known.refused)
        for known in (prefill.history, decode.history)
    )


def _model(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (*bodies.UNREADABLE, KeyError, IndexError, TypeError):
        return ""
