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

from simulation.front.engines import EngineFaults
from simulation.front.world import FrontResult, SeedPlan, draw, run_seed
from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.router import canary, fleet, front, relay, reserve, resuming, shared
from vllm_ascend_pd.router.core import accumulated, blocks, bodies, resume
from vllm_ascend_pd.router.core.accumulated import RepeatedAnswer
from vllm_ascend_pd.router.core.blocks import BlockStream, FollowedRow
from vllm_ascend_pd.router.core.bodies import Use
from vllm_ascend_pd.router.core.decisions import Circuit, CircuitPolicy, LoadRecord, PairProof, ProcessHistory
from vllm_ascend_pd.router.core.resume import StreamState
from vllm_ascend_pd.router.exchange import Attempt, Journal, RoutedTransfer
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
        instance.history = instance.history.refuses(time.monotonic())


_PROBE = Prober.probe


def _always(*_: Any) -> bool:
    return True


_ASK: Callable[..., Awaitable[object]] = reserve.PostedPrefill._ask


async def _answer_proves(self: reserve.PostedPrefill, leg: fleet.LegInFlight) -> None:
    await _ASK(self, leg)
    attempt, prefill = self._attempt, leg.instance
    life = prefill.history.statements[-1].incarnation if prefill.history.statements else ""
    self._front.fleet.prove(PairProof(prefill.name, life, attempt.decode.name, self._posted.decode, attempt.began))


def _keeps_its_load(self: fleet.LegInFlight, *failed: Any) -> None:
    if failed[0] is None:
        _EXIT(self, *failed)


_EXIT = fleet.LegInFlight.__exit__


def _only_dropped(exchange: Any, answer: bytes) -> Any:
    return resume.Cut.DROPPED if relay.dropped(answer) else None


def _not_stripped(answer: Any, **_: Any) -> Any:
    return answer, None


def _ticket_kept(self: Journal, attempt: Attempt) -> None:
    """Never invalidate a ticket."""


def _breaking(plan: SeedPlan) -> SeedPlan:
    """One sound D among others that break, drop and die, and are asked all the same."""
    bad = EngineFaults(sound=False, fault=0.7)
    return replace(
        plan,
        prefills=[EngineFaults()],
        decodes=[EngineFaults(), bad, bad],
        requests=100,
        restarts_s=20.0,
        admin_s=0.0,
        workers=1,
        settings={**plan.settings, "circuit": CircuitPolicy(1 << 30), "sidecar": False},
    )


def _nothing_kept(plan: SeedPlan) -> SeedPlan:
    return replace(plan, settings={**plan.settings, "resume_tokens": 0})


def _dated(plan: SeedPlan) -> SeedPlan:
    """The same, but the prompts of the others have a date in them."""
    world = _breaking(plan)
    return replace(world, decodes=[world.decodes[0], *(replace(kind, dated=True) for kind in world.decodes[1:])])


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


_GO_ON, _PARAMS, _DECODE = StreamState.go_on, front.Front._params, front.Front.decode


def _repeats_nothing(self: StreamState) -> bool:
    """Let all that another D says go out."""
    came = _GO_ON(self)
    self._repeats = None
    return came


def _all_is_new(self: RepeatedAnswer, said: Any, at: Any = ()) -> dict[str, Any]:
    _BEYOND(self, said, at)
    return dict(said)


_BEYOND = RepeatedAnswer.beyond


def _rest_unseen(self: RepeatedAnswer, piece: Any, path: Any) -> Any:
    """Drop as much as the client has, whatever it is."""
    at, had = self._at.get(path, 0), len(self._had.get(path, ()))
    size = len(piece.encode()) if isinstance(piece, str) else len(piece)
    if path in self._at:
        self._at[path] = at + size
    left = max(0, had - at)
    return piece.encode()[left:].decode(errors="ignore") if isinstance(piece, str) else piece[left:]


def _any_prompt(self: StreamState, prompt: str) -> list[int]:
    return list(self.ids[: self.given])


def _any_ticket(self: Any, ticket: str, default: Any = None) -> Any:
    return dict.get(self, ticket) or next(iter(self.values()), default)


class _AnyTicket(dict[str, Any]):
    get = _any_ticket


def _with_tickets_of_all(self: Journal) -> None:
    _JOURNAL(self)
    self.tickets = _AnyTicket()


_JOURNAL = Journal.__init__


def _anew(self: front.Front, attempt: Attempt) -> Any:
    params = _PARAMS(self, attempt)
    if params is not None:
        params.pop("continue", None)
    return params


def _prompt_alone(self: front.Front, attempt: Attempt) -> Any:
    params = _PARAMS(self, attempt)
    if params is not None and "continue" in params:
        del params["send_tokens"]
    return params


def _own_head(self: StreamState, read: Any) -> None:
    _NOTE(self, read)
    self._head = {}


_NOTE = StreamState._note


def _the_dead_one(self: front.Front, exchange: Any) -> Any:
    return (
        self.fleet.get(next(iter(exchange.tried))) if exchange.streaming and exchange.tried else _DECODE(self, exchange)
    )


def _ending(self: StreamState) -> bytes:
    return b"data: [DONE]\n\n"


