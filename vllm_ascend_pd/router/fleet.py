# SPDX-License-Identifier: Apache-2.0
"""The instances that this process knows: their load, their circuits, and the choice among them.

An instance has a source: flags, the instances file, the admin API or a request's header. A source that replaces its
instances removes none of another source's; the admin API removes any.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vllm_ascend_pd.protocol.versions import may_pair
from vllm_ascend_pd.router.core.decisions import (
    AnswerLengths,
    Circuit,
    CircuitPolicy,
    CircuitState,
    Condition,
    Evidence,
    LoadRecord,
    PairProof,
    ProcessHistory,
    Role,
    condition,
)
from vllm_ascend_pd.router.core.ends import LegEnd
from vllm_ascend_pd.router.core.prefixes import Marks, Prompts
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.settings import LAST_PORT
from vllm_ascend_pd.router.upstream import Reply
from vllm_ascend_pd.shared.core.failures import HttpFailure
from vllm_ascend_pd.shared.http_session import Origin

log = logging.getLogger(__name__)
MAX_ENDPOINTS = 1024  # in one text of `parse_specs`
REST_S = 1.0  # after a refusal, as long as others take requests
_STEP = 16  # tokens of an answer between two corrections of the load
NAMED = "header"  # source of the P's that requests name
_GOOD = frozenset({Evidence.SERVED, Evidence.PROBE_OK})
Now = Callable[[], float]


def monotonic() -> float:
    """Return the process's clock, looked up at each call: the simulator of the front door puts another one there."""
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class Spec:
    """An instance as an operator specifies it."""

    role: Role
    origin: Origin
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.origin.netloc


def parse_specs(role: Role, text: object, weight: object = 1.0) -> list[Spec]:
    """Parse `host:port`, a URL, or either with `+16` behind its port: one endpoint on each of sixteen ports.

    Data-parallel ranks with their own servers are started like that. Raise ValueError with the text in it.
    """
    several = re.fullmatch(r"(.*:)(\d{1,5})\+(\d{1,5})/?", text) if isinstance(text, str) else None
    if several is None:
        return [parse_spec(role, text, weight)]
    head, first, count = several[1], int(several[2]), int(several[3])
    if not 1 <= count <= MAX_ENDPOINTS:
        raise ValueError(f"{role.value} instances {text!r}: {count} is not between 1 and {MAX_ENDPOINTS}")
    if first + count - 1 > LAST_PORT:
        raise ValueError(f"{role.value} instances {text!r} would end at port {first + count - 1}")
    return [parse_spec(role, f"{head}{port}", weight) for port in range(first, first + count)]


