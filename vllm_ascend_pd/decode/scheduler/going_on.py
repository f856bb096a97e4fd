# SPDX-License-Identifier: Apache-2.0
"""Requests whose answer goes on here: the router is asked for what the client has, and that is put out once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd.decode.scheduler.beginnings import LoadOwner
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.given import Question, unfit
from vllm_ascend_pd.decode.scheduler.core.routes import Ticket
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.protocol.continuing import AnswerWanted, goes_on
from vllm_ascend_pd.vllm_patches import given_tokens, step_hooks

ANSWER_S = 10.0  # a router that is away for longer has lost its memory, and the answer with it


class GoingOn(step_hooks.StepHooks):
    """Given tokens on D. A request that cannot begin with them begins anew, which its router notices.

    `vocabulary`: its size if requests may begin with given tokens, or 0. Prompt and answer may be `longest` together.
    """

    def __init__(
        self,
        tally: Tally,
        book: TokenBook,
        scheduler: LoadOwner,
        anew: Callable[[str, str, str], None],
        vocabulary: int,
        longest: int,
    ) -> None:
        super().__init__()
        self._tally, self._book, self._scheduler, self._begin_anew = tally, book, scheduler, anew
        self.vocabulary, self._longest = vocabulary, longest
        self._open: dict[str, Question] = {}  # by request; its tokens are not put out yet
        self._told: dict[str, tuple[int, ...]] = {}  # of these, those with tokens

    def open(self) -> int:
        return len(self._open)

    def waits(self, request: Any) -> bool:
        """Return whether a request begins with tokens that are not put out yet. Repeatable."""
        request_id = request.request_id
        if self._book.decides_beginning(request_id) and goes_on(request.kv_transfer_params):
            self._ask(request)
        question = self._open.get(request_id)
        if question is not None and time.monotonic() >= question.until:
            self._anew(question, "scheduler" if request_id in self._told else "late", "it took too long")
            self._hang_up(question)
        return request_id in self._open

    def _ask(self, request: Any) -> None:
        route = self._book.route(request.request_id, lambda: None)
        question = Question(
            request.request_id, time.monotonic() + ANSWER_S, self._longest - len(request.prompt_token_ids or ())
        )
        if not self.vocabulary or not isinstance(route, Ticket):
            self._anew(question, "engine", "this engine does not take given tokens, or none from this router")
        elif why := given_tokens.refusal(request):
            self._anew(question, "request", why)
        else:
            self._open[request.request_id] = question
            wanted = AnswerWanted(route.ticket, prompt_hash(request.prompt_token_ids))
            if (client := self._scheduler.client()) is not None:
                client.ask(question, route.metaserver, wanted, ANSWER_S)

    def answered(self, question: Question, outcome: Outcome) -> None:
        """Handle what the router says of a request's answer so far."""
        if self._open.get(question.request_id) is not question:
            return
        if outcome.failure is not None:
            self._anew(question, outcome.failure.code, outcome.failure.detail)
        elif why := unfit(outcome.tokens, self.vocabulary, question.room):
            self._anew(question, "tokens", why)
        elif outcome.tokens:
            self._told[question.request_id] = outcome.tokens
        else:
            del self._open[question.request_id]  # the client has nothing yet

    def after(self, scheduler: Any, outputs: Any) -> None:
        if not self._open:
            return
        self._scheduler.listen()
        told, self._told = self._told, {}
        for request_id, tokens in told.items():
            question = self._open.pop(request_id)
            request = scheduler.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            if given_tokens.has_run(request):  # vLLM waits for no connector if a request may not read the prefix cache
                self._anew(question, "scheduler", "vLLM did not wait for it")
            else:
                self._book.give(request_id, tokens)
                for output in given_tokens.give(scheduler, request, tokens):
                    step_hooks.add(outputs, request.client_index, output)
                self._tally.add("answers_continued", 1)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._told.pop(request_id, None)
        if (question := self._open.pop(request_id, None)) is not None:
            self._hang_up(question)

    def _hang_up(self, question: Question) -> None:
        if (client := self._scheduler.client()) is not None:
            client.forget(question)

    def _anew(self, question: Question, reason: str, why: str) -> None:
        self._open.pop(question.request_id, None)
        self._told.pop(question.request_id, None)
        self._begin_anew(question.request_id, reason, why)
