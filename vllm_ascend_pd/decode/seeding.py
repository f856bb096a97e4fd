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
    """`listen` brings in what the loop thread has heard; `told` hears of each request where its first token came from, and
    `answer` says what stands in a request's answer. With a vocabulary of 0 nothing is seeded."""

    def __init__(
        self,
        engine: Engine,
        tally: Tally,
        vocabulary: int,
        desk: Desk,
        listen: Callable[[], None],
        told: Told,
        answer: Callable[[str], dict[str, Any] | None],
    ) -> None:
        super().__init__()
        self._engine, self._tally, self._vocabulary, self._desk = engine, tally, vocabulary, desk
        self._listen, self._told, self._answer = listen, told, answer

    def off(self, why: str) -> None:
        """A worker cannot go on behind a token that it has not sampled."""
        if self._vocabulary:
            log.warning("P's first token is not used, a worker says: %s", why)
        self._vocabulary = 0

    def ask(self, request: Any, transfer: TransferId, *, leaves_last: bool) -> tuple[Seed, dict[str, Any]] | None:
        """What the reservation asks for, and what P must be sent to choose the same."""
        if not self._vocabulary or not self._desk.seeds_come(request.request_id):
            return None
        given = first_token.chosen(request) if request.sampling_params is not None else {}

        def wanted() -> Wanted | str:  # of what is refused no digest is made: its lists have no bound
            why, place = sampling.refusal(given), request.num_prompt_tokens
            return why or Wanted(transfer, place, sampling.digest(given), given.get("logprobs"), self._vocabulary)

        produced = (
            request.num_output_tokens or request.num_preemptions
        )  # what it had when it lost its blocks may still come
        asked = request.request_id, wanted, produced
        why = first_token.barred(request, self.ungrammatical) or self._desk.ask(*asked, leaves_last=leaves_last)
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
        if not self._desk.seeds.held_count():
            return
        self._listen()
        for ready in self._desk.seeds.take(time.monotonic()):
            first_token.release(scheduler, ready.request_id)
            request = scheduler.requests.get(ready.request_id)
            if ready.first is None or request is None or request.is_finished():
                self.unseeded(ready.request_id, ready.why or "aborted")
                continue
            if why := first_token.unfit(request, ready.first.token):
                self.unseeded(ready.request_id, why)
                continue
            self._tally.add("first_tokens_taken", 1)
            self._told(ready.request_id, TAKEN)
            trace.emit("seeded", transfer=str(ready.first.transfer), request=ready.request_id)
            output = first_token.start(scheduler, request, ready.first, self._answer(ready.request_id))
            first_token.add(outputs, request.client_index, output)

    def unseeded(self, request_id: str, why: str) -> None:
        """D computes its first token itself."""
        self._tally.count("num_first_tokens_computed", why)
        self._told(request_id, why)