def parse_spec(role: Role, text: object, weight: object = 1.0) -> Spec:
    """Parse `host:port` or a URL. Raise ValueError with the text in it."""
    if not isinstance(text, str):
        raise ValueError(f"{role.value} instance {text!r} is not a string")
    try:
        parts = urlsplit(text if "://" in text else "http://" + text)
        port = parts.port
    except ValueError as problem:
        raise ValueError(f"{role.value} instance {text!r}: {problem}") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
        or parts.username is not None
    ):
        raise ValueError(f"{role.value} instance {text!r} is not host:port or http(s)://host:port")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError(f"{role.value} instance {text!r} has a host that is no name") from None
    if port == 0:
        raise ValueError(f"{role.value} instance {text!r} has port 0")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e6:
        raise ValueError(f"weight {weight!r} of {text} is not a positive number")
    port = port or (443 if parts.scheme == "https" else 80)
    return Spec(role, Origin(parts.scheme, parts.hostname, port), float(weight))


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """One engine as this process sees it."""

    name: str
    role: Role
    origin: Origin
    weight: float
    source: str
    circuit: Circuit
    prompts: Prompts  # that were sent to it in its present life
    clock: Now = monotonic
    cards: dict[str, msgspec.Raw] | None = None  # entries of its model list, by name; None: it was not asked yet
    answered: bool = False
    healthy: bool = False  # its last probe was good
    history: ProcessHistory = field(default_factory=ProcessHistory)
    loads: LoadRecord = field(default_factory=LoadRecord)  # as a D
    draining: bool = False
    rests_until: float = 0.0  # it refused a request
    load: float = 0.0  # tokens in flight from this process
    load_elsewhere: float = 0.0  # and from the metaserver's other processes, as last reported
    requests: int = 0  # legs in flight
    served: int = 0
    broke: int = 0
    last_error: str = ""
    last_error_at: float = 0.0  # wall clock, for the operator
    _history_of_prompts: ProcessHistory = field(default_factory=ProcessHistory)

    def __repr__(self) -> str:
        """<prefill 10.0.0.2:8100 ready, 120 tokens in 2 requests, served 7, broke 1: no connection>"""
        words = [self.condition().value]
        words += [f"{self.load:g} tokens in {self.requests} requests"] if self.requests else []
        words += [f"served {self.served}"] if self.served else []
        words += [f"broke {self.broke}: {self.last_error}"] if self.broke else []
        return f"<{self.role.value} {self.name} {', '.join(words)}>"

    @property
    def label(self) -> str:
        """Its name in metrics. Callers name P's to a sidecar as they like: all of these have one label."""
        return "named" if self.source == NAMED else self.name

    @property
    def fingerprint(self) -> str:
        """Fingerprint, which decides the engines that it can pair with; empty if it is not known now."""
        return self.history.fingerprint(self.clock())

    def cached_tokens(self, marks: Marks) -> int:
        """Return how many of a prompt's tokens are in its prefix cache, as far as is known."""
        if self._history_of_prompts is not self.history:
            if self.history.restarted_since(self._history_of_prompts):
                self.prompts.forget()
            self._history_of_prompts = self.history
        return self.prompts.has(marks)

    def sent(self, marks: Marks) -> int:
        """Note that the prompt is sent to it; return how many of its tokens were there before."""
        there = self.cached_tokens(marks)
        self.prompts.add(marks)
        return there

    def load_with(self, cost: float) -> float:
        """Return its load by weight after `cost` more tokens."""
        return (self.load + self.load_elsewhere + cost) / self.weight

    def condition(self) -> Condition:
        seen = condition(self.circuit, self.answered, self.draining)
        return Condition.SUSPECT if seen is Condition.READY and self.loads.failed else seen

    def usable(self, now: float) -> bool:
        return not self.draining and self.circuit.admits(now)

    def last_resort(self) -> bool:
        """Return whether it may serve if no other can: its circuit is open for bad answers, but its probes are good.

        A request that fails on every engine must not lock out all others.
        """
        return not self.draining and self.healthy and self.circuit.state in (CircuitState.WEDGED, CircuitState.TRIAL)

    def facts(self) -> dict[str, Any]:
        """Return what an operator sees."""
        return {
            "name": self.name,
            "role": self.role.value,
            "host": self.origin.host,
            "port": self.origin.port,
            "scheme": self.origin.scheme,
            "weight": self.weight,
            "source": self.source,
            "state": self.condition().value,
            "fingerprint": self.fingerprint,
            "models": sorted(self.cards or ()),
            "prompt_tokens_cached": self.prompts.tokens,
            "kv_events": self.prompts.reported,
            "tokens_in_flight": self.load,
            "requests": self.requests,
            "served": self.served,
            "broke": self.broke,
            "last_error": self.last_error,
            "last_error_at": self.last_error_at,
        }


