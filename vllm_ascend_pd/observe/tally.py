# SPDX-License-Identifier: Apache-2.0
"""Counts for metrics. A worker or scheduler keeps a `Tally`; vLLM collects it after each step and adds all of them up.

Each fact has one reporter, so that nothing is multiplied by the TP size: bytes and descriptors are reported by the
worker that wrote them, times of a push by P's first worker, everything about whole requests by the scheduler. Levels
are kept by reporter and added up. vLLM's log line forgets after each interval, and of several API servers each gets
some of the messages. So a level is reported again as long as it is not 0: each message has all levels that are not 0.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "vllm:ascend_pd_"
MAX_TIMES = 4096  # kept between two collections; more are left out


@dataclass(frozen=True, slots=True)
class Metric:
    kind: str  # time | sum | count (by reason) | level
    words: str


METRICS: dict[str, Metric] = {
    "xfer_time_seconds": Metric(
        "time", "Time of one push, from the first BEGIN to its end (reported by P's first worker)."
    ),
    "exposed_time_seconds": Metric(
        "time", "What of a push came after the last layer's computation (P's first worker)."
    ),
    "ready_wait_seconds": Metric("time", "Time from BEGIN to the READY that answered it (P's first worker)."),
    "regroup_time_seconds": Metric("time", "Time of one exchange between the prefill ranks (P's first worker)."),
    "metaserver_time_seconds": Metric("time", "Time of one reservation's call to the metaserver (D)."),
    "bytes_transferred": Metric("sum", "Bytes written into decode engines, all workers of P together."),
    "bytes_direct": Metric(
        "sum", "Of these bytes, those that engines whose P ranks can exchange wrote without an exchange."
    ),
    "num_descriptors": Metric("sum", "Contiguous spans written, all workers of P together."),
    "exchanges_repeated": Metric(
        "sum",
        "Exchanges of one layer made again because a rank of P had no staging slot for them, all stages together.",
    ),
    "num_failed_transfers": Metric("count", "Pushes that failed on P, each once whatever the TP size, by reason."),
    "num_failed_recvs": Metric("count", "Loads that failed on D, each once whatever the TP size, by reason."),
    "first_tokens_taken": Metric("sum", "Requests that D started with P's first token."),
    "num_first_tokens_computed": Metric(
        "count", "Requests with remote KV whose first token D computed itself, by reason."
    ),
    "answers_continued": Metric("sum", "Requests that D began with the tokens of an answer that another D had begun."),
    "num_answers_begun_anew": Metric(
        "count", "Requests that should have begun so, and whose answer D computes from its beginning, by reason."
    ),
    "num_kv_expired_reqs": Metric("count", "Requests whose KV was given up because time ran out, by reason."),
    "num_protocol_events": Metric(
        "count", "Events that a transfer has only if something was late, lost, repeated or refused, by name."
    ),
    "num_side_channel_faults": Metric(
        "count", "What went wrong on the side channel of a worker or scheduler, by reason (docs/operations.md)."
    ),
    "num_recomputed_reqs": Metric("count", "Requests whose prompt D computes itself after a load, by reason."),
    "reservations_open": Metric("level", "Reservations of D that have not ended."),
    "blocks_quarantined": Metric("level", "Blocks of D that are held until their writers are known to be quiet."),
    "revoking_seconds": Metric(
        "level", "Time since access to a rank of D had to be revoked, which has not succeeded yet: no P can push to it."
    ),
    "blocks_held": Metric("level", "Blocks of P that are held for a decode engine that has not come yet."),
    "hooks_off": Metric(
        "level", "Changes to vLLM that this engine lacks: its log at the start names them and what that costs."
    ),
    "writers_dead": Metric(
        "level", "Workers of P whose writer thread has died: the engine ends once its pushes are over."
    ),
}


class Tally:
    """Facts since the last collection. Any thread may add; `take` empties it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = empty()
        self._totals: dict[str, dict[str, int]] = {}  # as of the last call
        self._levels: dict[str, int] = {}  # to be reported: all that are not 0, and those that have just become 0
        self._reporter = uuid.uuid4().hex[:8]

    def record(self, name: str, value: float) -> None:
        """Record a value by the metric's kind, if that needs no reason."""
        match METRICS[name].kind:
            case "time":
                self.time(name, value)
            case "sum":
                self.add(name, int(value))
            case _:
                self.level(name, int(value))

    def time(self, name: str, seconds: float) -> None:
        with self._lock:
            times = self._data["times"].setdefault(name, [])
            if len(times) < MAX_TIMES:
                times.append(round(seconds, 6))

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            self._data["sums"][name] = self._data["sums"].get(name, 0) + amount

    def count(self, name: str, reason: str) -> None:
        with self._lock:
            self._increase(name, reason, 1)

    def totals(self, name: str, totals: Mapping[str, int]) -> None:
        """Count by how much each total has grown since the last call. Another thread may add to them meanwhile."""
        with self._lock:
            seen = self._totals.setdefault(name, {})
            for reason, total in dict(totals).items():
                if grown := total - seen.get(reason, 0):
                    self._increase(name, reason, grown)
                    seen[reason] = total

    def level(self, name: str, value: int) -> None:
        """Set a gauge. It is reported at each collection while it is not 0, and once when it is 0 again."""
        with self._lock:
            if value or name in self._levels:
                self._levels[name] = value

    def raise_level(self, name: str) -> None:
        """Add 1 to a gauge."""
        with self._lock:
            self._levels[name] = self._levels.get(name, 0) + 1

    def _increase(self, name: str, reason: str, amount: int) -> None:
        reasons = self._data["counts"].setdefault(name, {})
        reasons[reason] = reasons.get(reason, 0) + amount

    def take(self) -> dict[str, Any] | None:
        """Return plain, serialisable data, and start anew; None if there is nothing to report."""
        with self._lock:
            if not any(self._data.values()) and not self._levels:
                return None
            data, self._data = self._data, empty()
            data["levels"] = {name: {self._reporter: value} for name, value in self._levels.items()}
            self._levels = {name: value for name, value in self._levels.items() if value}
            return data


def empty() -> dict[str, Any]:
    return {"times": {}, "sums": {}, "counts": {}, "levels": {}}
