# SPDX-License-Identifier: Apache-2.0
"""Readiness: true once a pair has really moved a block since both of its engines came up.

A canary is a request for one token with a prompt that nobody has ever sent, through the same way as a client's, over a
given P and D. It is sent only for an engine that is in no proven pair, so that readiness outlives one that goes away;
an engine that went away and came back must be proven again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import MutableMapping
from itertools import product
from typing import Any

import msgspec

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import Backoff, Condition, Role
from vllm_ascend_pd.metaserver.http1 import Headers, UpstreamError
from vllm_ascend_pd.metaserver.service.exchange import Exchange, Interrupt
from vllm_ascend_pd.metaserver.service.fleet import Instance
from vllm_ascend_pd.metaserver.service.front import Front
from vllm_ascend_pd.metaserver.service.metrics import METRICS
from vllm_ascend_pd.metaserver.within import within

_PROMPT_TOKENS = 192  # more than one block of 128
_TOKEN_IDS = range(3, 256)  # in every vocabulary
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.25
_BACKOFF = Backoff(first_s=1.0, longest_s=30.0)

Pair = tuple[str, str]
Proof = tuple[str, int, str, int]  # names, and which coming up of theirs


class Canary:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._proofs: set[Proof] = set()
        self._told: list[Pair] | None = None  # by the worker that flies the canaries, if that is not this one
        self._failed: dict[Proof, tuple[int, float]] = {}  # how often, and until when it is left alone
        self.last_error = ""

    # -- what is known

    def proven(self) -> list[Pair]:
        """Pairs that are up, and have moved a block since."""
        if self._told is not None:
            return self._told
        return [(p.name, d.name) for p, d in self._pairs() if _proof(p, d) in self._proofs]

    def ready(self) -> bool:
        if self._front.closing:
            return False
        if self._front.settings.canary:
            return bool(self.proven())
        return bool(self._pairs())

    def learn(self, pairs: list[Pair]) -> None:
        """What the worker that flies the canaries has proven."""
        self._told = pairs

    def _pairs(self) -> list[tuple[Instance, Instance]]:
        """All pairs that could serve, in a mixed order."""
        up = (Condition.READY, Condition.SUSPECT)
        prefills, decodes = ([i for i in self._front.fleet.of(r) if i.condition() in up] for r in Role)
        pairs = list(product(prefills, decodes))
        random.shuffle(pairs)
        return pairs

    # -- the canary's flight

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            METRICS.ready.set(self.ready())
            if not self._front.settings.canary or self._front.closing:
                continue
            pair = self._wanted()
            if pair is not None:
                await self._fly(*pair)

    def _wanted(self) -> tuple[Instance, Instance] | None:
        """A pair with an engine that is in no proven one, and that is not left alone after a failure."""
        pairs, now = self._pairs(), time.monotonic()
        self._forget_the_gone()
        known = {name for pair in self.proven() for name in pair}
        for prefill, decode in pairs:
            _, until = self._failed.get(_proof(prefill, decode), (0, 0.0))
            if not {prefill.name, decode.name} <= known and now >= until:
                return prefill, decode
        return None

    def _forget_the_gone(self) -> None:
        """Lives of engines that have ended; one that is down for a while has not."""
        lives = {(i.name, i.comings) for i in self._front.fleet}
        gone = [proof for proof in (*self._proofs, *self._failed) if not {proof[:2], proof[2:]} <= lives]
        for proof in gone:
            self._proofs.discard(proof)
            self._failed.pop(proof, None)

    async def _fly(self, prefill: Instance, decode: Instance) -> None:
        proof = _proof(prefill, decode)
        try:
            self.last_error = await within(_PATIENCE_S, self._try(prefill, decode))
        except asyncio.TimeoutError:
            self.last_error = f"no answer within {_PATIENCE_S:g} s"
        except UpstreamError as problem:
            self.last_error = problem.why
        if not self.last_error:
            self._proofs.add(proof)
            return
        self.last_error = f"{prefill.name} to {decode.name}: {self.last_error}"
        failures = self._failed.get(proof, (0, 0.0))[0] + 1
        self._failed[proof] = failures, time.monotonic() + _BACKOFF.delay(failures, 0.5 + random.random() / 2)

    async def _try(self, prefill: Instance, decode: Instance) -> str:
        """What went wrong, or nothing."""
        headers = self._headers()
        reply = await self._front.upstream.send(decode.origin, "GET", b"/v1/models", headers, b"", 10.0)
        async with reply:
            model = _model(await reply.rest(1 << 20, 10.0))
        if not model:
            return f"/v1/models answered {reply.status}, without a model"
        prompt = [random.choice(_TOKEN_IDS) for _ in range(_PROMPT_TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "stream": False}
        answer = _Answer()
        exchange = Exchange(
            bodies.parse(bodies.COMPLETIONS, msgspec.json.encode(body)),
            headers,
            dict(headers)[b"x-request-id"].decode(),
            Interrupt(),
            answer,
            pinned=(prefill, decode),
        )
        await self._front.serve(exchange)
        moved = [name for name, _, _ in exchange.stages].count("prefilled")
        return answer.problem() or ("" if moved else "D answered without a prefill elsewhere")

    def _headers(self) -> Headers:
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"canary-" + uuid.uuid4().hex.encode())]
        if self._front.settings.engine_token:
            headers.append((b"authorization", b"Bearer " + self._front.settings.engine_token.encode()))
        return headers


class _Answer:
    """Takes what a client would get."""

    def __init__(self) -> None:
        self._status = 0
        self._body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self._status = message.get("status", self._status)
        self._body += message.get("body", b"")

    def problem(self) -> str:
        if self._status != 200:
            return f"status {self._status}: {self._body[:300].decode(errors='replace')}"
        # A D of this package says how many tokens it received; one that recomputed the prompt would say none.
        with contextlib.suppress(*bodies.UNREADABLE, KeyError, TypeError):
            received = msgspec.json.decode(self._body)["kv_transfer_params"]["received_tokens"]
            return "" if received else "D computed the prompt by itself"
        return ""


def _proof(prefill: Instance, decode: Instance) -> Proof:
    return (prefill.name, prefill.comings, decode.name, decode.comings)


def _model(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (*bodies.UNREADABLE, KeyError, IndexError, TypeError):
        return ""
