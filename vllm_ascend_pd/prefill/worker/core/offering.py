# SPDX-License-Identifier: Apache-2.0
"""Offers of what was computed and exchanged to the protocol's machine, in the order of the device, and the seal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from vllm_ascend_pd.prefill.worker.core.exchanges import Run, Staged
from vllm_ascend_pd.prefill.worker.core.planning import StepPlan
from vllm_ascend_pd.prefill.worker.core.push import DirectWrites, Push, SlotShare, Unit
from vllm_ascend_pd.prefill.worker.core.register import PushRegister
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.regroup.core.staging import StagingSlot

MAX_CHARACTERS = 200  # characters of another library's error that are sent to D

Sums: TypeAlias = Mapping[int, tuple[int, ...]]  # checksums of each component, by member of an exchange


class PushOffers:
    def __init__(self, register: PushRegister) -> None:
        self._register = register

    def computed(self, now: float, step: StepPlan, layer: int) -> None:
        """Offer a layer of a step, which is in the cache now, to every destination of the step's direct pushes."""
        for push in step.direct:
            plan = push.plan(step.number, layer)
            if plan is not None and not push.closed:
                for rank in plan.by_rank:
                    self._offer(now, push, push.worker(layer, rank), Unit(step.number, layer), plan.nbytes(rank))

    def uncomputed(self, now: float, plan: StepPlan, layer: str) -> None:
        """Abort all pushes of a step in which a layer was not computed, also those that it would push later."""
        for push in plan.pushes:
            self._register.abort(now, push.name, Failure("PD-GEO-004", layer))

    def staged(self, now: float, item: Staged, absent: Sequence[list[int]], sums: Sequence[Sums]) -> None:
        """Offer what an exchange has brought; drop bytes of pushes that have ended or started over meanwhile.

        By slot: `absent` are the ranks that did not send their part, `sums` the checksums of what came, if wanted.
        """
        register, run, exchanges = self._register, item.run, self._register.exchanges
        if exchanges is None:
            return
        if register.site.leads:
            register.measure("regroup_time_seconds", item.waited)
        if item.error is not None:
            self._fail_exchanged(now, run.exchange.members, str(item.error)[:MAX_CHARACTERS])
        for index, (slot, ranks) in enumerate(zip(item.slots, absent, strict=True)):
            if slot is None:
                continue
            share = run.exchange.shares[index]
            if ranks:
                why = f"prefill ranks {', '.join(map(str, ranks))} did not give their part"
                self._fail_exchanged(now, list(share.pushes), why)
            elif item.error is None:
                self._offer_staged(now, run, index, slot, sums[index])
            if not slot.users:
                exchanges.staging.release(slot)
            exchanges.arrived(share, run.unit.layer)
        self._seal(now, run.exchange.members)
        register.note("staged", item.facts)

    def _offer_staged(self, now: float, run: Run, index: int, slot: StagingSlot, sums: Sums) -> None:
        planned, share = run.exchange.plan.slots[index], run.exchange.shares[index]
        for member, writes in planned.writes.items():
            push, slot_share = run.exchange.members[member], SlotShare(slot, writes, sums.get(member))
            if slot_share.nbytes and share in push.owed:
                slot.users += 1
                worker = push.worker(run.unit.layer, planned.d_rank)
                push.slot_shares[worker, run.unit] = slot_share
                self._offer(now, push, worker, run.unit, slot_share.nbytes)

    def _offer(self, now: float, push: Push, worker: int, unit: Unit, nbytes: int) -> None:
        self._register.do(now, self._register.sender.offer(now, push, worker, unit, nbytes))

    def _fail_exchanged(self, now: float, pushes: Iterable[Push], why: str) -> None:
        for push in pushes:
            self._register.abort(now, push.name, Failure("PD-XFER-006", why))

    # -- the end of a step, and of a push

    def direct_writes(self, step: int, names: Iterable[str]) -> list[DirectWrites]:
        """Return what was pushed directly of the pushes whose last step this was: all of it is computed now."""
        ending = (push for push in self._ending(step, names) if push.live)
        return [written for push in ending for written in push.direct_writes()]

    def sealed(
        self,
        now: float,
        step: int,
        names: Iterable[str],
        announced_at: float,
        sums: Iterable[tuple[DirectWrites, tuple[int, ...]]] = (),
    ) -> None:
        """End a step whose direct layers were all offered. It was the last of these pushes: seal them once complete.

        `sums`: the checksums of their direct parts, if wanted.
        """
        ending = {push.name: push for push in self._ending(step, names)}
        for part, values in sums:
            if (push := ending.get(part.push)) is not None:
                self._register.sender.checksum(push, part.worker, push.index(part.layer), values)
        for push in ending.values():
            push.sealing, push.sealed_at = True, announced_at
            self._seal(now, [push])

    def _ending(self, step: int, names: Iterable[str]) -> list[Push]:
        """Return those pushes whose last step this was: others have started over."""
        return [push for push in self._register.unclosed(names) if push.final_step == step]

    def _seal(self, now: float, pushes: Iterable[Push]) -> None:
        """Seal the pushes that are complete; one that exchanges still owe something waits for it."""
        for push in pushes:
            if push.sealing and not self._owes(push):
                push.sealing = False
                self._register.do(now, self._register.sender.seal(now, push))

    def _owes(self, push: Push) -> bool:  # a rule of its own: a mutation of the simulator leaves it out
        return bool(push.owed)
