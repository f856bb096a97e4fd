# SPDX-License-Identifier: Apache-2.0
"""The metaserver with a real pair and the unchanged clients of `openai` and `anthropic`.

The engines are the faulty pair's, without a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pairs import PairMaker, eventually, prefilled

from tools.support.cells import STORES, FaultSite
from tools.support.checks import counter
from tools.support.client import body_of
from tools.support.cluster import STRICT, Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec, MetaserverSpec

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


def response(client: openai.OpenAI, said: str, **more: Any) -> Any:
    asked = {"model": "model", "input": said, "temperature": 0, "max_output_tokens": 8, **more}
    return client.responses.create(**asked, extra_body={"ignore_eos": True})


def of_events(events: Iterable[Any]) -> tuple[str, str, int]:
    """Return text, end and number of tokens of a response's stream, whose events are numbered."""
    listed = list(events)
    assert [event.sequence_number for event in listed] == list(range(len(listed)))
    assert listed[0].type == "response.created" and listed[-1].type == "response.completed"
    whole = listed[-1].response
    assert whole.id == listed[0].response.id and whole.kv_transfer_params is None
    text = "".join(event.delta for event in listed if event.type == "response.output_text.delta")
    assert text == whole.output_text
    return text, whole.status, whole.usage.output_tokens


def test_a_response_says_what_one_engine_says(door: FaultyFrontDoor) -> None:
    said = "tell me of this " * 20
    both(door, lambda c: (got := response(c, said)).output_text + f"{got.usage.input_tokens} {got.kv_transfer_params}")
    both(door, lambda c: of_events(response(c, "now " + said, stream=True)))


def test_a_response_goes_on_where_it_is_stored(door: FaultyFrontDoor) -> None:
    first = {client: response(client, "remember this well " * 20) for client in (door.client, door.single)}
    both(door, lambda c: response(c, "and now? " * 20, previous_response_id=first[c].id).output_text)
    both(door, lambda c: c.responses.retrieve(first[c].id).output_text, loads=0)
    assert door.client.responses.retrieve(first[door.client].id).kv_transfer_params is None
    with pytest.raises(openai.NotFoundError) as refused:
        door.client.responses.retrieve("resp_" + "0" * 32 + "t" + "0" * 24)
    assert refused.value.code == "PD-META-034"


@pytest.mark.slow
def test_each_follow_up_comes_to_the_d_that_has_the_response(cluster: Cluster) -> None:
    """With two D's, in twenty conversations side by side, of four turns each."""
    port = cluster.port()
    extra = cluster.push_config(f"http://127.0.0.1:{port}")
    common: dict[str, Any] = {"role": "kv_consumer", "extra": extra, "environment": STORES}
    p, *ds = cluster.start(
        EngineSpec("stored-p", ensure("gqa"), "kv_producer", extra=cluster.push_config()),
        *(EngineSpec(f"stored-d{number}", ensure("gqa"), **common) for number in range(2)),
    )
    front = cluster.metaserver([p], ds, port, STRICT)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0, timeout=120) as client:

        def talk(number: int) -> int:
            last = response(client, f"remember {number} " * 20)
            for turn in range(3):
                last = response(client, f"and {turn} " * 20, previous_response_id=last.id)
                assert client.responses.retrieve(last.id).output_text == last.output_text
            return 3

        with ThreadPoolExecutor(5) as clients:
            assert sum(clients.map(talk, range(20))) == 60
    served = [counter(d, "vllm:request_success_total") for d in ds]
    assert min(served) >= 16, f"one D has had nearly all, so the other one was never the wrong one: {served}"
    cluster.stop(front, p, *ds)


@contextmanager
def messages_of(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0, timeout=120) as client:
        yield client


def test_a_message_says_what_one_engine_says(door: FaultyFrontDoor) -> None:
    asked: dict[str, Any] = {"model": "model", "max_tokens": 8, "system": "be brief " * 20}
    asked["extra_body"] = {"temperature": 0}
    with messages_of(door.url) as client, messages_of(str(door.single.base_url).removesuffix("/v1/")) as single:

        def answer(client: anthropic.Anthropic, said: str) -> Any:
            whole = client.messages.create(messages=[{"role": "user", "content": said}], **asked)
            return [one.text for one in whole.content], whole.stop_reason, whole.usage.input_tokens

        def stream(client: anthropic.Anthropic, said: str) -> Any:
            with client.messages.stream(messages=[{"role": "user", "content": said}], **asked) as events:
                text = "".join(events.text_stream)
                last = events.get_final_message()
            assert [one.text for one in last.content] == [text]
            return text, last.stop_reason, last.usage.output_tokens

        for said, ask in (("how are you " * 20, answer), ("and how are you " * 20, stream)):
            with prefilled_by_p(door.url, 1):
                through = ask(client, said)
            assert through == ask(single, said)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(messages=[{"role": "user", "content": "x"}], **{**asked, "model": "another"})


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
