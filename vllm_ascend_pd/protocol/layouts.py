# SPDX-License-Identifier: Apache-2.0
"""An engine's cache as the other engine is told of it: what it needs to know to plan. A layout is named by the hash of its
bytes, so that it need be told, and read, once.

The types say more than this release can do: kinds of caches and parallel modes to come have their fields. What is filled and
not understood is refused by the field's name.
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
    MAX_GROUPS,
    MAX_KINDS,
    MAX_LAYERS,
    STATE,
    WINDOW,
    CacheGeometry,
    Group,
    Name,
    Region,
    Stride,
    in_one_word,
    word_by_word,
)
from vllm_ascend_pd.geometry.layout import Kind as Unlike
from vllm_ascend_pd.protocol.failure import Text
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint, Rank, Token

MAX_COMPONENTS, MAX_SECTIONS, MAX_WORKERS = 16, 8, 4096
MAX_COMPONENTS_OF_ALL = 16384  # layers × components
_KEPT = 64  # layouts of reservations: each D has one, and each of its data-parallel ranks is a D
MAX_LAYOUT_BYTES = 1 << 20

Index = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Which ranks hold what of a component: by heads, by tokens, or one rank alone."""

    heads: Annotated[int, msgspec.Meta(ge=0, le=65536)]  # of the model; with fewer than ranks neighbours hold replicas
    world: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1  # ranks among which the tokens are divided
    interleave: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    only: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 16)] = -1


class Section(msgspec.Struct, frozen=True, array_like=True):
    """A part of a cell that is held otherwise than the rest."""

    offset: Stride
    bytes: Stride
    held: Held


class Component(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a layer: where its cells lie in a rank's memory, and who holds them."""

    name: Name
    dtype: Token
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
    cell_bytes: Stride
    packing: Token
    held: Held
    sections: Annotated[tuple[Section, ...], msgspec.Meta(max_length=MAX_SECTIONS)] = ()


class Kind(msgspec.Struct, frozen=True):
    """What equal layers share."""

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
    endpoint: Endpoint | None = None  # of who listens: D's


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """`layers` are in the order of execution."""

    model: Text  # fingerprint
    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(max_length=MAX_KINDS)]
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    workers: Annotated[tuple[Worker, ...], msgspec.Meta(max_length=MAX_WORKERS)]
    drafter: Text = ""  # fingerprint of the draft model
    drafts: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()  # which layers are its


class Told(msgspec.Struct, frozen=True):
    """A layout as this release plans with it."""

    model: str
    geometry: CacheGeometry
    endpoints: tuple[Endpoint, ...] = ()  # by rank


def layout_of(engine: Told) -> Layout:
    g = engine.geometry
    kind_of = {name: (index, kind.group) for index, kind in enumerate(g.kinds) for name in kind.layers}
    layers = tuple(Layer(name, *kind_of[name], stage) for stage, names in enumerate(g.stages) for name in names)
    ranks = [(stage, rank) for stage in range(len(g.stages)) for rank in range(g.tp_size)]
    endpoints = (*engine.endpoints, *(None for _ in ranks[len(engine.endpoints) :]))
    workers = tuple(Worker(*rank, 0, endpoint) for rank, endpoint in zip(ranks, endpoints, strict=True))
    drafts = tuple(index for index, name in enumerate(g.layers) if name in set(g.drafts))
    kinds = tuple(Kind(_components(kind)) for kind in g.kinds)
    return Layout(engine.model, kinds, g.tables, layers, workers, g.drafter, drafts)


def _components(g: CacheGeometry) -> tuple[Component, ...]:
    held, count = Held(g.kv_heads), len(g.regions)
    return tuple(
        Component(r.name, dtype, r.block_stride, r.head_stride, r.token_stride, r.cell_bytes, packing, held)
        for r, dtype, packing in zip(
            g.regions, word_by_word(g.dtype, count), word_by_word(g.packing, count), strict=True
        )
    )


@lru_cache(maxsize=_KEPT)
def written(engine: Told) -> bytes:
    """The bytes that name a layout."""
    return msgspec.msgpack.encode(layout_of(engine))


