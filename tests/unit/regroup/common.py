# SPDX-License-Identifier: Apache-2.0
"""D of a pair without vLLM, and what both sides use: caches of every layout as plain bytes, prompts, a transport.

A prompt's KV is random bytes, known by (layer, region, token, head). P's ranks get their heads of it step by step,
as a model would write it; D's memory is compared with it to the last byte, including bytes that must not change.
Nothing here uses the package's arithmetic for places: heads are dealt by iteration, blocks are looked up token by
token.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unit.device.caches import Pool
from unit.geometry.kit import range_of
from unit.kits.watching import parsed
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.worker.runtime import ReceiveRuntime, Site
from vllm_ascend_pd.device.base import PLAIN, Packing
from vllm_ascend_pd.device.caches import Caches, CacheShape, describe
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import Bind, DecodeStep, LoadCancel, LoadEnd
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, TransferId
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write
from vllm_ascend_pd.transport.spans import Bounds

LOOPBACK = "127.0.0.1"
NAME = "a model of the tests"
UNTOUCHED = 0xA5
DEADLINE_S = 30.0
HEADER = 4096  # of a shared file: holds the generation
FAST = {
    "transport": "memory",
    "regroup": "always",
    "resend_first_s": 0.05,
    "resend_max_s": 0.2,
    "transfer_timeout_s": 5,
    "quiet_extra_s": 0.0,
}


def config(*, quiet_s: float | None = None, **keys: Any) -> PushConfig:
    return parsed({**FAST, **keys}, quiet_s)


# ---- caches


@dataclass(frozen=True)
class EngineCache:
    """One engine's cache. `layout`: token (as vllm-ascend's), head, or plane (the token axis is opaque)."""

    layout: str = "token"
    tp: int = 1
    heads: int = 4
    block: int = 8
    packed: bool = False
    dtype: str = "bfloat16"
    dim: int = 16
    layers: int = 2
    pp: int = 1

    @property
    def item(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def cells(self) -> tuple[int, ...]:
        """Bytes of one (token, head) cell by region."""
        return (2 * self.dim * self.item,) if self.packed else (self.dim * self.item,) * 2

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{index}.self_attn.attn" for index in range(self.layers))

    def stage(self, stage: int) -> tuple[str, ...]:
        return tuple(map(str, np.array_split(np.array(self.names), self.pp)[stage]))

    def content(self, seed: int, tokens: int) -> list[np.ndarray]:
        """Return the content by region: [layer, token, head, byte]."""
        return _content(seed, tokens, self.layers, self.heads, self.cells)


@functools.lru_cache(maxsize=64)
def _content(seed: int, tokens: int, layers: int, heads: int, cells: tuple[int, ...]) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 256, (layers, tokens, heads, cell), dtype=np.uint8) for cell in cells]


class LayoutDevice(CpuDevice):
    """Host memory with a given layout. With `inline` exchanges run in the layer's hook, as on an NPU. Recorded work
    is done at once, except while the test keeps the device `busy`."""

    def __init__(self, layout: str, inline: bool = False) -> None:
        self.token_major = layout == "token"
        self.exchanges_inline = inline
        self.busy = False
        self._opaque = layout == "plane"

    def record(self) -> Any:
        device = self

        class Recorded:
            def done(self) -> bool:
                return not device.busy

        return Recorded()

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        return Packing("planes", opaque=True) if self._opaque else PLAIN


class RegisteredMemory:
    """One worker's cache: the tensors that it registers, and each region as bytes [block, head, token, byte]."""

    def __init__(self, cache: EngineCache, names: Sequence[str], rank: int, blocks: int, memory: Any = None) -> None:
        self.cache, self.blocks = cache, blocks
        self.heads = range_of(cache.heads, cache.tp, rank)
        size = len(names) * sum(blocks * len(self.heads) * cache.block * cell for cell in cache.cells)
        raw = torch.empty(size, dtype=torch.uint8) if memory is None else torch.frombuffer(memory, dtype=torch.uint8)
        self.tensors: dict[str, Any] = {}
        self.views: list[list[np.ndarray]] = []
        at = 0
        for name in names:
            parts, views = [], []
            for cell in cache.cells:
                inner = (cache.block, len(self.heads)) if cache.layout == "token" else (len(self.heads), cache.block)
                length = blocks * cache.block * len(self.heads) * cell
                flat = raw[at : at + length].view(blocks, *inner, cell)
                at += length
                parts.append(flat.view(getattr(torch, cache.dtype)))
                view = flat.numpy()
                views.append(view.transpose(0, 2, 1, 3) if cache.layout == "token" else view)
            self.tensors[name] = parts[0] if cache.packed else tuple(parts)
            self.views.append(views)

    @classmethod
    def bytes_of(cls, cache: EngineCache, rank: int, blocks: int) -> int:
        heads = len(range_of(cache.heads, cache.tp, rank))
        return cache.layers * sum(blocks * heads * cache.block * cell for cell in cache.cells)

    def fill(self, value: int) -> None:
        for views in self.views:
            for view in views:
                view[...] = value

    def write(
        self, layer: int, local_layer: int, content: list[np.ndarray], table: Sequence[int], lo: int, hi: int
    ) -> None:
        """Write tokens [lo, hi) of a prompt as the model's layer `layer` does into this worker's `local_layer`."""
        tokens = np.arange(lo, hi)
        ids = np.asarray(table)[tokens // self.cache.block]
        for view, wanted in zip(self.views[local_layer], content, strict=True):
            view[ids, :, tokens % self.cache.block] = wanted[layer, tokens][:, self.heads]

    def scribble(self, blocks: Sequence[int], value: int) -> None:
        for views in self.views:
            for view in views:
                view[list(blocks)] = value

    def described(self, device: LayoutDevice) -> Caches:
        cache = self.cache
        shape = CacheShape(cache.block, len(self.heads), cache.heads, cache.dim, cache.tp)
        return describe(self.tensors, shape, device)


# ---- a transfer engine between processes of one machine


class SharedTransport(MemoryTransport):
    """Transport for processes of one host: D's memory is a file that the writer maps too. A session names the file
    and its address on D."""

    def __init__(self, path: Path | None = None, memory: mmap.mmap | None = None) -> None:
        self._path, self._file, self._generation = path, memory, 0
        self._maps: dict[str, mmap.mmap] = {}
        super().__init__()

    def _open(self) -> None:
        if self._file is None:
            super()._open()
            return
        self._generation += 1
        self._file[:8] = self._generation.to_bytes(8, "little")
        self._session = f"shared:{address_of(self._file)}:{self._generation}:{self._path}"

    def _shut(self) -> None:
        if self._file is None:
            super()._shut()
        else:
            self._file[:8] = bytes(8)

    def land(self, write: Write) -> WriteState:
        if not write.session.startswith("shared:"):
            return super().land(write)
        base, generation, path = write.session.split(":", 3)[1:]
        target = self._maps.get(path)
        if target is None:
            with Path(path).open("r+b") as file:
                target = self._maps[path] = mmap.mmap(file.fileno(), 0)
        if int.from_bytes(target[:8], "little") != int(generation):
            return WriteState.FAILED
        Bounds([(int(base) + HEADER, len(target) - HEADER)], "destination").check(write.dst, write.size)
        here = address_of(target) - int(base)
        for src, dst, size in zip(write.src.tolist(), write.dst.tolist(), write.size.tolist(), strict=True):
            ctypes.memmove(dst + here, src, size)
        return WriteState.LANDED


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ---- prompts and decode engines


@dataclass(eq=False)
class RegroupPrompt:
    """One request on both sides."""

    name: str
    seed: int
    tokens: int
    first: int
    site: RegroupDecodeSite
    reservation: Reservation
    d_blocks: list[int]
    p_blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def transfer(self) -> TransferId:
        return self.reservation.transfer


class RegroupDecodeSite:
    """One decode engine: a receive runtime for each rank. With `folder`, its memory is shared with other processes."""

    make_memory: Callable[..., RegisteredMemory] = RegisteredMemory
    make_device: Callable[..., Any] = LayoutDevice

    def __init__(
        self, cache: EngineCache, *, blocks: int = 160, folder: Path | None = None, push: PushConfig | None = None
    ) -> None:
        self.cache, self.incarnation = cache, uuid.uuid4().hex[:16]
        self.pool, self._count = Pool(blocks, 2), 0
        self.ranks: list[RegisteredMemory] = []
        self.runtimes: list[ReceiveRuntime] = []
        self.transports: list[MemoryTransport] = []
        geometries: list[CacheGeometry] = []
        for rank in range(cache.tp):
            memory, transport = self._memory(rank, blocks, folder)
            self.ranks.append(memory)
            memory.fill(UNTOUCHED)
            device = self.make_device(cache.layout)
            caches = memory.described(device)
            site = Site(self.incarnation, 0, rank, NAME, LOOPBACK, 0, "")
            self.runtimes.append(ReceiveRuntime(push or config(), site, caches, device, transport, None))
            self.transports.append(transport)
            geometries.append(caches.geometry)
        self.geometry = geometries[0]
        self.prompts: list[RegroupPrompt] = []
        self._binds: list[Bind] = []
        self.reports: dict[str, list[LoadEnd]] = {}

    def _memory(self, rank: int, blocks: int, folder: Path | None) -> tuple[RegisteredMemory, MemoryTransport]:
        if folder is None:
            return self.make_memory(self.cache, self.cache.names, rank, blocks), MemoryTransport()
        path = folder / f"{self.incarnation}-{rank}"
        with path.open("w+b") as file:
            file.truncate(HEADER + RegisteredMemory.bytes_of(self.cache, rank, blocks))
            shared = mmap.mmap(file.fileno(), 0)
        view = memoryview(shared)[HEADER:]
        return RegisteredMemory(self.cache, self.cache.names, rank, blocks, view), SharedTransport(path, shared)

    def reserve(
        self, tokens: int, *, first: int = 0, deadline_s: float = 30.0, seed: int | None = None
    ) -> RegroupPrompt:
        """Allocate blocks for [first, tokens); the workers get it in the next step."""
        self._count += 1
        name = f"request {self._count}"
        count = -(-tokens // self.cache.block) - first // self.cache.block
        blocks = self.pool.take(count)
        transfer = TransferId(self.incarnation, self._count, uuid.uuid4().hex)
        table = np.asarray(blocks, dtype=np.int32)
        self._binds.append(Bind(name, transfer, first, tokens, (table,), deadline_s, (1,)))
        reservation = Reservation(
            version=PROTOCOL_VERSION,
            transfer=transfer,
            model=NAME,
            first=first,
            end=tokens,
            blocks=(table.astype("<i4").tobytes(),),
            geometry=self.geometry,
            endpoints=tuple(runtime.endpoint for runtime in self.runtimes),
            deadline_s=deadline_s,
            prompt_length=tokens,
            prompt_hash="the hash",
        )
        prompt = RegroupPrompt(
            name, hash(transfer) % 2**32 if seed is None else seed, tokens, first, self, reservation, blocks
        )
        self.prompts.append(prompt)
        return prompt

    def step(self) -> None:
        """Bind on all ranks what was reserved since the last step."""
        binds, self._binds = tuple(self._binds), []
        self.tell(DecodeStep(binds=binds, incarnation=self.incarnation, geometry=self.geometry))

    @property
    def sessions(self) -> set[str]:
        return {transport.session for transport in self.transports}

    def tell(self, step: DecodeStep) -> None:
        for runtime in self.runtimes:
            runtime.step(step)

    def cancel(self, prompt: RegroupPrompt) -> None:
        gone = LoadCancel(prompt.transfer, Failure("PD-XFER-002", "the client left"))
        self.tell(DecodeStep(cancels=(gone,), incarnation=self.incarnation))

    def collect(self) -> None:
        for runtime in self.runtimes:
            for report in runtime.take_reports():
                self.reports.setdefault(report.request_id, []).append(report)

    def ended(self, prompt: RegroupPrompt) -> list[LoadEnd] | None:
        """Return the reports of all ranks, or None while some are missing."""
        self.collect()
        reports = self.reports.get(prompt.name, [])
        assert len(reports) <= self.cache.tp, f"{prompt.name} was reported twice: {reports}"
        return reports if len(reports) == self.cache.tp else None

    def check(self, *prompts: RegroupPrompt) -> None:
        """Check that the KV of these prompts is complete, and that nothing changed but blocks of prompts not named."""
        for rank, memory in enumerate(self.ranks):
            for layer, views in enumerate(memory.views):
                for region, view in enumerate(views):
                    self._check(prompts, f"rank {rank}, layer {layer}, region {region}", view, (layer, region), memory)

    def _check(
        self,
        prompts: Sequence[RegroupPrompt],
        where: str,
        view: np.ndarray,
        at: tuple[int, int],
        memory: RegisteredMemory,
    ) -> None:
        expected, free = np.full_like(view, UNTOUCHED), np.zeros(view.shape[:1] + view.shape[2:3], dtype=bool)
        block, (layer, region) = self.cache.block, at
        for prompt in self.prompts:
            if prompt not in prompts:
                free[prompt.d_blocks] = True
                continue
            tokens = np.arange(prompt.first, prompt.tokens)
            ids = np.asarray(prompt.d_blocks)[tokens // block - prompt.first // block]
            wanted = self.cache.content(prompt.seed, prompt.tokens)[region][layer, tokens][:, memory.heads]
            expected[ids, :, tokens % block] = wanted
            wrong = np.flatnonzero((view[ids, :, tokens % block] != wanted).any(axis=(1, 2)))
            assert not len(wrong), f"{prompt.name}: {where}: wrong tokens {(prompt.first + wrong[:8]).tolist()}"
            if behind := prompt.tokens % block:
                expected[prompt.d_blocks[-1], :, behind:] = 0  # D has cleared it
                free[prompt.d_blocks[-1], behind:] = self.cache.layout == "plane"  # a plane is written whole
        touched = (view != expected).any(axis=(1, 3)) & ~free
        assert not touched.any(), f"{where}: (block, token) {np.argwhere(touched)[:8].tolist()} were touched"

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()
