# SPDX-License-Identifier: Apache-2.0
"""The metaserver with a real pair and the unchanged `openai` client.

The engines are the faulty pair's, without a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from pairs import PairMaker, eventually, prefilled

from tools.support.cells import FaultSite
from tools.support.client import body_of
from tools.support.engine import EngineProcess
from tools.support.spec import MetaserverSpec

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]
WORDS = {"model": "model", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@dataclass
class FaultyFrontDoor:
    url: str
    decode: EngineProcess
    client: openai.OpenAI
    single: openai.OpenAI  # the prefill engine, asked directly: one engine's answers


@pytest.fixture(scope="module")
def door(faulty: FaultSite, make_pair: PairMaker) -> Iterator[FaultyFrontDoor]:
    pair = make_pair(faulty.prefill, faulty.decode)
    urls = (pair.front.url, faulty.prefill.url)
    clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=120) for url in urls]
    yield FaultyFrontDoor(pair.front.url, faulty.decode, *clients)
    for client in clients:
        client.close()
    pair.cluster.stop(pair.front)


@contextmanager
def prefilled_by_p(url: str, count: int) -> Iterator[None]:
    """Require `count` loads from P for the requests inside. D may report one after its answer."""
    wanted = prefilled(url) + count
    yield
    eventually(lambda: prefilled(url) >= wanted, f"{count} loads")
    assert prefilled(url) == wanted


def both(door: FaultyFrontDoor, ask: Callable[[openai.OpenAI], Any], loads: int = 1) -> None:
    """Require the answer of one engine from the pair, prefilled by P."""
    with prefilled_by_p(door.url, loads):
        through = ask(door.client)
    assert through == ask(door.single)


def written(stream: Iterable[Any]) -> tuple[str, list[int], str]:
    """Return a stream's text, tokens and reason to finish. How many tokens an event has is a matter of the load."""
    choices = [piece.choices[0] for piece in stream]
    text = "".join((c.delta.content or "") if hasattr(c, "delta") else c.text for c in choices)
    tokens = [token for c in choices for token in getattr(c, "token_ids", None) or ()]
    assert len(tokens) == WORDS["max_tokens"]
    return text, tokens, choices[-1].finish_reason


def test_completions_and_chat_say_what_one_engine_says(door: FaultyFrontDoor) -> None:
    prompt, messages = "one two three " * 30, [{"role": "user", "content": "how are you " * 20}]
    both(door, lambda c: c.completions.create(prompt=prompt, **WORDS).choices[0].text)
    both(door, lambda c: c.chat.completions.create(messages=messages, **WORDS).choices[0].message.content)
    stream = {**WORDS, "stream": True, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    both(door, lambda c: written(c.completions.create(prompt="s" + prompt, **stream)))
    messages = [{"role": "user", "content": "and how are you " * 20}]
    both(door, lambda c: written(c.chat.completions.create(messages=messages, **stream)))


def test_list_prompts_and_several_choices(door: FaultyFrontDoor) -> None:
    prompts = ["the first prompt " * 20, "the second prompt " * 20]
    both(door, lambda c: [x.text for x in c.completions.create(prompt=prompts, **WORDS).choices], loads=2)
    asked = {**WORDS, "temperature": 1.0, "n": 2}  # no seed: with one, vLLM on a CPU fails in a chunked prefill
    with prefilled_by_p(door.url, 2):
        assert len(door.client.completions.create(prompt="two answers " * 20, **asked).choices) == 2


def test_several_choices_of_a_chat_and_of_a_stream(door: FaultyFrontDoor) -> None:
    asked = {**WORDS, "temperature": 1.0, "n": 2}  # no seed: with one, vLLM on a CPU fails in a chunked prefill
    messages = [{"role": "user", "content": "two answers to this, please " * 20}]
    with prefilled_by_p(door.url, 2):
        assert len(door.client.chat.completions.create(messages=messages, **asked).choices) == 2
    with prefilled_by_p(door.url, 2):
        pieces = door.client.completions.create(prompt="two streams " * 20, stream=True, **asked)
        assert {choice.index for piece in pieces for choice in piece.choices} == {0, 1}


def test_an_engines_errors_reach_the_client_as_they_are(door: FaultyFrontDoor) -> None:
    with pytest.raises(openai.NotFoundError):
        door.client.completions.create(prompt="x", **{**WORDS, "model": "another"})
    with pytest.raises(openai.BadRequestError):
        door.client.completions.create(prompt=[5] * 5000, **WORDS)


def test_a_client_that_leaves_ends_the_request_on_d(door: FaultyFrontDoor) -> None:
    stream = door.client.completions.create(prompt="leave this one " * 20, **{**WORDS, "max_tokens": 1500}, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: not door.decode.metrics()["vllm:num_requests_running"], "the abort has arrived", 10)


def test_a_sidecar_of_d_prefills_where_the_header_says(faulty: FaultSite, ports: list[int]) -> None:
    p = faulty.prefill.url.removeprefix("http://")
    how = MetaserverSpec(("--prefill-allowed", f"127.0.0.0/8:{p.partition(':')[2]}"), sidecar=True)
    front = faulty.cluster.metaserver([], [faulty.decode], ports[-1], how)

    def ask(url: str, prompt: str, named: str = "") -> httpx.Response:
        headers = {"x-prefiller-host-port": named} if named else {}
        return httpx.post(f"{url}/v1/completions", json=body_of(prompt, 8), headers=headers, timeout=120)

    try:
        for number, named in enumerate((p, "", p)):
            prompt = f"{number} {named} how are you " * 30
            with prefilled_by_p(front.url, 1 if named else 0):  # D prefills where no P is named
                answer = ask(front.url, prompt, named)
            right = ask(faulty.prefill.url, prompt)
            assert answer.json()["choices"][0]["text"] == right.json()["choices"][0]["text"]
        assert prefilled(front.url) == 2
        refused = ask(front.url, "elsewhere", "127.0.0.1:9")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "PD-META-032"
    finally:
        faulty.cluster.stop(front)
