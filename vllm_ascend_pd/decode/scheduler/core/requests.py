# SPDX-License-Identifier: Apache-2.0
"""Handling of requests by D's scheduler, on top of its two books: loads, and first tokens.

The adapter in ../role.py translates vLLM's objects, and calls the metaserver, router or P that brings the KV. The
simulator calls this too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.decode.scheduler.core.book import LoadBook, Ticket, Verdict
from vllm_ascend_pd.decode.scheduler.core.first_tokens import FirstTokenBook, Wanted
from vllm_ascend_pd.protocol.dialects import Meet, PassingRouter
from vllm_ascend_pd.protocol.first import First
from vllm_ascend_pd.protocol.identity import TransferId

Way: TypeAlias = Ticket | Meet | PassingRouter  # how a request's KV is to be had


@dataclass(frozen=True, slots=True)
class Received:
    """A load that is over."""

    transfer: TransferId
    verdict: Verdict
    hangs_up: bool  # the call or offer for it is of no use any more
    why_no_first_token: str  # why D computes the token that it asked for; empty: not asked, or it may still come


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over."""

    unwanted: Meet | None = None  # the P that may hold something for it, which D will not fetch
    open: TransferId | None = None  # its load, which is cancelled now


class LoadRequests:
    def __init__(self, book: LoadBook, first_token_book: FirstTokenBook) -> None:
        self.book, self.first_token_book = book, first_token_book
        self._ways: dict[str, Way | None] = {}  # by request; looked up in every step that it waits

    def way(self, request_id: str, read: Callable[[], Way | None]) -> Way | None:
        """Return how a request's KV is to be had, which is `read` once; None: it is prefilled here."""
        if request_id not in self._ways:
            self._ways[request_id] = read()
        return self._ways[request_id]

    def wanted(self, request_id: str, length: int, computed: int, *, recomputes_last: bool) -> int:
        """Return how many tokens to load of a prompt of `length`, of which `computed` are here. Repeatable."""
        if self._ways.get(request_id) is None:
            return 0
        return self.book.wanted(request_id, length, computed, recomputes_last=recomputes_last)

    def loads_nothing(self, request_id: str) -> Meet | None:
        """Record that D computes a request itself, or that it has ended. Return, once, the P to notify of it, if any.

        D computes it also if it has lost its blocks in the middle of the answer, and its prompt is not cached any more.
        """
        if self.book.has_loaded(request_id):
            return None
        way, self._ways[request_id] = self._ways.get(request_id), None
        return way if isinstance(way, Meet) else None

    def first_tokens_come(self, request_id: str) -> bool:
        """Return whether P's first token can come the same way as the KV: by a `PassingRouter` it cannot."""
        return isinstance(self._ways.get(request_id), Ticket | Meet)

    def each_p_sends_first(self, request_id: str) -> bool:
        """Return whether the metaserver says that each P which it may ask sends its first token."""
        way = self._ways.get(request_id)
        return isinstance(way, Ticket) and way.first_token

    def ask(self, request_id: str, wanted: Callable[[], Wanted | str], *, recomputes_last: bool) -> str:
        """Record that the reservation asks for P's first token. Return why it does not; empty: it does.

        `wanted` returns what to ask for, or why not to ask. The client has no token yet: a request loads only when it
        is first scheduled.
        """
        found = "window" if recomputes_last else wanted()
        if isinstance(found, str):
            return found
        self.first_token_book.ask(request_id, found)
        return ""

    def outcome(self, transfer: TransferId, kind: str, code: str = "", detail: str = "") -> None:
        """Record how the call for a prefill, and with it P's request, has ended."""
        self.book.answered(transfer, kind, code, detail)

    def token(self, transfer: TransferId, first: First | None, code: str = "", why: str = "") -> None:
        """Record the first token that has come with the end of the call, or why none will come."""
        self.first_token_book.received(transfer, first if not code else None, "prefill failed" if code else why)

    def received(self, now: float, request_id: str, *, starts: bool) -> Received | None:
        """Record that all workers have reported a request. None if it is no load of ours (any more).

        `starts`: held requests can be started.
        """
        verdict, transfer = self.book.verdict(request_id), self.book.received(request_id)
        if transfer is None:
            return None
        why_no_first_token = ""
        if (starts or self.first_token_book.whole(request_id)) and not verdict.code:
            self.first_token_book.complete(request_id, verdict.push, now)
        elif self.first_token_book.forget(request_id):
            why_no_first_token = "load failed" if verdict.code else "scheduler"
        # The offer to a P that still has to send the first token is kept.
        met = isinstance(self._ways.get(request_id), Meet) and not self.first_token_book.holds(request_id)
        hangs_up = verdict.hangs_up or met
        return Received(transfer, verdict, hangs_up, why_no_first_token)

    def finished(self, request_id: str) -> Ended:
        """Handle the end of a request."""
        unwanted = self.loads_nothing(request_id)
        self._ways.pop(request_id, None)
        self.first_token_book.forget(request_id)
        return Ended(unwanted, self.book.request_finished(request_id))
