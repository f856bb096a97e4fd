# SPDX-License-Identifier: Apache-2.0
"""Layout of a KV cache in memory, as plain numbers.

Every layout that is supported is affine: the byte address of the cell of (block, head, token) is
`base + block*block_stride + head*head_stride + token*token_stride`, and a cell is contiguous.
Head-major, token-major, packed K‖V and MLA differ only in these strides. Where the token axis
is opaque (the CPU backend permutes inside a (block, head) plane) `token_stride` is 0 and the cell
is the whole plane.

Layers with one block table are a *group*. It has a block size, and a rule for which tokens matter once the prompt is
computed. Groups take their blocks from one pool and share memory, so a layer is identified by its name, never by an
address.

A recurrent layer keeps one state of all tokens so far. Parts of it that ranks hold differently are layers of their own
here (states.py); their blocks have one entry.

A compressed layer keeps one entry for several tokens, made of them when the last of them is computed. Plans count its
entries.

Layers of one group need not be alike: a draft model has heads of its own, an indexer keeps one key per token beside
the attention's cache. Layers that are alike are a *kind*. Each kind can be seen as a cache of its own.

`CacheGeometry` is also what the other engine gets (protocol/layouts.py). Its fields' bounds are in their types: an
impossible cache must not reach the share arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

from vllm_ascend_pd.geometry.context_parallel import TokenSplit

MAX_LAYERS, MAX_COMPONENTS, MAX_KINDS, MAX_GROUPS = 4096, 16, 256, 64
# Packing of a D's int8 of heads under vllm-ascend: [block, head, channels by 32, token, 32]. P has no such memory: it
# makes this of its own cache on the way, in staging slots.
FRACTAL_PACKING, FRACTAL_CHANNELS = "int8-fractals", 32

Name = Annotated[str, msgspec.Meta(max_length=256)]
Stride = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]  # in bytes; times any block id it fits into 64 bits
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


# Values of `Group.matters` that are supported.
ALL, WINDOW, STATE, COMPRESSED = "all", "window", "state", "compressed"


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Layers with one block table, and the tokens that matter once a prompt is computed.

    all: every token. window: the last `n`, counting the next one. state: the state after the last token, in the block
    that covers that token. compressed: every token, with one entry for each `n`.
    """

    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    matters: Annotated[str, msgspec.Meta(max_length=64)] = ALL
    n: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0

    def __str__(self) -> str:
        words = {WINDOW: f"{self.matters} of {self.n} tokens", COMPRESSED: f"one entry for {self.n} tokens"}
        return words.get(self.matters, self.matters)

    @property
    def partial(self) -> bool:
        """True if not all tokens matter."""
        return self.matters in (WINDOW, STATE)

    @property
    def stateful(self) -> bool:
        return self.matters == STATE

    @property
    def entries(self) -> int:
        """Entries of a block: one for each token or for several, or one state."""
        return 1 if self.stateful else self.block_size

    @property
    def per_entry(self) -> int:
        """Tokens of an entry. (A state is of all tokens so far, and is not counted by this.)"""
        return self.n if self.matters == COMPRESSED else 1

    @property
    def covers(self) -> int:
        """Tokens that a block of the table stands for."""
        return self.block_size * self.per_entry

    def blocks(self, first: int, end: int) -> range:
        """Return the places in the table of the blocks that hold what is wanted of [first, end)."""
        per = self.per_entry
        return range(self.begins(first, end) // per // self.block_size, -(-(end // per) // self.block_size))

    def begins(self, first: int, end: int) -> int:
        """Return the first wanted token of [first, end), where `end` is the next token to be computed.

        A window begins at the first token of a block, or at `first` if that is later: D treats a block as complete, and
        shares it with requests of the same prefix.
        """
        if not self.partial:
            return first
        if self.stateful:
            return end - 1
        return max(first, max(0, end - self.n + 1) // self.block_size * self.block_size)


class LayerKind(msgspec.Struct, frozen=True, omit_defaults=True):
    """Layers that differ from the first kind, which is in the fields of `CacheGeometry` itself."""

    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    dtype: Name
    packing: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
    group_index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)] = 0
    whole: bool = False  # with context parallelism: every rank holds all tokens (an indexer's keys)


