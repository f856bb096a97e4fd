# SPDX-License-Identifier: Apache-2.0
"""How a KV cache lies in memory, as plain numbers.

Every layout we meet is affine: the byte address of the cell of (block, head, token) is
`base + block*block_stride + head*head_stride + token*token_stride`, and a cell is contiguous.
Head-major, token-major, packed K‖V and MLA differ only in these strides. Where the token axis
is opaque (the CPU backend permutes inside a (block, head) plane) `token_stride` is 0 and the cell
is the whole plane.

Layers of one block table are a *group*: with a block size, and a rule of which tokens matter once a prompt is there. Groups
draw their blocks from one pool and share memory: what tells layers apart is their name, never an address.

A recurrent layer keeps one state of all tokens so far. What of it is held by other ranks than the rest is a layer of its own here
(states.py), whose blocks have one entry.

Layers of one group need not be alike: a draft model has heads of its own, an indexer keeps one key per token beside
the attention's cache. Layers that are alike are a *kind*, and each kind by itself is a cache whose layers are all alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
MAX_GROUPS = 64
ALL, WINDOW, STATE = "all", "window", "state"  # of the rules of which tokens matter those that are understood


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Layers with one block table, and which of the tokens matter to who has a prompt: all, the last `n` with the next one, or the
    state after the last, which is in the block that stands for that token."""

    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    matters: Annotated[str, msgspec.Meta(max_length=64)] = ALL
    n: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0

    def __str__(self) -> str:
        return f"{self.matters} of {self.n} tokens" if self.matters == WINDOW else self.matters

    @property
    def partial(self) -> bool:
        """Whether tokens cease to matter."""
        return self.matters != ALL

    @property
    def stateful(self) -> bool:
        return self.matters == STATE

    @property
    def entries(self) -> int:
        """Of a block: one for each token, or one state."""
        return 1 if self.stateful else self.block_size

    def begins(self, first: int, end: int) -> int:
        """Where the wanted ones of tokens [first, end) begin, `end` being the next token that is computed. Whole blocks: D takes a
        block for complete, and gives it to whoever has the same prefix."""
        if not self.partial:
            return first
        if self.stateful:
            return end - 1
        return max(first, max(0, end - self.n + 1) // self.block_size * self.block_size)


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """Layers that are unlike the first ones."""

    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    dtype: Name
    packing: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    layers: Stage
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)] = 0


class CacheGeometry(msgspec.Struct, frozen=True):
    """One engine's KV cache: what the peer must know to write into it or read from it.

    Regions describe one rank's tensors and are the same for all ranks and for all layers but those of `others`. `kv_heads`
    counts heads of the whole model (1 for MLA and MQA); rank r of tp_size holds heads `head_range(r)`. `block_size` (entries of a
    block) and `group` are those of the layers that are not of `others`; without `groups` there is one, in which all tokens matter.
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
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)] = 0

    @property
    def tables(self) -> tuple[Group, ...]:
        """The groups, each with a block table; also of a plain cache."""
        return self.groups or (Group(self.block_size),)

    @property
    def own(self) -> Group:
        """Of layers that are all alike."""
        return self.tables[self.group]

    @property
    def leaves_last(self) -> bool:
        """Whether the last token of a prompt must not be taken for computed before it is: D runs it again, and P would have let go
        of what that needs."""
        return any(group.partial for group in self.groups)

    def places(self, first: int, end: int) -> tuple[int, int]:
        """Of layers that are all alike: what of tokens [first, end) is wanted, as plans count it. Of a state its one entry."""
        return (0, 1) if self.own.stateful else (self.own.begins(first, end), end)

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
        """Whether tokens cannot be told apart in a block that has several. A state has none to tell apart."""
        return any(region.opaque for kind in self.kinds if not kind.own.stateful for region in kind.regions)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage)

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers of the model itself, in order."""
        drafts = set(self.drafts)
        return tuple(name for name in self.layers if name not in drafts)

    @property
    def states(self) -> tuple[str, ...]:
        """The layers that are parts of states."""
        return tuple(name for kind in self.kinds if kind.own.stateful for name in kind.layers)

    @property
    def workers(self) -> int:
        """Of all stages; a worker is counted stage by stage, and by rank within its stage."""
        return max(1, len(self.stages)) * self.tp_size

    def worker(self, stage: int, rank: int) -> int:
        return stage * self.tp_size + rank

    def place_of(self, worker: int) -> tuple[int, int]:
        """Its stage, and its rank there."""
        return divmod(worker, self.tp_size)

    def first_layer(self, stage: int) -> int:
        """Of a stage's layers the first, counted through the whole engine."""
        return sum(map(len, self.stages[:stage]))

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
            only(
                set(k.layers),
                block_size=geometry.tables[k.group].entries,
                kv_heads=k.kv_heads,
                dtype=k.dtype,
                packing=k.packing,
                regions=k.regions,
                group=k.group,
            )
            for k in geometry.others
        ),
    )


@lru_cache(maxsize=256)
def _by_layer(geometry: CacheGeometry) -> tuple[CacheGeometry, ...]:
    of = {name: kind for kind in geometry.kinds for name in kind.layers}
    return tuple(of[name] for name in geometry.layers)


def section_of(layer: str, section: str) -> str:
    """What a section of a recurrent layer is called as a layer."""
    return f"{layer}/{section}"


def executed(names: Iterable[str]) -> list[str]:
    """Names of layers as they are executed: by the numbers in them, and where those are equal as they come. vLLM registers caches
    group by group."""
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


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