@dataclass(slots=True)
class LegInFlight:
    """A request at an instance: its call, and how that ends. It is in the instance's load while entered.

    Its prompt counts until its end, and of its answer what is still expected. It is counted under its end afterwards.
    """

    instance: Instance
    trial: int  # the number of the circuit's trial that it is; 0: it is none
    prompt: float
    answer: float = 0.0  # tokens that were expected of it
    limit: int = 0  # tokens that it can have; 0: any number
    came: int = 0  # tokens that are there
    cost: float = 0.0  # its part of the load
    _weigh_at: int = _STEP
    kept: bool = False  # the trial outlives this leg, until D reports the load or is late with it
    end: LegEnd = LegEnd.CUT  # from here, unless the instance has ended it
    reply: Reply | None = None
    stopped: Exception | None = None  # why it was ended from here, before the instance had

    def __enter__(self) -> LegInFlight:
        self.instance.requests += 1
        self._weigh(self.answer)
        return self

    def __exit__(self, failure: type[BaseException] | None = None, *failed: object) -> None:
        if not self.kept:
            self.returned()
        instance = self.instance
        self.reply, end = None, LegEnd.CUT if failure is asyncio.CancelledError else self.end
        METRICS.legs.labels(instance.role.value, instance.label, end.value).inc()
        instance.requests -= 1
        instance.load = instance.load - self.cost if instance.requests else 0.0  # no drift from rounding

    def attach(self, reply: Reply) -> Reply:
        """Take its call. Who waits for the answer gets what has stopped the leg, if something has."""
        self.reply = reply
        if self.stopped is not None:
            reply.stop(self.stopped)
        return reply

    def stop(self, why: Exception) -> None:
        """End it: who waits for its answer gets `why`. An answer that is all here is one."""
        if self.reply is None or not self.reply.at_end:
            self.stopped = self.stopped or why
            if self.reply is not None:
                self.reply.stop(self.stopped)

    def check(self) -> None:
        """Raise what has stopped it, if something has."""
        if self.stopped is not None:
            raise self.stopped

    def take(self, tokens: int) -> None:
        """Note that tokens of the answer came. Of a longer one than expected, an eighth of that goes on counting."""
        self.came += tokens
        if self.came >= self._weigh_at:
            self._weigh_at = self.came + _STEP
            left = max(self.answer - self.came, self.answer / 8)
            self._weigh(max(0.0, min(left, self.limit - self.came)) if self.limit else left)

    def counts(self, prompt: float) -> None:
        """Note how many tokens the prompt really has."""
        expected, self.prompt = self.cost - self.prompt, prompt
        self._weigh(expected)

    def _weigh(self, expected: float) -> None:
        cost = self.prompt + expected
        self.instance.load += cost - self.cost
        self.cost = cost

    def refused(self) -> None:
        """Note that its engine did not take it: for a moment others are asked, if there are any."""
        self.end, self.instance.rests_until = LegEnd.REFUSED, self.instance.clock() + REST_S

    def returned(self) -> None:
        """End the trial: the request shows no more about its instance."""
        self.instance.circuit.returned(self.instance.clock(), self.trial)


Fits = Callable[[Instance], bool]


def any_instance(instance: Instance) -> bool:
    return True


def among(names: frozenset[str] | None) -> Fits:
    """Return a test for instances with one of these names; None: all."""
    return any_instance if names is None else lambda instance: instance.name in names


def both(one: Fits, other: Fits) -> Fits:
    """Return a test for instances that pass both tests."""
    if one is any_instance:
        return other
    return one if other is any_instance else lambda instance: one(instance) and other(instance)


def pairing(*fingerprints: str) -> Fits:
    """Return a test for instances that can pair with an engine of one of these fingerprints."""
    known = frozenset(fingerprints)

    def fits(instance: Instance) -> bool:
        fingerprint = instance.fingerprint
        return fingerprint in known or any(may_pair(fingerprint, one) for one in known)

    return fits


