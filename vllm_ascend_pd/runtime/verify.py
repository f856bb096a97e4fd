# SPDX-License-Identifier: Apache-2.0
"""`verify: full`: every pushed block is summed where it is read and again where it arrived (geometry/digest.py).

For tests and for hunting a bad link: it reads everything once more on both sides, on the threads that move the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.decode.decisions import Bind
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.digest import cache_digest, slot_digest
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import Slot
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.regroup.staging import StagingSlot
from vllm_ascend_pd.runtime.batches import unit_of
from vllm_ascend_pd.runtime.work import PushWork


class _Memory:
    """This rank's cache, readable by layer and region."""

    def __init__(self, caches: Caches, device: Device) -> None:
        self._caches, self._device = caches, device

    def region(self, layer: int, region: int) -> NDArray[np.uint8]:
        length = self._caches.num_blocks * self._caches.geometry.regions[region].block_stride
        return np.frombuffer(self._device.view(self._caches.bases[layer][region], length), dtype=np.uint8)


class Summer:
    """P: adds what is about to be written to the sums that DONE will carry."""

    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        self._memory, self._geometry, self._rank = _Memory(caches, device), caches.geometry, rank
        self._device = device

    def add(self, sender: Sender, claim: Claim, work: PushWork) -> None:
        unit = unit_of(claim)
        part = work.plans[unit.step].parts[claim.d_rank]
        value = cache_digest(
            lambda region: self._memory.region(unit.layer, region),
            self._geometry,
            self._rank,
            range(*part.heads),
            range(part.lo, part.hi),
            work.blocks[: work.known],
        )
        sender.checksum(claim.push, claim.d_rank, self._geometry.layers[unit.layer], value)

    def staged(self, slot: Slot, jobs: Sequence[Job], memory: StagingSlot) -> dict[int, int]:
        """The sums of what an exchange has staged, by job index."""
        data = np.frombuffer(self._device.view(memory.address, slot.nbytes), dtype=np.uint8)
        return slot_digest(slot, jobs[next(iter(slot.writes))].d, jobs, data)


class Verifier:
    """D: compares its memory with the contributors' sums."""

    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        self._memory, self._geometry, self._rank = _Memory(caches, device), caches.geometry, rank
        self._binds: dict[TransferId, Bind] = {}

    def expect(self, bind: Bind) -> None:
        self._binds[bind.transfer] = bind

    def forget(self, transfer: TransferId) -> None:
        self._binds.pop(transfer, None)

    def first_difference(self, transfer: TransferId, sums: Mapping[str, int]) -> str | None:
        """The first layer whose bytes are not what was sent; None if all are."""
        bind = self._binds[transfer]
        if not sums:
            return f"{self._geometry.layers[0]} (prefill sent no checksums: set verify to full there too)"
        for index, name in enumerate(self._geometry.layers):
            found = cache_digest(
                lambda region, layer=index: self._memory.region(layer, region),  # type: ignore[misc]
                self._geometry,
                self._rank,
                self._geometry.head_range(self._rank),
                range(bind.first, bind.end),
                bind.blocks,
                bind.first // self._geometry.block_size,
            )
            if sums.get(name) != found:
                return name
        return None
