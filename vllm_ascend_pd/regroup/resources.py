# SPDX-License-Identifier: Apache-2.0
"""Parts that a P worker allocates at start to take part in exchanges: buffers, staging slots, a process group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_ascend_pd.config import PushConfig, RegroupConfig
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.regroup.core.staging import Staging, exchanges_possible
from vllm_ascend_pd.regroup.core.world import ALIGNMENT, EngineWorld, slot_bytes
from vllm_ascend_pd.regroup.exchange import GroupExchange, new_group, tags_of
from vllm_ascend_pd.regroup.ops import cell_view, use_own_kernels

log = logging.getLogger(__name__)

# Longer than vLLM waits for its workers (300 s), so a rank that is stopped for a while only delays exchanges. A rank
# that dies is noticed at once, by its closed connections.
GROUP_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class RegroupResources:
    exchange: GroupExchange
    staging: Staging

    @property
    def room(self) -> Room:
        buffer = self.exchange.buffer_bytes
        return Room(self.staging.slot_bytes, buffer, buffer)


def allocate(
    config: PushConfig,
    world: EngineWorld,
    caches: Caches,
    device: Device,
    make_images: Callable[[int, torch.Tensor], None] | None = None,
) -> RegroupResources | None:
    """Allocate the parts, or return None if no exchange can ever be needed.

    Every rank of the world must call this: it makes process groups.
    """
    if not exchanges_possible(config.regroup, caches.geometry, world.tp_size):
        return None
    group = new_group(world.tp_size, world.groups, world.rank, device.collectives, GROUP_TIMEOUT_S)
    return build_resources(config.regroup, world, caches, device, group, make_images)


def build_resources(
    config: RegroupConfig,
    world: EngineWorld,
    caches: Caches,
    device: Device,
    group: dist.ProcessGroup,
    make_images: Callable[[int, torch.Tensor], None] | None = None,
) -> RegroupResources:
    """Allocate buffers and slots for a group that exists. Nothing is allocated later."""
    if device.name == "npu":
        use_own_kernels(config.regroup_kernels == "own")
    geometry = caches.geometry
    slot = slot_bytes(geometry, world)
    stride = slot + -(-tags_of(world.tp_size) // ALIGNMENT) * ALIGNMENT
    count = config.staging_slots * config.staging_destinations
    memory = torch.empty(stride * count + ALIGNMENT, dtype=torch.uint8, device=device.name)
    skip = -memory.data_ptr() % ALIGNMENT
    rank = world.rank % world.tp_size
    views = [  # states are never exchanged
        [
            cell_view(part, region, len(kind.head_range(rank)), 1 if region.opaque else kind.block_size)
            for part, region in zip(parts, kind.regions, strict=not kind.group.stateful)
        ]
        for parts, kind in zip(caches.tensors, geometry.by_layer, strict=True)
    ]
    log.info(
        "regroup: %d staging slots of %.1f MiB (%d for each of %d destinations), 2 buffers of %.1f MiB",
        count,
        slot / 2**20,
        config.staging_slots,
        config.staging_destinations,
        2 * slot / 2**20,
    )
    staging = Staging(
        memory[skip : skip + stride * count],
        slot,
        config.staging_slots,
        stride=stride,
        waits=not device.exchanges_inline,
    )
    return RegroupResources(GroupExchange(group, rank, views, 2 * slot, device.name, make_images), staging)
