# SPDX-License-Identifier: Apache-2.0
"""Pairs whose prefill ranks are processes: a prompt is pushed through them, and their exchanges are compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unit.kits.watching import until
from unit.regroup.common import EngineCache, RegroupDecodeSite, RegroupPrompt, config
from unit.regroup.worker import ChildProcesses, ChildProcessWorker

WORK = [
    (0, 0, 3, [3]),  # less than a block: one owner, the others own nothing
    (0, 0, 40, [11, 29]),  # whole blocks
    (0, 16, 61, [20, 21, 20]),  # a prefix hit on D, a partial last chunk
    (0, 0, 97, [33, 1, 63]),  # blocks that no number of ranks divides
]


class ProcessEngines:
    """A prefill engine of processes and its decode engines."""

    def __init__(
        self, fleet: ChildProcesses, p: EngineCache, *ds: EngineCache, folder: Path, kind: str = "plain", **keys: Any
    ) -> None:
        self._fleet = fleet
        self.d = [RegroupDecodeSite(d, folder=folder, push=config(**keys)) for d in ds]
        self.p = fleet.engine(p, kind=kind, **keys)

    def __enter__(self) -> ProcessEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.shut(self.p)
        for site in self.d:
            site.close()

    def push(self, work: Sequence[tuple[int, int, int, list[int]]], hook: str = "name") -> list[RegroupPrompt]:
        """Push (decode engine, first token, tokens, chunks) of each prompt. Chunk by chunk, all prompts in the same
        steps."""
        prompts = [self.d[site].reserve(tokens, first=first) for site, first, tokens, _ in work]
        for site in self.d:
            site.step()
        self.p.admit(*prompts)
        for counts in itertools.zip_longest(*(chunks for *_, chunks in work)):
            self.p.compute(
                *[(prompt, count) for prompt, count in zip(prompts, counts, strict=True) if count], hook=hook
            )
        assert self.p.ended(*prompts)
        return prompts

    def check(self, prompts: Sequence[RegroupPrompt]) -> None:
        for site in self.d:
            site.check(*[prompt for prompt in prompts if prompt.site is site])
        self.p.finished(*prompts)
        self.p.holds_nothing()

    def exchanges(self) -> list[tuple[int, int, int]]:
        """Return (step, layer, sub-step) of all exchanges without repeated ones, after checking that all ranks
        agree."""
        workers = [worker for worker in self.p.workers if isinstance(worker, ChildProcessWorker)]

        def alike() -> bool:
            """Wait for ranks that received nothing, which may report later."""
            by_rank = [worker.exchanges()[0] for worker in workers]
            counts = [stats["exchanges"] for stats in self.p.stats()]
            return all(exchanges == by_rank[0] for exchanges in by_rank) and counts == [len(by_rank[0])] * len(by_rank)

        until(alike, "the ranks are not of one mind")
        made = [worker.exchanges() for worker in workers]
        first, called = made[0]
        assert all(each == called for _, each in made), "a rank called a collective alone"
        assert [stats["collectives"] for stats in self.p.stats()] == [called] * len(made)
        assert called in (0, len(first)), "not one collective for each exchange"
        distinct = list(dict.fromkeys(first))
        assert len(first) == len(distinct) + self.p.catch_ups, "an exchange was made twice without an order"
        return distinct
