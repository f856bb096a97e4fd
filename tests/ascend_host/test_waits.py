# SPDX-License-Identifier: Apache-2.0
"""The package's waits for events are taken out one by one (plugin/ascend_host/faults.py): each time the tokens are wrong, or
`verify: full` finds the bytes. With all of them in their places the same engines are right (test_pairs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine_sets import BLOCK, Engines, Side, few_blocks
from host_build import HostBuild
from pairs import fresh_prompt, reference_answers

from scripts.support.client import Answer, attempt, body_of
from scripts.support.cluster import Cluster, fresh_directory

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

LONG = 700
REGROUPED = {"regroup": "always"}
OWN_KERNELS = {**REGROUPED, "regroup_kernels": "own"}
LATE, DELAYED = 200_000, 20_000
# D's next prompt gets the blocks of the one before, into which the last of its writes still land.
REUSED = few_blocks(LONG // BLOCK + 3)

WITHOUT = {
    "computed": Engines("without computed", p=Side(late_us=LATE, forgets="computed"), verify="off"),
    "computed, verified": Engines("without computed, verified", p=Side(late_us=LATE, forgets="computed")),
    "hold": Engines("without hold", p=Side(2, keys=REGROUPED, late_us=LATE, forgets="hold"), verify="off"),
    "staged": Engines("without staged", p=Side(2, keys=OWN_KERNELS, delay_us=DELAYED, forgets="staged"), verify="off"),
    "gate": Engines("without gate", d=Side(flags=REUSED, late_us=LATE, forgets="gate"), verify="off"),
}
WITH = {
    "gate": Engines("with gate", d=Side(flags=REUSED, late_us=LATE)),
}


@pytest.fixture
def cluster(told: Callable[[str], None]) -> Iterator[Cluster]:
    with Cluster(fresh_directory("ascend_host"), progress=told, port_base=25000) as cluster:
        yield cluster
    assert not cluster.leaks, cluster.leaks


def wrong(engines: Engines, build: HostBuild, cluster: Cluster) -> list[str]:
    """What was not as it should be, of three prompts one after the other."""
    pair = engines.start(build, cluster)
    found = []
    for _ in range(3):
        prompt = fresh_prompt(LONG)
        (want,) = reference_answers(pair.prefill, [prompt], 12)
        (got,) = attempt(pair.front.url, [body_of(prompt, 12)])
        if not isinstance(got, Answer):
            found.append(f"no answer: {got}")
        elif got.tokens != want.tokens:
            found.append(f"expected {want.tokens}, got {got.tokens}")
    return found + pair.failed_transfers()


@pytest.mark.parametrize("name", WITHOUT)
def test_a_wait_that_is_left_out_is_seen(name: str, build: HostBuild, cluster: Cluster) -> None:
    assert wrong(WITHOUT[name], build, cluster)


@pytest.mark.parametrize("name", WITH)
def test_with_it_all_is_right(name: str, build: HostBuild, cluster: Cluster) -> None:
    assert not wrong(WITH[name], build, cluster)
