# SPDX-License-Identifier: Apache-2.0
"""The seam for tokens with which D's requests begin and that D did not compute. `first_token: off` closes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.core.book import WITHHELD, LoadBook
from vllm_ascend_pd.decode.scheduler.core.load import RemoteLoad, Start
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol.continuing import goes_on
from vllm_ascend_pd.protocol.first import FirstTokenRequest
from vllm_ascend_pd.vllm_patches import step_hooks

log = logging.getLogger(__name__)


class LoadOwner(Protocol):
    """The scheduler, as far as its hooks need it."""

    def listen(self) -> None:
        """Take in what the loop thread has received."""

    def act(self) -> None:
        """Do what the book wants done."""

    def useless(self, request_id: str, why: str) -> None:
        """The KV of the request came, and it cannot begin without P's token."""

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """Return what a request's answer reports of its load."""

    def client(self) -> MetaserverClient | None:
        """Return what asks a router for an answer so far, while there is one. The outcome comes by `listen`."""


class WithheldLoads(step_hooks.StepHooks):
    """Loads that have failed, where vLLM does not take that by request."""

    def __init__(self, book: LoadBook, loads: LoadOwner) -> None:
        super().__init__()
        self._withheld, self._loads = book, loads

    def after(self, scheduler: Any, outputs: Any) -> None:
        if not self._withheld.count(*WITHHELD):
            return
        self._loads.listen()
        for start in self.taken(scheduler):
            request = scheduler.requests.get(start.request_id)
            if request is None or request.is_finished():
                step_hooks.release(scheduler, start.request_id)
            elif (output := self.begin(scheduler, request, start)) is not None:
                step_hooks.add(outputs, request.client_index, output)
        self._loads.act()

    def taken(self, scheduler: Any) -> list[Start]:
        return self._withheld.take(time.monotonic())

    def begin(self, scheduler: Any, request: Any, start: Start) -> Any:
        """Let vLLM go on with a request. Return the output for its client, if there is one."""
        if start.fails:
            return step_hooks.fail(scheduler, request)
        step_hooks.release(scheduler, start.request_id)
        return None


@dataclass(frozen=True, slots=True)
class Beginning:
    """A request's beginning, as its reservation says it."""

    tokens: Sequence[int]  # all that P is to compute
    seed: FirstTokenRequest | None = None
    needs: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)  # for the metaserver


class Beginnings:
    """Those of a D that computes all of them itself, which is what each method answers here."""

    def __init__(self, tally: Tally, book: LoadBook, *hooks: step_hooks.StepHooks) -> None:
        self._tally, self._book, self.hooks = tally, book, hooks

    def off(self, why: str) -> None:
        """Take no tokens any more: a worker cannot go on behind a token that it has not sampled."""

    def arrived(self, request: Any) -> None:
        """Handle a request whose KV P may bring, once."""
        if goes_on(request.kv_transfer_params):
            self.anew(request.request_id, "engine", "this engine does not take given tokens")

    def waits(self, request: Any) -> bool:
        """Return whether it is not known yet with what a request begins. Repeatable."""
        return False

    def behind(self, request_id: str) -> int:
        """Return how many tokens behind its prompt a request loads, too."""
        return 0

    def begins(self, request: Any) -> bool:
        """Return whether a request begins with a token that is not computed here: all before it may be loaded."""
        return False

    def of(self, request: Any, bind: Bind, *, recomputes_last: bool) -> Beginning:
        """Return how a request begins for which blocks are bound."""
        return Beginning(request.prompt_token_ids)

    def outcome(self, key: Hashable, outcome: Outcome) -> None:
        """Handle the last answer of a metaserver, router or P."""

    def received(self, now: float, request_id: str) -> RemoteLoad | None:
        """Record that all workers have reported a request."""
        return self._book.received(now, request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""

    def open_count(self) -> int:
        """Return how many requests wait for what they begin with, apart from loads."""
        return 0

    def anew(self, request_id: str, reason: str, why: str) -> None:
        """Record that an answer begins anew, which its router notices."""
        self._tally.count("num_answers_begun_anew", reason)
        log.warning("the answer of request %s begins anew: %s", request_id, why)
