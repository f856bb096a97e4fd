# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through a P and two real D's, one of which is killed in the middle.

Each client gets a right answer, and no error where its kind goes on. `scripts/resume.sh` runs any number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.support.cluster import Cluster
from tools.support.resuming import run_all, vllm_on_cpu

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_streams_outlive_their_d(cluster: Cluster, progress: Callable[[str], None]) -> None:
    report = run_all(cluster, 7, progress, vllm_on_cpu(), streams=64, at_once=32)
    assert report.kills == 2 and report.resumed, "no stream was hit"
    assert not report.problems, report.problems[0]
