# SPDX-License-Identifier: Apache-2.0
"""What P remembers of a push: the order, its pairs, and what of each is owed, out and covered."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import Done, Failed, LayerAddresses
from vllm_ascend_pd.protocol.tables import PairState
from vllm_ascend_pd.protocol.timing import Backoff

MAX_SENT = 128  # BEGINs whose sending time is remembered; older ones could not extend anything


@dataclass(frozen=True, slots=True)
class Destination:
    """One D rank of a push, and what was agreed about it from the two geometries."""

    d_rank: int
    peer: Hashable
    contributors: tuple[Contributor, ...]
    plan_digest: str
    layers: int  # of D, and regions of each: what the addresses in READY must be of
    regions: int

    def fits(self, addresses: LayerAddresses) -> bool:
        """Whether every address that a plan may ask for is there."""
        return len(addresses.bases) == self.layers and all(len(base) == self.regions for base in addresses.bases)


@dataclass(frozen=True, slots=True)
class PushOrder:
    """The source and the reservation have met: what this P rank shall push, where, until when."""

    push: str
    transfer: TransferId
    deadline_s: float
    tokens: int
    layers: int
    destinations: tuple[Destination, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit that may be written now. It counts as out until `wrote` or `returned`."""

    push: str
    d_rank: int
    unit: Hashable
    epoch: int


@dataclass(slots=True)
class Coverage:
    """The units of one pair in one epoch."""

    pending: dict[Hashable, int] = field(default_factory=dict)  # in the order offered
    out: dict[Hashable, int] = field(default_factory=dict)
    covered: set[Hashable] = field(default_factory=set)
    nbytes: int = 0
    checksums: dict[str, int] = field(default_factory=dict)

    def knows(self, unit: Hashable) -> bool:
        return unit in self.pending or unit in self.out or unit in self.covered

    @property
    def complete(self) -> bool:
        return not self.pending and not self.out


@dataclass(slots=True)
class Pair:
    """One push towards one D rank."""

    push: Push
    destination: Destination
    begin: Backoff
    ready_by: float
    state: PairState = PairState.UNATTACHED
    seq: int = 0
    sent: dict[int, float] = field(default_factory=dict)  # BEGIN's seq -> when it was sent
    authority: float | None = None
    addresses: LayerAddresses | None = None
    layout: str = ""
    coverage: Coverage = field(default_factory=Coverage)
    owing: bool = False  # units may have been ignored, or their source overwritten: DONE would be a lie
    quiet_at: float = 0.0  # on the running clock: when the last lost write has settled
    said: Done | Failed | None = None  # repeated until acknowledged or `speak_until`
    acknowledged: bool = False
    speak: Backoff | None = None
    speak_until: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return (self.push.order.push, self.destination.d_rank)

    @property
    def speaking(self) -> bool:
        return self.said is not None and not self.acknowledged

    def sent_begin(self, seq: int, now: float) -> None:
        self.sent[seq] = now
        while len(self.sent) > MAX_SENT:
            del self.sent[next(iter(self.sent))]


@dataclass(slots=True)
class Push:
    order: PushOrder
    deadline: float
    progress: float  # when coverage last moved
    pairs: dict[int, Pair] = field(default_factory=dict)
    epoch: int = 0
    sealed: bool = False
    failure: tuple[str, str] | None = None
    closed: bool = False

    @property
    def delivered(self) -> bool:
        return all(isinstance(pair.said, Done) for pair in self.pairs.values())
