# SPDX-License-Identifier: Apache-2.0
"""`verify: full` on P: every pushed block is summed where it is read (geometry/digest.py); D compares what arrived."""

from __future__ import annotations

import numpy as np

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import CacheBytes, Caches
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.digest import cache_digest, slot_digest
from vllm_ascend_pd.prefill.core.exchanges import Staged
from vllm_ascend_pd.prefill.core.push import Push, Unit
from vllm_ascend_pd.prefill.core.pushes import Sums


class Summer:
    """Checksums of what is about to be written; DONE carries them to D."""

    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        self._memory, self._geometry, self._rank = CacheBytes(caches, device), caches.geometry, rank
        self._device = device

    def direct(self, push: Push, unit: Unit, worker: int) -> tuple[int, ...]:
        """Return the checksums of what one layer's writes to a D worker read from the cache."""
        plan = push.plan(unit.step, unit.layer)
        if plan is None:
            raise LocalProtocolError(f"step {unit.step} of push {push.name} was forgotten")
        d_rank, d = push.rank_of(worker), push.d_kind(unit.layer)
        part = plan.parts[d_rank]
        return cache_digest(
            lambda region: self._memory.region(unit.layer, region),
            self._geometry.by_layer[unit.layer],
            self._rank,
            range(*part.heads),
            range(part.lo, part.hi),
            push.table(unit.layer),
            peer=(d.dealt, d.ranks.part(d_rank)),
        )

    def staged(self, item: Staged) -> list[Sums]:
        """Return the checksums of what an exchange has brought: by slot, by member."""
        part, sums = item.run.part, list[Sums]()
        for planned, slot in zip(part.plan.slots, item.slots, strict=True):
            if slot is None or item.error is not None:
                sums.append({})
                continue
            data = np.frombuffer(self._device.view(slot.address, planned.nbytes), dtype=np.uint8)
            sums.append(slot_digest(planned, part.jobs[next(iter(planned.writes))].d, part.jobs, data))
        return sums
