# SPDX-License-Identifier: Apache-2.0
"""D's record of a transfer: its reservation, and the state of each contributor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import Begin, Checksum, Done, Failed, Renew
from vllm_ascend_pd.protocol.states import ReservationState, WriterEvent, WriterState
from vllm_ascend_pd.protocol.timing import Repetition


def _writer() -> dict[WriterState, dict[WriterEvent, WriterState]]:
    s, e = WriterState, WriterEvent
    return {
        s.AWAITED: {e.GRANTED: s.LEASED, e.ANSWER: s.AWAITED},
        s.LEASED: {
            e.GRANTED: s.LEASED,
            e.DONE: s.DONE,
            e.ANSWER: s.ANSWERED,
            e.PROVEN: s.QUIET,
            e.REVOKED: s.QUIET,
        },
        s.ANSWERED: {e.DONE: s.DONE, e.ANSWER: s.ANSWERED, e.PROVEN: s.QUIET, e.REVOKED: s.QUIET},
        s.DONE: {e.ANSWER: s.DONE},
        s.QUIET: {e.ANSWER: s.QUIET},
    }


WRITER_TABLE: Mapping[WriterState, Mapping[WriterEvent, WriterState]] = _writer()


@dataclass(slots=True, repr=False)
class WriterRecord:
    """One contributor of one transfer, as D sees it. `lapse_at` and `landed_at` are on the running clock."""

    contributor: Contributor
    state: WriterState = WriterState.AWAITED
    peer: Hashable = None
    granted: Begin | None = None  # the newest BEGIN that was answered with READY
    seq: int = 0  # of that, or of the newest RENEW
    quiet_s: float = 0.0
    lapse_at: float = 0.0
    landed_at: float = 0.0
    read_at: float = 0.0  # as `Fence.input_drained_at`: when all that it sent before its answer has been read
    checksums: tuple[Checksum, ...] = ()
    cancel: Repetition | None = None  # CANCEL is repeated while this is set and the writer leased

    def __repr__(self) -> str:
        """<Writer P0.1 leased, asked 3 of prefill-2, lapses at 20.0, held until 60.1>"""
        words = f"{self.contributor} {self.state.value}"
        if self.granted is not None:
            words += f", asked {self.seq} of {self.p_incarnation[:16]}"
        if self.waited_for:
            words += f", lapses at {self.lapse_at:.1f}, held until {self.landed_at:.1f}"
        return f"<Writer {words}>"

    @property
    def p_incarnation(self) -> str:
        return self.granted.p_incarnation if self.granted else ""

    @property
    def waited_for(self) -> bool:
        """True if a write of it may still land."""
        return self.state in (WriterState.LEASED, WriterState.ANSWERED)

    @property
    def cancel_at(self) -> float | None:
        """Time of the next CANCEL; None if there is none."""
        return self.cancel.at if self.cancel is not None and self.state is WriterState.LEASED else None

    def on(self, event: WriterEvent) -> None:
        into = WRITER_TABLE[self.state].get(event)
        if into is None:
            raise LocalProtocolError(f"{event.value} of {self!r}")
        self.state = into


@dataclass(slots=True, repr=False)
class Transfer:
    """One reservation on this rank."""

    transfer: TransferId
    state: ReservationState
    first: int = 0
    end: int = 0
    deadline: float | None = None
    settle_at: float | None = None  # set when prefill has ended well: fail if a contributor has not begun by then
    push: str = ""  # bound by the first BEGIN that is granted
    plan_digest: str = ""
    contributors: str = ""  # hash of the set, as BEGIN has it
    pushed: frozenset[str] = frozenset()  # names of the layers that P pushes
    writers: dict[Contributor, WriterRecord] = field(default_factory=dict)
    cached: int = 0  # tokens of the prompt that P did not compute, by its report
    failure: Failure | None = None

    def __repr__(self) -> str:
        """<Transfer decode-1/7/uuid-7 open, tokens [0, 40), push-1: P0.0 leased, P0.1 awaited>"""
        words = f"{self.transfer} {self.state.value}, tokens [{self.first}, {self.end})"
        if self.bound:
            writers = ", ".join(f"{writer.contributor} {writer.state.value}" for writer in self.writers.values())
            words += f", {self.push}: {writers}"
        return f"<Transfer {words}{f', failed: {self.failure}' if self.failure else ''}>"

    @property
    def bound(self) -> bool:
        """True if it is bound to one push, with its plan and its contributors."""
        return bool(self.writers)

    @property
    def expires(self) -> float | None:
        """Time at which to give up.

        A push that has begun on all its ranks renews its leases, so it has until the deadline. Else it has until
        `settle_at`, if prefill has ended.
        """
        if self.deadline is None or self.settle_at is None:
            return self.deadline
        begun = self.bound and all(writer.state is not WriterState.AWAITED for writer in self.writers.values())
        return self.deadline if begun else min(self.deadline, self.settle_at)

    def leased(self) -> list[WriterRecord]:
        """Return the writers that have to be waited for."""
        return [writer for writer in self.writers.values() if writer.waited_for]

    def author(self, message: Begin | Renew | Done | Failed) -> WriterRecord:
        """Return the contributor that sent a message."""
        return self.writers[message.contributor]
