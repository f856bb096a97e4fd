# SPDX-License-Identifier: Apache-2.0
"""KV caches of a made-up model in the layouts that vLLM and vllm-ascend register, for `runtime_pair`: torch tensors, known
contents, and views of them as [block, head, token, width]."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.cpu import CpuDevice


class TokenMajorDevice(CpuDevice):
    """Host memory that lies as vllm-ascend's caches do: token by token, nothing permuted."""

    token_major = True

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> tuple[str, bool]:
        return "plain", False


class HeldDevice(TokenMajorDevice):
    """What was recorded is done only when the test lets it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.seen_done = 0

    def record(self) -> Any:
        device = self

        class Held:
            def done(self) -> bool:
                device.seen_done += device.open.is_set()
                return device.open.is_set()

        return Held()


@dataclass(frozen=True)
class Model:
    """`opaque`: the CPU backend's planes, all layers in one storage. `latent`: MLA. `token`: tuples of K and V as
    vllm-ascend has them; `uneven`: with a V half as wide as K. `stacked`: K and V in one tensor."""

    layout: str = "opaque"
    heads: int = 2
    layers: int = 3
    dim: int = 16
    drafts: int = 0  # more layers, of a draft model
    drafter: str = "a draft model"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{i}.self_attn.attn" for i in range(self.layers + self.drafts))

    @property
    def own_drafts(self) -> tuple[str, ...]:
        return self.names[self.layers :]

    @property
    def drafted(self) -> dict[str, Any]:
        """What a CacheShape says of it."""
        return {"drafter": self.drafter, "drafts": frozenset(self.own_drafts)} if self.drafts else {}

    @property
    def regions(self) -> int:
        return len(self.widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a cell, by region."""
        even = (self.dim, self.dim)
        return {"opaque": (2 * self.dim,), "latent": (self.dim,), "uneven": (self.dim, self.dim // 2)}.get(
            self.layout, even
        )

    @property
    def width(self) -> int:
        return self.widths[0]

    def device(self) -> Device:
        return CpuDevice() if self.layout in ("opaque", "latent") else TokenMajorDevice()

    def content(self, tokens: int, seed: int) -> np.ndarray:
        """A prompt's KV: [layer, region, token, head, width]."""
        dice = np.random.default_rng(seed)
        size = (self.layers + self.drafts, self.regions, tokens, self.heads, self.width)
        return dice.integers(1, 2**31 - 1, size, dtype=np.int32)


class RankCache:
    """One worker's KV cache: what it registers, and views of it as [block, head, token, width]."""

    def __init__(self, model: Model, names: Sequence[str], heads: Sequence[int], blocks: int, block: int) -> None:
        self.heads = list(heads)
        n, layers = len(self.heads), len(names)
        self.tensors: dict[str, Any] = {}
        self.views: list[list[np.ndarray]] = []
        if model.layout == "opaque":
            storage = torch.empty(layers, blocks, n, block, model.width)
            self.tensors = {name: storage[i] for i, name in enumerate(names)}
            parts = [[storage[i]] for i in range(layers)]
        elif model.layout == "latent":
            parts = [[torch.empty(blocks, 1, block, model.width)] for _ in names]
            self.tensors = {name: part[0] for name, part in zip(names, parts, strict=True)}
        elif model.layout in ("token", "uneven"):
            pairs = [tuple(torch.empty(blocks, block, n, width) for width in model.widths) for _ in names]
            self.tensors = dict(zip(names, pairs, strict=True))
            parts = [[tensor.permute(0, 2, 1, 3) for tensor in pair] for pair in pairs]
        else:
            stacks = [torch.empty(2, blocks, block, n, model.width) for _ in names]
            self.tensors = dict(zip(names, stacks, strict=True))
            parts = [[stack[i].permute(0, 2, 1, 3) for i in range(2)] for stack in stacks]
        self.views = [[tensor.view(torch.int32).numpy() for tensor in layer] for layer in parts]

    def fill(self, value: int) -> None:
        for layer in self.views:
            for view in layer:
                view[...] = value

    def scribble(self, blocks: Sequence[int], value: int) -> None:
        """Another request's KV comes into these blocks."""
        for layer in self.views:
            for view in layer:
                view[list(blocks)] = value


class Pool:
    """Free blocks, handed out in an order of their own."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._free = list(range(blocks))
        random.Random(seed).shuffle(self._free)

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the pool is empty"
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        self._free = [*self._free, *blocks]

    @property
    def free(self) -> int:
        return len(self._free)
