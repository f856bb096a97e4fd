# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through a P and two real D's, one of which is killed in the middle.

Each client gets a right answer, and no error where its kind goes on. `scripts/resume.sh` runs any number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.support.cluster import Cluster
from tools.support.resuming import Resuming, vllm_on_cpu

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]
ROUNDS, STREAMS = 2, 32


def test_streams_outlive_their_d(cluster: Cluster, progress: Callable[[str], None]) -> None:
    run = Resuming(cluster, 7, progress, vllm_on_cpu())
    try:
        for _ in range(ROUNDS):
            run.round(STREAMS)
    finally:
        run.close()
    progress(f"resume: {run.report}")
    assert run.report.kills == ROUNDS and run.report.resumed, "no stream was hit"
    assert not run.report.wrong, run.report.wrong[0]
    assert not run.report.broken, run.report.broken[0]
