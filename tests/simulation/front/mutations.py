# SPDX-License-Identifier: Apache-2.0
"""The service with one rule removed at a time, each of which the simulator must find."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from msgspec import structs

from simulation.front.engines import EngineFaults
from simulation.front.world import FrontResult, SeedPlan, draw, run_seed
from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.router import canary, fleet, front, relay, reserve, resuming, shared
from vllm_ascend_pd.router.core import bodies, resumable, resume
from vllm_ascend_pd.router.core.bodies import Use
from vllm_ascend_pd.router.core.decisions import Circuit, Life, LoadRecord, PairProof
from vllm_ascend_pd.router.core.resume import StreamState
from vllm_ascend_pd.router.exchange import Attempt, Journal
from vllm_ascend_pd.router.intake import Body
from vllm_ascend_pd.router.probes import Prober
from vllm_ascend_pd.shared import http_session


def _any_world(plan: SeedPlan) -> SeedPlan:
    return plan


def _two_models(plan: SeedPlan) -> SeedPlan:
    prefills, decodes = (
        [replace(kind, model="mn"[i % 2]) for i, kind in enumerate(kinds)] for kinds in (plan.prefills, plan.decodes)
    )
    return replace(plan, prefills=prefills, decodes=decodes)


def _beside_one(plan: SeedPlan) -> SeedPlan:
    """A sidecar with its D, and several P's."""
    return replace(
        plan,
        prefills=[EngineFaults(), EngineFaults(), EngineFaults()],
        decodes=[EngineFaults()],
        workers=1,
        settings={**plan.settings, "sidecar": True},
    )


def _hanging_and_idle(plan: SeedPlan) -> SeedPlan:
    """A sound pair beside engines that fail every request; only canaries send any."""
    bad = EngineFaults(sound=False, fault=1.0)
    return replace(
        plan,
        prefills=[EngineFaults()],
        decodes=[EngineFaults(), bad, bad, bad],
        requests=0,
        restarts_s=0.0,
        admin_s=0.0,
        workers=1,
    )


def _failing_alone(plan: SeedPlan) -> SeedPlan:
    """A single pair, whose D fails most requests until the clients have left; each of two workers sees it."""
    bad = EngineFaults(sound=False, fault=0.9)
    return replace(plan, prefills=[EngineFaults()], decodes=[bad], requests=60, restarts_s=0.0, admin_s=0.0, workers=2)


def _beside_a_deaf_one(plan: SeedPlan) -> SeedPlan:
    """Sound engines, and a D whose loads all fail. Clients come for longer than it takes to know."""
    return replace(
        plan,
        prefills=[EngineFaults(), EngineFaults()],
        decodes=[EngineFaults(), EngineFaults(deaf=True)],
        requests=60,
        gap_s=1.0,
        restarts_s=0.0,
        admin_s=0.0,
    )


def _all_refuse(plan: SeedPlan) -> SeedPlan:
    full = [EngineFaults(refuses=True), EngineFaults(refuses=True)]  # fewer than attempts
    return replace(plan, prefills=[EngineFaults()], decodes=full, requests=60, restarts_s=0.0, admin_s=0.0)


@dataclass(frozen=True)
class FrontMutation:
    """A removed rule. `changes` are (where, name, replacement); with these `worlds` as seeds its lack shows."""

    name: str
    changes: tuple[tuple[Any, str, Any], ...]
    worlds: Callable[[SeedPlan], SeedPlan] = _any_world

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, name, instead in self.changes:
                stack.enter_context(mock.patch.object(where, name, instead))
            yield

    def run(self, seed: int, *, taken_out: bool) -> FrontResult:
        """Run a seed in this mutation's world, with or without the rule."""
        plan = self.worlds(draw(random.Random(f"plan/{seed}")))
        with self.applied() if taken_out else nullcontext():
            return run_seed(seed, plan=plan)


_PAIRS = canary.Canary._pairs


def _pairs_up(self: canary.Canary, serves: fleet.Fits = canary._up) -> Any:
    return _PAIRS(self, fleet.both(serves, canary._up))


_SEND_OUT = canary.Canary._send_out


def _only_one_worker(self: canary.Canary) -> None:
    if self._proves:
        _SEND_OUT(self)


def _serving_unasked(self: fleet.Fleet, model: str) -> fleet.Fits:
    return lambda instance: not instance.cards or model in instance.cards


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


async def _nothing_awaited(*_: Any, **__: Any) -> None:
    """Do nothing, as a coroutine."""


def _never(*_: Any) -> bool:
    return False


async def _slow_is_another(self: Prober, instance: fleet.Instance) -> None:
    began = time.monotonic()
    await _PROBE(self, instance)
    if time.monotonic() > began + 1.0:
        instance.life = instance.life.refuses(time.monotonic())


