# SPDX-License-Identifier: Apache-2.0
"""Clients that send forged transfer parameters directly to a real engine.

Each gets a 4xx or the right tokens of a plain prefill; no process dies, no block stays allocated, and the pair keeps
serving. tests/unit/test_forged_requests.py has many more forgeries at the scheduler's level.
"""

from __future__ import annotations

import base64
from typing import Any

import pytest
from pairs import Pair, settled_free_blocks, wait_for_free_blocks

from tools.support.cells import FaultSite
from tools.support.checks import fresh_prompt, reference_answers
from tools.support.client import RequestFailed, TimedAnswer, attempt, body_of

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

TOKENS = 8
HUGE = list(range(100_000))


def _forged(site: FaultSite) -> dict[str, Any]:
    envelope = base64.b64encode(b"PDR\x00" + bytes(range(200))).decode()
    decode = {"do_remote_decode": True}
    prefill = {"do_remote_prefill": True}
    return {
        "nothing": {},
        "missing keys": decode | prefill,
        "wrong types": {"do_remote_decode": True, "reservation": {"a": HUGE}, "metaserver": HUGE, "ticket": 7},
        "a huge list": {"do_remote_decode": True, "do_remote_prefill": True, "remote_block_ids": [HUGE] * 4},
        "an invented envelope": decode | {"reservation": envelope},
        "a long envelope": decode | {"reservation": "A" * (1 << 20)},
        "another metaserver": prefill | {"metaserver": "http://169.254.169.254", "ticket": "t"},
        "an invented ticket": prefill | {"metaserver": site.front.url, "ticket": "t" * 32},
        "a warm-up that D is to pretend": prefill | {"do_virtual": True},
        "a warm-up that P is to pretend": decode | {"do_virtual": True},
        "another engine": decode
        | prefill
        | {
            "remote_engine_id": "another-engine",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_block_ids": [0, 1],
        },
    }


WRONG: dict[str, Any] = {"text": "do_remote_decode", "number": 7, "list": HUGE, "true": True}


def test_forged_parameters_are_a_plain_prefill_or_a_4xx(faulty: FaultSite) -> None:
    engines = (faulty.prefill, faulty.decode)
    before = {engine.name: settled_free_blocks(engine) for engine in engines}
    for engine in engines:
        forged = _forged(faulty)
        prompts = [fresh_prompt(40 + 10 * index) for index in range(len(forged))]
        wanted = reference_answers(faulty.prefill, prompts, TOKENS)
        bodies = [
            body_of(p, TOKENS, kv_transfer_params=params) for p, params in zip(prompts, forged.values(), strict=True)
        ]
        for name, prompt, want, got in zip(forged, prompts, wanted, attempt(engine.url, bodies), strict=True):
            if isinstance(got, RequestFailed):
                assert 400 <= got.status < 500, f"{engine.name}, {name}: {got}"
            else:
                assert isinstance(got, TimedAnswer), f"{engine.name}, {name}: {got}"
                faulty.tally.check(f"{engine.name}, {name}", prompt, want.tokens, got.tokens, faulty.prefill.url)
        for name, got in zip(WRONG, attempt(engine.url, [_wrong(value) for value in WRONG.values()]), strict=True):
            assert isinstance(got, RequestFailed) and 400 <= got.status < 500, f"{engine.name}, {name}: {got}"
        # vLLM's own way to pass what its schema does not allow. It ends in vLLM's API server, or in a plain prefill.
        for got in attempt(engine.url, [_aside(value) for value in ("text", 7, [1, 2])]):
            assert isinstance(got, TimedAnswer | RequestFailed), got
    wait_for_free_blocks(engines, before)
    pair = Pair(faulty.cluster, faulty.front, faulty.prefill, (faulty.decode,), faulty.tally)
    failed = len(pair.failed_transfers())
    through = attempt(faulty.front.url, [_aside("text"), _wrong({"do_remote_decode": True, "reservation": "x"})])
    assert all(isinstance(got, TimedAnswer) for got in through), "the metaserver lets none of it through"
    assert len(pair.failed_transfers()) == failed


def _wrong(value: Any) -> dict[str, Any]:
    return body_of(fresh_prompt(50), TOKENS, kv_transfer_params=value)


def _aside(value: Any) -> dict[str, Any]:
    return body_of(fresh_prompt(50), TOKENS, vllm_xargs={"kv_transfer_params": value})
