# SPDX-License-Identifier: Apache-2.0
"""First tokens that D takes from P: one per request, only of the push that its KV came from, and only in time.

The token and the KV come separately, in either order. A request whose KV is complete is held until its token is
there, or it is known that none comes, or the wait is over. Pure: `now` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ascend_pd.protocol.first import First
from vllm_ascend_pd.protocol.identity import TransferId


@dataclass(frozen=True, slots=True)
class Wanted:
    """The first token that D asks P for in the reservation of a transfer."""

    transfer: TransferId
    position: int  # the prompt's length
    digest: str
    logprobs: int | None
    vocabulary: int
    whole: bool = False  # D can begin only with it: the prompt's last token cannot be computed again in its cache


@dataclass(frozen=True, slots=True)
class Start:
    """Release of a held request: with P's token, or without one, and then why."""

    request_id: str
    first: First | None
    why: str = ""
    whole: bool = False

    @property
    def fails(self) -> bool:
        """True if P's token is missing and the KV is of no use without it."""
        return self.whole and self.first is None


@dataclass(slots=True)
class _Record:
    request_id: str
    wanted: Wanted
    first: First | None = None
    none: str = ""  # why no token comes
    push: str = ""  # that its KV came from, once that is complete
    complete: float | None = None  # when that was


def fault(wanted: Wanted, first: First) -> str:
    """Return why a token is not the one that was asked for; empty if it is."""
    if first.transfer != wanted.transfer:
        return "another transfer"
    if first.position != wanted.position:
        return "another prompt"
    if first.digest != wanted.digest:
        return "other sampling"
    tokens = (first.token, *(token for token, _, _ in first.logprobs))
    if max(tokens) >= wanted.vocabulary:
        return "not in the vocabulary"
    if wanted.logprobs is None:
        return "logprobs" if first.logprobs else ""
    well = len(first.logprobs) == wanted.logprobs + 1 and first.logprobs[0][0] == first.token
    return "" if well and all(value <= 0.0 for _, value, _ in first.logprobs) else "logprobs"  # no NaN passes


class FirstTokenBook:
    """First tokens by request, from its reservation until it goes on or ends."""

    def __init__(self, wait_s: float, whole_wait_s: float) -> None:
        """`whole_wait_s`: for requests that can begin only with P's token."""
        self._wait_s = {False: wait_s, True: max(wait_s, whole_wait_s)}
        self._records: dict[str, _Record] = {}
        self._held: dict[str, _Record] = {}  # those of them whose KV is complete: read in each step
        self._by_transfer: dict[TransferId, _Record] = {}
        self._dropped: list[Start] = []  # held requests that have ended

    def ask(self, request_id: str, wanted: Wanted) -> None:
        """Record that a request's reservation asks for a token."""
        self._records[request_id] = self._by_transfer[wanted.transfer] = _Record(request_id, wanted)

    def asked(self, transfer: TransferId) -> bool:
        return transfer in self._by_transfer

    def received(self, transfer: TransferId, first: First | None, why: str = "") -> None:
        """Record P's token, or (None) why none will come. What comes first counts."""
        record = self._by_transfer.get(transfer)
        if record is None or record.first is not None or record.none:
            return
        why = fault(record.wanted, first) if first is not None else why or "not sent"
        if why:
            record.none = why
        else:
            record.first = first

    def complete(self, request_id: str, push: str, now: float) -> None:
        """Record that a request's KV is complete. If a token was asked for, it is held until `take` returns it."""
        record = self._records.get(request_id)
        if record is not None and record.complete is None:
            record.push, record.complete = push, now
            self._held[request_id] = record

    def whole(self, request_id: str) -> bool:
        """Return whether a request can begin only with P's token."""
        record = self._records.get(request_id)
        return record is not None and record.wanted.whole

    def holds(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        return record is not None and record.complete is not None

    def forget(self, request_id: str) -> bool:
        """Drop a request that has ended, or whose load has failed. Return whether a token had been asked for."""
        record = self._remove(request_id)
        if record is not None and record.complete is not None:
            self._dropped.append(Start(request_id, None, "aborted"))
        return record is not None

    def take(self, now: float) -> list[Start]:
        """Return held requests that go on now, or were dropped, each once."""
        ready, self._dropped = self._dropped, []
        for record in list(self._held.values()):
            start = self._start(record, now)
            if start is not None:
                self._remove(record.request_id)
                ready.append(start)
        return ready

    def due_s(self, now: float) -> float:
        """Time until the first held request is not waited for any longer."""
        if self._dropped:
            return 0.0
        ends = map(self._waited_until, self._held.values())
        return max(0.0, min(ends, default=math.inf) - now)

    def held_count(self) -> int:
        return len(self._held) + len(self._dropped)

    def open_count(self) -> int:
        return len(self._records) + len(self._dropped)

    def _start(self, record: _Record, now: float) -> Start | None:
        if record.complete is None:
            return None
        request, whole = record.request_id, record.wanted.whole
        if record.first is not None:
            if record.first.push == record.push:
                return Start(request, record.first, whole=whole)
            return Start(request, None, "another push", whole)
        if record.none:
            return Start(request, None, record.none, whole)
        return Start(request, None, "late", whole) if now >= self._waited_until(record) else None

    def _waited_until(self, record: _Record) -> float:
        return math.inf if record.complete is None else record.complete + self._wait_s[record.wanted.whole]

    def _remove(self, request_id: str) -> _Record | None:
        record = self._records.pop(request_id, None)
        self._held.pop(request_id, None)
        if record is not None:
            del self._by_transfer[record.wanted.transfer]
        return record
