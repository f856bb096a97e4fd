# SPDX-License-Identifier: Apache-2.0
"""Description of an engine's cache for the other engine, with all that planning needs.

A layout is named by the hash of its bytes, so it has to be sent, and read, only once.

The types can express more than this release supports: they have fields for kinds of caches and parallel modes to come.
A field that is filled but not supported is refused by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

from vllm_ascend_pd.errors import PdError, RemoteProtocolError
from vllm_ascend_pd.geometry.layout import (
    ALL,
    COMPRESSED,
    MAX_GROUPS,
    MAX_KINDS,
    MAX_LAYERS,
    STATE,
    WINDOW,
    CacheGeometry,
    Group,
    Name,
    Ranks,
    Region,
    Stride,
    joined_names,
    split_names,
)
from vllm_ascend_pd.geometry.layout import LayerKind as Unlike
from vllm_ascend_pd.protocol.failure import Text
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint, Rank, Token

MAX_COMPONENTS, MAX_WORKERS = 16, 4096
MAX_COMPONENTS_OF_ALL = 16384  # layers × components
_KEPT = 64  # layouts in a cache: each D has one, and each of its data-parallel ranks counts as a D
MAX_LAYOUT_BYTES = 1 << 20

Index = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class Sharding(msgspec.Struct, frozen=True, array_like=True):
    """Division of a component among ranks: by heads, and by tokens."""

    heads: Annotated[int, msgspec.Meta(ge=0, le=65536)]  # of the model; if fewer than ranks, neighbours hold replicas
    world: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1  # ranks among which the tokens are divided
    interleave: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1


class Component(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a layer: the places of its cells in a rank's memory, and the ranks that hold them."""

    name: Name
    dtype: Token
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
    cell_bytes: Stride
    packing: Token
    held: Sharding


class Kind(msgspec.Struct, frozen=True):
    """Components of layers that are alike."""

    components: Annotated[tuple[Component, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]


class Layer(msgspec.Struct, frozen=True, array_like=True):
    name: Name
    kind: Index
    group: Index
    stage: Index


class Worker(msgspec.Struct, frozen=True, array_like=True):
    stage: Index
    tp: Annotated[int, msgspec.Meta(ge=0, lt=1024)]
    cp: Rank = 0
    endpoint: Endpoint | None = None  # of D's workers, which listen


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's model and cache. `layers` are in the order of execution."""

    model: Text  # fingerprint
    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(max_length=MAX_KINDS)]
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    workers: Annotated[tuple[Worker, ...], msgspec.Meta(max_length=MAX_WORKERS)]
    drafter: Text = ""  # fingerprint of the draft model
    drafts: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()  # indices of its layers


class EngineLayout(msgspec.Struct, frozen=True):
    """Contents of a layout in the form in which this release plans with it."""

    model: str
    geometry: CacheGeometry
    endpoints: tuple[Endpoint, ...] = ()  # by rank


def layout_of(engine: EngineLayout) -> Layout:
    g = engine.geometry
    kind_of = {name: (index, kind.group) for index, kind in enumerate(g.kinds) for name in kind.layers}
    layers = tuple(Layer(name, *kind_of[name], stage) for stage, names in enumerate(g.stages) for name in names)
    places = _places(len(g.stages), g.ranks)
    endpoints = (*engine.endpoints, *(None for _ in places[len(engine.endpoints) :]))
    workers = tuple(Worker(*place, endpoint) for place, endpoint in zip(places, endpoints, strict=True))
    drafts = tuple(index for index, name in enumerate(g.layers) if name in set(g.drafts))
    kinds = tuple(Kind(_components(kind)) for kind in g.kinds)
    return Layout(engine.model, kinds, g.groups or (Group(g.block_size),), layers, workers, g.drafter, drafts)


def _places(stages: int, ranks: Ranks) -> list[tuple[int, int, int]]:
    """Return each worker's stage, its place in tensor parallelism, and its part of the tokens, in worker order."""
    return [(stage, rank % ranks.tp_size, ranks.part(rank)) for stage in range(stages) for rank in range(len(ranks))]


