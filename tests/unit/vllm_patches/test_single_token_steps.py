# SPDX-License-Identifier: Apache-2.0
"""No step of a P whose D has its heads in int8 is called a decode; all others keep their names."""

from __future__ import annotations

import enum
import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_ascend_pd.vllm_patches import single_token_steps


class StepState(enum.Enum):
    PrefillNoCache = 0
    DecodeOnly = 2
    ChunkedPrefill = 3


NAME = "_build_attn_state"


def names_a_step(self: Any, num_reqs: Any, num_scheduled_tokens: Any, num_valid_tokens: Any) -> Any:
    self.attn_state = num_scheduled_tokens
    return self.attn_state


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("vllm_ascend.worker.model_runner_v1")
    module.NPUModelRunner = type("NPUModelRunner", (), {NAME: names_a_step})
    for name in ("vllm_ascend", "vllm_ascend.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.NPUModelRunner


@pytest.mark.parametrize("state", StepState)
def test_a_step_of_single_tokens_is_a_chunk(runner: Any, state: StepState) -> None:
    assert single_token_steps.install() == single_token_steps.install() == ""
    one = runner()
    wanted = StepState.ChunkedPrefill if state is StepState.DecodeOnly else state
    assert getattr(one, NAME)(1, state, 1) is one.attn_state is wanted


def test_another_runner_is_not_wrapped(runner: Any) -> None:
    setattr(runner, NAME, lambda self, batch: batch)
    assert "otherwise" in single_token_steps.install()
    delattr(runner, NAME)
    assert "otherwise" in single_token_steps.install()
