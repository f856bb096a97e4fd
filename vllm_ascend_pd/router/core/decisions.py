# SPDX-License-Identifier: Apache-2.0
"""Decisions of the metaserver, without side effects: which instance, whether and when to retry, which circuit is open.

Pure: time and randomness are arguments, nothing here waits or sends. The service carries out what is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from vllm_ascend_pd.protocol.identity import dp_rank_of
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import NOT_EXECUTED, HttpFailure

# ---- retries --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RetryBudget:
    """Limit of repeated work over all requests: each request adds `share`, each repetition of executed work takes 1."""

    share: float = 0.2
    max_tokens: float = 200.0
    tokens: float = 200.0

    def request(self) -> None:
        self.tokens = min(self.max_tokens, self.tokens + self.share)

    def take(self) -> bool:
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


_USUAL = Backoff(0.05, 2.0)
_WEDGED = Backoff(1.0, 30.0, floor=0.8)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    attempts: int = 3
    backoff: Backoff = _USUAL

    def retry_delay(
        self, failure: HttpFailure, attempt: int, repeatable: bool, budget: RetryBudget, rand: float
    ) -> float | None:
        """Return the delay before attempt number `attempt` + 1, or None if there is to be none.

        `repeatable`: to do it twice does no harm (a generation does none; other routes may). Work that surely was not
        executed is repeated without a charge to the budget.
        """
        if attempt >= self.attempts:
            return None
        if failure not in NOT_EXECUTED and not (repeatable and budget.take()):
            return None
        return self.backoff.delay(attempt, rand)


# ---- blame for failures ---------------------------------------------------------------------------------------


# D's codes for KV that did not come, and what P's status says then: they count against P's circuit. Nothing counts
# against D's circuit: D may answer well. That D is to blame shows when its loads from several P's fail (`LoadRecord`).
AGAINST_PREFILL = {
    "PD-XFER-001": "not all KV came before D's deadline",
    "PD-XFER-004": "P's process or its lease was gone in the middle of a push",
    "PD-XFER-006": "P's own ranks could not exchange what they were to push",
}
# Codes that count against D's loads from that P: those above, and what lies with one of the two or between them, or on
# D's way to the metaserver. All others are the request's or the metaserver's, or were counted where it happened.
AGAINST_PAIR = frozenset(AGAINST_PREFILL) | {
    *("PD-XFER-003", "PD-XFER-005", "PD-WIRE-003", "PD-WIRE-004", "PD-WIRE-005", "PD-GEO-001"),
    *("PD-CTRL-002", "PD-CTRL-003", "PD-CTRL-004", "PD-SEC-003", "PD-META-001", "PD-META-002"),
}


@dataclass(slots=True)
class FailedLoads:
    """Loads of one D from one P that failed in a row."""

    times: int = 0
    at: float = 0.0  # when the last one was reported
    until: float = 0.0  # no request tries the pair before, if another can be asked; infinite: a canary does


class LoadRecord:
    """A D's loads, as it reports them. A P from which one failed is avoided by this D until one has been received.

    So are all P's if loads from several failed with none received in between: then D is to blame. Canaries try what is
    avoided; where there are none, one request does, at growing intervals.
    """

    def __init__(self) -> None:
        self.failed: dict[str, FailedLoads] = {}  # by P; "": D has not even asked for one
        self._received = 0.0

    def fail(self, prefill: str, asked: float, now: float, rand: float, canaries: bool) -> None:
        """Take in a failed load of a request from the time `asked`. Those that were under way together count once."""
        known = self.failed.setdefault(prefill, FailedLoads())
        known.times += asked >= known.at
        known.at, known.until = now, math.inf if canaries else now + _WEDGED.delay(known.times, rand)

    def receive(self, prefill: str, now: float) -> None:
        self._received = now
        self.failed.pop(prefill, None)
        self.failed.pop("", None)

    def tried(self, prefill: str, now: float, rand: float) -> None:
        """Note that a request goes out over a pair: if that was avoided until now, others wait for its result."""
        known = self.failed.get(prefill)
        if known is not None and known.until < math.inf:
            known.until = now + _WEDGED.delay(known.times, rand)

    def avoids(self, prefill: str, now: float) -> bool:
        """Return whether another P, or another D, is to be asked."""
        since = [name for name, known in self.failed.items() if now < known.until and known.at > self._received]
        return len(since) > 1 or "" in since or (prefill in self.failed and now < self.failed[prefill].until)

    def broken(self, prefill: str, threshold: int) -> bool:
        """Return whether so many loads from a P failed in a row that what was proven of the two is void."""
        return prefill in self.failed and self.failed[prefill].times >= threshold


PRINT_S = 120.0  # a fingerprint is believed so long, counted from the request whose answer had it
MAX_RANKS = 1024  # behind one address whose statements are kept: a faulty engine may invent more


class Statement(NamedTuple):
    """A process's statement about itself, in answer to a request made at `at`."""

    incarnation: str
    at: float
    fingerprint: str = ""  # decides which engines it can pair with
    sends_first: bool = False  # as P it sends its first token to a D that asks


