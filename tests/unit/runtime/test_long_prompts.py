# SPDX-License-Identifier: Apache-2.0
"""Prompts of 1,048,576 tokens, the longest that vllm-ascend's configurations allow: no limit cuts them."""

from __future__ import annotations

import pytest

from unit.device.caches import CacheModel
from unit.kits.watching import running
from unit.router.cluster import cluster
from unit.runtime.sites import DecodeSite, PrefillSite, config
from vllm_ascend_pd.decode.scheduler.role import pace

LONGEST = 1 << 20


@pytest.mark.parametrize("block", [16, 128])
def test_the_longest_prompt_comes_whole_in_chunks(block: int) -> None:
    model = CacheModel("latent", heads=1, layers=2, dim=1)
    blocks = LONGEST // block + 1
    p = PrefillSite(model, 1, block=block, blocks=blocks, push=config(verify="off"))
    d = DecodeSite(model, 1, block=block, blocks=blocks, push=config(verify="off"))
    with running(p, d):
        request = d.bound("r", LONGEST, deadline_s=300.0)
        p.prefill(request, *[8192] * (LONGEST // 8192))
        assert all(report.ok for report in d.received(request, seconds=300.0))
        d.check(request)
        p.finish_and_free(request)


@pytest.mark.parametrize("shape", ["tokens", "text", "chat"])
def test_the_longest_prompt_goes_through_the_metaserver_to_both(shape: str) -> None:
    """Token ids as a client sends them and as D posts them, seven bytes each; text of five bytes for each token."""
    ids = [100_000 + n % 50_000 for n in range(LONGEST)]
    text = "".join(f" {n % 9000 + 1000}" for n in range(LONGEST))
    with cluster(decode=1, prefill=1) as c:
        if shape == "chat":
            asked = {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
            answer = c.http.post("/v1/chat/completions", json=asked, timeout=None)
        else:
            asked = {"model": "fake", "prompt": ids if shape == "tokens" else text, "max_tokens": 3}
            answer = c.http.post("/v1/completions", json=asked, timeout=None)
        assert answer.status_code == 200, answer.text
        (leg,) = c.legs()
        if shape == "tokens":
            assert leg["prompt"] == ids
        else:
            assert len(leg["prompt"]) > LONGEST, "the fake D's ids are the bytes of the prompt"


def test_d_tells_the_pace_that_its_longest_prompt_needs() -> None:
    assert "3,495 tokens a second" in pace(LONGEST, 300.0)
    assert "437 tokens a second" in pace(131_072, 300.0)
