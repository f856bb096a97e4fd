# SPDX-License-Identifier: Apache-2.0
"""P's and D's workers with the real `NpuDevice` over the stand-ins: caches on `npu`, HCCL groups, production hooks.

`serve` is one worker of a prefill engine (class `NpuFleet`): its own process and device, driven through the layer hooks
as vllm-ascend drives them. The KV of a layer is written by copies that the compute
stream makes later, so what gathers or pushes without waiting for them takes the wrong bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from npu_forks import Nursery

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from unit.regroup.common import LOOPBACK, EngineCache, RegisteredMemory, RegroupDecodeSite, SharedTransport, config
from unit.regroup.prefill import RegroupPrefillRank
from unit.regroup.runner import AscendRank
from unit.regroup.worker import KEY, ChildProcesses, GlooWorld, Member, WorkerCommands

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.resources import allocate


class NpuMemory(RegisteredMemory):
    """Tensors on the device.

    `views` are the host's copies, from which writes are made and into which results are read.
    """

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._hosts = [self._parts(value) for value in self.tensors.values()]
        self._mirrors = [[torch.empty_like(part, device="npu") for part in parts] for parts in self._hosts]
        self._sent: list[torch.Tensor] = []  # host sides of copies that may still be in progress
        dtype = getattr(torch, self.cache.dtype)
        for name, parts in zip(self.tensors, self._mirrors, strict=True):
            typed = tuple(part.view(dtype) for part in parts)
            self.tensors[name] = typed[0] if self.cache.packed else typed

    @staticmethod
    def _parts(value: Any) -> list[torch.Tensor]:
        """Return the parts as bytes, which can be copied whatever the dtype is."""
        return [part.view(torch.uint8) for part in ((value,) if isinstance(value, torch.Tensor) else value)]

    def _send(self, local_layer: int) -> None:
        for host, mirror in zip(self._hosts[local_layer], self._mirrors[local_layer], strict=True):
            self._sent.append(host.clone().pin_memory())  # a copy from other memory would wait for the stream
            mirror.copy_(self._sent[-1], non_blocking=True)

    def fill(self, value: int) -> None:
        super().fill(value)
        for local_layer in range(len(self._hosts)):
            self._send(local_layer)
        torch.npu.synchronize()

    def write(self, layer: int, local_layer: int, *rest: Any) -> None:
        super().write(layer, local_layer, *rest)
        self._send(local_layer)

    def fetch(self) -> None:
        torch.npu.synchronize()
        for hosts, mirrors in zip(self._hosts, self._mirrors, strict=True):
            for host, mirror in zip(hosts, mirrors, strict=True):
                host.copy_(mirror)


def npu_device(layout: str, inline: bool = True) -> Any:
    from vllm_ascend_pd.device.npu import NpuDevice

    return NpuDevice()


class NpuRank(AscendRank):
    make_memory = NpuMemory
    make_device = staticmethod(npu_device)


class NpuPrefillRank(RegroupPrefillRank):
    make_memory = NpuMemory
    make_device = staticmethod(npu_device)


class NpuDecodeSite(RegroupDecodeSite):
    """A D in this process, on its current device."""

    make_memory = NpuMemory
    make_device = staticmethod(npu_device)

    def check(self, *prompts: Any) -> None:
        for memory in self.ranks:
            memory.fetch()
        super().check(*prompts)


class NpuWorker(WorkerCommands):
    """A worker, in the child process."""

    def enter(self, world: GlooWorld) -> None:
        torch.npu.set_device(world.rank)
        dist.init_process_group(
            "hccl", init_method=f"tcp://{LOOPBACK}:{world.port}", world_size=world.size, rank=world.rank
        )

    def open(self, cache: EngineCache, blocks: int, kind: str, keys: dict[str, Any]) -> CacheGeometry:
        self._exchanges.clear()
        self._called = 0
        place = Contributor(0, dist.get_rank())
        self._rank = NpuRank(cache, place, allocate, transport=SharedTransport(), blocks=blocks, push=config(**keys))
        return self._rank.geometry

    def close(self) -> None:
        super().close()
        torch.npu.synchronize()


class NpuFleet(ChildProcesses):
    """A process for each device, forked by one that has used none."""

    def __init__(self, count: int, nursery: Nursery, rank: Callable[[int], object]) -> None:
        self._nursery_of_ranks = nursery
        self.members: list[Member] = []
        self._size = 0
        with Listener((LOOPBACK, 0), backlog=count, authkey=KEY) as listener:
            self._pids = [nursery.start(rank, listener.address[1]) for _ in range(count)]
            for _ in range(count):
                connection = listener.accept()
                self.members.append(Member(connection, connection.recv()))

    def close(self) -> None:
        self.leave()
        for member in self.members:
            member.hang_up()
        ended = [self._nursery_of_ranks.wait(pid) for pid in self._pids]
        assert not any(ended), f"workers ended with {ended}"


def serve(port: int) -> None:
    torch.set_num_threads(1)
    with Client((LOOPBACK, port), authkey=KEY) as connection:
        connection.send(os.getpid())
        NpuWorker().serve(connection)
