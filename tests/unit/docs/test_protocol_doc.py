# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md matches the implementation: states, messages, timers and refusals."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.prefill.scheduler.core.request import RequestState
from vllm_ascend_pd.prefill.scheduler.core.rules import MAX_WAITING
from vllm_ascend_pd.protocol import agreement, auth, fence, parking, timing
from vllm_ascend_pd.protocol.meeting import Meeting
from vllm_ascend_pd.protocol.messages import Message, RefusalCode
from vllm_ascend_pd.protocol.states import PairState, ReservationState

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize("message", [*typing.get_args(Message), *typing.get_args(Meeting)], ids=lambda m: m.__name__)
def test_every_message_is_described(message: type) -> None:
    assert f"| {message.__struct_config__.tag.upper()} |" in TEXT


def test_every_state_is_described() -> None:
    words = {state.value.replace("_ok", "").replace("_failed", "") for state in ReservationState}
    words |= {state.value for state in PairState} | {state.value for state in RequestState}
    assert all(word in TEXT for word in words)


def test_every_refusal_is_described() -> None:
    assert all(f"`{code.value}`" in TEXT for code in RefusalCode)


def test_the_timers_of_the_protocol_are_described_with_their_defaults() -> None:
    defaults = {
        "lease_s": "15 s",
        "margin_s": "5 s",
        "ready_timeout_s": "30 s",
        "stall_timeout_s": "120 s",
        "recv_deadline_s": "300 s",
        "hold_s": "120 s",
        "meet_s": "30 s",
    }
    for name, default in defaults.items():
        assert f"{getattr(Timers(), name):g} s" == default
        rows = [line for line in TEXT.splitlines() if line.startswith("|") and name.removesuffix("_s") in line]
        assert any(default in row for row in rows), name
    assert {field.name for field in dataclasses.fields(Timers)} >= set(defaults)


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    assert "at most 4,096" in TEXT
    assert parking.MAX_PARKED == MAX_WAITING == 4096
    assert "window of 1,024" in TEXT
    assert auth.WINDOW == 1024
    assert "every 0.8 s" in TEXT
    assert timing.WAKE_S == 0.8
    assert "at most one second" in TEXT
    assert timing.OBSERVED_GAP_S == 1.0
    assert "more than 120 s" in TEXT
    assert timing.MAX_QUIET_S == 120
    assert timing.DRIFT == 0.001


def test_pure_modules_import_nothing_that_waits_or_speaks() -> None:
    forbidden = ("import threading", "import socket", "import time", "import os", "import random", "import asyncio")
    package = Path(fence.__file__).parent
    for path in sorted(package.glob("*.py")):
        source = path.read_text()
        assert not [name for name in forbidden if name in source], path.name
    assert agreement.PLAN_MODES == ("direct", "regroup")
