# SPDX-License-Identifier: Apache-2.0
"""Kinds of cache that vllm-ascend 0.30 lays out otherwise than 0.23, and that this package refuses there so far.

A refusal stops the engine, with a code and a sentence. Under 0.23 these kinds run (test_pairs.py, ELSEWHERE).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from host_build import HostBuild
from test_host import HERE, run

from tools.support.models import ensure

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
# 0.30's DeepSeek-V4 does not start otherwise with one rank: it looks a block size up that the core has changed.
DSV4 = {"distributed_executor_backend": "mp", "block_size": 32, "kv_cache_memory_bytes": 192 << 20}


@pytest.mark.parametrize(
    ("model", "more", "code", "why"),
    [
        # What were tokens for an entry are now tokens for a state, and its groups are of a kind that was not tried.
        ("dsv4", DSV4, "PD-CONF-005", "under vllm-ascend"),
    ],
    ids=["compressed"],
)
def test_it_stops_the_start(build: HostBuild, model: str, more: dict[str, Any], code: str, why: str) -> None:
    words = [str(HERE / "hooks.py"), str(ensure(model)), "bfloat16", json.dumps(more)]
    done = run(build, *words, VLLM_HOST_IP="127.0.0.1")
    said = [line for line in (done.stdout + done.stderr).splitlines() if code in line]
    assert done.returncode != 0 and any(why in line for line in said), done.stdout[-2000:] + done.stderr[-4000:]
