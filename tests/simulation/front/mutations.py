# SPDX-License-Identifier: Apache-2.0
"""The service with one rule taken out at a time. The simulator must find each of them."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from simulation.front.engines import Kind
from simulation.front.house import Plan, Result, draw, run_seed
from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.bodies import Use
from vllm_ascend_pd.metaserver.decisions import Circuit, Life, Proof
from vllm_ascend_pd.metaserver.service import canary, fleet, front, relay, reserve, shared
from vllm_ascend_pd.metaserver.service.exchange import Attempt, Journal
from vllm_ascend_pd.metaserver.service.intake import Body
from vllm_ascend_pd.metaserver.service.probes import Prober


def _any_world(plan: Plan) -> Plan:
    return plan


def _hanging_and_idle(plan: Plan) -> Plan:
    """A sound pair beside engines that fail whatever they are asked; nobody asks but canaries."""
    bad = Kind(sound=False, fault=1.0)
    return replace(
        plan, prefills=[Kind()], decodes=[Kind(), bad, bad, bad], requests=0, restarts_s=0.0, admin_s=0.0, workers=1
    )


@dataclass(frozen=True)
class Mutation:
    """`changes`: (where, name, what stands there instead). `worlds`: of these seeds its lack can be seen."""

    name: str
    changes: tuple[tuple[Any, str, Any], ...]
    worlds: Callable[[Plan], Plan] = _any_world

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, name, instead in self.changes:
                stack.enter_context(mock.patch.object(where, name, instead))
            yield

    def run(self, seed: int, *, taken_out: bool) -> Result:
        """A seed in this mutation's world: without the rule, or with it."""
        plan = self.worlds(draw(random.Random(f"plan/{seed}")))
        with self.applied() if taken_out else nullcontext():
            return run_seed(seed, plan=plan)


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what should happen."""


async def _nothing_awaited(*_: Any, **__: Any) -> None:
    """The same of a coroutine."""


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


_ASK: Callable[..., Awaitable[None]] = reserve.Reservations._ask


async def _answer_proves(self: reserve.Reservations, attempt: Attempt, posted: Any, prefill: Any) -> None:
    await _ASK(self, attempt, posted, prefill)
    life = prefill.life.told[-1].incarnation if prefill.life.told else ""
    self._front.fleet.prove(Proof(prefill.name, life, attempt.decode.name, posted.decode, attempt.began))


def _keeps_its_load(self: fleet.Trial, *failed: object) -> None:
    if failed[0] is None:
        _EXIT(self, *failed)


_EXIT = fleet.Trial.__exit__


def _not_stripped(shared_: Any, answer: Any) -> Any:
    return answer
    yield 0


def _ticket_kept(self: Journal, attempt: Attempt) -> None:
    """Never void."""


# The first nine are defects that the service once had.
ALL = {
    mutation.name: mutation
    for mutation in (
        Mutation("P's good answer proves a pair", ((reserve.Reservations, "_ask", _answer_proves),)),
        Mutation("D is blamed for P's failure", ((Attempt, "load_failed", False),)),
        Mutation("what D has is thrown away when P's answer breaks", ((Attempt, "received", _never),)),
        Mutation("P gets what chooses the token", ((bodies, "FIELDS", dict.fromkeys(bodies.FIELDS, Use.PROMPT)),)),
        Mutation("a dropped answer is passed on", ((relay, "dropped", _never), (relay, "_cut_short", _never))),
        Mutation("clients' overload stops canaries", ((front, "_MOST_CANARIES", 0),)),
        Mutation("a slow probe is another life", ((Prober, "probe", _slow_is_another),)),
        Mutation("an engine that has restarted keeps its proof", ((Life, "may_be", _always),)),
        Mutation("canaries fly one at a time", ((canary, "_AT_ONCE", 1),), _hanging_and_idle),
        Mutation(
            "an answer that its engine ended is passed on",
            ((relay, "_cut_short", relay.dropped), (relay, "_NOTHING", relay._DROPPED)),
        ),
        Mutation("D's word is not waited for", ((Attempt, "explained", _nothing_awaited),)),
        Mutation("every failed load speaks against P", ((shared, "against_prefill", lambda code: "it failed"),)),
        Mutation("a place is never given back", ((front.Turnstile, "leave", _nothing),)),
        Mutation("a leg that failed keeps its load", ((fleet.Trial, "__exit__", _keeps_its_load),)),
        Mutation("half events go out", ((relay, "_whole_events", lambda stream: (stream, b"")),)),
        Mutation("what engines say to each other goes out", ((relay, "_stripping", _not_stripped),)),
        Mutation("heartbeats never end", ((reserve.Heart, "remove", _nothing),)),
        Mutation("tickets are never void", ((Journal, "close", _ticket_kept),)),
        Mutation("a trial never ends", ((Circuit, "returned", _nothing),)),
        Mutation("a body is never let go", ((Body, "release", _nothing),)),
    )
}
