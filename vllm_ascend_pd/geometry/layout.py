# SPDX-License-Identifier: Apache-2.0
"""How a KV cache lies in memory, as plain numbers.

Every layout we meet is affine: the byte address of the cell of (block, head, token) is
`base + block*block_stride + head*head_stride + token*token_stride`, and a cell is contiguous.
Head-major, token-major, packed K‖V and MLA differ only in these strides. Where the token axis
is opaque (the CPU backend permutes inside a (block, head) plane) `token_stride` is 0 and the cell
is the whole plane.

Layers of one block table need not be alike: a draft model has heads of its own, an indexer keeps one key per token beside
the attention's cache. Layers that are alike are a *kind*, and each kind by itself is a cache whose layers are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

MAX_LAYERS = 4096
MAX_REGIONS = 64

# What one field can bound is bound where it is decoded: a made-up cache must not reach the share arithmetic.
Name = Annotated[str, msgspec.Meta(max_length=256)]
Stride = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]  # in bytes; times any block id it fits 64 bits
Stage = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_LAYERS)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a layer: packed K‖V, K or V alone, an MLA latent."""

    name: Name
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
    cell_bytes: Stride

    @property
    def opaque(self) -> bool:
        return self.token_stride == 0


MAX_KINDS = 256


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """Layers that are unlike the first ones."""

    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    dtype: Name
    packing: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    layers: Stage


class CacheGeometry(msgspec.Struct, frozen=True):
    """One engine's KV cache: what the peer must know to write into it or read from it.

    Regions describe one rank's tensors and are the same for all ranks and for all layers but those of `others`. `kv_heads`
    counts heads of the whole model (1 for MLA and MQA); rank r of tp_size holds heads `head_range(r)`.
    """

    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    dtype: Name
    packing: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=1024)]  # layer names by pipeline stage
    drafter: Name = ""  # which draft model; empty without one, or where it has no cache
    drafts: Stage = ()  # its layers, of those in `stages`
    others: Annotated[tuple[Kind, ...], msgspec.Meta(max_length=MAX_KINDS)] = ()

    @property
    def kinds(self) -> tuple[CacheGeometry, ...]:
        """Each a geometry of layers that are all alike; of a plain cache itself."""
        return _kinds(self) if self.others else (self,)

    @property
    def by_layer(self) -> tuple[CacheGeometry, ...]:
        """The kind of each layer."""
        return _by_layer(self)

    @property
    def opaque(self) -> bool:
        return any(region.opaque for kind in self.kinds for region in kind.regions)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage)

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers of the model itself, in order."""
        drafts = set(self.drafts)
        return tuple(name for name in self.layers if name not in drafts)

    def head_range(self, rank: int) -> range:
        """Heads that `rank` holds. With fewer heads than ranks neighbouring ranks hold replicas."""
        first = rank * self.kv_heads // self.tp_size
        return range(first, max(first + 1, (rank + 1) * self.kv_heads // self.tp_size))


@lru_cache(maxsize=256)
def _kinds(geometry: CacheGeometry) -> tuple[CacheGeometry, ...]:
    apart = {name for kind in geometry.others for name in kind.layers}

    def only(names: set[str], **changes: object) -> CacheGeometry:
        stages = tuple(tuple(name for name in stage if name in names) for stage in geometry.stages)
        own = tuple(name for name in geometry.drafts if name in names)
        return msgspec.structs.replace(geometry, stages=stages, drafts=own, others=(), **changes)

    first = only({name for name in geometry.layers if name not in apart})
    return (
        first,
        *(
            only(set(k.layers), kv_heads=k.kv_heads, dtype=k.dtype, packing=k.packing, regions=k.regions)
            for k in geometry.others
        ),
    )


@lru_cache(maxsize=256)
def _by_layer(geometry: CacheGeometry) -> tuple[CacheGeometry, ...]:
    of = {name: kind for kind in geometry.kinds for name in kind.layers}
    return tuple(of[name] for name in geometry.layers)


def attention_of(name: str) -> str:
    """Of an indexer's layer the attention after it, whose hook stands for both; of any other layer nothing."""
    attention, indexer, _ = name.partition(".indexer.")
    return f"{attention}.attn" if indexer else ""


def in_one_word(words: Sequence[str]) -> str:
    """A word for each region as one: once, if all are equal."""
    return "/".join(words) if len(set(words)) > 1 else words[0]


def word_by_word(word: str, count: int) -> tuple[str, ...]:
    """The other way round; one word is everybody's."""
    words = tuple(word.split("/"))
    return words if len(words) == count else (word,) * count
