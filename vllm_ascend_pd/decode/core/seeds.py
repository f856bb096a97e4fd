# SPDX-License-Identifier: Apache-2.0
"""Which first tokens D takes from P: each request's once, only of the push that its KV is of, and in time.

The token and the KV come on different ways, in either order. A request whose KV is complete is held until both are there or it is
known that no token comes. Pure: `now` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_pd.protocol.first import First
from vllm_ascend_pd.protocol.identity import TransferId

SEEDED = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What D asked P for, in the reservation of a transfer."""

    transfer: TransferId
    position: int  # the prompt's length
    digest: str
    logprobs: int | None
    vocabulary: int
    whole: bool = False  # D can begin with nothing else: of its cache the prompt's last token cannot be computed again


@dataclass(frozen=True, slots=True)
class Start:
    """A held request may go on: with P's token, or as D would alone, and then why."""

    request_id: str
    first: First | None
    why: str = SEEDED
    whole: bool = False

    @property
    def fails(self) -> bool:
        """Whether its KV is of no use without P's token."""
        return self.whole and self.first is None


@dataclass(slots=True)
class _Record:
    request_id: str
    wanted: Wanted
    first: First | None = None
    none: str = ""  # why no token comes
    push: str = ""  # whose KV it is, once that is complete
    complete: float | None = None  # when that was


def fault(wanted: Wanted, first: First) -> str:
    """Why a token is not the one that was asked for."""
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


class SeedBook:
    """By request, from its reservation until it goes on or ends."""

    def __init__(self, wait_s: float, whole_wait_s: float) -> None:
        """`whole_wait_s`: for requests that can begin with nothing else."""
        self._wait_s = {False: wait_s, True: max(wait_s, whole_wait_s)}
        self._records: dict[str, _Record] = {}
        self._held: dict[str, _Record] = {}  # of these the ones whose KV is complete: each step asks for them
        self._by_transfer: dict[TransferId, _Record] = {}
        self._dropped: list[Start] = []  # held requests that have ended

    def ask(self, request_id: str, wanted: Wanted, produced: int) -> bool:
        """Whether the reservation of a request asks for a token: not if its client has some already. (D had the prompt then, and
        the request lost its blocks.)"""
        if produced:
            return False
        self._records[request_id] = self._by_transfer[wanted.transfer] = _Record(request_id, wanted)
        return True

    def asked(self, transfer: TransferId) -> bool:
        return transfer in self._by_transfer

    def told(self, transfer: TransferId, first: First | None, why: str = "") -> None:
        """P's token has come, or (None) it is known why none will. What came first counts."""
        record = self._by_transfer.get(transfer)
        if record is None or record.first is not None or record.none:
            return
        why = fault(record.wanted, first) if first is not None else why or "not told"
        if why:
            record.none = why
        else:
            record.first = first

    def complete(self, request_id: str, push: str, now: float) -> None:
        """The KV is complete: a request of which a token was asked for is held until `take` names it."""
        record = self._records.get(request_id)
        if record is not None and record.complete is None:
            record.push, record.complete = push, now
            self._held[request_id] = record

    def whole(self, request_id: str) -> bool:
        """Whether it can begin with nothing but P's token."""
        record = self._records.get(request_id)
        return record is not None and record.wanted.whole

    def holds(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        return record is not None and record.complete is not None

    def forget(self, request_id: str) -> bool:
        """The request has ended, or its load has failed. Whether a token had been asked for."""
        record = self._remove(request_id)
        if record is not None and record.complete is not None:
            self._dropped.append(Start(request_id, None, "aborted"))
        return record is not None

    def take(self, now: float) -> list[Start]:
        """Held requests that go on now, or have failed, each once."""
        ready, self._dropped = self._dropped, []
        for record in list(self._held.values()):
            start = self._start(record, now)
            if start is not None:
                self._remove(record.request_id)
                ready.append(start)
        return ready

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
        return Start(request, None, "late", whole) if now >= record.complete + self._wait_s[whole] else None

    def _remove(self, request_id: str) -> _Record | None:
        record = self._records.pop(request_id, None)
        self._held.pop(request_id, None)
        if record is not None:
            del self._by_transfer[record.wanted.transfer]
        return record
