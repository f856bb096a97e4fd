# SPDX-License-Identifier: Apache-2.0
"""P's record of a push: its order, its pairs, and each pair's units: pending, out (being written) and covered."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import Done, Failed, Memory, message_name
from vllm_ascend_pd.protocol.states import PairState
from vllm_ascend_pd.protocol.timing import Repetition

OPEN = (PairState.ASK, PairState.PUSH)  # D may still give or withdraw authority
MAX_SENT = 128  # BEGINs and RENEWs whose sending time is kept; older ones could not extend anything


@dataclass(frozen=True, slots=True)
class Destination:
    """One D worker of a push, and what follows for it from the two geometries."""

    d_rank: int
    peer: Hashable
    contributors: tuple[Contributor, ...]
    plan_digest: str
    regions: tuple[int, ...]  # number of regions of each layer of its stage; the addresses in READY must match
    groups: int = 1  # of D; the addresses in READY have a number of blocks for each

    def fits(self, addresses: Memory) -> bool:
        """Return whether every address that a plan may ask for is there."""
        return addresses.counts == self.regions and len(addresses.blocks) == self.groups


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit that may be written now. It counts as out until `wrote` or `returned`."""

    push: str
    d_rank: int
    unit: Hashable
    epoch: int


@dataclass(frozen=True, slots=True)
class ComputedUnit:
    """A unit that is computed."""

    unit: Hashable
    nbytes: int


@dataclass(slots=True)
class Coverage:
    """The units of one pair in one epoch."""

    pending: dict[Hashable, int] = field(default_factory=dict)  # in the order offered
    out: dict[Hashable, int] = field(default_factory=dict)
    covered: set[Hashable] = field(default_factory=set)
    nbytes: int = 0
    checksums: dict[tuple[int, int], int] = field(default_factory=dict)  # by layer and component

    def knows(self, unit: Hashable) -> bool:
        return unit in self.pending or unit in self.out or unit in self.covered

    def owe(self, unit: Hashable) -> None:
        """Return a unit from out to pending: it has not been written."""
        self.pending[unit] = self.out.pop(unit)


@dataclass(slots=True, repr=False, eq=False)
class PairRecord:
    """One push towards one D rank."""

    push: PushRecord
    destination: Destination
    begin: Repetition
    ready_by: float
    state: PairState = PairState.UNATTACHED
    seq: int = 0
    sent: dict[int, float] = field(default_factory=dict)  # seq of a BEGIN or RENEW -> when it was sent
    authority: float | None = None
    addresses: Memory | None = None
    memory: str = ""  # the name of `addresses`
    asked_which: bool = False  # D did not know our layout
    coverage: Coverage = field(default_factory=Coverage)
    owing: bool = False  # units may have been ignored, or their source overwritten: DONE would be wrong
    quiet_at: float = 0.0  # on the running clock: when the last lost write has settled
    final: Done | Failed | None = None  # repeated until acknowledged or `resend_until`
    acknowledged: bool = False
    resend: Repetition | None = None
    resend_until: float = 0.0
    key: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.push.name, self.destination.d_rank)

    def __repr__(self) -> str:
        """<Pair push-1 to D0 at d0: push until 14.97, units: 2 pending, 1 out, 5 covered; sends DONE, …>"""
        push, units = self.push.name, self.coverage
        until = "" if self.authority is None else f" until {self.authority:.2f}"
        words = f"{push} to D{self.destination.d_rank} at {self.destination.peer}: {self.state.value}{until}"
        words += f", units: {len(units.pending)} pending, {len(units.out)} out, {len(units.covered)} covered"
        if self.final is not None:
            words += f"; sends {message_name(self.final).upper()}, {'' if self.acknowledged else 'not '}acknowledged"
        return f"<Pair {words}>"

    @property
    def due(self) -> float | None:
        """Latest time for the next look at it, on the wall clock."""
        at = None
        if self.state in OPEN:
            at = min(self.begin.at, self.ready_by if self.authority is None else self.authority)
        if self.resend is not None and self.resending:
            at = self.resend.at if at is None else min(at, self.resend.at)
        return at

    @property
    def resending(self) -> bool:
        return self.final is not None and not self.acknowledged

    @property
    def complete(self) -> bool:
        """True if every unit was offered and has landed."""
        return self.push.sealed and not self.coverage.pending and not self.coverage.out

    def authorised(self, now: float) -> bool:
        return self.authority is not None and now < self.authority

    def sent_begin(self, seq: int, now: float) -> None:
        self.sent[seq] = now
        while len(self.sent) > MAX_SENT:
            del self.sent[next(iter(self.sent))]


@dataclass(slots=True, repr=False, eq=False, kw_only=True)
class PushRecord:
    """One push of a P worker, from its order to its end. The worker adds what it plans and stages (`Push`)."""

    name: str
    transfer: TransferId
    deadline_s: float
    destinations: tuple[Destination, ...]
    cached: int = 0  # tokens of the prompt that P did not compute
    opened: float = 0.0
    progress: float = 0.0  # when it last made progress
    pairs: dict[int, PairRecord] = field(default_factory=dict)  # by D worker, from `Sender.open` on
    epoch: int = 0
    sealed: bool = False
    failure: Failure | None = None
    closed: bool = False  # no write of it is in flight, and none will be

    def __repr__(self) -> str:
        """<Push push-1 of decode-1/7/uuid-7, sealed, failed: PD-XFER-002 left; D0 drain 3 out, D1 closed>"""
        pairs = [
            f"D{rank} {pair.state.value}" + (f" {len(pair.coverage.out)} out" if pair.coverage.out else "")
            for rank, pair in self.pairs.items()
        ]
        words = ", ".join([f"{self.name} of {self.transfer}", *self.words()])
        return f"<Push {words}; {', '.join(pairs) or 'goes nowhere'}>"

    def words(self) -> list[str]:
        """Return how far it is, for its representation."""
        words = [f"epoch {self.epoch}"] if self.epoch else []
        words += ["sealed"] if self.sealed else []
        return words + ([f"failed: {self.failure}"] if self.failure else [])

    @property
    def deadline(self) -> float:
        return self.opened + self.deadline_s

    @property
    def out(self) -> int:
        """Number of writes in flight, or claimed."""
        return sum(len(pair.coverage.out) for pair in self.pairs.values())

    @property
    def live(self) -> bool:
        """True until it has closed or failed: what is computed or exchanged for it is needed."""
        return not self.closed and self.failure is None

    @property
    def cause(self) -> Failure:
        """Failure to report of a push that was not delivered."""
        return self.failure or Failure("PD-XFER-002", "unknown")

    @property
    def delivered(self) -> bool:
        return all(isinstance(pair.final, Done) for pair in self.pairs.values())
