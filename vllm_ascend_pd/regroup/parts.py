# SPDX-License-Identifier: Apache-2.0
"""What a P worker allocates at start to take part in exchanges: buffers, staging slots, a process group of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.regroup.exchange import Exchange, new_group
from vllm_ascend_pd.regroup.ops import cell_view
from vllm_ascend_pd.regroup.staging import Staging

log = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 60.0
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where this worker is in its engine, and the most tokens that a step computes."""

    rank: int  # global
    tp_size: int
    pp_size: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class RegroupParts:
    exchange: Exchange
    staging: Staging

    @property
    def room(self) -> Room:
        buffer = self.exchange.buffer_bytes
        return Room(self.staging.slot_bytes, buffer, buffer)


def allocate(config: PushConfig, place: Place, caches: Caches, device: Device) -> RegroupParts | None:
    """None where no exchange can ever be needed: TP 1, one KV head for all ranks, or regroup switched off.

    Every rank of the engine must call this: it makes a process group.
    """
    geometry, regroup = caches.geometry, config.regroup
    if place.tp_size == 1 or geometry.kv_heads == 1 or regroup.regroup == "never":
        return None
    slot = slot_bytes(geometry, place)
    count = regroup.staging_slots * regroup.staging_destinations + regroup.staging_spares
    memory = torch.empty(slot * count + ALIGNMENT, dtype=torch.uint8, device=device.name)
    skip = -memory.data_ptr() % ALIGNMENT
    heads = len(geometry.head_range(place.rank % place.tp_size))
    views = [
        [
            cell_view(part, region, heads, 1 if region.opaque else geometry.block_size)
            for part, region in zip(parts, geometry.regions, strict=True)
        ]
        for parts in caches.tensors
    ]
    group = new_group(place.tp_size, place.pp_size, place.rank, device.collectives, GROUP_TIMEOUT_S)
    log.info(
        "regroup: %d staging slots of %.1f MiB (%d for each of %d destinations, %d spares), buffers of %.1f MiB",
        count,
        slot / 2**20,
        regroup.staging_slots,
        regroup.staging_destinations,
        regroup.staging_spares,
        2 * slot / 2**20,
    )
    return RegroupParts(
        Exchange(group, views, 2 * slot, device.name),
        Staging(memory[skip : skip + slot * count], slot, regroup.staging_slots, regroup.staging_spares),
    )


def slot_bytes(geometry: CacheGeometry, place: Place) -> int:
    """One rank's share of a full step with all heads, and two blocks more for rounding; longer steps are cut."""
    cell = sum(r.cell_bytes * (1 if r.opaque else geometry.block_size) for r in geometry.regions)
    blocks = -(-place.step_tokens // (place.tp_size * geometry.block_size)) + 2
    return -(-blocks * cell * geometry.kv_heads // ALIGNMENT) * ALIGNMENT
