# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of a connector's life cycle, unchanged, with this package's connector instead of NIXL's.

vLLM's tests of failed loads, invalid blocks, errors and the aggregator replace the connector by a mock, so they test
none. Those of what is around a connector are in test_vllm_around.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from their_tests import CONNECTORS, PINS, compare, extract, run

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
PREFILL, DECODE = "test_remote_prefill_lifecycle", "test_remote_decode_lifecycle"
PULLS = "it wants block ids in P's answer, which are for a D that pulls"
# For each role the tests that cannot pass, with a part of the failure and the reason.
CANNOT: dict[str, dict[str, tuple[str, str]]] = {
    "kv_producer": {
        "test_short_prompt_lifecycle": ("remote_block_ids", PULLS),
        "test_prefix_cache_lifecycle": ("remote_block_ids", PULLS),
        "test_p_side_chunked_prefill_mamba": (
            "assert 64 == (64 - 1)",
            "states are not held for a D that comes later (PD-META-031), so P's prompt is not cut for one",
        ),
    },
    "kv_consumer": {
        f"test_async_load_does_not_double_reserve_mamba_spec_blocks[{case}]": (
            "PD-CONF-005",
            "Mamba-2 states with drafts are refused",
        )
        for case in ("none-128-18", "align-16-18")
    },
}
# For each role the files, and the selection of its tests.
ROLES = {"kv_consumer": ((PREFILL,), "not p_side"), "kv_producer": ((DECODE, PREFILL), f"{DECODE} or p_side")}


@pytest.mark.parametrize(("role", "passes"), [("kv_consumer", 13), ("kv_producer", 2)])
@pytest.mark.parametrize("release", PINS)
def test_what_passes_and_what_cannot(release: str, role: str, passes: int, tmp_path: Path) -> None:
    names, of_role = ROLES[role]
    files = [f"{CONNECTORS}/{name}.py" for name in names]
    extract(release, tmp_path, files)
    compare(run(release, tmp_path, role, files, of_role), CANNOT[role], passes)
