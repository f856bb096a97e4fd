# SPDX-License-Identifier: Apache-2.0
"""Threads of this package use their rank's own device, with two ranks on both sides; and not without `set_device`.

The wire is the one of Ascend's links (transport/ascend.py), whose threads take the device from their context; below it
Mooncake's TCP carries the bytes. On an NPU exchanges run in the model's thread, and no thread of ours makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_sets import Engines, Machine, Side
from host_build import HostBuild
from seen import OURS, DeviceProcess, DeviceUse, processes

from tools.support.checks import fresh_prompt
from tools.support.cluster import Cluster, fresh_directory
from tools.support.engine import EngineProcess

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

REGROUPED = {"regroup": "always"}
ASCEND = {"mooncake_protocol": "ascend"}
KINDS = {"p": {"pd-writer", "pd-wire"}, "d": {"pd-receive"}}  # threads that use the device


def of(build: HostBuild) -> Machine:
    machine = Machine.host(build)
    environment = {name: value for name, value in machine.environment.items() if name != "MC_FORCE_TCP"}
    environment["ASCEND_HOST_WIRE"] = "tcp"
    return dataclasses.replace(machine, environment=environment, keys={**machine.keys, **ASCEND})


def ranks(engine: EngineProcess) -> list[DeviceProcess]:
    """Return the notes of an engine's two ranks, by their device."""
    rank_processes = sorted(processes(Path(engine.spec.environment["STAND_IN_NOTES"])), key=DeviceProcess.device)
    assert [rank.device() for rank in rank_processes] == [0, 1]
    return rank_processes


def ours(rank: DeviceProcess) -> list[DeviceUse]:
    return [use for use in rank.uses if use.thread.startswith(OURS)]


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "without set_device"])
def test_our_threads_use_their_ranks_device(
    build: HostBuild, progress: Callable[[str], None], tmp_path: Path, planted: bool
) -> None:
    file = tmp_path / "fault"
    file.write_text("device" if planted else "")
    p, d = (Side(2, keys=keys, faults=str(file)) for keys in (REGROUPED, {}))
    with Cluster(fresh_directory("ascend_host"), progress=progress) as cluster:
        pair = Engines("devices 2to2", p=p, d=d).start(of(build), cluster)
        for length in (20, 300, 700):
            pair.check([fresh_prompt(length)], name="devices")
        for side, engine in (("p", pair.prefill), ("d", *pair.decode)):
            assert isinstance(engine, EngineProcess)
            for rank in ranks(engine):
                uses = ours(rank)
                kinds = {"-".join(use.thread.split("-")[:2]) for use in uses}
                strays = sorted(
                    f"{use.thread}: {use.call} on {use.device}" for use in uses if use.device != rank.device()
                )
                progress(
                    f"figure: {side} rank {rank.device()}: {len(uses)} calls of {sorted(kinds)}, elsewhere: {strays}"
                )
                assert kinds >= KINDS[side]
                assert bool(strays) is (planted and rank.device() == 1), strays
    assert not cluster.leaks, cluster.leaks
