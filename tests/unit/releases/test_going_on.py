# SPDX-License-Identifier: Apache-2.0
"""Answers that go on at another D, on vLLM's own scheduler and our connectors of P and D, without a model.

In a process of its own, because the engines there have a device with an NPU's layout. Scenarios: going_on.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.support.environments import NEWEST, RELEASES, beside
from vllm_ascend_pd.vllm_patches.tried import TRIED_GIVEN, VLLM, untried

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SCENARIOS = (
    "an_answer_goes_on_behind_what_it_has",
    "an_answer_that_had_ended_ends_before_any_load",
    "a_failed_load_is_computed_behind_the_same_answer",
    "an_answer_that_is_not_this_prompt_s_is_begun_anew",
    "a_client_gives_no_tokens",
    "a_router_that_says_nothing_is_not_waited_for_long",
    "aborted_while_it_goes_on_leaves_nothing",
    "a_request_for_which_vllm_does_not_wait_is_begun_anew",
    "blocks_of_given_tokens_are_cached",
    "a_grammar_is_advanced_over_the_answer",
    "log_probabilities_have_a_row_for_each_token",
)


@pytest.fixture(
    scope="module",
    params=[
        NEWEST,
        *(pytest.param(one, marks=pytest.mark.slow) for one in RELEASES if not untried({VLLM: one}, TRIED_GIVEN)),
    ],
)
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    env |= {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    python = sys.executable if request.param == NEWEST else beside(request.param, "--python")
    command = [python, HERE / "going_on.py"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.timeout(600)
def test_an_answer_goes_on(errors: dict[str, str], name: str) -> None:
    assert not errors[name], errors[name]
