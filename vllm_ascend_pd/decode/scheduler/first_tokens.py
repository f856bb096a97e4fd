# SPDX-License-Identifier: Apache-2.0
"""P's first token on D, which asks for it, waits for it, and starts a request with it."""

from __future__ import annotations

import base64
import logging
import time
from typing import Any

from vllm_ascend_pd.decode.scheduler.beginnings import LoadOwner, WithheldLoads
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.load import Start, Wanted
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol import sampling
from vllm_ascend_pd.protocol.auth import unseal_first
from vllm_ascend_pd.protocol.first import FirstToken, FirstTokenRequest
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.vllm_patches import first_token
from vllm_ascend_pd.vllm_patches.tried import FIRST_TOKEN, off

log = logging.getLogger(__name__)


class FirstTokenReceiver(WithheldLoads, first_token.FirstTokenHooks):
    """First tokens on D. With a vocabulary of 0, which a worker that cannot go on behind one leads to, none is taken.

    `whole`: requests that begin with P's token may load all of the prompt into any cache.
    """

    def __init__(
        self,
        engine: Engine,
        tally: Tally,
        vocabulary: int,
        book: TokenBook,
        loads: LoadOwner,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__(book, loads)
        self._engine, self._tally, self._vocabulary = engine, tally, vocabulary
        self._book, self._whole = book, whole
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
        request_id = request.request_id
        if not (self._whole and self._vocabulary and self._proven and self._book.each_p_sends_first(request_id)):
            return False
        if self.refusal(request):
            return False
        # P knows how it reads a grammar only after it has computed the prompt: too late to leave the last token out.
        return request.structured_output_request is None and not sampling.refusal(first_token.chosen(request))

    def ask(
        self, request: Any, transfer: TransferId, *, recomputes_last: bool, whole: bool = False
    ) -> tuple[FirstTokenRequest, dict[str, Any]] | None:
        """Return what the reservation asks for, and what P must receive to choose the same token; None: no token.

        `whole`: the request can begin only with P's token.
        """
        if not self._vocabulary or not self._book.first_tokens_come(request.request_id):
            return None
        given = first_token.chosen(request) if request.sampling_params is not None else {}
        why = self.refusal(request) or ("window" if recomputes_last else sampling.refusal(given))
        if why:  # no digest is made: the lists of what is refused have no bound
            self._book.ask(request.request_id, why)
            self._loads.act()
            return None
        seed = FirstTokenRequest(sampling.digest(given), given.get("logprobs"))
        wanted = Wanted(transfer, request.num_prompt_tokens, seed.digest, seed.logprobs, self._vocabulary, whole)
        self._book.ask(request.request_id, wanted)
        return seed, sampling.sent(given)

    def outcome(self, transfer: TransferId, answer: str | FirstToken | None, *, failed: bool) -> None:
        """Handle the last answer of the metaserver (with P's token sealed), or of P itself, or one without a token."""
        if not self._book.expects(transfer):
            return
        first, why = answer if isinstance(answer, FirstToken) else None, ""
        if isinstance(answer, str) and not failed:
            try:
                first = unseal_first(base64.b64decode(answer, validate=True), self._engine.secrets)
            except (ValueError, RemoteProtocolError) as refused:
                log.warning("transfer %s: its first token is refused: %s", transfer, refused)
                why = "refused"
        self._book.token(transfer, first, why, failed=failed)

    def after(self, scheduler: Any, outputs: Any) -> None:
        self._proven = True
        super().after(scheduler, outputs)

    def taken(self, scheduler: Any) -> list[Start]:
        def unfit(request_id: str, first: FirstToken) -> str:
            request = scheduler.requests.get(request_id)
            gone = request is None or request.is_finished()
            return "aborted" if gone else first_token.unfit(request, first.token)

        return self._book.take(time.monotonic(), unfit)

    def begin(self, scheduler: Any, request: Any, start: Start) -> Any:
        if start.fails and start.why:
            self._loads.useless(start.request_id, start.why)
        output = super().begin(scheduler, request, start)
        if start.first is None:
            return output
        self._tally.add("first_tokens_taken", 1)
        trace.emit("seeded", transfer=str(start.first.transfer), request=start.request_id)
        return first_token.start(scheduler, request, start.first, self._loads.answer(start.request_id))