_PROBE = Prober.probe


def _always(*_: Any) -> bool:
    return True


_ASK: Callable[..., Awaitable[object]] = reserve.Reservations._ask


async def _answer_proves(self: reserve.Reservations, attempt: Attempt, posted: Any, leg: fleet.LegInFlight) -> None:
    await _ASK(self, attempt, posted, leg)
    prefill = leg.instance
    life = prefill.life.statements[-1].incarnation if prefill.life.statements else ""
    self._front.fleet.prove(PairProof(prefill.name, life, attempt.decode.name, posted.decode, attempt.began))


def _keeps_its_load(self: fleet.LegInFlight, *failed: Any) -> None:
    if failed[0] is None:
        _EXIT(self, *failed)


_EXIT = fleet.LegInFlight.__exit__


def _not_stripped(answer: Any) -> Any:
    return answer, None


def _ticket_kept(self: Journal, attempt: Attempt) -> None:
    """Never invalidate a ticket."""


def _breaking(plan: SeedPlan) -> SeedPlan:
    """One sound D among others that break, drop and die."""
    bad = EngineFaults(sound=False, fault=0.7)
    return replace(
        plan,
        prefills=[EngineFaults()],
        decodes=[EngineFaults(), bad, bad],
        requests=100,
        restarts_s=20.0,
        admin_s=0.0,
        workers=1,
    )


def _cutting(plan: SeedPlan) -> SeedPlan:
    """Nothing fails but connections, which break at any byte."""
    bad = EngineFaults(sound=False, cut=0.5)
    return replace(
        plan, prefills=[EngineFaults(), bad], decodes=[EngineFaults(), bad, bad], restarts_s=0.0, admin_s=0.0
    )


def _lost_is_the_end(self: Any, problem: Exception | None) -> None:
    answer = self._answer
    if answer is not None and not answer.is_eof():
        answer.feed_eof()
    _LOST(self, problem)
    if answer is not None:
        answer.set_exception(None)


_LOST = http_session.HttpWire.connection_lost


_POINT, _NEXT, _CONTINUED, _FRAMED, _NOTE_HEAD, _DECODE = (
    *(StreamState.point, StreamState.next_request, resumable.continued, StreamState._framed, StreamState._note_head),
    front.Front._decode,
)


def _one_less(original: Any, prompt: bytes, tokens: int, answer: Any, at: int, room: int) -> Any:
    return _CONTINUED(original, prompt, tokens, answer, max(0, at - 1), room)


def _limit_kept(original: Any, prompt: bytes, tokens: int, answer: Any, at: int, room: int) -> Any:
    asked = _CONTINUED(original, prompt, tokens, answer, at, room)
    fields: dict[str, Any] = {**asked.fields}
    return structs.replace(asked, fields={**fields, "max_tokens": fields["max_tokens"] + at})


def _least_kept(original: Any, prompt: bytes, tokens: int, answer: Any, at: int, room: int) -> Any:
    asked = _CONTINUED(original, prompt, tokens, answer, at, room)
    return structs.replace(
        asked, fields={**asked.fields, "min_tokens": min(original.least, asked.fields["max_tokens"])}
    )


def _last_point(self: StreamState) -> Any:
    _POINT(self)
    return resume.Point(len(self.ids), self._released + self.original.held, self._offset)


def _after(**changes: Any) -> Callable[..., Any]:
    def next_request(self: StreamState, room: int) -> Any:
        asked = _NEXT(self, room)
        for name, change in changes.items():
            setattr(self, name, change(getattr(self, name)))
        return asked

    return next_request


def _as_it_came(self: StreamState, event: dict[str, Any], choice: Any, text: str, tokens: list[int], again: int) -> Any:
    return {**event, "text": text, "prompt_token_ids": None, "token_ids": tokens if self.original.asked_ids else None}


def _own_head(self: StreamState, read: Any, choice: Any) -> None:
    _NOTE_HEAD(self, read, choice)
    self._head = {}


def _the_dead_one(self: front.Front, exchange: Any) -> Any:
    return self.fleet.get(next(iter(exchange.tried))) if exchange.streaming else _DECODE(self, exchange)


def _ending(self: StreamState) -> bytes:
    return b"data: [DONE]\n\n"


