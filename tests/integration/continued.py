# SPDX-License-Identifier: Apache-2.0
"""Answers that another engine has begun, and that go on at D: the test is the metaserver that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fake_metaserver import Answer as Said
from fake_metaserver import fake_metaserver
from pairs import Pair, fresh_prompt

from tools.support.checks import eventually, fresh_salt
from tools.support.client import body_of, complete, gather, post
from tools.support.engine import RunningServer
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.protocol.continuing import CONTINUE

LENGTHS = (20, 31, 32, 33, 300, 700)


@dataclass
class AnswersOfAnother:
    """Metaserver that has the beginnings of answers by ticket, and lets P compute the prompts that D posts."""

    prefill: RunningServer
    url: str
    so_far: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)  # D's reports
    model: str = "model"  # of P's requests, as an adapter is named

    def __call__(self, body: dict[str, Any]) -> Said:
        if "prompt" in body:
            prompt, tokens = self.so_far[body["ticket"]]
            return (200, [{"tokens": tokens}]) if prompt == body["prompt"] else (409, [])
        if "reservation" not in body:
            self.loads.append(body)
            return 204, []
        params = {"do_remote_decode": True, "reservation": body["reservation"]}
        more = {"kv_transfer_params": params, "cache_salt": body["ticket"], "model": self.model, **body["first_token"]}
        post(self.prefill.url, body_of(body["prompt_token_ids"], 1, **more))
        return 200, [{"event": "accepted", "prefill": "127.0.0.1:1"}, {"event": "prefilled"}]

    def body(self, asked: dict[str, Any], prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """Return a request that goes on behind these tokens. Its ticket is its salt: D has nothing of it cached."""
        ticket = fresh_salt("goes-on")
        self.so_far[ticket] = prompt_hash(prompt), tokens
        params = {"do_remote_prefill": True, "metaserver": self.url, "ticket": ticket, CONTINUE: True}
        return {**asked, "kv_transfer_params": params, "cache_salt": ticket}

    def check(self, requests: int) -> None:
        """Check that so many requests went on, each with its KV from P."""
        eventually(lambda: len(self.loads) == requests, f"D has reported {requests} loads")
        assert all(load["first_token"] == "given" for load in self.loads)
        assert not any(load.get("code") for load in self.loads), self.loads


@contextmanager
def answers_of_another(prefill: RunningServer, port: int) -> Iterator[AnswersOfAnother]:
    made = AnswersOfAnother(prefill, f"http://127.0.0.1:{port}")
    with fake_metaserver(port, made):
        yield made


def check_answers_of_another(pair: Pair, port: int, model: str = "model") -> None:
    """Check that D goes on with one engine's answers."""
    prompts = [fresh_prompt(length) for length in LENGTHS]
    asks = [body_of(prompt, 12, model=model) for prompt in prompts]
    wholes = [one.tokens for one in gather(pair.prefill.url, asks)]
    with answers_of_another(pair.prefill, port) as others:
        others.model = model
        for count, prompt, asked, whole in zip((1, 2, 4, 7, 10, 11), prompts, asks, wholes, strict=True):
            body = others.body(asked, prompt, list(whole[:count]))
            assert complete(pair.decode[0].url, body).tokens == whole, f"behind {count} tokens of {len(prompt)}"
        others.check(len(prompts))


def behind(answer: Any, count: int) -> Any:
    """Return an answer without the log-probabilities of its first tokens, which another engine had."""
    if isinstance(answer, dict):
        cut = dict(answer)
        logprobs = answer.get("logprobs")
        if isinstance(logprobs, list):
            cut["logprobs"] = logprobs[count:]
        elif isinstance(logprobs, dict):
            cut["logprobs"] = {name: values[count:] for name, values in logprobs.items() if values}
        return {key: behind(value, count) for key, value in cut.items()}
    return [behind(value, count) for value in answer] if isinstance(answer, list) else answer
