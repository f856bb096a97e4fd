# SPDX-License-Identifier: Apache-2.0
"""Proof that the simulator can fail: with any one rule removed, the protocol breaks a promise, which is detected."""

from __future__ import annotations

import warnings

import pytest

from simulation.mutations import ALL, Mutation
from simulation.run import run_seed

# Seeds by mutation. A change of the machines may invalidate one; then a search from 0 finds another.
KNOWN = {
    "DONE counted twice": 11,
    "no incarnation check": 32,
    "lease not checked before a write": 58,
    "cancel not acknowledged": 6,
    "quarantine skipped": 11,
    "cancel answered at once": 5,
    "DONE from a lost source": 192,
    "sealed push restarted": 107,
    "hold runs while D is stopped": 58,
    "answer believed right after a stop": 121,
    "gone is quiet": 6,
    "time alone frees": 4,
    "preempted blocks not drained": 62,
    "reported though no blocks are held": 12,
    "ranks plan what they know": 76,
    "revocation keeps the session": 6,
    "one batch, two sessions": 10,
    "absent ranks believed": 3,
    "sealed before the catch-up": 3,
    "slots reused at once": 5,
    "a rank stays away from a catch-up": 37,
    "a first token for a request that has one": 10,
    "a wake-up is lost": 83,
    "source of a dead incarnation taken": 5,
    "lost blocks are pushed": 10,
}
SEEDS, FEW = 400, 10


@pytest.mark.parametrize("mutation", ALL.values(), ids=lambda m: m.name)
def test_a_removed_rule_is_found(mutation: Mutation) -> None:
    for seed in (KNOWN.get(mutation.name, 0), *range(SEEDS)):
        result = run_seed(seed, mutation)
        if result.violation:
            assert "promise" in result.violation or "LocalProtocolError" in result.violation
            itself = Mutation(world=mutation.world)
            assert not run_seed(seed, itself).violation, "the protocol itself holds in this world"
            if seed > FEW and seed != KNOWN.get(mutation.name):
                warnings.warn(f"set KNOWN[{mutation.name!r}] to {seed}: the search takes its time", stacklevel=1)
            return
    pytest.fail(f"{SEEDS} seeds did not notice: {mutation.name}")