def _components(g: CacheGeometry) -> tuple[Component, ...]:
    held, count = Sharding(g.kv_heads, g.ranks.world, g.interleave if g.ranks.world > 1 else 1), len(g.regions)
    return tuple(
        Component(r.name, dtype, r.block_stride, r.head_stride, r.token_stride, r.cell_bytes, packing, held)
        for r, dtype, packing in zip(g.regions, split_names(g.dtype, count), split_names(g.packing, count), strict=True)
    )


@lru_cache(maxsize=_KEPT)
def written(engine: EngineLayout) -> bytes:
    """Return an engine's layout as bytes. Their hash is its name."""
    return msgspec.msgpack.encode(layout_of(engine))


def layout_hash(layout: bytes) -> str:
    return hashlib.sha256(layout).hexdigest()[:32]


_DECODER = msgspec.msgpack.Decoder(Layout)


@lru_cache(maxsize=_KEPT)
def read(layout: bytes) -> EngineLayout:
    """Read a layout. Raise PD-CTRL-002 if it is none, PD-CTRL-004 if it has something that cannot be planned with."""
    try:
        found = _DECODER.decode(layout)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("PD-CTRL-002", why=f"layout: {str(error)[:200]}") from None
    word = _unsupported(found)
    if word:
        raise RemoteProtocolError("PD-CTRL-004", word=word)
    why = _contradiction(found)
    if why:
        raise RemoteProtocolError("PD-CTRL-002", why=f"layout: {why}")
    stages: list[list[str]] = [[] for _ in range(1 + found.workers[-1].stage)]
    of_kind: list[list[str]] = [[] for _ in found.kinds]
    group_of = [0 for _ in found.kinds]
    for layer in found.layers:
        stages[layer.stage].append(layer.name)
        of_kind[layer.kind].append(layer.name)
        group_of[layer.kind] = layer.group
    plain = len(found.groups) == 1 and found.groups[0].matters == ALL
    heads, dtype, packing, regions = _planned(found.kinds[0])
    held = found.kinds[0].components[0].held
    geometry = CacheGeometry(
        block_size=found.groups[group_of[0]].entries,
        kv_heads=heads,
        tp_size=1 + found.workers[-1].tp,
        dtype=dtype,
        packing=packing,
        regions=regions,
        stages=tuple(map(tuple, stages)),
        drafter=found.drafter,
        drafts=tuple(found.layers[index].name for index in found.drafts),
        others=tuple(
            Unlike(*_planned(kind), tuple(names), group, _is_whole(kind, held))
            for kind, names, group in list(zip(found.kinds, of_kind, group_of, strict=True))[1:]
        ),
        groups=() if plain else found.groups,
        group=group_of[0],
        dcp=held.world // _again(found),
        pcp=_again(found),
        interleave=held.interleave,
    )
    endpoints = tuple(worker.endpoint for worker in found.workers if worker.endpoint is not None)
    return EngineLayout(found.model, geometry, endpoints)


