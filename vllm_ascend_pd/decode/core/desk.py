# SPDX-License-Identifier: Apache-2.0
"""What D's scheduler does with requests, over its books of loads and of first tokens.

The adapter in scheduler.py translates vLLM's objects and calls whoever brings the KV; the simulator calls the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.decode.core.seeds import SeedBook, Wanted
from vllm_ascend_pd.decode.decisions import LoadBook, Ticket, Verdict
from vllm_ascend_pd.protocol.dialects import Meet, Relay
from vllm_ascend_pd.protocol.first import First
from vllm_ascend_pd.protocol.identity import TransferId

Way: TypeAlias = Ticket | Meet | Relay  # on which a request's KV comes


@dataclass(frozen=True, slots=True)
class Received:
    """A load that is over."""

    transfer: TransferId
    verdict: Verdict
    hangs_up: bool  # nothing more is wanted of whoever was asked
    unseeded: str  # why D computes a first token that was asked for; empty where none was, or it may still come


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over."""

    unwanted: Meet | None = None  # who holds something for it that nobody will fetch
    open: TransferId | None = None  # its load, which is cancelled now


class Desk:
    def __init__(self, book: LoadBook, seeds: SeedBook) -> None:
        self.book, self.seeds = book, seeds
        self._ways: dict[str, Way | None] = {}  # by request: asked about in every step that it waits

    def way(self, request_id: str, read: Callable[[], Way | None]) -> Way | None:
        """Where its KV is to be had, which is `read` once; None: it is prefilled here."""
        if request_id not in self._ways:
            self._ways[request_id] = read()
        return self._ways[request_id]

    def wanted(self, request_id: str, length: int, computed: int, *, leaves_last: bool) -> int:
        """How many tokens to load of a prompt of `length`, of which `computed` are here. Repeatable."""
        if self._ways.get(request_id) is None:
            return 0
        return self.book.wanted(request_id, length, computed, leaves_last=leaves_last)

    def spare(self, request_id: str) -> Meet | None:
        """It loads nothing, for all of it is here or it has ended: who is to be told, once, that no offer comes."""
        way = self._ways.get(request_id)
        if not isinstance(way, Meet) or self.book.has_loaded(request_id):
            return None
        self._ways[request_id] = None
        return way

    def seeds_come(self, request_id: str) -> bool:
        """Whether P's first token can come on the way of its KV: no other router's word brings it."""
        return isinstance(self._ways.get(request_id), Ticket | Meet)

    def tells(self, request_id: str) -> bool:
        """Whether the router says that each P that may be asked tells its first token."""
        way = self._ways.get(request_id)
        return isinstance(way, Ticket) and way.first_token

    def ask(self, request_id: str, wanted: Callable[[], Wanted | str], produced: int, *, leaves_last: bool) -> str:
        """Ask P for its first token with the reservation; else why not. `wanted` may say why not, too."""
        found = "window" if leaves_last else wanted()
        if isinstance(found, str):
            return found
        return "" if self.seeds.ask(request_id, found, produced) else "preempted"

    def heard(self, transfer: TransferId, kind: str, code: str = "", detail: str = "") -> None:
        """The call for a prefill has ended, as P's request did."""
        self.book.answered(transfer, kind, code, detail)

    def token(self, transfer: TransferId, first: First | None, code: str = "", why: str = "") -> None:
        """P's first token has come with that, or it is known why none will."""
        self.seeds.told(transfer, first if not code else None, "prefill failed" if code else why)

    def received(self, now: float, request_id: str, *, starts: bool) -> Received | None:
        """All workers have reported it. None if it is no load of ours (any more). `starts`: held requests can be started."""
        verdict, transfer = self.book.verdict(request_id), self.book.received(request_id)
        if transfer is None:
            return None
        unseeded = ""
        if (starts or self.seeds.whole(request_id)) and not verdict.code:
            self.seeds.complete(request_id, verdict.push, now)
        elif self.seeds.forget(request_id):
            unseeded = "load failed" if verdict.code else "scheduler"
        # A P that still has to bring the first token is not told that nothing more is wanted.
        met = isinstance(self._ways.get(request_id), Meet) and not self.seeds.holds(request_id)
        hangs_up = verdict.hangs_up or met
        return Received(transfer, verdict, hangs_up, unseeded)

    def finished(self, request_id: str) -> Ended:
        """The request ended."""
        unwanted = self.spare(request_id)
        self._ways.pop(request_id, None)
        self.seeds.forget(request_id)
        return Ended(unwanted, self.book.request_finished(request_id))
