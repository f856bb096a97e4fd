# SPDX-License-Identifier: Apache-2.0
"""`verify: full` on P: checksums of what was pushed (geometry/digest.py); D compares them with what arrived.

What is pushed directly is summed in the cache after the push's last step, so that bytes which were read before they
were computed do not match. What an exchange brings is summed in its staging slot.
"""

from __future__ import annotations

import numpy as np

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import CacheBytes, Caches
from vllm_ascend_pd.geometry.digest import cache_digest, slot_digest
from vllm_ascend_pd.prefill.worker.core.exchanges import Staged
from vllm_ascend_pd.prefill.worker.core.offering import Sums
from vllm_ascend_pd.prefill.worker.core.push import DirectWrites


class PushSums:
    """Checksums that DONE carries to D."""

    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        self._memory, self._geometry, self._rank = CacheBytes(caches, device), caches.geometry, rank
        self._device = device

    def direct(self, writes: DirectWrites) -> tuple[int, ...]:
        """Return the checksums of what the cache holds of what was written directly."""
        return cache_digest(
            lambda region: self._memory.region(writes.layer, region),
            self._geometry.by_layer[writes.layer],
            self._rank,
            writes.heads,
            writes.tokens,
            writes.blocks,
            peer=writes.peer,
        )

    def staged(self, item: Staged) -> list[Sums]:
        """Return the checksums of what an exchange has brought: by slot, by member."""
        exchange, sums = item.run.exchange, list[Sums]()
        for planned, slot in zip(exchange.plan.slots, item.slots, strict=True):
            if slot is None or item.error is not None:
                sums.append({})
                continue
            data = np.frombuffer(self._device.view(slot.address, planned.nbytes), dtype=np.uint8)
            sums.append(slot_digest(planned, exchange.jobs[next(iter(planned.writes))].d, exchange.jobs, data))
        return sums
