# SPDX-License-Identifier: Apache-2.0
"""D: evidence that a contributor is quiet, which means that nothing of it can land any more.

Time alone frees nothing: a writer that was stopped in the middle of a write finishes it when it continues. A silent
contributor is quiet when its process is known to be gone, timer H has passed since its last READY, and everything that
it may have written up to its end has had the time to land; or when access was revoked.

A contributor that says that it is quiet is believed. If this process was stopped a moment ago, it first has to run for
a while: what the contributor sent before its answer may still wait in local buffers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.protocol.messages import Begin, Renew
from vllm_ascend_pd.protocol.states import WriterEvent, WriterState
from vllm_ascend_pd.protocol.timing import RunningClock, landed_s, lapse_s, settled_s
from vllm_ascend_pd.protocol.transfer import WriterRecord

MAX_GONE = 4096


@dataclass(slots=True)
class Fence:
    """The running clock, the timers of leases that count on it, and the processes that are gone."""

    timers: Timers
    quiet_s: float
    clock: RunningClock = field(default_factory=RunningClock)
    revoking: bool = False
    input_drained_at: float = 0.0  # running time without stops: when the input of the last stop has been read
    _gone: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def observe(self, now: float) -> None:
        if self.clock.observe(now):
            self.input_drained_at = self.clock.seconds - self.clock.stopped + self.timers.margin_s

    def lease(self, writer: WriterRecord, asked: Begin | Renew) -> None:
        """Start the lease of a writer, and timer H: a READY leaves now."""
        writer.on(WriterEvent.GRANTED)
        writer.seq = asked.seq
        if isinstance(asked, Begin):
            writer.granted, writer.quiet_s = asked, max(self.quiet_s, asked.quiet_s)
        lease_s, margin_s = self.timers.lease_s, self.timers.margin_s
        writer.lapse_at = self.clock.seconds + lapse_s(lease_s, margin_s)
        writer.landed_at = self.clock.seconds + landed_s(lease_s, writer.quiet_s, margin_s)

    def answered(self, writer: WriterRecord) -> None:
        """Record that a writer says that it is quiet.

        Stops of this process after the first such answer do not prolong the wait. Else a process that is stopped again
        and again would never believe an answer.
        """
        if writer.state is not WriterState.ANSWERED:
            writer.read_at = self.input_drained_at
        writer.on(WriterEvent.ANSWER)

    def gone(self, p_incarnation: str) -> None:
        self._gone.setdefault(p_incarnation, self.clock.seconds)
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)  # forgetting one may cost a revocation, never a wrong write

    def back(self, p_incarnation: str) -> None:
        self._gone.pop(p_incarnation, None)

    def is_gone(self, p_incarnation: str) -> bool:
        return p_incarnation in self._gone

    def lapsed(self, writer: WriterRecord) -> bool:
        return writer.state is WriterState.LEASED and self.clock.seconds >= writer.lapse_at

    def proven_at(self, writer: WriterRecord) -> float | None:
        """Return when, on the running clock, this writer is proven quiet; None if nothing known proves it."""
        if writer.state is WriterState.ANSWERED:
            return writer.read_at + self.clock.stopped
        gone_at = self._gone.get(writer.p_incarnation)
        if gone_at is None:
            return None
        return max(writer.landed_at, gone_at + settled_s(writer.quiet_s))

    def proven(self, writer: WriterRecord) -> bool:
        proven_at = self.proven_at(writer)
        return proven_at is not None and self.clock.seconds >= proven_at

    def must_revoke(self, writer: WriterRecord) -> bool:
        return self.clock.seconds >= writer.landed_at and self.proven_at(writer) is None