class Fleet:
    """All instances of this process.

    `lost` is called with an instance whose circuit opens, and why. `prefix_tokens`: size of each engine's prefix cache.
    `clock` and `dice` are the process's own, except in `vllm-ascend-pd plan --load`.
    """

    def __init__(
        self,
        policy: CircuitPolicy,
        lost: Callable[[Instance, str], None] = lambda instance, why: None,
        prefix_tokens: int = 0,
        clock: Now = monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._lost = lost
        self._prefix_tokens = prefix_tokens
        self._clock, self._dice = clock, dice
        self.answers = AnswerLengths()
        self.several_models = False  # not all engines list the same models
        self._models: frozenset[str] = frozenset()  # that engines list
        self._instances: dict[str, Instance] = {}
        self._proofs: dict[tuple[str, str, str, str], PairProof] = {}  # the newest for each pair of lives

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def get(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def of(self, role: Role) -> list[Instance]:
        return [i for i in self._instances.values() if i.role is role]

    # -- metrics

    def labels(self) -> frozenset[str]:
        """Return the labels in metrics of all instances, and the one of an unknown P."""
        return frozenset({"", *(instance.label for instance in self)})

    def show(self) -> None:
        """Set the gauges of all instances."""
        shown: dict[tuple[str, str], list[float]] = {}
        for instance in self:
            load, up, is_open = shown.setdefault((instance.role.value, instance.label), [0.0, 0.0, 0.0])
            up = max(up, instance.condition() in (Condition.READY, Condition.SUSPECT))
            shown[instance.role.value, instance.label] = [load + instance.load, up, is_open + instance.circuit.open]
        for labels, values in shown.items():
            for gauge, value in zip((METRICS.tokens, METRICS.up, METRICS.circuit), values, strict=True):
                gauge.labels(*labels).set(value)

    # -- membership

    def add(self, spec: Spec, source: str) -> Instance:
        """Add an instance. A known one keeps its state, takes the new weight and is no longer drained.

        Raise ValueError if the name has another role.
        """
        known = self._instances.get(spec.name)
        if known is not None and known.role is not spec.role:
            raise ValueError(f"{spec.name} is a {known.role.value} instance already")
        if known is not None and known.origin == spec.origin:
            known.weight, known.draining = spec.weight, False
            if known.source == NAMED:
                known.source = source  # an operator's from now on
            return known
        if known is not None:  # https now, or no more: another server
            self.remove(spec.name)
        circuit, prompts = Circuit(self._policy), Prompts(self._prefix_tokens)
        made = Instance(spec.name, spec.role, spec.origin, spec.weight, source, circuit, prompts, self._clock)
        self._instances[spec.name] = made
        return made

    def remove(self, name: str) -> Instance | None:
        """Remove an instance: it gets no new requests; those in flight finish on the object that they hold."""
        gone = self._instances.pop(name, None)
        if gone is not None:
            gone.draining = True
            for other in self:
                other.loads.failed.pop(name, None)
            self._compare_models()
        return gone

    def replace(self, specs: Iterable[Spec], source: str) -> None:
        """Make `specs` the instances of this source.

        Raise ValueError and change nothing if another source has one of them in the other role.
        """
        wanted = {spec.name: spec for spec in specs}
        for instance in self:
            spec = wanted.get(instance.name)
            if spec is not None and spec.role is not instance.role and instance.source != source:
                raise ValueError(
                    f"{spec.name} is named for {spec.role.value}, but is a {instance.role.value} instance by {instance.source}"
                )
        for instance in self:
            if instance.source == source and instance.name not in wanted:
                self.remove(instance.name)
        for spec in wanted.values():
            known = self._instances.get(spec.name)
            if known is None:
                self.add(spec, source)
            elif known.role is not spec.role or (known.source == source and known.origin != spec.origin):
                self.remove(spec.name)
                self.add(spec, source)
            else:
                known.weight = spec.weight  # an operator's drain outlives a reload

    # -- models

    def set_models(self, instance: Instance, cards: dict[str, msgspec.Raw]) -> None:
        """Take in an engine's model list; it is empty if the engine has none or shows none."""
        instance.cards = cards
        self._compare_models()

    def _compare_models(self) -> None:
        self._models = frozenset(name for i in self._instances.values() for name in i.cards or ())
        self.several_models = len({frozenset(i.cards) for i in self._instances.values() if i.cards}) > 1

    def prefilling(self, model: str, names: frozenset[str] | None) -> Fits:
        """Return a test for P instances that serve a request: those in `names`; if that is None, those of its model."""
        return self.serving(model) if names is None else among(names)

    def serving(self, model: str) -> Fits:
        """Return a test for instances that serve a model: those that list it, and those that list nothing when asked.

        If no instance lists it, all pass: one may have loaded the model since; any other refuses the request itself.
        """
        if model not in self._models:
            return any_instance
        return lambda instance: instance.cards is not None and (model in instance.cards or not instance.cards)

    # -- choice

    def usable(self, role: Role, fits: Fits = any_instance) -> bool:
        now = self._clock()
        return any(i.role is role and i.usable(now) and fits(i) for i in self._instances.values())

    def serves(self, role: Role) -> bool:
        """Return whether an instance that has answered once may be chosen."""
        now = self._clock()
        return any(i.answered and (i.usable(now) or i.last_resort()) for i in self.of(role))

    def another(self, role: Role, refused: Container[str], fits: Fits) -> bool:
        """Return whether an instance that fits may take a request that those in `refused` did not take."""
        now = self._clock()
        return any(i.rests_until <= now and i.usable(now) and i.name not in refused and fits(i) for i in self.of(role))

    def all_send_first(self, fits: Fits) -> bool:
        """Return whether all P instances that fit and take requests send their first tokens."""
        now = self._clock()
        usable = [i for i in self.of(Role.PREFILL) if i.usable(now) and fits(i)]
        return bool(usable) and all(i.history.sends_first for i in usable)

    def has_prefill(
        self, avoid: frozenset[str] = frozenset(), serves: Fits = any_instance, loads: bool = False
    ) -> Fits:
        """Return a test for D instances that can pair with a P that serves and takes requests and is not in `avoid`.

        `loads`: and from which their loads do not fail.
        """
        now = self._clock()
        usable = [i for i in self.of(Role.PREFILL) if i.name not in avoid and i.usable(now) and serves(i)]
        pairs = pairing(*(i.fingerprint for i in usable))

        def fits(decode: Instance) -> bool:
            if not (loads and decode.loads.failed):  # nearly always
                return pairs(decode)
            good = (p for p in usable if not decode.loads.avoids(p.name, now))
            return any(may_pair(p.fingerprint, decode.fingerprint) for p in good)

        return fits

    def avoided_by(self, decode: Instance) -> frozenset[str]:
        """Return the P's from which a D's loads fail."""
        if not decode.loads.failed:
            return frozenset()
        now = self._clock()
        return frozenset(p.name for p in self.of(Role.PREFILL) if decode.loads.avoids(p.name, now))

    def choose(
        self,
        role: Role,
        cost: float,
        avoid: frozenset[str] = frozenset(),
        fits: Fits = any_instance,
        marks: Marks = (),
    ) -> Instance | None:
        """Return the instance for `cost` more tokens, of those that fit; one in `avoid` only if there is no other.

        What an instance has in its cache of the prompt with these marks costs it nothing.
        """
        now = self._clock()
        fitting = [i for i in self.of(role) if fits(i)]
        usable = [i for i in fitting if i.usable(now)]
        usable = [i for i in usable if i.name not in avoid] or usable or [i for i in fitting if i.last_resort()]
        usable = [i for i in usable if i.rests_until <= now] or usable
        if len(usable) == 1:
            return usable[0]
        usable = [i for i in usable if i.answered] or usable
        after = {i: i.load_with(max(0.0, cost - i.cached_tokens(marks))) for i in usable}
        least = [i for i in usable if after[i] <= min(after.values())]
        return least[int(self._dice() * len(least)) % len(least)] if least else None

    def choose_decode(
        self,
        cost: float,
        tried: frozenset[str] = frozenset(),
        serves: Fits = any_instance,
        marks: Marks = (),
        prefills: Fits = any_instance,
        bad_prefills: frozenset[str] = frozenset(),
    ) -> Instance | None:
        """Return the D for a request whose prompt a P in `prefills` is to compute; one in `tried` only if need be.

        A D that a P fits comes before one that would have to prefill by itself (a rollout may have both), and one that
        loads before one that does not.
        """
        for avoid, loads in ((bad_prefills, True), (frozenset[str](), True), (bad_prefills, False)):
            has_prefill = both(serves, self.has_prefill(avoid, prefills, loads))
            fits = both(has_prefill, lambda decode: decode.name not in tried)
            good = self.choose(Role.DECODE, cost, fits=fits, marks=marks)
            if good is not None and good.usable(self._clock()):
                return good
        return self.choose(Role.DECODE, cost, tried, serves, marks)

    def choose_prefill(
        self, decode: Instance, cost: float, fits: Fits = any_instance, marks: Marks = (), bad: Iterable[str] = ()
    ) -> Instance | None:
        """Return the P for a prompt whose KV goes to a D; one from which that D's loads fail only if need be."""
        return self.choose(Role.PREFILL, cost, self.avoided_by(decode).union(bad), fits, marks)

    # -- what is proven

    def proven(self) -> list[PairProof]:
        """Return the proofs that still hold, and forget the others."""
        self._proofs = {key: proof for key, proof in self._proofs.items() if self._holds(proof)}
        return list(self._proofs.values())

    def _holds(self, proof: PairProof) -> bool:
        prefill, decode = self._instances.get(proof.prefill), self._instances.get(proof.decode)
        if prefill is None or decode is None or (prefill.role, decode.role) != (Role.PREFILL, Role.DECODE):
            return False
        return proof.holds(prefill.history, decode.history)

    def prove(self, proof: PairProof) -> None:
        """Keep the proof that KV has come, here or at another worker."""
        key = (proof.prefill, proof.prefill_incarnation, proof.decode, proof.decode_incarnation)
        known = self._proofs.get(key)
        if known is None or known.at < proof.at:
            self._proofs[key] = proof

    def merge(self, histories: Mapping[str, ProcessHistory], proofs: Iterable[PairProof]) -> None:
        """Take in what another worker knows, so that all come to know the same."""
        for name, history in histories.items():
            instance = self._instances.get(name)
            if instance is not None:
                instance.history = instance.history.merged(history)
        for proof in proofs:
            self.prove(proof)

    # -- load and evidence

    def leg(self, instance: Instance, prompt: float, answer: float = 0.0, limit: int = 0) -> LegInFlight:
        """Return the context of a request to the instance: the request counts while the context is entered.

        `prompt`, `answer`: its tokens and those expected in return; `limit`: the most that can come, if there is one.
        """
        return LegInFlight(instance, instance.circuit.sent(self._clock()), prompt, answer, limit)

    def expected(self, model: str, stream: bool, limit: int) -> float:
        """Return how many tokens an answer of a model is likely to have."""
        return self.answers.expected(self._listed(model), stream, limit)

    def answered(self, model: str, stream: bool, length: float, limit: int) -> None:
        """Take in how many tokens a model's answer had."""
        self.answers.record(self._listed(model), stream, length, limit)

    def _listed(self, model: str) -> str:
        """Return one name for all models that no engine lists: clients may invent any number."""
        return model if model in self._models else ""

    def failed(self, instance: Instance, failure: HttpFailure, why: str) -> None:
        """Note a failed request to an instance. What went wrong on our side says nothing about it."""
        if failure is not HttpFailure.OURS:
            self.record(instance, Evidence.UNREACHED if failure is HttpFailure.CONNECT else Evidence.BROKE, why)

    def load_failed(self, decode: Instance, prefill: str, asked: float, why: str, canaries: bool) -> None:
        """Note that a D's load of a request from the time `asked` failed, of which one of the two is to blame."""
        decode.loads.fail(prefill, asked, self._clock(), self._dice(), canaries)
        decode.last_error = f"its load from {prefill or 'any prefill instance'} failed: {why}"
        decode.last_error_at = time.time()

    def record(self, instance: Instance, evidence: Evidence, why: str = "") -> None:
        """Take in evidence about an instance: its circuit moves."""
        was_open = instance.circuit.open
        instance.circuit.record(self._clock(), evidence, self._dice())
        if evidence in _GOOD:
            instance.answered = True
        else:
            instance.last_error, instance.last_error_at = why, time.time()
        if evidence is Evidence.PROBE_OK:
            instance.healthy = True
        elif evidence in (Evidence.PROBE_FAILED, Evidence.UNREACHED):
            instance.healthy = False
        instance.served += evidence is Evidence.SERVED
        instance.broke += evidence in (Evidence.BROKE, Evidence.UNREACHED)
        if instance.circuit.open and not was_open:
            state = "takes no requests" if instance.answered else "has not answered yet"
            log.warning("%s %s %s: %s", instance.role.value, instance.name, state, why)
            if instance.answered:
                self._lost(instance, why)
        elif was_open and not instance.circuit.open:
            log.info("%s %s takes requests again", instance.role.value, instance.name)
