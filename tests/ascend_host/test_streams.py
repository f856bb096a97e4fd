# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through vllm-ascend's engines: D's recompute scheduler drops some, and one D is killed.

Each client gets a right answer, and no error where its kind goes on. `scripts/resume.sh --vllm-ascend` runs any number.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_sets import Machine
from resume import LENGTH, vllm_ascend

from tools.support.cluster import Cluster, fresh_directory
from tools.support.resuming import Resuming

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]
ROUNDS, STREAMS = 2, 32


def test_streams_outlive_their_d_and_its_recompute_scheduler(host: Machine, progress: Callable[[str], None]) -> None:
    with Cluster(fresh_directory("ascend_host"), progress, forks=host.forks) as cluster:
        run = Resuming(cluster, 7, progress, vllm_ascend(host), LENGTH)
        try:
            for _ in range(ROUNDS):
                run.round(STREAMS)
        finally:
            run.close()
        progress(f"resume: {run.report}")
    assert run.report.kills == ROUNDS and run.report.resumed and run.report.dropped, "no stream was hit"
    assert not run.report.wrong, run.report.wrong[0]
    assert not run.report.broken, run.report.broken[0]
    assert not cluster.leaks
