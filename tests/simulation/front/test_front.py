# SPDX-License-Identifier: Apache-2.0
"""The metaserver's promises hold in simulated worlds, and the lack of each removed rule is found."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest

from simulation.front.mutations import ALL, FrontMutation
from simulation.front.run import Total, run_seeds
from simulation.front.world import run_seed

SEEDS = {"few": 75, "ci": 150, "all": 1100}  # of 150 requests, most of which have clients
# Few seeds draw few breaks of streams: with the same seeds, releases that draw in another order have 50 and 72.
AT_LEAST = {75: (9_000, 35), 150: (19_000, 90), 1100: (145_000, 1_000)}  # seeds → requests, streams that go on
SEARCHED = 60
# Seeds by mutation, where 0 does not find it. A change of the service may invalidate one; a search finds another.
KNOWN = {
    "blocks are said again": 1,
    "ids of blocks are each D's own": 1,
    "events are numbered anew": 2,
    "token ids go out between events": 13,
    "the end of a stream has no usage": 5,
    "P's good answer proves a pair": 3,
    "D is blamed for P's failure": 17,
    "what D has is thrown away when P's answer breaks": 18,
    "a dropped answer is passed on": 2,
    "clients' overload stops canaries": 1,
    "a slow probe is another life": 5,
    "an engine that has restarted keeps its proof": 3,
    "canaries try no wedged engine": 4,
    "other workers try no wedged engine": 6,
    "canaries fly one at a time": 1,
    "an answer that its engine ended is passed on": 2,
    "D's word is not waited for": 26,
    "a stream goes on after its end": 2,
    "half events go out": 2,
    "a trial never ends": 6,
    "an engine serves every model": 4,
    "an engine that was not asked yet serves every model": 6,
    "a stream goes on with the D that died": 1,
    "one break is survived, not two": 3,
    "what was in an event is said again": 1,
    "P gets the prompt alone": 1,
    "tokens go to another prompt": 2,
    "any ticket is good": 1,
    "the rest is another answer's": 1,
    "every failed load speaks against P": 4,
    "names of calls are compared": 17,
}


@pytest.fixture(scope="module")
def seeds(request: pytest.FixtureRequest) -> int:
    return SEEDS[request.config.getoption("--seeds")]


@pytest.fixture(scope="module")
def many(seeds: int, progress: Callable[[str], None]) -> Total:
    """Run the seeds on two cores."""
    total = run_seeds(1000, seeds, jobs=2, progress_s=1e9)
    progress(f"front door: {total.seeds} of {SEEDS['all']} seeds, {total.requests} requests")
    return total


@pytest.mark.timeout(3000)
def test_no_promise_is_broken(many: Total, seeds: int) -> None:
    broken = many.violations
    assert not broken, f"scripts/simulate.sh --front --seeds 1 --from {broken[0].seed}: {broken[0].violation}"
    assert many.seeds == seeds
    requests, resumed = AT_LEAST[seeds]
    assert many.requests > requests and many.resumed > resumed
    assert many.said["right"] > 0.8 * many.requests and set(many.said) == {"right", "left", "broken off", "error"}


@pytest.mark.ci  # few seeds are too few
def test_every_kind_of_fault_happens(many: Total, seeds: int) -> None:
    wanted = {
        "silent",
        "breaks after push",
        "refuses to push",
        "half",
        "hangs",
        "500",
        "503",
        "ends",
        "empty",
        "breaks",
    }
    wanted |= {"cut", "breaks later", "drops", "drops later", "fails after load", "killed", "deaf"}
    wanted |= {"fails later", "ends later", "hangs later"}  # in the middle of a stream
    assert set(many.faults) == wanted and min(many.faults.values()) > 0.4 * seeds


def test_a_seed_replays() -> None:
    logging.disable(logging.CRITICAL)
    one, two = (run_seed(3, 60) for _ in range(2))
    logging.disable(logging.NOTSET)
    assert one == two and one.faults


@pytest.mark.parametrize("mutation", ALL.values(), ids=lambda mutation: mutation.name)
def test_a_removed_rule_is_found(mutation: FrontMutation) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for seed in (KNOWN.get(mutation.name, 0), *range(SEARCHED)):
            violation = mutation.run(seed, taken_out=True).violation
            if violation:
                assert violation.startswith("promise"), violation
                assert not mutation.run(seed, taken_out=False).violation, "the service itself holds"
                if seed != KNOWN.get(mutation.name, 0):
                    warnings.warn(f"set KNOWN[{mutation.name!r}] to {seed}: the search takes its time", stacklevel=1)
                return
    finally:
        logging.disable(logging.NOTSET)
    pytest.fail(f"{SEARCHED} seeds did not notice: {mutation.name}")
