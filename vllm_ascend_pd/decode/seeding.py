# SPDX-License-Identifier: Apache-2.0
"""D's side of the first token: what its scheduler asks P for, holds back, and starts requests with."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd import first_token
from vllm_ascend_pd.decode.core.desk import Desk
from vllm_ascend_pd.decode.core.seeds import Wanted
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol import sampling
from vllm_ascend_pd.protocol.auth import unseal_first
from vllm_ascend_pd.protocol.first import First, Seed
from vllm_ascend_pd.protocol.identity import TransferId

log = logging.getLogger(__name__)

TAKEN = "prefill"  # in a report: the first token is P's
Told = Callable[[str, str], None]


class Seeding(first_token.Around):
    """`listen` brings in what the loop thread has heard; `told` hears of each request where its first token came from, `useless`
    of each whose KV is of no use without it, and `answer` says what stands in a request's answer. With a vocabulary of 0 nothing
    is seeded."""

    def __init__(
        self,
        engine: Engine,
        tally: Tally,
        vocabulary: int,
        desk: Desk,
        listen: Callable[[], None],
        told: Told,
        answer: Callable[[str], dict[str, Any] | None],
        useless: Told,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self._engine, self._tally, self._vocabulary, self._desk = engine, tally, vocabulary, desk
        self._listen, self._told, self._answer, self._useless = listen, told, answer, useless
        self._whole = whole  # what begins with P's token may load all of its prompt into any cache
        self._proven = False  # vLLM has been seen to call `after`

    def off(self, why: str) -> None:
        """A worker cannot go on behind a token that it has not sampled."""
        if self._vocabulary:
            log.warning("P's first token is not used, a worker says: %s", why)
        self._vocabulary = 0

    def begins(self, request: Any) -> bool:
        """Whether all of a prompt may be loaded into a cache in which its last token cannot be computed again: only P's token can
        begin there, and without it the load has failed. Repeatable."""
        if not (self._whole and self._vocabulary and self._proven and self._desk.tells(request.request_id)):
            return False
        if self.barred(request) or _produced(request):
            return False
        # How a grammar is read is known on P when the prompt has been computed, which is too late to end one token earlier.
        return request.structured_output_request is None and not sampling.refusal(first_token.chosen(request))

    def ask(
        self, request: Any, transfer: TransferId, *, leaves_last: bool, whole: bool = False
    ) -> tuple[Seed, dict[str, Any]] | None:
        """What the reservation asks for, and what P must be sent to choose the same. `whole`: nothing else can begin there."""
        if not self._vocabulary or not self._desk.seeds_come(request.request_id):
            return None
        given = first_token.chosen(request) if request.sampling_params is not None else {}

        def wanted() -> Wanted | str:  # of what is refused no digest is made: its lists have no bound
            why, place = sampling.refusal(given), request.num_prompt_tokens
            asked = sampling.digest(given), given.get("logprobs"), self._vocabulary
            return why or Wanted(transfer, place, *asked, whole)

        produced = _produced(request)
        asked = request.request_id, wanted, produced
        why = self.barred(request) or self._desk.ask(*asked, leaves_last=leaves_last)
        if why:
            self.unseeded(request.request_id, why)
            return None
        return Seed(sampling.digest(given), given.get("logprobs")), sampling.sent(given)

    def heard(self, transfer: TransferId, told: str | First | None, failed: str) -> None:
        """The last word of the metaserver, with P's token in its envelope, or of P itself, or without one."""
        if not self._desk.seeds.asked(transfer):
            return
        first, why = told if isinstance(told, First) else None, ""
        if isinstance(told, str) and not failed:
            try:
                first = unseal_first(base64.b64decode(told, validate=True), self._engine.secrets)
            except (ValueError, RemoteProtocolError) as refused:
                log.warning("transfer %s: its first token is refused: %s", transfer, refused)
                why = "refused"
        self._desk.token(transfer, first, failed, why)

    def after(self, scheduler: Any, outputs: Any) -> None:
        self._proven = True
        if not self._desk.seeds.held_count():
            return
        self._listen()
        for ready in self._desk.seeds.take(time.monotonic()):
            request, why = scheduler.requests.get(ready.request_id), ready.why
            if request is None or request.is_finished():
                first_token.release(scheduler, ready.request_id)
                self.unseeded(ready.request_id, why or "aborted")
                continue
            if ready.first is not None:
                why = first_token.unfit(request, ready.first.token)
            if not why and ready.first is not None:
                output = self._start(scheduler, request, ready.first)
            else:
                output = self._go_without(scheduler, request, why, useless=ready.whole)
            if output is not None:
                first_token.add(outputs, request.client_index, output)

    def _start(self, scheduler: Any, request: Any, first: First) -> Any:
        self._tally.add("first_tokens_taken", 1)
        self._told(request.request_id, TAKEN)
        trace.emit("seeded", transfer=str(first.transfer), request=request.request_id)
        first_token.release(scheduler, request.request_id)
        return first_token.start(scheduler, request, first, self._answer(request.request_id))

    def _go_without(self, scheduler: Any, request: Any, why: str, *, useless: bool) -> Any:
        """`useless`: nothing but P's token could begin behind this KV."""
        if useless:
            self._useless(request.request_id, why)
        self.unseeded(request.request_id, why)
        if useless:
            return first_token.fail(scheduler, request)
        first_token.release(scheduler, request.request_id)
        return None

    def unseeded(self, request_id: str, why: str) -> None:
        """D computes its first token itself."""
        self._tally.count("num_first_tokens_computed", why)
        self._told(request_id, why)


def _produced(request: Any) -> int:
    """Not 0 of a request that was computed here before: what it had when it lost its blocks may still come."""
    return int(request.num_output_tokens or request.num_preemptions)
