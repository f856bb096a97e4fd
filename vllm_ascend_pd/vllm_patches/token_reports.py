# SPDX-License-Identifier: Apache-2.0
"""Token ids between the events of a response's or a message's stream, if the router asks for them.

vLLM has no parameter for that on these routes. The task that writes a stream also reads the request's outputs, so what
it reads between two events is what the second one was made of. Ids go out before that event, with the reason that ended
the answer if there is one: a router must know that D has dropped it before it passes on what D made of a half answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import msgspec

from vllm_ascend_pd.protocol.continuing import EVENT, REPORT, TokensSaid
from vllm_ascend_pd.vllm_patches.wrapping import differing, wrap

_PARAMETERS = ("self", "request", "raw_request")


class _OutputsRead:
    """Outputs that the task which writes a stream has read since its last event."""

    def __init__(self, *, stored: bool) -> None:
        self._prompt: list[int] | None = None
        self._ids: list[int] = []
        self._ended: tuple[str | None, Any] = None, None
        self._stored, self.news = stored, False

    def take(self, output: Any) -> None:
        (part,) = output.outputs[:1] or (None,)
        if part is None:
            return
        if not self.news and self._prompt is None:
            self._prompt = list(output.prompt_token_ids or ())
        self._ids += part.token_ids
        self._ended, self.news = (part.finish_reason, part.stop_reason), True

    def said(self) -> str:
        """Return the data of an event, and begin the next one."""
        prompt, ids = self._prompt, self._ids
        self._prompt, self._ids, self.news = [], [], False
        said = TokensSaid(ids, prompt or None, *self._ended, stored=self._stored)
        return msgspec.json.encode(said).decode()


_READ: ContextVar[_OutputsRead | None] = ContextVar("pd_read", default=None)


class _Event:
    """An event as vLLM's converter takes it, which writes its `type` and its JSON."""

    type = EVENT

    def __init__(self, data: str) -> None:
        self._data = data

    def model_dump_json(self, **_: object) -> str:
        return self._data


def note(output: Any) -> None:
    """Note an output that some task has read from its request's queue."""
    read = _READ.get()
    if read is not None and output is not None:
        read.take(output)


def wrap_servers() -> str:
    """Wrap what makes these streams, once. Return why not; empty: it is wrapped."""
    try:
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

        makers = OpenAIServingResponses.create_responses, AnthropicServingMessages.create_messages
    except (ImportError, AttributeError) as missing:
        return f"this vLLM has {missing.name} elsewhere"
    if others := differing(*((maker, _PARAMETERS) for maker in makers)):
        return f"this vLLM's {others[0]} differs"
    wrap(OpenAIServingResponses, "create_responses", lambda original: _reporting(original, _Event))
    wrap(AnthropicServingMessages, "create_messages", lambda original: _reporting(original, _written))
    return ""


def _written(data: str) -> str:
    return f"event: {EVENT}\ndata: {data}\n\n"


def _reporting(original: Any, as_event: Callable[[str], Any]) -> Any:
    async def create(self: Any, request: Any, raw_request: Any = None) -> Any:
        answer = await original(self, request, raw_request)
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(answer, AsyncGenerator) and params and params.get(REPORT) is True:
            return with_tokens(answer, as_event, stored=bool(getattr(request, "store", False)))
        return answer

    return create


async def with_tokens(
    events: AsyncGenerator[Any, None], as_event: Callable[[str], Any], *, stored: bool
) -> AsyncIterator[Any]:
    """Yield a stream's events, and before each the tokens that were read since the last one."""
    read = _OutputsRead(stored=stored)
    _READ.set(read)
    async with aclosing(events):
        async for event in events:
            if read.news:
                yield as_event(read.said())
            yield event