def _again(layout: Layout) -> int:
    """Return how often a stage has each rank of tensor parallelism."""
    return max(1, sum(worker.stage == 0 for worker in layout.workers) // (1 + layout.workers[-1].tp))


def _planned(kind: Kind) -> tuple[int, str, str, tuple[Region, ...]]:
    some = kind.components
    regions = tuple(Region(c.name, c.block_stride, c.head_stride, c.token_stride, c.cell_bytes) for c in some)
    return some[0].held.heads, joined_names([c.dtype for c in some]), joined_names([c.packing for c in some]), regions


def _is_whole(kind: Kind, first: Sharding) -> bool:
    """Return whether all ranks have all tokens of a kind, unlike the first one."""
    return kind.components[0].held.world == 1 < first.world


def _unsupported(layout: Layout) -> str:
    """Return a word for something that this release does not support; empty if there is nothing."""
    components = [component for kind in layout.kinds for component in kind.components]
    held = [component.held for component in components]
    divided = {(h.world, h.interleave) for h in held}
    if layout.workers and _again(layout) == 1 and held and held[0].world > 1:
        divided -= {(1, 1)}  # of such a kind every rank has all tokens
    filled = {
        "world": len(divided) > 1
        or (any(h.world > 1 for h in held) and (len(layout.groups) != 1 or layout.groups[0].matters != ALL)),
        "replicated": not all(h.heads for h in held),
        "components": any(len({c.held for c in kind.components}) > 1 for kind in layout.kinds),
        "matters": any(group.matters not in (ALL, WINDOW, STATE, COMPRESSED) for group in layout.groups),
    }
    return next((word for word, is_filled in filled.items() if is_filled), "")


def _contradiction(layout: Layout) -> str:
    """Return what contradicts itself in a layout whose single fields are within their bounds; empty if nothing does."""
    counts = [len(kind.components) for kind in layout.kinds]
    if not (layout.kinds and layout.groups and layout.workers and all(counts)):
        return "it has no kind, component, group or worker"
    if len(layout.layers) * max(counts) > MAX_COMPONENTS_OF_ALL:
        return f"{len(layout.layers)} layers of {max(counts)} components"
    last = layout.workers[-1]
    held, again = layout.kinds[0].components[0].held, _again(layout)
    if (last.stage + 1) * (last.tp + 1) * again != len(layout.workers):
        return "its workers are not those of every stage and rank, in order"
    if held.world % again or any(
        (last.tp + 1) % (c.held.heads * c.held.world // again)
        for k in layout.kinds
        for c in k.components
        if held.world > again
    ):
        return f"tokens in {held.world} parts for {len(layout.workers)} workers"
    if held.world > 1 and layout.groups[0].block_size % held.interleave:
        return f"blocks of {layout.groups[0].block_size} tokens in runs of {held.interleave}"
    grid = _places(last.stage + 1, Ranks(held.heads, last.tp + 1, held.world // again, again))
    if [(worker.stage, worker.tp, worker.cp) for worker in layout.workers] != grid:
        return "its workers are not those of every stage and rank, in order"
    groups = len(layout.groups)
    if any(layer.kind >= len(counts) or layer.group >= groups or layer.stage > last.stage for layer in layout.layers):
        return "a layer is of a kind, group or stage that is not there"
    if any(group.n < 2 if group.matters in (WINDOW, COMPRESSED) else group.n for group in layout.groups):
        return "a window of no tokens before the next, an entry for one token, or a number where there is neither"
    if len({(layer.kind, layer.group) for layer in layout.layers}) > len({layer.kind for layer in layout.layers}):
        return "layers of one kind are of several groups"
    if len(counts) > 1 and {layer.kind for layer in layout.layers} != set(range(len(counts))):
        return "of one of its kinds there is no layer"
    stages = [layer.stage for layer in layout.layers]
    if stages != sorted(stages):
        return "its layers are not in the order of the stages"
    if len({layer.name for layer in layout.layers}) != len(layout.layers):
        return "two of its layers have one name"
    if list(layout.drafts) != sorted(set(layout.drafts)) or any(i >= len(layout.layers) for i in layout.drafts):
        return "its draft layers are not some of its layers, in order"
    if bool(layout.drafter) != bool(layout.drafts):
        return "it has draft layers without a draft model, or one without"
    return ""


class Layouts:
    """D: layouts that P engines have sent, by hash. At most 64 are kept; the oldest is dropped first."""

    max_kept = 64

    def __init__(self) -> None:
        self._known: dict[str, EngineLayout | PdError] = {}

    def add(self, layout: bytes) -> None:
        """Store a layout, or the error why it cannot be used: the next P with this layout gets the same answer."""
        name = layout_hash(layout)
        if name in self._known:
            return
        try:
            self._known[name] = read(layout)
        except RemoteProtocolError as error:
            self._known[name] = error
        while len(self._known) > self.max_kept:
            del self._known[next(iter(self._known))]

    def get(self, name: str) -> EngineLayout | PdError | None:
        return self._known.get(name)


def contributors_digest(contributors: Sequence[Contributor]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(contributors)).hexdigest()[:32]
