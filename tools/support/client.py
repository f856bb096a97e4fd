# SPDX-License-Identifier: Apache-2.0
"""Client of the OpenAI endpoints that measures the time to the first token and keeps the token ids."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(connect=5.0, read=240.0, write=30.0, pool=240.0)


class RequestFailed(RuntimeError):
    """The status is not 200, or the stream ended with an error event or without a token."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status
        self.text = text


@dataclass
class TimedAnswer:
    """Contents and times of one answer."""

    prompt: tuple[int, ...] = ()  # as tokenised by the engine
    tokens: tuple[int, ...] = ()
    chances: list[float] = field(default_factory=list)  # log-probabilities of the tokens, if the request asked for them
    text: str = ""
    finish: str = ""
    ttft: float = 0.0
    times: list[float] = field(default_factory=list)  # of each chunk with tokens, seconds after sending
    started: float = 0.0  # by this process's monotonic clock

    @property
    def seconds(self) -> float:
        return self.times[-1] if self.times else 0.0


def prompt(length: int, seed: int, vocab: int = 512) -> list[int]:
    """Return `length` random token ids, fixed by seed and length, none of them special."""
    dice = random.Random(f"{seed}/{length}")
    return [dice.randrange(3, vocab - 1) for _ in range(length)]


def body_of(tokens: Sequence[int] | str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """Return a greedy completion request for exactly `max_tokens` tokens, with token ids in the answer."""
    return {
        "model": "model",
        "prompt": tokens if isinstance(tokens, str) else list(tokens),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def chat_body_of(text: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = body_of("", max_tokens, **more)
    del body["prompt"]
    return {**body, "messages": [{"role": "user", "content": text}]}


async def stream(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    answer: TimedAnswer | None = None,
    headers: Mapping[str, str] | None = None,
) -> TimedAnswer:
    """Send a request with streaming on; `url` ends in /completions or /chat/completions.

    `answer`: filled as the chunks come, so that another thread sees how far it is.
    """
    answer = answer or TimedAnswer()
    answer.started = time.monotonic()
    tokens: list[int] = []
    async with client.stream("POST", url, json={**body, "stream": True}, headers=headers) as response:
        if response.status_code != 200:
            raise RequestFailed(response.status_code, (await response.aread()).decode(errors="replace"))
        async for line in lines_of(response):
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            _take(answer, tokens, json.loads(line[5:]), time.monotonic() - answer.started)
    if not tokens:
        raise RequestFailed(200, "the stream ended without a token")
    answer.tokens = tuple(tokens)
    return answer


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """Split at newlines only: httpx also splits at U+0085 and U+2028, which may occur in a model's text."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _take(answer: TimedAnswer, tokens: list[int], chunk: dict[str, Any], at: float) -> None:
    if "error" in chunk:
        code = chunk["error"].get("code")  # an HTTP status, or a code of the metaserver
        raise RequestFailed(int(code) if str(code).isdecimal() else 500, json.dumps(chunk["error"]))
    answer.prompt = answer.prompt or tuple(chunk.get("prompt_token_ids") or ())
    for choice in chunk.get("choices", ()):
        answer.prompt = answer.prompt or tuple(choice.get("prompt_token_ids") or ())
        new = choice.get("token_ids") or ()
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
        if new:
            answer.ttft = answer.ttft or at
            answer.times.append(at)
            tokens.extend(new)
            answer.chances.extend((choice.get("logprobs") or {}).get("token_logprobs") or ())


def complete(base: str, body: Mapping[str, Any], path: str = "/v1/completions") -> TimedAnswer:
    """Send one streamed request from synchronous code."""
    return gather(base, [body], path)[0]


def gather(base: str, bodies: Sequence[Mapping[str, Any]], path: str = "/v1/completions") -> list[TimedAnswer]:
    """Send all requests at once. Raise the first failure, after all have ended."""
    results = attempt(base, bodies, path)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, TimedAnswer)]


def attempt(
    base: str, bodies: Sequence[Mapping[str, Any]], path: str = "/v1/completions", names: Sequence[str] = ()
) -> list[TimedAnswer | BaseException]:
    """Send all requests at once, under these ids if there are any. Return an answer or an exception for each."""
    headers = [{"x-request-id": name} for name in names] or [{}] * len(bodies)

    async def run() -> list[TimedAnswer | BaseException]:
        limits = httpx.Limits(max_connections=len(bodies), max_keepalive_connections=len(bodies))
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False, verify=False) as client:
            asked = zip(bodies, headers, strict=True)
            return await asyncio.gather(
                *(stream(client, base + path, body, headers=more) for body, more in asked), return_exceptions=True
            )

    return asyncio.run(run())


def post(
    base: str, body: Mapping[str, Any], path: str = "/v1/completions", headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Send one request without streaming. Return the JSON of the answer."""
    response = httpx.post(base + path, json=dict(body), headers=headers, timeout=TIMEOUT, trust_env=False, verify=False)
    if response.status_code != 200:
        raise RequestFailed(response.status_code, response.text)
    answer: dict[str, Any] = response.json()
    return answer


def leave_after(base: str, body: Mapping[str, Any], seconds: float) -> None:
    """Send a streamed request and close the connection after `seconds`, even in the middle of the answer."""

    async def run() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, verify=False) as client:
            try:
                await asyncio.wait_for(stream(client, base + "/v1/completions", body), seconds)
            except asyncio.TimeoutError:
                return

    asyncio.run(run())


def leave_when(base: str, body: Mapping[str, Any], reached: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Send a streamed request, and close the connection once `reached()` is true, which it must be before its end."""

    async def run() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, verify=False) as client:
            asked = asyncio.create_task(stream(client, base + "/v1/completions", body))
            until = time.monotonic() + deadline_s
            while not await asyncio.to_thread(reached):
                assert not asked.done() and time.monotonic() < until, "its client could not leave in time"
                await asyncio.sleep(0.005)
            asked.cancel()
            await asyncio.wait([asked])

    asyncio.run(run())
