# SPDX-License-Identifier: Apache-2.0
"""Token ids between the events of a response's or a message's stream: before what is made of them, and on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_ascend_pd.protocol.continuing import REPORT, TokensSaid, read_said
from vllm_ascend_pd.vllm_patches import one_by_one, token_reports

SERVERS = ((OpenAIServingResponses, "create_responses"), (AnthropicServingMessages, "create_messages"))


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install it as vLLM's front end does, over streams of a fake server."""
    for name in ("put", "get", "get_nowait"):
        monkeypatch.setattr(RequestOutputCollector, name, getattr(RequestOutputCollector, name))
    for owner, name in SERVERS:
        monkeypatch.setattr(owner, name, _served)
    assert one_by_one.install() == token_reports.wrap_servers() == ""
    yield


class _Said:
    type = "an event"

    def __init__(self, text: str) -> None:
        self.text = text

    def model_dump_json(self, **_: object) -> str:
        return f'"{self.text}"'


def _converted(event: Any) -> str:
    """Write an event as vLLM does."""
    return f"event: {event.type}\ndata: {event.model_dump_json(indent=None, by_alias=True)}\n\n"


async def _served(self: Any, request: Any, raw_request: Any = None) -> Any:
    """Serve a request whose outputs are in `self.queue`; of a text of one letter no event is made."""
    if not request.stream:
        return "whole"

    async def stream() -> AsyncIterator[Any]:
        written = (lambda text: text) if isinstance(self, AnthropicServingMessages) else _Said
        yield written("opening")
        while True:
            output = self.queue.get_nowait() or await self.queue.get()
            (part,) = output.outputs
            if len(part.text) > 1:
                yield written(part.text)
            if output.finished:
                break
        yield written("closing")
        self.closed = True

    return stream()


def output_of(text: str, ids: list[int], finish: str | None = None, stop: str | None = None) -> RequestOutput:
    part = CompletionOutput(0, text, ids, None, None, finish_reason=finish, stop_reason=stop)
    return RequestOutput("r", "", [9, 8], None, [part], finish is not None)


def ask(server: type, outputs: list[RequestOutput], **fields: Any) -> list[Any]:
    """Return the events of a stream."""
    made: Any = object.__new__(server)
    made.queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    request = SimpleNamespace(**{"stream": True, "kv_transfer_params": {REPORT: True}, **fields})

    async def read() -> list[Any]:
        answer = await getattr(made, dict(SERVERS)[server])(request)
        if isinstance(answer, str):
            return [answer]

        async def put() -> None:
            for output in outputs:
                made.queue.put(output)
                await asyncio.sleep(0.001)

        putting = asyncio.ensure_future(put())
        got = [event if isinstance(event, str) else _converted(event) async for event in answer]
        await putting
        return got

    return asyncio.run(read())


def tokens_of(event: str) -> TokensSaid:
    name, _, data = event.partition("\ndata: ")
    assert name == "event: pd.tokens" and data.endswith("\n\n")
    return read_said(data.encode())


OUTPUTS = [output_of("ab", [1]), output_of("c", [2]), output_of("", [3, 4]), output_of("de", [5]), output_of("", [], "stop", "recomputed")]  # fmt: skip


@pytest.mark.parametrize("server", [one for one, _ in SERVERS])
def test_ids_come_before_what_is_made_of_them_and_the_end_before_all_that_follows_from_it(server: type) -> None:
    opening, first, ab, second, de, last, closing = ask(server, OUTPUTS)
    assert "opening" in opening and "ab" in ab and "de" in de and "closing" in closing
    assert tokens_of(first) == TokensSaid([1], prompt=[9, 8])
    assert tokens_of(second) == TokensSaid([2, 3, 4, 5]), "of two outputs nothing was made"
    assert tokens_of(last) == TokensSaid([], finish_reason="stop", stop_reason="recomputed")


@pytest.mark.parametrize("server", [one for one, _ in SERVERS])
@pytest.mark.parametrize("params", [None, {}, {REPORT: False}, {REPORT: 1}, {"do_remote_prefill": True}])
def test_who_does_not_ask_gets_vllms_own_stream(server: type, params: object) -> None:
    events = ask(server, OUTPUTS, kv_transfer_params=params)
    assert len(events) == 4 and not any("pd.tokens" in event for event in events)


def test_an_answer_that_d_keeps_says_so_and_a_whole_one_is_left_alone() -> None:
    assert tokens_of(ask(OpenAIServingResponses, OUTPUTS, store=True)[1]).stored
    assert not tokens_of(ask(AnthropicServingMessages, OUTPUTS)[1]).stored
    assert ask(OpenAIServingResponses, [], stream=False) == ["whole"]


def test_two_streams_at_once_have_their_own_tokens() -> None:
    async def both() -> list[list[Any]]:
        return await asyncio.gather(*(asyncio.to_thread(ask, server, OUTPUTS) for server, _ in SERVERS))

    one, other = asyncio.run(both())
    assert [tokens_of(one[at]) for at in (1, 3, 5)] == [tokens_of(other[at]) for at in (1, 3, 5)]


def test_a_client_that_leaves_ends_the_stream_below() -> None:
    left = []

    async def stream() -> AsyncIterator[str]:
        try:
            while True:
                yield "x"
        finally:
            left.append("the engine's request is aborted here")

    async def leave() -> None:
        events = token_reports.with_tokens(stream(), str, stored=False)  # type: ignore[arg-type]
        async with aclosing(events):  # type: ignore[type-var]
            async for _ in events:
                break
        assert left

    asyncio.run(leave())


def test_a_server_that_differs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def create_messages(self: Any, request: Any) -> None: ...

    assert token_reports.wrap_servers() == "", "once more changes nothing"
    monkeypatch.setattr(AnthropicServingMessages, "create_messages", create_messages)
    assert "create_messages differs" in token_reports.wrap_servers()
    assert AnthropicServingMessages.create_messages is create_messages
    monkeypatch.delattr(AnthropicServingMessages, "create_messages")
    assert "create_messages elsewhere" in token_reports.wrap_servers()
