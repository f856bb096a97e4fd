# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.23.0, which vllm-ascend 0.23.0.post1 pairs with: its scheduler, aggregator and hooks call our connector.

The scenarios are in vllm023_program.py and run in an environment of their own, all in one process: importing vLLM takes
longer than they do.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the environment takes a minute to make


@pytest.fixture(scope="module")
def python() -> str:
    made = subprocess.run([str(HERE / "vllm023_env.sh")], capture_output=True, text=True, check=False, timeout=800)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return {**env, "PYTHONPATH": f"{ROOT}:{HERE}", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def results(python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, str(HERE / "vllm023_program.py")],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


def test_the_environment_has_this_vllm(results: dict[str, str]) -> None:
    assert results.pop("version") == ""
    assert set(results) == set(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_connector_on_vllm_0_23(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
