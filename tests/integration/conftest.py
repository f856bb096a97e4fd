# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests: one cluster of real engines per session, pairs per module.

A start takes 2 to 10 s on two cores, so the tests are grouped by the engines they need. At the end everything is
stopped, and leftovers fail the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import kind_pairs
import pytest
from pairs import FORKED, Pair, PairMaker, engine_forks

from tools.support.cells import FaultSite, make_site, start_pair
from tools.support.cluster import STRICT, Cluster, fresh_directory
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the pairs of kinds which sizes this test says by its mark, before its fixtures start engines."""
    mark = item.get_closest_marker("sizes")
    kind_pairs.DECLARED[:] = [(mark.args[1], mark.args[2])] if mark else []


@pytest.fixture(scope="session")
def tally(progress: Callable[[str], None]) -> Iterator[AnswerTally]:
    tally = AnswerTally()
    yield tally
    progress(f"tokens: {tally.summary()}")


@pytest.fixture(scope="session")
def cluster(progress: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    begun, directory = time.monotonic(), fresh_directory("integration")
    with (
        engine_forks(tmp_path_factory.mktemp("forks"), "vllm.v1.worker.cpu_worker") as forks,
        Cluster(directory, progress, plugins=FORKED, forks=forks) as cluster,
    ):
        yield cluster
    progress(f"engines: {cluster.starts} servers started, {time.monotonic() - begun:.0f} s in all")
    assert not cluster.leaks, cluster.leaks


@pytest.fixture(scope="session")
def ports(cluster: Cluster) -> list[int]:
    """Ports of the session's metaservers, all allowed by each D, so that it can serve several P's one after another.

    The last port is for a test's own metaserver, the one before it for the faulty pair's, and the one before that for
    pairs that use it one after another.
    """
    return [cluster.port() for _ in range(34)]


@pytest.fixture(scope="session")
def allowed(ports: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


@pytest.fixture(scope="session")
def make_pair(cluster: Cluster, ports: list[int], tally: AnswerTally) -> PairMaker:
    """Return a function that starts a metaserver in front of running engines, on one of the allowed ports."""
    free = ports[:-3]

    def make(
        prefill: EngineProcess,
        *decode: EngineProcess,
        options: tuple[str, ...] = (),
        more_prefill: Sequence[EngineProcess] = (),
    ) -> Pair:
        front = cluster.metaserver([prefill, *more_prefill], decode, free.pop(0), (*STRICT, *options))
        return Pair(cluster, front, prefill, decode, tally, more_prefill=tuple(more_prefill))

    return make


@pytest.fixture(scope="session")
def faulty(cluster: Cluster, allowed: list[str], ports: list[int], tally: AnswerTally) -> Iterator[FaultSite]:
    """A pair with faults on order and short timers. Its D checks no blocks, so a wrong byte gives a wrong token."""
    prefill, decode, orders = start_pair(cluster, "faulty", 1, allowed, verify="off")
    site = make_site(cluster, prefill, decode, orders, ports[-2], tally)
    yield site
    cluster.stop(*(site.servers[role] for role in "MDP"))
