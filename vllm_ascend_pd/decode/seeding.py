# SPDX-License-Identifier: Apache-2.0
"""D's side of the first token: what its scheduler asks P for, holds back, and starts requests with."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd import first_token
from vllm_ascend_pd.decode.core.seeds import SeedBook, Wanted
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
        listen: Callable[[], None],
        told: Told,
        answer: Callable[[str], dict[str, Any] | None],
    ) -> None:
        super().__init__()
        self._engine, self._tally, self._vocabulary = engine, tally, vocabulary
        self._listen, self._told, self._answer = listen, told, answer
        self._book = SeedBook(engine.config.timers.first_token_wait_s)

    def ask(self, request: Any, transfer: TransferId, *, leaves_last: bool) -> tuple[Seed, dict[str, Any]] | None:
        """What the reservation asks for, and what P must be sent to choose the same."""
        if not self._vocabulary:
            return None
        given = first_token.given(request.sampling_params) if request.sampling_params is not None else {}
        why = first_token.barred(request) or ("window" if leaves_last else sampling.refusal(given))
        if why:
            self._unseeded(request.request_id, why)
            return None
        seed = Seed(sampling.digest(given), given.get("logprobs"))
        wanted = Wanted(transfer, request.num_prompt_tokens, seed.digest, seed.logprobs, self._vocabulary)
        if self._book.ask(request.request_id, wanted, request.num_output_tokens):
            return seed, sampling.sent(given)
        self._unseeded(request.request_id, "preempted")
        return None

    def heard(self, transfer: TransferId, sealed: str, failed: str) -> None:
        """The metaserver's last word: P's token in its envelope, or nothing."""
        if not self._book.asked(transfer):
            return
        first: First | None = None
        why = failed and "prefill failed"
        if sealed and not failed:
            try:
                first = unseal_first(base64.b64decode(sealed, validate=True), self._engine.secrets)
            except (ValueError, RemoteProtocolError) as refused:
                log.warning("transfer %s: its first token is refused: %s", transfer, refused)
                why = "refused"
        self._book.told(transfer, first, why)

    def complete(self, request_id: str, push: str, code: str) -> None:
        """The load is over."""
        if not code and self.entered:
            self._book.complete(request_id, push, time.monotonic())
        elif self._book.forget(request_id):
            self._unseeded(request_id, "load failed" if code else "scheduler")

    def holds(self, request_id: str) -> bool:
        """Whether vLLM is not to hear of a load that is over before `after`."""
        return self._book.holds(request_id)

    def over(self, request_id: str) -> None:
        self._book.forget(request_id)

    def held_count(self) -> int:
        return self._book.held_count()

    def after(self, scheduler: Any, outputs: Any) -> None:
        if not self._book.held_count():
            return
        self._listen()
        for ready in self._book.take(time.monotonic()):
            first_token.release(scheduler, ready.request_id)
            request = scheduler.requests.get(ready.request_id)
            if ready.first is None or request is None or request.is_finished():
                self._unseeded(ready.request_id, ready.why or "aborted")
                continue
            self._tally.add("first_tokens_taken", 1)
            self._told(ready.request_id, TAKEN)
            trace.emit("seeded", transfer=str(ready.first.transfer), request=ready.request_id)
            output = first_token.start(scheduler, request, ready.first, self._answer(ready.request_id))
            first_token.add(outputs, request.client_index, output)

    def _unseeded(self, request_id: str, why: str) -> None:
        self._tally.count("num_first_tokens_computed", why)
        self._told(request_id, why)
