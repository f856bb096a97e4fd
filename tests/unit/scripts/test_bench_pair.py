# SPDX-License-Identifier: Apache-2.0
"""scripts/bench_pair.sh without engines: what the processes around the model do for a request."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

from tools.bench_pair import COLD, TimeSample, work
from tools.support.processor_time import Scheduled, parts, scheduled


def test_work_and_waits_for_a_processor_are_medians_by_process_and_length() -> None:
    short, long = COLD
    times = [(0.003, 0.001, 40), (0.001, 0.0, 20), (0.002, 0.0005, 30)]
    samples = [TimeSample("c", case, 1.0, 0.0, spent={"metaserver": Scheduled(*one)}) for one in times for case in COLD]
    samples += [TimeSample("a", short, 1.0, 0.0), TimeSample("c", long, 1.0, 0.0, spent={"metaserver": Scheduled()})]
    _, row = work(samples, COLD)
    assert row.split() == ["metaserver", "2.0;", "0.5;", "30", "1.5;", "0.2;", "25"]


def test_the_kernel_counts_what_ran_and_the_first_thread_apart() -> None:
    mine = [os.getpid()]
    before, first = scheduled(mine), scheduled(mine, first=True)
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    spent = scheduled(mine).since(before)
    assert spent.ran >= 0.04 and first.ran <= before.ran and first.times <= before.times
    assert scheduled([1 << 30]) == Scheduled()  # it has ended


def test_processes_of_an_engine_are_known_by_vllm_s_titles() -> None:
    titles = {"VLLM::Worker_TP0": "worker", "VLLM::EngineCore_DP0": "core", "python3": "server"}
    members = [SimpleNamespace(name=lambda title=title: title, pid=title) for title in titles]
    found = parts(cast(Any, SimpleNamespace(process=SimpleNamespace(members=lambda: members))))
    assert {str(pid): part for part, pids in found.items() for pid in pids} == titles
