# SPDX-License-Identifier: Apache-2.0
"""Parts that a P worker allocates at start to take part in exchanges: buffers, staging slots, a process group."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vllm_ascend_pd.config import PushConfig, RegroupConfig
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.regroup.exchange import GroupExchange, new_group, tags_of
from vllm_ascend_pd.regroup.ops import cell_view, use_own_kernels
from vllm_ascend_pd.regroup.staging import Staging, exchanges_possible

log = logging.getLogger(__name__)

# Longer than vLLM waits for its workers (300 s), so a rank that is stopped for a while only delays exchanges. A rank
# that dies is noticed at once, by its closed connections.
GROUP_TIMEOUT_S = 600.0
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class EngineWorld:
    """A worker's rank and its engine's sizes, and the most tokens that a step computes."""

    rank: int  # of the world: all stages of all data-parallel ranks that compute together
    tp_size: int
    groups: int  # number of groups of tp_size ranks in the world
    step_tokens: int

    @classmethod
    def of(cls, parallel: Any, pcp: int, step_tokens: int) -> EngineWorld:
        """Return a worker's world by vLLM's parallel configuration, whose `rank` is within a data-parallel rank."""
        return cls(
            rank=parallel.data_parallel_rank * parallel.world_size + parallel.rank,
            tp_size=parallel.tensor_parallel_size,
            groups=parallel.pipeline_parallel_size * parallel.data_parallel_size * pcp,
            step_tokens=step_tokens,
        )


@dataclass(frozen=True, slots=True)
class RegroupResources:
    exchange: GroupExchange
    staging: Staging

    @property
    def room(self) -> Room:
        buffer = self.exchange.buffer_bytes
        return Room(self.staging.slot_bytes, buffer, buffer)


def allocate(config: PushConfig, world: EngineWorld, caches: Caches, device: Device) -> RegroupResources | None:
    """Allocate the parts, or return None if no exchange can ever be needed.

    Every rank of the world must call this: it makes process groups.
    """
    if not exchanges_possible(config.regroup, caches.geometry, world.tp_size):
        return None
    group = new_group(world.tp_size, world.groups, world.rank, device.collectives, GROUP_TIMEOUT_S)
    return assembled(config.regroup, world, caches, device, group)


def assembled(
    config: RegroupConfig, world: EngineWorld, caches: Caches, device: Device, group: dist.ProcessGroup
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
            for part, region in zip(parts, kind.regions, strict=not kind.own.stateful)
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
    return RegroupResources(GroupExchange(group, rank, views, 2 * slot, device.name), staging)


def slot_bytes(geometry: CacheGeometry, world: EngineWorld) -> int:
    """Return the size of one rank's share of a full step with all heads, plus two blocks for rounding.

    Longer steps are cut.
    """
    sizes = [
        (-(-world.step_tokens // (world.tp_size * kind.block_size)) + 2)
        * kind.kv_heads
        * sum(r.cell_bytes * (1 if r.opaque else kind.block_size) for r in kind.regions)
        for kind in geometry.kinds
        if (kind.kv_heads > 1 or not geometry.others) and not kind.own.stateful
    ]
    return -(-max(sizes) // ALIGNMENT) * ALIGNMENT
