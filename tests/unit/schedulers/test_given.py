# SPDX-License-Identifier: Apache-2.0
"""D's request where an answer goes on: for the KV of the prompt and of all given tokens but the last, and no token."""

from __future__ import annotations

import base64
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.json import encode
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from unit.kits.watching import until
from unit.schedulers.kit import CACHE, ENDPOINTS, SECRETS, TOKENS, engine, request
from unit.schedulers.recording_metaserver import PREFILLED, RecordingMetaserver
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.protocol.auth import prompt_hash, unseal
from vllm_ascend_pd.protocol.continuing import CONTINUE, AnswerSoFar, goes_on
from vllm_ascend_pd.protocol.versions import WHOLE
from vllm_ascend_pd.vllm_patches import first_token, given_tokens
from vllm_ascend_pd.vllm_patches.patience import Patience
from vllm_ascend_pd.vllm_patches.tried import VLLM

GIVEN = [7, 8, 9]
WINDOW = msgspec.structs.replace(CACHE, groups=(Group(4, "window", 6),))


def going_on(server: RecordingMetaserver, **facts: Any) -> DecodeScheduler:
    keys = {"vocabulary": 128, "whole": True, "longest": 64, "gives": True, **facts}
    return DecodeScheduler(engine(SECRETS, metaserver_urls=[server.url]), Patience(lambda: 0), **keys)


def posted(cache: CacheGeometry, blocks: list[int], said: tuple[int, bytes], **facts: Any) -> tuple[Any, ...]:
    """Return D's post for a request that goes on, its reservation, what was put out before, and D's question."""
    with RecordingMetaserver(PREFILLED) as server, closing(going_on(server, **facts)) as d:
        server.so_far = said
        d.attach_workers({(0, rank): WorkerFacts(where, cache) for rank, where in enumerate(ENDPOINTS)})
        ticket = {"do_remote_prefill": True, "metaserver": server.url, "ticket": "t", CONTINUE: True}
        asked, outputs = request("r", ticket), dict[int, Any]()
        asked.max_tokens = 50
        manager = SimpleNamespace(accept_tokens=lambda request, tokens: True)
        scheduler = SimpleNamespace(
            requests={"r": asked}, log_stats=True, max_model_len=64, structured_output_manager=manager
        )
        first, *others = d.step_hooks()
        first.after(scheduler, {})
        counts: list[int] = []

        def stepped() -> bool:
            count = d.wanted(asked, 4)
            if count is None:
                assert d.nap_budget() == 1, "the engine naps meanwhile"
                d.build_step()
                for hooks in others:
                    hooks.after(scheduler, outputs)
                return False
            counts.append(count)
            return True

        until(stepped, "the answer so far")
        assert not d.nap_budget()
        d.allocated(asked, [blocks], counts[0])
        until(lambda: server.bodies, "the POST")
        body = server.bodies[0]
        return body, unseal(base64.b64decode(body["reservation"]), SECRETS), outputs, server.questions


@pytest.mark.parametrize(("cache", "needs"), [(CACHE, ()), (WINDOW, (WHOLE,))], ids=["all of it", "a window"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_d_reserves_what_is_computed_before_the_next_token(
    cache: CacheGeometry, needs: tuple[str, ...], count: int
) -> None:
    given = GIVEN[:count]
    body, reserved, outputs, questions = posted(cache, [40, 41, 42, 43], (200, encode(AnswerSoFar(given))))
    assert questions == [{"ticket": "t", "prompt": prompt_hash(TOKENS)}]
    before = [*TOKENS, *given[:-1]]
    assert (reserved.prompt_length, reserved.prompt_hash) == (len(before), prompt_hash(before))
    assert reserved.end == len(before) and reserved.needs == needs
    assert reserved.seed is None, "P's next token is none of D's"
    assert body["first_token"]["allowed_token_ids"] == given[-1:], "and must be the one that P's drafter looks at"
    assert body["prompt_token_ids"] == before, "P gets what D computes behind, and not what the router has rendered"
    assert [output.new_token_ids for output in outputs[0].outputs] == [[token] for token in given]


@pytest.mark.parametrize("facts", [{"gives": False}, {"vocabulary": 0}, {"longest": 12}], ids=str)
def test_an_engine_that_takes_none_begins_anew(facts: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    body, reserved, outputs, _ = posted(CACHE, [40, 41, 42], (200, encode(AnswerSoFar(GIVEN))), **facts)
    assert reserved.prompt_length == len(TOKENS) and not outputs and "prompt_token_ids" not in body
    assert "the answer of request r begins anew" in caplog.text


@pytest.mark.parametrize("tokens", [[], GIVEN], ids=str)
def test_a_request_whose_client_has_nothing_begins(tokens: list[int], caplog: pytest.LogCaptureFixture) -> None:
    _, reserved, outputs, _ = posted(CACHE, [40, 41, 42], (200, encode(AnswerSoFar(tokens))))
    assert (reserved.prompt_length == len(TOKENS), bool(outputs)) == (not tokens, bool(tokens))
    assert "begins anew" not in caplog.text


def test_a_request_that_ends_hangs_up() -> None:
    with RecordingMetaserver(PREFILLED) as server, closing(going_on(server)) as d:
        server.so_far = None
        d.attach_workers({(0, rank): WorkerFacts(where, CACHE) for rank, where in enumerate(ENDPOINTS)})
        asked = request("r", {"do_remote_prefill": True, "metaserver": server.url, "ticket": "t", CONTINUE: True})
        assert d.wanted(asked, 0) is None
        until(lambda: server.questions, "the question")
        assert d.wanted(asked, 0) is None and d.nap_budget() == 1
        d.request_finished(asked, False)
        until(lambda: server.left, "D hangs up")
        assert not d.nap_budget() and len(server.questions) == 1


def test_a_grammar_that_takes_no_tokens_here_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    shaped = Request("r", TOKENS, shape, None)
    assert given_tokens.refusal(shaped) == ""
    monkeypatch.setattr(first_token, "TRIED_GRAMMARS", {VLLM: ()})
    assert given_tokens.refusal(shaped).endswith("was not tried with grammars")
    assert given_tokens.refusal(request()) == ""


@pytest.mark.parametrize("value", [None, False, 1, "true", [True], {"tokens": [7]}], ids=str)
def test_nothing_but_true_goes_on(value: object) -> None:
    assert not goes_on({CONTINUE: value}) and goes_on({CONTINUE: True})
