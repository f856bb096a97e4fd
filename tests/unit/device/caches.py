# SPDX-License-Identifier: Apache-2.0
"""KV caches of a test model in the layouts that vLLM and vllm-ascend register, for `runtimes.py`: torch tensors,
known contents, and views of them as [block, head, token, width]."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from unit.geometry.kit import range_of
from vllm_ascend_pd.device.base import PLAIN, Device, Packing
from vllm_ascend_pd.device.caches import CacheShape, LayerShape
from vllm_ascend_pd.device.cpu import CpuDevice


class TokenMajorDevice(CpuDevice):
    """Host memory with the layout of vllm-ascend's caches: token by token, nothing permuted."""

    token_major = True

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        return PLAIN


class Divided(NamedTuple):
    """Context parallelism: the ranks that share the tokens, and the length of their runs."""

    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    @property
    def world(self) -> int:
        return self.dcp * self.pcp


class HeldDevice(TokenMajorDevice):
    """Device whose recorded work is done only when the test sets `open`."""

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
class CacheModel:
    """Model with a cache layout.

    `opaque`: the CPU backend's planes, all layers in one storage. `latent`: MLA. `token`: tuples of K and V as
    vllm-ascend has them; `uneven`: with a V half as wide as K. `stacked`: K and V in one tensor. `indexed`: tuples
    of latent, rope and index key, in the last layer of latent and rope alone, as vllm-ascend has MLA with an
    indexer. With DCP each rank has all keys, in as many blocks for one of the table as there are ranks.
    """

    layout: str = "opaque"
    heads: int = 2
    layers: int = 3
    dim: int = 16
    drafts: int = 0  # additional layers of a draft model
    drafter: str = "a draft model"
    draft_heads: int = 0  # of the draft model; 0: as many as the model
    draft_dim: int = 0
    indexers: bool = False  # each layer has an indexer too, with one key per token

    @property
    def names(self) -> tuple[str, ...]:
        numbers = range(self.layers + self.drafts)
        attention = [f"model.layers.{i}.self_attn.attn" for i in numbers]
        indexers = [f"model.layers.{i}.self_attn.indexer.k_cache" for i in numbers if self.indexers]
        return (*attention, *indexers)

    @property
    def own_drafts(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if int(name.split(".")[2]) >= self.layers)

    def heads_of(self, name: str) -> int:
        if ".indexer." in name:
            return 1
        return (self.draft_heads or self.heads) if name in self.own_drafts else self.heads

    def widths_of(self, name: str) -> tuple[int, ...]:
        """Elements of a cell, by region."""
        if ".indexer." in name:
            return (6,)
        if name in self.own_drafts and self.draft_dim:
            return tuple(width * self.draft_dim // self.dim for width in self.widths)
        if self.layout == "indexed" and name == self.names[self.layers - 1]:
            return self.widths[:2]
        return self.widths

    @property
    def drafted(self) -> dict[str, Any]:
        """Fields of a CacheShape for the draft model."""
        return {"drafter": self.drafter, "drafts": frozenset(self.own_drafts)} if self.drafts else {}

    def shape(self, block: int, tp: int, rank: int, divided: Divided = Divided()) -> CacheShape:  # noqa: B008
        def of(name: str) -> LayerShape:
            heads = self.heads_of(name)
            dim = 6 if ".indexer." in name else self.widths_of(name)[0] // (2 if self.layout == "opaque" else 1)
            return LayerShape(len(range_of(heads, tp, rank % tp)), heads, dim)

        first = of(self.names[0])
        unlike = {name: of(name) for name in self.names if of(name) != first}
        keys = {name: 1 for name in self.names if len(self.widths_of(name)) == 3}
        more: dict[str, Any] = {**self.drafted, **divided._asdict(), "indexes": keys}
        sizes = first.total_heads, first.head_size
        return CacheShape(block, first.local_heads, *sizes, tp, other_shapes=unlike, **more)

    @property
    def regions(self) -> int:
        return len(self.widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a cell, by region."""
        even = (self.dim, self.dim)
        half = self.dim // 2
        others = {"opaque": (2 * self.dim,), "latent": (self.dim,), "uneven": (self.dim, half)}
        return {**others, "indexed": (self.dim, half, 6)}.get(self.layout, even)

    @property
    def width(self) -> int:
        return self.widths[0]

    def device(self) -> Device:
        return CpuDevice() if self.layout in ("opaque", "latent") else TokenMajorDevice()

    def content(self, tokens: int, seed: int) -> np.ndarray:
        """A prompt's KV: [layer, region, token, head, width]."""
        dice = np.random.default_rng(seed)
        most = max(self.heads, self.draft_heads)
        width = max(self.widths_of(name)[0] for name in self.names)
        size = (len(self.names), self.regions, tokens, most, width)
        return dice.integers(1, 2**31 - 1, size, dtype=np.int32)


class RankCache:
    """One worker's KV cache: the tensors that it registers, and views of them as [block, head, token, width]."""

    def __init__(
        self,
        model: CacheModel,
        names: Sequence[str],
        tp: int,
        rank: int,
        blocks: int,
        block: int,
        divided: Divided = Divided(),  # noqa: B008
    ) -> None:
        self.heads = [list(range_of(model.heads_of(name), tp, rank % tp)) for name in names]
        self.block, self.divided = block, divided
        self.part = rank // tp * divided.dcp + rank % tp % divided.dcp
        self.tensors: dict[str, Any] = {}
        self.views: list[list[np.ndarray]] = []
        self.whole: set[tuple[int, ...]] = set()  # layer and region of which a rank of DCP has all tokens
        alike = len({(model.heads_of(name), model.widths_of(name)) for name in names}) == 1
        storage = torch.empty(len(names), blocks, len(self.heads[0]), block, model.width)
        for index, name in enumerate(names):
            n, widths = len(self.heads[index]), model.widths_of(name)
            if ".indexer." in name:
                tensor = torch.empty(blocks, block, *widths)
                self.tensors[name], parts = tensor, [tensor[:, None]]
            elif model.layout == "opaque":
                tensor = storage[index] if alike else torch.empty(blocks, n, block, *widths)
                self.tensors[name], parts = tensor, [tensor]
            elif model.layout == "latent":
                tensor = torch.empty(blocks, 1, block, *widths)
                self.tensors[name], parts = tensor, [tensor]
            elif model.layout in ("token", "uneven", "indexed"):
                ranks = [1, 1, divided.dcp][: len(widths)]
                self.whole.update((index, region) for region, count in enumerate(ranks) if count > 1)
                some = tuple(
                    torch.empty(blocks * count, block, n, width) for count, width in zip(ranks, widths, strict=True)
                )
                self.tensors[name] = some
                parts = [tensor.view(blocks, -1, *tensor.shape[2:]).permute(0, 2, 1, 3) for tensor in some]
            else:
                stack = torch.empty(2, blocks, block, n, widths[0])
                self.tensors[name], parts = stack, [stack[i].permute(0, 2, 1, 3) for i in range(2)]
            self.views.append([part.view(torch.int32).numpy() for part in parts])

    def rank_tokens(self, begin: int, end: int, *of: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """This rank's tokens of [begin, end), `of` a layer and region: their numbers, the place of each one's block in
        the table, and its place in the block. A rank's tokens of a prompt lie one after the other."""
        tokens, block = np.arange(end), self.block
        if of in self.whole:
            stored, block = tokens, block * self.divided.dcp
        else:
            stored = np.flatnonzero(tokens // self.divided.interleave % self.divided.world == self.part)
        positions = np.arange(len(stored))[stored >= begin]
        return stored[stored >= begin], positions // block, positions % block

    def fill(self, value: int) -> None:
        for layer in self.views:
            for view in layer:
                view[...] = value

    def scribble(self, blocks: Sequence[int], value: int) -> None:
        """Overwrite these blocks as another request's KV would."""
        for layer in self.views:
            for view in layer:
                view[list(blocks)] = value


class Pool:
    """Free blocks in a random order."""

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
