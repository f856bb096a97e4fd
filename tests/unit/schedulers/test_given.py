# SPDX-License-Identifier: Apache-2.0
"""D's request where an answer goes on: for the KV of the prompt and of all given tokens but the last, and no token."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from unit.kits.watching import until
from unit.schedulers.kit import CACHE, ENDPOINTS, SECRETS, TOKENS, engine, request
from unit.schedulers.recording_metaserver import PREFILLED, RecordingMetaserver
from vllm_ascend_pd.decode.scheduler.core.given import CONTINUE, read_given
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.protocol.auth import prompt_hash, unseal
from vllm_ascend_pd.protocol.versions import WHOLE
from vllm_ascend_pd.vllm_patches.patience import Patience

GIVEN = [7, 8, 9]
WINDOW = msgspec.structs.replace(CACHE, groups=(Group(4, "window", 6),))


def posted(cache: CacheGeometry, blocks: list[int], asked_with: Any, **facts: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return D's post for a request with the answer so far, its reservation, and what was put out before."""
    server = RecordingMetaserver(PREFILLED)
    keys = {"vocabulary": 128, "whole": True, "longest": 64, "gives": True, **facts}
    d = DecodeScheduler(engine(SECRETS, metaserver_urls=[server.url]), Patience(lambda: 0), **keys)
    try:
        d.attach_workers({(0, rank): WorkerFacts(where, cache) for rank, where in enumerate(ENDPOINTS)})
        ticket = {"do_remote_prefill": True, "metaserver": server.url, "ticket": "t", CONTINUE: asked_with}
        asked, outputs = request("r", ticket), dict[int, Any]()
        asked.max_tokens = 50
        manager = SimpleNamespace(accept_tokens=lambda request, tokens: True)
        scheduler = SimpleNamespace(requests={}, log_stats=True, max_model_len=64, structured_output_manager=manager)
        d.first_tokens.after(scheduler, outputs)
        scheduler.requests["r"] = asked
        count = d.wanted(asked, 4)
        while count is None:
            d.first_tokens.after(scheduler, outputs)
            count = d.wanted(asked, 4)
        d.allocated(asked, [blocks], count)
        until(lambda: server.bodies, "the POST")
        body = server.bodies[0]
        return body, unseal(base64.b64decode(body["reservation"]), SECRETS), outputs
    finally:
        d.close()
        server.served.stop()


@pytest.mark.parametrize(("cache", "needs"), [(CACHE, ()), (WINDOW, (WHOLE,))], ids=["all of it", "a window"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_d_reserves_what_is_computed_before_the_next_token(
    cache: CacheGeometry, needs: tuple[str, ...], count: int
) -> None:
    given = GIVEN[:count]
    body, reserved, outputs = posted(cache, [40, 41, 42, 43], {"prompt": prompt_hash(TOKENS), "tokens": given})
    before = [*TOKENS, *given[:-1]]
    assert (reserved.prompt_length, reserved.prompt_hash) == (len(before), prompt_hash(before))
    assert reserved.end == len(before) and reserved.needs == needs
    assert reserved.seed is None and "first_token" not in body, "P's own next token is none of D's"
    assert body["prompt_token_ids"] == before, "P gets what D computes behind, and not what the router has rendered"
    (output,) = outputs[0].outputs
    assert output.new_token_ids == given


@pytest.mark.parametrize("facts", [{"gives": False}, {"vocabulary": 0}, {"longest": 12}], ids=str)
def test_an_engine_that_takes_none_begins_anew(facts: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    asked_with = {"prompt": prompt_hash(TOKENS), "tokens": GIVEN}
    body, reserved, outputs = posted(CACHE, [40, 41, 42], asked_with, **facts)
    assert reserved.prompt_length == len(TOKENS) and not outputs and "prompt_token_ids" not in body
    assert "the answer of request r begins anew" in caplog.text


@pytest.mark.parametrize(
    "value", [None, 7, "x", [], {}, {"tokens": None}, {"tokens": {"0": 1}}, {"tokens": [1.0]}], ids=str
)
def test_what_is_no_answer_is_none(value: Any) -> None:
    found = read_given({CONTINUE: value}, TOKENS, 128, 50)
    assert found == () if value is None else isinstance(found, str)