def _numbered_anew(self: BlockStream, said: dict[str, Any]) -> dict[str, Any]:
    return _AS_FIRST(self, said) | {name: said[name] for name in ("sequence_number",) if name in said}


_AS_FIRST, _TAKE = BlockStream._as_first, BlockStream.take


def _with_ids(self: BlockStream, stream: bytes) -> bytes:
    events = (event + b"\n\n" for event in stream.split(b"\n\n"))
    return b"".join(event for event in events if event.startswith(blocks.TOKENS_EVENT)) + _TAKE(self, stream)


# The first nine are defects that the service once had.
ALL = {
    mutation.name: mutation
    for mutation in (
        FrontMutation("P's good answer proves a pair", ((reserve.PostedPrefill, "_ask", _answer_proves),)),
        FrontMutation("D is blamed for P's failure", ((Attempt, "load_failed", False),)),
        FrontMutation("what D has is thrown away when P's answer breaks", ((RoutedTransfer, "received", False),)),
        FrontMutation("P gets what chooses the token", ((bodies, "FIELDS", dict.fromkeys(bodies.FIELDS, Use.PROMPT)),)),
        FrontMutation("a dropped answer is passed on", ((relay, "dropped", _never), (relay, "_cut_short", _nothing))),
        FrontMutation("clients' overload stops canaries", ((front, "_MAX_CANARIES", 0),)),
        FrontMutation("a slow probe is another life", ((Prober, "probe", _slow_is_another),)),
        FrontMutation("an engine that has restarted keeps its proof", ((ProcessHistory, "may_be", _always),)),
        FrontMutation("canaries fly one at a time", ((canary, "_AT_ONCE", 1),), _hanging_and_idle),
        FrontMutation("canaries try no wedged engine", ((canary.Canary, "_pairs", _pairs_up),), _failing_alone),
        FrontMutation(
            "other workers try no wedged engine", ((canary.Canary, "_send_out", _only_one_worker),), _failing_alone
        ),
        FrontMutation(
            "an answer that its engine ended is passed on",
            ((relay, "_cut_short", _only_dropped), (relay, "_NOTHING", relay.DROPPED)),
        ),
        FrontMutation("D's word is not waited for", ((Attempt, "explained", _nothing_awaited),)),
        FrontMutation(
            "every failed load speaks against P", ((shared, "AGAINST_PREFILL", dict.fromkeys(CATALOGUE, "it failed")),)
        ),
        FrontMutation("a place is never given back", ((front.AdmissionQueue, "leave", _nothing),)),
        FrontMutation("a leg that failed keeps its load", ((fleet.LegInFlight, "__exit__", _keeps_its_load),)),
        FrontMutation("a stream goes on after its end", ((relay, "has_last_event", _never),), _nothing_kept),
        FrontMutation("half events go out", ((relay, "_whole_events", lambda tail, piece, _: piece),), _nothing_kept),
        FrontMutation("what engines say to each other goes out", ((relay, "stripped_of", _not_stripped),)),
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
        # Answers that outlive their D.
        FrontMutation("all is said again", ((StreamState, "go_on", _repeats_nothing),), _breaking),
        FrontMutation("what was in an event is said again", ((RepeatedAnswer, "beyond", _all_is_new),), _breaking),
        FrontMutation("what is repeated is not looked at", ((RepeatedAnswer, "_rest", _rest_unseen),), _breaking),
        FrontMutation("another D begins anew", ((front.Front, "_params", _anew),), _breaking),
        FrontMutation("P gets the prompt alone", ((front.Front, "_params", _prompt_alone),), _breaking),
        FrontMutation("tokens go to another prompt", ((StreamState, "tokens", _any_prompt),), _dated),
        FrontMutation("any ticket is good", ((Journal, "__init__", _with_tickets_of_all),), _breaking),
        FrontMutation("names of calls are compared", ((accumulated, "_is_name", _never),), _breaking),
        FrontMutation("a stream goes on with the D that died", ((front.Front, "decode", _the_dead_one),), _breaking),
        FrontMutation(
            "ids go to clients that did not ask",
            ((resume, "without_ids", lambda said, **_: said), (relay, "without_ids", lambda said: said)),
            _breaking,
        ),
        FrontMutation("the rest is another answer's", ((StreamState, "_note", _own_head),), _breaking),
        FrontMutation("the end of a stream has no usage", ((StreamState, "ending", _ending),), _breaking),
        FrontMutation("blocks are said again", ((FollowedRow, "beyond", _always),), _breaking),
        FrontMutation(
            "ids of blocks are each D's own", ((BlockStream, "_named", lambda self, value, at: value),), _breaking
        ),
        FrontMutation("events are numbered anew", ((BlockStream, "_as_first", _numbered_anew),), _breaking),
        FrontMutation(
            "what D makes of half an answer goes out",
            ((BlockStream, "_cut_by", _nothing), (relay, "_cut_short", _nothing)),
            _breaking,
        ),
        FrontMutation("token ids go out between events", ((BlockStream, "take", _with_ids),), _breaking),
        FrontMutation("what is kept is never let go", ((resuming, "let_go", _nothing),), _breaking),
        FrontMutation("one break is survived, not two", ((resume, "MAX_TIMES", 1),), _breaking),
    )
}