def layout_hash(layout: bytes) -> str:
    return hashlib.sha256(layout).hexdigest()[:32]


_DECODER = msgspec.msgpack.Decoder(Layout)


@lru_cache(maxsize=_KEPT)
def read(layout: bytes) -> Told:
    """Raises PD-CTRL-002 for what is no layout, PD-CTRL-004 for one of which this release cannot plan with all."""
    try:
        found = _DECODER.decode(layout)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("PD-CTRL-002", why=f"layout: {str(error)[:200]}") from None
    word = _beyond(found)
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
    plain = len(found.groups) == 1 and not found.groups[0].partial
    heads, dtype, packing, regions = _planned(found.kinds[0])
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
            Unlike(*_planned(kind), tuple(names), group)
            for kind, names, group in list(zip(found.kinds, of_kind, group_of, strict=True))[1:]
        ),
        groups=() if plain else found.groups,
        group=group_of[0],
    )
    endpoints = tuple(worker.endpoint for worker in found.workers if worker.endpoint is not None)
    return Told(found.model, geometry, endpoints)


def _planned(kind: Kind) -> tuple[int, str, str, tuple[Region, ...]]:
    some = kind.components
    regions = tuple(Region(c.name, c.block_stride, c.head_stride, c.token_stride, c.cell_bytes) for c in some)
    return some[0].held.heads, in_one_word([c.dtype for c in some]), in_one_word([c.packing for c in some]), regions


def _beyond(layout: Layout) -> str:
    """A field that says what this release does not understand."""
    components = [component for kind in layout.kinds for component in kind.components]
    held = [component.held for component in components]
    filled = {
        "sections": any(component.sections for component in components),
        "world": any(h.world > 1 for h in held),
        "only": any(h.only >= 0 for h in held),
        "replicated": not all(h.heads for h in held),
        "components": any(len({c.held for c in kind.components}) > 1 for kind in layout.kinds),
        "matters": any(group.matters not in (ALL, WINDOW, STATE) for group in layout.groups),
        "context": any(worker.cp for worker in layout.workers),
    }
    return next((word for word, is_filled in filled.items() if is_filled), "")


def _contradiction(layout: Layout) -> str:
    """What no engine can mean; the fields by themselves are within their bounds."""
    counts = [len(kind.components) for kind in layout.kinds]
    if not (layout.kinds and layout.groups and layout.workers and all(counts)):
        return "it has no kind, component, group or worker"
    if len(layout.layers) * max(counts) > MAX_COMPONENTS_OF_ALL:
        return f"{len(layout.layers)} layers of {max(counts)} components"
    last = layout.workers[-1]
    grid = [(stage, rank) for stage in range(last.stage + 1) for rank in range(last.tp + 1)]
    if [(worker.stage, worker.tp) for worker in layout.workers] != grid:
        return "its workers are not those of every stage and rank, in order"
    groups = len(layout.groups)
    if any(layer.kind >= len(counts) or layer.group >= groups or layer.stage > last.stage for layer in layout.layers):
        return "a layer is of a kind, group or stage that is not there"
    if any(group.n < 2 if group.matters == WINDOW else group.n for group in layout.groups):
        return "a window of no tokens before the next, or the length of one where there is none"
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
    """D: what P's have told of their caches, by hash; at most 64, the oldest goes."""

    most = 64

    def __init__(self) -> None:
        self._known: dict[str, Told | PdError] = {}

    def learn(self, layout: bytes) -> None:
        """Also that it cannot be used, and why: whoever says it again gets the same answer."""
        name = layout_hash(layout)
        if name in self._known:
            return
        try:
            self._known[name] = read(layout)
        except RemoteProtocolError as error:
            self._known[name] = error
        while len(self._known) > self.most:
            del self._known[next(iter(self._known))]

    def get(self, name: str) -> Told | PdError | None:
        return self._known.get(name)


def contributors_digest(contributors: Sequence[Contributor]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(contributors)).hexdigest()[:32]