class Ranks(msgspec.Struct, frozen=True):
    """Ranks of a pipeline stage, and what each of them holds.

    A rank holds heads by its place in tensor parallelism, and a part of the tokens by its place in context parallelism.
    With fewer heads than ranks, neighbouring ranks hold replicas. Context parallelism of decode (`dcp`) divides the
    tokens among such neighbours. That of prefill (`pcp`) adds ranks: `tp_size` for each of its places.
    """

    kv_heads: int
    tp_size: int
    dcp: int = 1
    pcp: int = 1

    def __len__(self) -> int:
        return self.tp_size * self.pcp

    @property
    def world(self) -> int:
        """Number of parts of the tokens."""
        return self.dcp * self.pcp

    def head_range(self, rank: int) -> range:
        place = rank % self.tp_size
        first = place * self.kv_heads // self.tp_size
        return range(first, max(first + 1, (place + 1) * self.kv_heads // self.tp_size))

    def part(self, rank: int) -> int:
        """Return the part of the tokens that `rank` holds."""
        return rank // self.tp_size * self.dcp + rank % self.tp_size % self.dcp


class CacheGeometry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine's KV cache: what the peer must know to write into it or read from it.

    The fields describe the first kind of layers; `others` describes the other kinds, and `kind_of` says of which kind
    each layer is. Names of `dtype` and `packing` that differ by region are joined. Regions are one rank's tensors,
    alike on all ranks. `kv_heads` counts heads of the whole model (1 for MLA and MQA); rank r of tp_size holds heads
    `head_range(r)`. `block_size` is the number of entries of a block on one rank. Without `groups` there is one group,
    in which all tokens matter. With context parallelism a block covers `block_size` x `dcp` x `pcp` tokens. Layers of a
    `whole` kind have all of these in each block.
    """

    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    dtype: Name
    packing: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=1024)]  # layer names by pipeline stage
    drafter: Annotated[str, msgspec.Meta(max_length=1024)] = ""  # the draft model; empty: none, or none with a cache
    drafts: Stage = ()  # layers of the draft model, which are in `stages` too
    others: Annotated[tuple[LayerKind, ...], msgspec.Meta(max_length=MAX_KINDS - 1)] = ()
    kind_of: Annotated[  # by layer: index of its kind, among the first one and `others`; empty: all are of the first
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_KINDS)], ...], msgspec.Meta(max_length=MAX_LAYERS)
    ] = ()
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    group_index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)] = 0
    dcp: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    pcp: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    interleave: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1

    @property
    def ranks(self) -> Ranks:
        """Ranks of a stage."""
        return Ranks(self.kv_heads, self.tp_size, self.dcp, self.pcp)

    @property
    def token_split(self) -> TokenSplit:
        """Division of the tokens among the ranks."""
        return TokenSplit(self.block_size, self.dcp * self.pcp, self.interleave)

    @property
    def covers(self) -> int:
        """Number of tokens in a block of the table, as plans count them (a state, or a compressed entry, is one)."""
        return self.block_size * self.dcp * self.pcp

    @property
    def tables(self) -> tuple[Group, ...]:
        """Groups, each with a block table. A cache without `groups` has one."""
        return self.groups or (Group(self.covers),)

    @property
    def group(self) -> Group:
        """Group of the layers. Only for a geometry of one kind."""
        return self.tables[self.group_index]

    @property
    def recomputes_last(self) -> bool:
        """True if D must compute a prompt's last token itself, unless it begins with P's first token.

        It needs the cache as it was before that token, to which windows and states cannot go back.
        """
        return any(group.partial for group in self.groups)

    def wanted_entries(self, first: int, end: int) -> tuple[int, int]:
        """Return the wanted part of tokens [first, end), as plans count: in entries. Only for one kind."""
        per = self.group.per_entry
        return (0, 1) if self.group.stateful else (self.group.begins(first, end) // per, end // per)

    @property
    def kinds(self) -> tuple[CacheGeometry, ...]:
        """Geometries of one kind each. A cache of one kind is its own."""
        return _kinds(self) if self.others else (self,)

    @property
    def by_layer(self) -> tuple[CacheGeometry, ...]:
        """Kind of each layer."""
        return tuple(map(self.kinds.__getitem__, self.kind_indices))

    @property
    def kind_indices(self) -> tuple[int, ...]:
        """Index of each layer's kind."""
        return self.kind_of or (0,) * len(self.layers)

    @property
    def opaque(self) -> bool:
        """True if single tokens of a block cannot be addressed. States do not count: their blocks have one entry."""
        return any(region.opaque for kind in self.kinds if not kind.group.stateful for region in kind.regions)

    def region_label(self, region: int) -> str:
        """Return a component's name for logs: engines only number a layer's tensors. Only for one kind."""
        name, roles = self.regions[region].name, _region_roles(self)
        return f"{name}: {roles[region]}" if name.startswith("kv") and region < len(roles) else name

    @property
    def layer_labels(self) -> tuple[str, ...]:
        """Label of each layer for logs and timelines: its name, its components, and its group if there are several."""

        def title(name: str, kind: CacheGeometry) -> str:
            words = [f"{name} ({', '.join(map(kind.region_label, range(len(kind.regions))))})"]
            words += ["of the draft model"] if name in self.drafts else []
            words += [f"group {kind.group_index}: {kind.group}"] if self.groups else []
            return ", ".join([*words, "leaves at the end of the prompt"] if kind.group.stateful else words)

        return tuple(map(title, self.layers, self.by_layer))

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage)

    @property
    def targets(self) -> tuple[str, ...]:
        """Layers of the model itself, in order: all but a draft model's."""
        drafts = set(self.drafts)
        return tuple(name for name in self.layers if name not in drafts)

    @property
    def states(self) -> tuple[str, ...]:
        """Layers that are parts of states."""
        return tuple(name for kind in self.kinds if kind.group.stateful for name in kind.layers)

    @property
    def workers(self) -> int:
        """Number of workers. They are numbered stage by stage, and by rank within a stage."""
        return max(1, len(self.stages)) * len(self.ranks)

    def worker(self, stage: int, rank: int) -> int:
        return stage * len(self.ranks) + rank

    def stage_and_rank(self, worker: int) -> tuple[int, int]:
        """Return the worker's stage, and its rank there."""
        return divmod(worker, len(self.ranks))

    def first_layer(self, stage: int) -> int:
        """Return the index of a stage's first layer, counted over all stages."""
        return sum(map(len, self.stages[:stage]))

    def head_range(self, rank: int) -> range:
        """Return the heads that `rank` holds. With fewer heads than ranks, neighbouring ranks hold replicas."""
        return self.ranks.head_range(rank)


_INDEX = ("index key", "scale of the index key")


def _region_roles(kind: CacheGeometry) -> tuple[str, ...]:
    """Return what a layer's tensors are, as far as their number and sizes show it."""
    if any(map(is_index, kind.layers)):
        return _INDEX
    if len(kind.regions) == 1:
        return ()
    if kind.kv_heads > 1 or len({region.cell_bytes for region in kind.regions}) == 1:
        return "k", "v"
    return "latent", "rope"


@lru_cache(maxsize=256)
def _kinds(geometry: CacheGeometry) -> tuple[CacheGeometry, ...]:
    of = dict(zip(geometry.layers, geometry.kind_of, strict=True))

    def only(index: int, **changes: object) -> CacheGeometry:
        stages = tuple(tuple(name for name in stage if of[name] == index) for stage in geometry.stages)
        drafts = tuple(name for name in geometry.drafts if of[name] == index)
        return msgspec.structs.replace(geometry, stages=stages, drafts=drafts, others=(), kind_of=(), **changes)

    return (
        only(0),
        *(
            only(
                index,
                kv_heads=k.kv_heads,
                dtype=k.dtype,
                packing=k.packing,
                regions=k.regions,
                group_index=k.group_index,
                **_division(geometry, k),
            )
            for index, k in enumerate(geometry.others, start=1)
        ),
    )


def _division(geometry: CacheGeometry, kind: LayerKind) -> dict[str, int]:
    """Return the entries of a kind's blocks, and what of the division of tokens differs from the first kind's."""
    if kind.whole:
        return {"block_size": geometry.covers, "dcp": 1, "interleave": 1}
    return {"block_size": geometry.groups[kind.group_index].entries if geometry.groups else geometry.block_size}


def in_kernel_blocks(tables: Sequence[Sequence[int]], counts: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return tables of vLLM's blocks by group, each block as `counts` of the kernels'. No counts: both are the same."""
    if not any(count > 1 for count in counts):
        return tables
    return [
        [block * count + part for block in table for part in range(count)] if count > 1 else table
        for table, count in zip(tables, counts, strict=True)
    ]


def section_of(layer: str, section: str) -> str:
    """Return the layer name of a section of a recurrent layer."""
    return f"{layer}/{section}"


def in_execution_order(names: Iterable[str]) -> list[str]:
    """Return names of layers in the order of execution: by the numbers in them, and by their given order if equal.

    vLLM registers caches in another order: group by group, and all indexers' of a group before its attention.
    """
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


_BESIDE_ATTENTION = re.compile(r"\.(indexer\..*|compressor\..*|swa_cache)$")


def attention_of(name: str) -> str:
    """Return the attention layer whose hook serves a layer that has none; else "".

    Such a layer is an indexer's, a compressor's, or the window beside compressed latents. The attention itself may have
    no cache.
    """
    attention, beside = _BESIDE_ATTENTION.subn("", name)
    return f"{attention}.attn" if beside else ""


_INDEX_CACHE = ".indexer.k_cache"


def is_index(name: str) -> bool:
    """Return whether a layer has an indexer's keys."""
    return name.endswith(_INDEX_CACHE)


def index_of(attention: str) -> str:
    """Return the name of the layer that has the keys of this attention's indexer."""
    return attention.removesuffix(".attn") + _INDEX_CACHE
