# SPDX-License-Identifier: Apache-2.0
"""Many requests, two decode engines, chunks, prefix hits, preemptions, aborts on both sides, failing writes.

In the end every request that succeeded has its bytes, every other one failed, and nothing is left.
"""

from __future__ import annotations

import os
import random

import pytest

from unit.device.caches import CacheModel
from unit.kits.watching import running, until
from unit.runtime.sites import DecodeSite, PrefillSite, SitePrompt, config
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

SEEDS = [int(seed) for seed in os.environ.get("PD_TEST_SEEDS", "1 2 3").split()]


class FlakyTransport(MemoryTransport):
    """Transport whose writes land after a while; some are reported as failed, and still land."""

    def __init__(self, dice: random.Random, lossy: float) -> None:
        super().__init__()
        self._dice, self._lossy = dice, lossy

    def land(self, write: Write) -> WriteState:
        if self._dice.random() < 0.5:
            return WriteState.PENDING
        state = super().land(write)
        return WriteState.FAILED if self._dice.random() < self._lossy else state


class RandomRun:
    """Drive both sides at random, as two schedulers and their clients would."""

    def __init__(self, seed: int, layout: str, p_size: tuple[int, int], d_tps: tuple[int, int], lossy: float) -> None:
        self.dice = random.Random(seed)
        model = CacheModel(layout, heads=1 if layout == "latent" else 2, layers=2)
        self.drains = self.dice.random() < 0.5
        verify = self.dice.choice(("full", "off"))  # "off" too, as a checksum would turn wrong bytes into a failure
        push = config(quiet_s=0.15, preempt_drain_s=5.0 if self.drains else 0.0, verify=verify)
        tp, pp = p_size
        self.p = PrefillSite(
            model, tp, pp=pp, blocks=60, push=push, make_transport=lambda: FlakyTransport(random.Random(seed), lossy)
        )
        self.ds = tuple(DecodeSite(model, tp, blocks=80, push=push, seed=tp + 5) for tp in d_tps)
        self.site_of: dict[str, DecodeSite] = {}
        self.active: list[SitePrompt] = []  # not ended on P
        self.aborted_on_d: set[str] = set()
        self.aborted_on_p: set[str] = set()
        self.ended: list[SitePrompt] = []
        self.count = self.good = 0

    @property
    def sites(self) -> tuple[PrefillSite | DecodeSite, ...]:
        return (self.p, *self.ds)

    def arrive(self) -> None:
        site = self.dice.choice(self.ds)
        if site.pool.free < 12:
            return
        tokens = self.dice.randint(2, 40)
        first = self.dice.randrange(0, tokens - 1) // site.covers * site.covers
        self.count += 1
        request = site.reserve(f"r{self.count}", tokens, first=first, seed=self.count)
        self.site_of[request.name] = site
        if self.dice.random() < 0.7:
            site.step()
        assert self.p.admit(request) is None
        self.active.append(request)

    def compute(self) -> None:
        room = self.p.pool.free
        work = []
        for request in self.dice.sample(self.active, min(len(self.active), 4)):
            count = min(self.dice.choice((1, 3, 4, 7, 40)), request.tokens - request.computed)
            need = -(-(request.computed + count) // self.p.covers) - len(request.p_blocks)
            if count and need <= room:
                room -= need
                work.append((request, count))
        if work:
            self.p.compute(*work)
        elif self.active:
            self.preempt()  # no room: vLLM would preempt a request
        for request in [each for each in self.active if each.computed == each.tokens]:
            self.end(request)

    def preempt(self) -> None:
        with_blocks = [request for request in self.active if request.p_blocks]
        if with_blocks:
            request = self.dice.choice(with_blocks)
            lost = list(request.p_blocks)
            self.p.preempt(request)
            for cache in self.p.caches.values():
                cache.scribble(lost, 99)

    def end(self, request: SitePrompt) -> None:
        self.active.remove(request)
        self.ended.append(request)
        if not self.p.finish(request, holds_blocks=bool(request.p_blocks)):
            self.p.pool.give(request.p_blocks)

    def abort_on_p(self) -> None:
        if self.active:
            request = self.dice.choice(self.active)
            if request.p_name not in self.p.known and not request.p_blocks:  # D is notified by the end of the HTTP call
                aborted = Failure("PD-META-006", "aborted")
                self.site_of[request.name].book.answered(request.reservation.transfer, aborted)
            self.aborted_on_p.add(request.name)
            self.end(request)

    def abort_on_d(self) -> None:
        loading = [name for name, site in self.site_of.items() if name not in site.done]
        if loading:
            name = self.dice.choice(loading)
            self.site_of[name].book.request_finished(name)
            self.aborted_on_d.add(name)

    def step(self) -> None:
        self.dice.choices(
            (self.arrive, self.compute, self.preempt, self.abort_on_p, self.abort_on_d), weights=(30, 60, 4, 3, 3)
        )[0]()
        self.release_ended()

    def release_ended(self) -> None:
        for site in self.ds:
            site.step()
            for request in list(site.requests.values()):
                if request.name in site.done and self.dice.random() < 0.3:
                    if all(report.ok for report in site.done[request.name]):
                        site.check(request)
                        self.good += 1
                    site.release(request)
        for request in list(self.ended):
            if request.p_name in self.p.released:
                self.p.pool.give(request.p_blocks)
                self.ended.remove(request)

    def settled(self) -> bool:
        if self.active:
            self.compute()
        self.p.idle()
        self.release_ended()
        loads = all(name in site.done for name, site in self.site_of.items())
        return loads and not self.active and self.p.book.open_count() == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("layout", "p_size", "d_tps", "lossy"),
    [
        ("opaque", (2, 1), (1, 2), 0.0),
        ("token", (1, 1), (2, 1), 0.03),
        ("latent", (3, 1), (2, 1), 0.03),
        ("uneven", (1, 2), (1, 2), 0.0),
    ],
    ids=["planes", "tuples", "latents", "two stages"],
)
def test_everything_ends_and_what_ends_well_is_right(
    layout: str, p_size: tuple[int, int], d_tps: tuple[int, int], lossy: float, seed: int
) -> None:
    run = RandomRun(seed, layout, p_size, d_tps, lossy)
    with running(*run.sites):
        for _ in range(300):
            run.step()
        until(run.settled, "the end of all", 30.0)
        for site in run.ds:
            left = [request for request in site.requests.values() if all(r.ok for r in site.done[request.name])]
            site.check(*left)
            run.good += len(left)
            failed = {name for name, reports in site.done.items() if not all(report.ok for report in reports)}
            if run.drains and not lossy:
                assert failed <= run.aborted_on_d | run.aborted_on_p
        assert run.good > run.count // 3, "too few went well: this shows little"
        assert run.p.pool.free == 60 and not run.p.ended, "P has all its blocks back"