# The first nine are defects that the service once had.
ALL = {
    mutation.name: mutation
    for mutation in (
        FrontMutation("P's good answer proves a pair", ((reserve.Reservations, "_ask", _answer_proves),)),
        FrontMutation("D is blamed for P's failure", ((Attempt, "load_failed", False),)),
        FrontMutation("what D has is thrown away when P's answer breaks", ((Attempt, "received", _never),)),
        FrontMutation("P gets what chooses the token", ((bodies, "FIELDS", dict.fromkeys(bodies.FIELDS, Use.PROMPT)),)),
        FrontMutation("a dropped answer is passed on", ((relay, "dropped", _never), (relay, "_cut_short", _never))),
        FrontMutation("clients' overload stops canaries", ((front, "_MAX_CANARIES", 0),)),
        FrontMutation("a slow probe is another life", ((Prober, "probe", _slow_is_another),)),
        FrontMutation("an engine that has restarted keeps its proof", ((Life, "may_be", _always),)),
        FrontMutation("canaries fly one at a time", ((canary, "_AT_ONCE", 1),), _hanging_and_idle),
        FrontMutation("canaries try no wedged engine", ((canary.Canary, "_pairs", _pairs_up),), _failing_alone),
        FrontMutation(
            "other workers try no wedged engine", ((canary.Canary, "_send_out", _only_one_worker),), _failing_alone
        ),
        FrontMutation(
            "an answer that its engine ended is passed on",
            ((relay, "_cut_short", relay.dropped), (relay, "_NOTHING", relay._DROPPED)),
        ),
        FrontMutation("D's word is not waited for", ((Attempt, "explained", _nothing_awaited),)),
        FrontMutation(
            "every failed load speaks against P", ((shared, "AGAINST_PREFILL", dict.fromkeys(CATALOGUE, "it failed")),)
        ),
        FrontMutation("a place is never given back", ((front.AdmissionQueue, "leave", _nothing),)),
        FrontMutation("a leg that failed keeps its load", ((fleet.LegInFlight, "__exit__", _keeps_its_load),)),
        FrontMutation("a stream goes on after its end", ((relay, "_said_all", _never),)),
        FrontMutation("half events go out", ((relay, "_whole_events", lambda stream: (stream, b"")),)),
        FrontMutation("what engines say to each other goes out", ((relay, "_stripped", _not_stripped),)),
        FrontMutation("heartbeats never end", ((reserve.Heartbeats, "remove", _nothing),)),
        FrontMutation("tickets are never void", ((Journal, "close", _ticket_kept),)),
        FrontMutation("a trial never ends", ((Circuit, "returned", _nothing),)),
        FrontMutation("a body is never let go", ((Body, "release", _nothing),)),
        FrontMutation(
            "an engine serves every model",
            ((fleet.Fleet, "serving", lambda self, model: fleet.any_instance),),
            _two_models,
        ),
        FrontMutation(
            "an engine that was not asked yet serves every model",
            ((fleet.Fleet, "serving", _serving_unasked),),
            _two_models,
        ),
        FrontMutation(
            "P's that are not named are asked",
            ((fleet.Fleet, "prefilling", lambda self, model, names: self.serving(model)),),
            _beside_one,
        ),
        FrontMutation(
            "an answer that breaks off has ended",
            ((http_session.HttpWire, "connection_lost", _lost_is_the_end),),
            _cutting,
        ),
        FrontMutation("a D whose loads fail is asked again", ((LoadRecord, "avoids", _never),), _beside_a_deaf_one),
        FrontMutation("what all D's refuse is repeated", ((fleet.Fleet, "another", _always),), _all_refuse),
        # Streams that outlive their D.
        FrontMutation("a token is said twice", ((resume, "continued", _one_less),), _breaking),
        FrontMutation(
            "text of the next token is lost", ((StreamState, "next_request", _after(_skip=lambda n: n + 1)),), _breaking
        ),
        FrontMutation("text is said again", ((StreamState, "next_request", _after(_skip=lambda n: 0)),), _breaking),
        FrontMutation("tokens before the break are not counted", ((StreamState, "_correct", _nothing),), _breaking),
        FrontMutation("a stream goes on with the D that died", ((front.Front, "_decode", _the_dead_one),), _breaking),
        FrontMutation("the limit is not lowered", ((resume, "continued", _limit_kept),), _breaking),
        FrontMutation("the least is not lowered", ((resume, "continued", _least_kept),), _breaking),
        FrontMutation("ids go to clients that did not ask", ((resume, "_without", lambda event: event),), _breaking),
        FrontMutation("a chat goes on as a completion", ((StreamState, "_framed", _as_it_came),), _breaking),
        FrontMutation("the rest is another answer's", ((StreamState, "_note_head", _own_head),), _breaking),
        FrontMutation("it goes on where text was held back", ((StreamState, "point", _last_point),), _breaking),
        FrontMutation(
            "log-probabilities begin anew",
            ((StreamState, "next_request", _after(_from=lambda point: point._replace(offset=0))),),
            _breaking,
        ),
        FrontMutation("the end of a stream has no usage", ((StreamState, "ending", _ending),), _breaking),
        FrontMutation("what is kept is never let go", ((resuming, "let_go", _nothing),), _breaking),
        FrontMutation("one break is survived, not two", ((resuming, "MAX_TIMES", 1),), _breaking),
    )
}
