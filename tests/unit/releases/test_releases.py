# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM other than the main environment's, among them 0.23.0, which vllm-ascend 0.23.0.post1 pairs with.

Their schedulers, aggregators and hooks call our connector. The scenarios are in program.py and run in an
environment of their own, all in one process: importing vLLM takes longer than they do.
`tests/integration/test_releases_real.py` starts real engines of each.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools.support.environments import RELEASES, beside, second_runner
from vllm_ascend_pd.vllm_patches.tried import TRIED_SECOND, VLLM, untried

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SECOND = "1"  # of vLLM's model runners
SCENARIOS = (
    "chunks_from_2_to_1",
    "chunks_from_1_to_2",
    "chunks_from_4_to_2",
    "a_layer_in_a_graph",
    "hooks_in_the_order_of_0_23",
    "a_prefix_on_prefill_is_pushed_too",
    "preempted_pushes_begin_again",
    "aborted_on_prefill_fails_on_decode",
    "aborted_on_decode_gives_the_blocks_back",
    "failed_loads_fail_as_configured",
    "failed_loads_are_recomputed_as_configured",
    "first_tokens_are_p_s",
    "a_worker_s_batch_takes_the_token_as_an_output",
    "first_tokens_that_do_not_come_are_computed",
    "aborted_while_held_gives_the_blocks_back",
    "loaded_requests_that_hold_all_blocks_go_on",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # creating an environment takes a minute


def environment(runner: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    more = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if runner == SECOND:
        more["PYTHONPATH"] += "".join(f":{folder}" for folder in second_runner())
    return {**env, **more, "VLLM_USE_V2_MODEL_RUNNER": runner}


@pytest.mark.parametrize(
    ("release", "runner"),
    [
        (one, runner)
        for one in RELEASES
        for runner in ("0", SECOND)
        if runner != SECOND or not untried({VLLM: one}, TRIED_SECOND)
    ],
)
def test_the_connector_on_another_vllm(release: str, runner: str) -> None:
    """Only its Python code: no kernel of vLLM's is called."""
    done = subprocess.run(
        [beside(release, "--python"), HERE / "program.py", release],
        env=environment(runner),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = {line["name"]: line["error"] for line in map(json.loads, filter(_is_result, done.stdout.splitlines()))}
    assert results.keys() == {"version", *SCENARIOS}
    assert not any(results.values()), "\n".join(f"{name}: {error}" for name, error in results.items() if error)


def _is_result(line: str) -> bool:
    return line.startswith("{")
