# SPDX-License-Identifier: Apache-2.0
"""Observation never touches what it observes: a full disk ends the trace, and nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_caches import Model
from runtime_pair import DecodeSite, PrefillSite, sites

from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.trace import TraceFile

FULL = Path("/dev/full")
STAGES = (
    "bound",
    "gate_open",
    "ready",
    "layer_computed",
    "step",
    "layer_submitted",
    "layer_pushed",
    "push_closed",
    "closed",
)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[TraceFile]:
    """A trace file on a disk that is full: what is written fails at the first flush."""
    if not FULL.exists():
        pytest.skip("this system has no /dev/full")
    made = TraceFile(str(tmp_path), "test")
    made._file.close()
    made._file = FULL.open("a", buffering=1)
    yield made
    made.close()


def test_a_full_disk_ends_the_trace_with_one_line(full: TraceFile, caplog: pytest.LogCaptureFixture) -> None:
    assert trace.enabled()
    for _ in range(3):
        trace.emit("bound", transfer="t")
    assert full not in trace._subscribers
    assert [r.levelno for r in caplog.records if r.name == trace.__name__] == [logging.ERROR]
    assert "No space left" in caplog.text and "restart" in caplog.text


@pytest.mark.parametrize("stage", STAGES)
def test_a_subscriber_that_raises_at_any_stage_loses_no_transfer(stage: str) -> None:
    """Each stage is reported in the middle of somebody's work: the engine's, the writer's or the loop's."""
    raised: list[str] = []

    def broken(name: str, facts: Any) -> None:
        if name == stage:
            raised.append(name)
            raise OSError(28, "No space left on device")

    unsubscribe = trace.subscribe(broken)
    model = Model("opaque")
    p, d = PrefillSite(model, 1), DecodeSite(model, 1)
    try:
        with sites(p, d):
            first, second = d.reserve("first", 30), d.reserve("second", 9)
            d.step()  # both are bound in one step
            p.prefill(first)
            p.prefill(second)
            assert all(report.ok for report in d.received(first, second))
            d.check(first, second)
    finally:
        unsubscribe()
    assert raised == [stage], "it happened, once, and the subscriber was dropped"


def test_the_end_of_a_process_is_not_disturbed_by_a_full_disk() -> None:
    program = (
        "import pathlib, sys, tempfile\n"
        "from vllm_ascend_pd.observe import trace\n"
        "file = trace.TraceFile(tempfile.mkdtemp(), 'test')\n"
        "file._file = pathlib.Path('/dev/full').open('a', buffering=1 << 16)\n"
        "trace.emit('bound', transfer='t')\n"  # stays in the buffer until the end
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
