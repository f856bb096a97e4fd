# SPDX-License-Identifier: Apache-2.0
"""Proof that the simulator can fail: the protocol with any one rule removed breaks a promise, and is caught."""

from __future__ import annotations

import pytest

from simulation.mutations import MORE, WANTED, Mutation
from simulation.run import run_seed

# Where each was found last. A change of the machines may move it; then a search from 0 finds another.
KNOWN = {
    "free before fence": 1,
    "DONE counted twice": 2,
    "no incarnation check": 157,
    "lease not checked before a write": 6,
    "cancel not acknowledged": 27,
    "quarantine skipped": 11,
    "cancel answered at once": 5,
    "DONE from a lost source": 86,
    "sealed push restarted": 22,
    "hold runs while D is stopped": 10,
    "answer believed right after a stop": 43,
    "gone is quiet": 52,
    "time alone frees": 1,
    "preempted blocks not drained": 62,
    "reported before it is closed": 2,
    "every answer is good": 1,
    "no answer is good": 1,
    "ranks plan what they know": 76,
    "revocation keeps the session": 6,
    "one batch, two sessions": 2,
    "strangers believed": 5,
    "sealed before the catch-up": 3,
    "slots reused at once": 3,
    "a rank stays away from a catch-up": 37,
    "a write that was never issued has landed": 1,
    "a first token for a request that has one": 39,
}
SEEDS = 400


@pytest.mark.parametrize("mutation", [*WANTED, *MORE], ids=lambda m: m.name)
def test_a_removed_rule_is_found(mutation: Mutation) -> None:
    for seed in (KNOWN.get(mutation.name, 0), *range(SEEDS)):
        result = run_seed(seed, mutation)
        if result.violation:
            assert "promise" in result.violation or "LocalProtocolError" in result.violation
            itself = Mutation(world=mutation.world)
            assert not run_seed(seed, itself).violation, "the protocol itself holds in this world"
            return
    pytest.fail(f"{SEEDS} seeds did not notice: {mutation.name}")


def test_the_eight_that_were_asked_for_are_there() -> None:
    assert [mutation.name for mutation in WANTED] == [
        "free before fence",
        "READY before bind",
        "DONE counted twice",
        "no incarnation check",
        "success in spite of one FAILED",
        "lease not checked before a write",
        "cancel not acknowledged",
        "quarantine skipped",
    ]