def _newest(words: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return the last statement of each rank, sorted; of two with the same time the later one in `words`.

    Of too many ranks the newest are kept. A statement without a fingerprint is another engine's, for example D's on its
    P: the process keeps what it said itself, with the new time.
    """
    described = {word.incarnation: word for word in words if word.fingerprint}
    of_rank = {dp_rank_of(word.incarnation): word for word in sorted(words, key=lambda word: word.at)}
    newest = sorted(of_rank.values(), key=lambda word: word.at)[-MAX_RANKS:]
    statements = (w if w.fingerprint else described.get(w.incarnation, w)._replace(at=w.at) for w in newest)
    return tuple(sorted(statements))


@dataclass(frozen=True, slots=True)
class ProcessHistory:
    """Statements of the processes behind an address: with data parallelism there are several, one for each rank.

    A statement has the time of the request, not of the answer. So statements, also those that other workers pass on,
    have the same effect in any order of arrival.
    """

    statements: tuple[Statement, ...] = ()  # the last statement of each rank, sorted
    refused: float = 0.0  # when the address last refused a connection
    fingerprinted: Statement | None = field(init=False, compare=False)  # the last one with a fingerprint since then

    def __post_init__(self) -> None:
        known = [word for word in self.statements if word.fingerprint and word.at > self.refused]
        object.__setattr__(self, "fingerprinted", max(known, key=lambda word: word.at, default=None))

    def fingerprint(self, now: float) -> str:
        """Return its fingerprint; empty if it is not known, or too old.

        An engine that does not fit gets no requests, so it cannot report a new version. Behind an address that never
        refuses a connection only this expiry makes it eligible again.
        """
        last = self.fingerprinted
        return last.fingerprint if last is not None and now < last.at + PRINT_S else ""

    @property
    def sends_first(self) -> bool:
        """True if it is a P that sends its first tokens, by its last statement.

        A P that was restarted with another setting refuses a request for its first token, which shows the change.
        """
        return self.fingerprinted is not None and self.fingerprinted.sends_first

    @classmethod
    def of(cls, statements: Iterable[Sequence[Any]], refused: float) -> ProcessHistory:
        """Return what another worker of this metaserver sent (`as_sent`)."""
        return cls(tuple(Statement(*word) for word in statements), refused)

    def reported(self, incarnation: str, at: float, fingerprint: str = "", sends_first: bool = False) -> ProcessHistory:
        """Return it with a statement of a process that was asked at `at`, from an answer, a reservation or a report."""
        if not incarnation:
            return self
        return replace(
            self, statements=_newest((*self.statements, Statement(incarnation, at, fingerprint, sends_first)))
        )

    def refuses(self, at: float) -> ProcessHistory:
        """Return it with a refused connection: the process has ended, or is about to."""
        return replace(self, refused=max(self.refused, at))

    def merged(self, other: ProcessHistory) -> ProcessHistory:
        """Return it with what another worker knows."""
        if other.statements == self.statements and other.refused <= self.refused:  # nearly always
            return self
        return replace(self.refuses(other.refused), statements=_newest((*self.statements, *other.statements)))

    def may_be(self, incarnation: str, at: float) -> bool:
        """Return whether the process that was asked at `at` may still be there. A slow one is still the same one."""
        known = self._of(incarnation)
        return at > self.refused and (known is None or incarnation == known.incarnation or at > known.at)

    def restarted_since(self, before: ProcessHistory) -> bool:
        """Return whether a process known in `before` is known to be gone, and its cache with it."""
        now = {dp_rank_of(word.incarnation): word.incarnation for word in self.statements}
        replaced = (now.get(dp_rank_of(w.incarnation), w.incarnation) != w.incarnation for w in before.statements)
        return self.refused > before.refused or any(replaced)

    def as_sent(self) -> tuple[tuple[Statement, ...], float]:
        """Return the arguments of `of`."""
        return self.statements, self.refused

    def _of(self, incarnation: str) -> Statement | None:
        """Return the last statement of this incarnation's rank."""
        rank = dp_rank_of(incarnation)
        return next((one for one in self.statements if dp_rank_of(one.incarnation) == rank), None)


@dataclass(frozen=True, slots=True)
class PairProof:
    """Proof that KV came from this P to this D, in these incarnations, for a request of the time `at`."""

    prefill: str
    prefill_incarnation: str
    decode: str
    decode_incarnation: str
    at: float

    def holds(self, prefill: ProcessHistory, decode: ProcessHistory) -> bool:
        return prefill.may_be(self.prefill_incarnation, self.at) and decode.may_be(self.decode_incarnation, self.at)


# ---- circuits -------------------------------------------------------------------------------------------------


class CircuitState(Enum):
    CLOSED = "closed"  # requests flow
    UNREACHABLE = "unreachable"  # no connection, or a bad /health: only a good probe closes it
    WEDGED = "wedged"  # requests failed although it answers: only a good request closes it
    TRIAL = "trial"  # wedged before; one request is in flight as a test


class Evidence(Enum):
    """Observation of an instance, by its own traffic or by a probe."""

    SERVED = "served"
    BROKE = "broke"  # a request reached it and failed
    UNREACHED = "unreached"  # no connection
    PROBE_OK = "probe ok"
    PROBE_FAILED = "probe failed"


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    threshold: int = 3  # consecutive failures that open it
    wedged: Backoff = _WEDGED  # from opening to the first trial, and while trials fail


class _CircuitStep(Enum):
    CALM = "forget all failures"
    REACHED = "forget that it was out of reach"
    COUNT_BROKE = "one more bad end; enough of them: wedged"
    COUNT_UNREACHED = "one more miss; enough of them: unreachable"
    CLOSE = "closed"
    WEDGE = "wedged, for longer than before"
    LOSE = "unreachable"
    STAY = "nothing"


# A wedged engine can still serve /health: a good probe does not close what requests have opened.
CIRCUIT: dict[CircuitState, dict[Evidence, _CircuitStep]] = {
    CircuitState.CLOSED: {
        Evidence.SERVED: _CircuitStep.CALM,
        Evidence.BROKE: _CircuitStep.COUNT_BROKE,
        Evidence.UNREACHED: _CircuitStep.COUNT_UNREACHED,
        Evidence.PROBE_OK: _CircuitStep.REACHED,
        Evidence.PROBE_FAILED: _CircuitStep.COUNT_UNREACHED,
    },
    CircuitState.UNREACHABLE: {
        Evidence.SERVED: _CircuitStep.CLOSE,
        Evidence.BROKE: _CircuitStep.STAY,
        Evidence.UNREACHED: _CircuitStep.STAY,
        Evidence.PROBE_OK: _CircuitStep.CLOSE,
        Evidence.PROBE_FAILED: _CircuitStep.STAY,
    },
    CircuitState.WEDGED: {
        Evidence.SERVED: _CircuitStep.CLOSE,
        Evidence.BROKE: _CircuitStep.STAY,
        Evidence.UNREACHED: _CircuitStep.LOSE,
        Evidence.PROBE_OK: _CircuitStep.STAY,
        Evidence.PROBE_FAILED: _CircuitStep.LOSE,
    },
    CircuitState.TRIAL: {
        Evidence.SERVED: _CircuitStep.CLOSE,
        Evidence.BROKE: _CircuitStep.WEDGE,
        Evidence.UNREACHED: _CircuitStep.LOSE,
        Evidence.PROBE_OK: _CircuitStep.STAY,
        Evidence.PROBE_FAILED: _CircuitStep.LOSE,
    },
}


@dataclass(slots=True)
class Circuit:
    """Circuit breaker: keeps requests away from an instance that fails, and finds out when it works again."""

    policy: CircuitPolicy = CircuitPolicy()
    state: CircuitState = CircuitState.CLOSED
    broke: int = 0  # consecutive
    unreached: int = 0  # consecutive
    trips: int = 0  # times wedged since it last served
    until: float = 0.0  # no trial before
    trials: int = 0  # begun so far

    @property
    def failures(self) -> int:
        return self.broke + self.unreached

    @property
    def open(self) -> bool:
        return self.state in (CircuitState.UNREACHABLE, CircuitState.WEDGED)

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent; if one is sent, `sent` must be called."""
        if self.state is CircuitState.WEDGED:
            return now >= self.until
        return self.state is CircuitState.CLOSED

    def sent(self, now: float) -> int:
        """Note that a request goes out. Return the trial's number, 0 if it is no trial.

        The request to a wedged instance is a trial: no other request goes out until it has ended.
        """
        if self.state is not CircuitState.WEDGED or now < self.until:
            return 0
        self.state = CircuitState.TRIAL
        self.trials += 1
        return self.trials

    def returned(self, now: float, trial: int) -> None:
        """Note that a request is over. A trial that ended without evidence (its client left) makes room for another."""
        if self.state is CircuitState.TRIAL and trial == self.trials:
            self.state, self.until = CircuitState.WEDGED, now

    def record(self, now: float, evidence: Evidence, rand: float) -> None:
        step = CIRCUIT[self.state][evidence]
        if step is _CircuitStep.REACHED:
            self.unreached = 0
        elif step in (_CircuitStep.CALM, _CircuitStep.CLOSE):
            self.state, self.broke, self.unreached = CircuitState.CLOSED, 0, 0
            self.trips = 0 if evidence is Evidence.SERVED else self.trips
        elif step is _CircuitStep.COUNT_BROKE:
            self.broke += 1
            if self.broke >= self.policy.threshold:
                self._wedge(now, rand)
        elif step is _CircuitStep.COUNT_UNREACHED:
            self.unreached += 1
            if self.unreached >= self.policy.threshold:
                self.state = CircuitState.UNREACHABLE
        elif step is _CircuitStep.WEDGE:
            self._wedge(now, rand)
        elif step is _CircuitStep.LOSE:
            self.state = CircuitState.UNREACHABLE

    def _wedge(self, now: float, rand: float) -> None:
        self.trips += 1
        self.state, self.until = CircuitState.WEDGED, now + self.policy.wedged.delay(self.trips, rand)


# ---- choosing -------------------------------------------------------------------------------------------------


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Condition(Enum):
    """State of an instance as operators see it."""

    STARTING = "starting"  # never answered yet
    READY = "ready"
    DRAINING = "draining"  # takes nothing new, finishes what it has
    SUSPECT = "suspect"  # failures lately, or on trial
    DOWN = "down"  # circuit open


def condition(circuit: Circuit, answered: bool, draining: bool) -> Condition:
    if draining:
        return Condition.DRAINING
    if circuit.open:
        return Condition.DOWN if answered or circuit.state is CircuitState.WEDGED else Condition.STARTING
    if not answered:
        return Condition.STARTING
    return Condition.SUSPECT if circuit.failures or circuit.state is CircuitState.TRIAL else Condition.READY


class AnswerLengths:
    """Tokens of a model's answers as they were seen, a moving mean. Streams are counted apart, in events."""

    FIRST = 256.0  # expected of a model that has not answered yet
    _WEIGHT = 1 / 32  # of the newest answer

    def __init__(self) -> None:
        self.means: dict[tuple[str, bool], float] = {}

    def expected(self, model: str, stream: bool, limit: int) -> float:
        """Return the tokens to expect. `limit`: the request's own; 0: none."""
        mean = self.means.get((model, stream), self.FIRST)
        return min(mean, limit) if limit else mean

    def record(self, model: str, stream: bool, length: float, limit: int) -> None:
        """Take in a whole answer. One that its limit ended says only that it would have been longer."""
        mean = self.means.get((model, stream), self.FIRST)
        if not limit or length < limit or length > mean:
            self.means[model, stream] = mean + (length - mean) * self._WEIGHT


# ---- admission ------------------------------------------------------------------------------------------------


class Admission(Enum):
    NOW = "now"
    QUEUE = "queue"
    OVERLOADED = "overloaded"


@dataclass(slots=True)
class Gatekeeper:
    """Limits of requests that run at once and that may wait; any more are refused."""

    max_running: int = 4096
    max_waiting: int = 4096
    running: int = 0
    waiting: int = field(default=0)

    def ask(self) -> Admission:
        if self.running < self.max_running:
            self.running += 1
            return Admission.NOW
        if self.waiting < self.max_waiting:
            self.waiting += 1
            return Admission.QUEUE
        return Admission.OVERLOADED

    def leave(self) -> bool:
        """Note that a request has ended. Return True if its place goes to the one that waited longest."""
        if self.waiting:
            self.waiting -= 1
            return True
        self.running -= 1
        return False

    def give_up(self) -> None:
        """Note that a waiting request has left."""
        self.waiting -= 1
