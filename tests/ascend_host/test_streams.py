# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through vllm-ascend's engines: D's recompute scheduler drops some, and one D is killed.

Each client gets a right answer, and no error where its kind goes on. `scripts/resume.sh --vllm-ascend` runs any number.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_sets import Engines, Machine, Side
from test_pairs import FEW, ONE_AT_A_TIME, RECOMPUTES

from tools.support.cluster import Cluster, fresh_directory
from tools.support.resuming import MakeSpecs, run_all, spoken
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]
LENGTH = 225  # of a prompt: two blocks of 128, and most answers need a third


def dropping(machine: Machine, decodes: int = 2) -> MakeSpecs:
    """Return what makes specifications of engines, D's with few blocks and the recompute scheduler.

    With asynchronous scheduling vllm-ascend 0.30 by itself, on either side and without this package, now and then
    counts the places of an answer wrong for min_tokens and processors of logits, after the batch has changed.
    """

    def make(cluster: Cluster, url: str) -> list[EngineSpec]:
        d = Side(flags=(*FEW, *RECOMPUTES))
        sets = [Engines(f"resume {i}", d=d, flags=ONE_AT_A_TIME, verify="off") for i in range(decodes)]
        pairs = [one.specs(machine, cluster, url) for one in sets]
        return [spoken(spec, cluster) for spec in (pairs[0][0], *(d for _, d in pairs))]

    return make


def test_streams_outlive_their_d_and_its_recompute_scheduler(host: Machine, progress: Callable[[str], None]) -> None:
    with Cluster(fresh_directory("ascend_host"), progress, forks=host.forks) as cluster:
        report = run_all(cluster, 7, progress, dropping(host), streams=64, at_once=32, length=LENGTH)
    assert report.kills == 2 and report.resumed and report.dropped, "no stream was hit"
    assert not report.problems, report.problems[0]
    assert not cluster.leaks
