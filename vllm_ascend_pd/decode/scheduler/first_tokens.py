# SPDX-License-Identifier: Apache-2.0
"""D's side of the first token: its scheduler asks P for it, holds requests until it comes, and starts them with it."""

from __future__ import annotations

import base64
import logging
import time
from typing import Any, Protocol

from vllm_ascend_pd.decode.scheduler.core.first_tokens import Wanted
from vllm_ascend_pd.decode.scheduler.core.requests import LoadRequests
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol import sampling
from vllm_ascend_pd.protocol.auth import unseal_first
from vllm_ascend_pd.protocol.first import First, Seed
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.vllm_patches import first_token
from vllm_ascend_pd.vllm_patches.tried import FIRST_TOKEN, off

log = logging.getLogger(__name__)

TAKEN = "prefill"  # in a report: the first token is P's


class LoadRecords(Protocol):
    """The scheduler's records of loads, by request."""

    def listen(self) -> None:
        """Take in what the loop thread has received."""

    def first_token_from(self, request_id: str, source: str) -> None:
        """The request starts with P's token (TAKEN), or with D's for the reason given."""

    def useless(self, request_id: str, why: str) -> None:
        """The KV of the request came, and it cannot begin without P's token."""

    def take_failing(self) -> set[str]:
        """Return the requests whose load has failed and is still to be failed in vLLM, once."""

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """Return what a request's answer reports of its load."""


class FirstTokenReceiver(first_token.StepHooks):
    """First tokens on D. With a vocabulary of 0 none is taken from P.

    `whole`: requests that begin with P's token may load all of the prompt into any cache.
    """

    def __init__(
        self,
        engine: Engine,
        tally: Tally,
        vocabulary: int,
        requests: LoadRequests,
        loads: LoadRecords,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self._engine, self._tally, self._vocabulary = engine, tally, vocabulary
        self._requests, self._loads, self._whole = requests, loads, whole
        self._proven = False  # vLLM has been seen to call `after`

    def off(self, why: str) -> None:
        """Take no token from P: a worker cannot go on behind a token that it has not sampled."""
        if self._vocabulary:
            log.warning("%s", off(FIRST_TOKEN, f"a worker says {why}"))
            self._tally.raise_level("hooks_off")
        self._vocabulary = 0

    def begins(self, request: Any) -> bool:
        """Return whether all of a prompt may be loaded into a cache in which its last token cannot be computed again.

        Only P's token can begin there; without it the load has failed. Repeatable.
        """
        if not (
            self._whole and self._vocabulary and self._proven and self._requests.each_p_sends_first(request.request_id)
        ):
            return False
        if self.refusal(request):
            return False
        # P knows how it reads a grammar only after it has computed the prompt: too late to leave the last token out.
        return request.structured_output_request is None and not sampling.refusal(first_token.chosen(request))

    def ask(
        self, request: Any, transfer: TransferId, *, recomputes_last: bool, whole: bool = False
    ) -> tuple[Seed, dict[str, Any]] | None:
        """Return what the reservation asks for, and what P must receive to choose the same token; None: no token.

        `whole`: the request can begin only with P's token.
        """
        if not self._vocabulary or not self._requests.first_tokens_come(request.request_id):
            return None
        given = first_token.chosen(request) if request.sampling_params is not None else {}

        def wanted() -> Wanted | str:  # of what is refused no digest is made: its lists have no bound
            if refused := sampling.refusal(given):
                return refused
            asked = sampling.digest(given), given.get("logprobs"), self._vocabulary
            return Wanted(transfer, request.num_prompt_tokens, *asked, whole)

        why = self.refusal(request) or self._requests.ask(request.request_id, wanted, recomputes_last=recomputes_last)
        if why:
            self.count_computed(request.request_id, why)
            return None
        return Seed(sampling.digest(given), given.get("logprobs")), sampling.sent(given)

    def outcome(self, transfer: TransferId, answer: str | First | None, failed: str) -> None:
        """Handle the last answer of the metaserver (with P's token sealed), or of P itself, or one without a token."""
        if not self._requests.first_token_book.asked(transfer):
            return
        first, why = answer if isinstance(answer, First) else None, ""
        if isinstance(answer, str) and not failed:
            try:
                first = unseal_first(base64.b64decode(answer, validate=True), self._engine.secrets)
            except (ValueError, RemoteProtocolError) as refused:
                log.warning("transfer %s: its first token is refused: %s", transfer, refused)
                why = "refused"
        self._requests.token(transfer, first, failed, why)

    def after(self, scheduler: Any, outputs: Any) -> None:
        self._proven = True
        for request_id in sorted(self._loads.take_failing()):
            self._fail(scheduler, outputs, request_id)
        if not self._requests.first_token_book.held_count():
            return
        self._loads.listen()
        for ready in self._requests.first_token_book.take(time.monotonic()):
            request, why = scheduler.requests.get(ready.request_id), ready.why
            if request is None or request.is_finished():
                first_token.release(scheduler, ready.request_id)
                self.count_computed(ready.request_id, why or "aborted")
                continue
            if ready.first is not None:
                why = first_token.unfit(request, ready.first.token)
            if not why and ready.first is not None:
                output = self._start(scheduler, request, ready.first)
            else:
                output = self._go_without(scheduler, request, why, useless=ready.whole)
            if output is not None:
                first_token.add(outputs, request.client_index, output)

    def _fail(self, scheduler: Any, outputs: Any, request_id: str) -> None:
        request = scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            first_token.release(scheduler, request_id)
        elif (output := first_token.fail(scheduler, request)) is not None:
            first_token.add(outputs, request.client_index, output)

    def _start(self, scheduler: Any, request: Any, first: First) -> Any:
        self._tally.add("first_tokens_taken", 1)
        self._loads.first_token_from(request.request_id, TAKEN)
        trace.emit("seeded", transfer=str(first.transfer), request=request.request_id)
        first_token.release(scheduler, request.request_id)
        return first_token.start(scheduler, request, first, self._loads.answer(request.request_id))

    def _go_without(self, scheduler: Any, request: Any, why: str, *, useless: bool) -> Any:
        """Let a request go on without P's token. `useless`: its KV is of no use without it, and the load fails."""
        if useless:
            self._loads.useless(request.request_id, why)
        self.count_computed(request.request_id, why)
        if useless:
            return first_token.fail(scheduler, request)
        first_token.release(scheduler, request.request_id)
        return None

    def count_computed(self, request_id: str, why: str) -> None:
        """Count a request that does not start with P's token."""
        self._tally.count("num_first_tokens_computed", why)
        self._loads.first_token_from(request_id, why)
