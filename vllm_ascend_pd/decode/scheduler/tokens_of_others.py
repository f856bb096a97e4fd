# SPDX-License-Identifier: Apache-2.0
"""Requests of D that begin with P's first token, or with the answer that another D had begun."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vllm_ascend_pd.decode.scheduler.beginnings import Beginning, Beginnings, LoadOwner
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.given import Question
from vllm_ascend_pd.decode.scheduler.core.load import RemoteLoad
from vllm_ascend_pd.decode.scheduler.first_tokens import FirstTokenReceiver
from vllm_ascend_pd.decode.scheduler.going_on import GoingOn
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.versions import WHOLE


class TokensOfOthers(Beginnings):
    """First tokens and given tokens. A `vocabulary` of 0: the latter are not taken."""

    def __init__(
        self,
        engine: Engine,
        tally: Tally,
        book: TokenBook,
        scheduler: LoadOwner,
        vocabulary: int,
        longest: int,
        *,
        whole: bool,
        gives: bool,
    ) -> None:
        self.first_tokens = FirstTokenReceiver(engine, tally, vocabulary, book, scheduler, whole=whole)
        self.going_on = GoingOn(tally, book, scheduler, self.anew, vocabulary if gives else 0, longest)
        super().__init__(tally, book, self.first_tokens, self.going_on)
        self._tokens = book

    def off(self, why: str) -> None:
        self.first_tokens.off(why)
        self.going_on.vocabulary = 0

    def arrived(self, request: Any) -> None:
        """Wait for the scheduler's question: it comes with each attempt to schedule the request."""

    def waits(self, request: Any) -> bool:
        return self.going_on.waits(request)

    def behind(self, request_id: str) -> int:
        return max(0, len(self._tokens.given(request_id)) - 1)

    def begins(self, request: Any) -> bool:
        return bool(self._tokens.given(request.request_id)) or self.first_tokens.begins(request)

    def of(self, request: Any, bind: Bind, *, recomputes_last: bool) -> Beginning:
        given, prompt = self._tokens.given(request.request_id), request.prompt_token_ids
        # The last given token is the next one that is computed here: to P all the others are prompt.
        tokens = [*prompt, *given[:-1]] if given else prompt
        whole = recomputes_last and bind.end == len(tokens)
        needs = (WHOLE,) if whole else ()
        if given:  # a drafter's KV at a position is that of the next token too
            next_one = {"temperature": 0.0, "allowed_token_ids": [given[-1]]}
            return Beginning(tokens, None, needs, {"first_token": next_one, "prompt_token_ids": tokens})
        leaves = recomputes_last and not whole
        asks = self.first_tokens.ask(request, bind.transfer, recomputes_last=leaves, whole=whole)
        if asks is not None:
            return Beginning(tokens, asks[0], needs, {"first_token": asks[1]})
        if whole:
            raise LocalProtocolError(f"all of {request.request_id} is reserved, and no first token is asked for")
        return Beginning(tokens)

    def outcome(self, key: Hashable, outcome: Outcome) -> None:
        if isinstance(key, Question):
            self.going_on.answered(key, outcome)
        elif isinstance(key, TransferId):
            self.first_tokens.outcome(key, outcome.first, failed=outcome.failure is not None)

    def received(self, now: float, request_id: str) -> RemoteLoad | None:
        return self._tokens.received(now, request_id, starts=self.first_tokens.entered)

    def forget(self, request_id: str) -> None:
        self.going_on.forget(request_id)

    def open_count(self) -> int:
        return self.going_on.open()
