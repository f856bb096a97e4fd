# SPDX-License-Identifier: Apache-2.0
"""Description of an engine's cache for the other engine, with all that planning needs.

A layout is named by the hash of its bytes, so it has to be sent, and read, only once.

It is the geometry that plans are made with. Its types bound each field; `read` checks what fields say together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

from vllm_ascend_pd.errors import PdError, RemoteProtocolError
from vllm_ascend_pd.geometry.layout import ALL, COMPRESSED, MAX_LAYERS, STATE, WINDOW, CacheGeometry
from vllm_ascend_pd.protocol.failure import Text
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint

MAX_WORKERS = 4096
MAX_COMPONENTS_OF_ALL = 16384  # layers × components
MAX_LAYOUT_BYTES = 1 << 20
_KEPT = 64  # layouts in a cache: each D has one, and each of its data-parallel ranks counts as a D


class EngineLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's model and cache."""

    model: Text  # fingerprint
    geometry: CacheGeometry
    endpoints: Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()  # of D's workers, in order


@lru_cache(maxsize=_KEPT)
def written(engine: EngineLayout) -> bytes:
    """Return an engine's layout as bytes. Their hash is its name."""
    return msgspec.msgpack.encode(engine)


def layout_hash(layout: bytes) -> str:
    return hashlib.sha256(layout).hexdigest()[:32]


_DECODER = msgspec.msgpack.Decoder(EngineLayout)


@lru_cache(maxsize=_KEPT)
def read(layout: bytes) -> EngineLayout:
    """Read a layout. Raise PD-CTRL-002 if it is none, PD-CTRL-004 if it has something that cannot be planned with."""
    try:
        engine = _DECODER.decode(layout)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("PD-CTRL-002", why=f"layout: {str(error)[:200]}") from None
    word = _unsupported(engine.geometry)
    if word:
        raise RemoteProtocolError("PD-CTRL-004", word=word)
    why = _contradiction(engine.geometry) or _contradiction_of_parts(engine.geometry)
    if why:
        raise RemoteProtocolError("PD-CTRL-002", why=f"layout: {why}")
    return engine


def _unsupported(g: CacheGeometry) -> str:
    """Return a word for something that this release does not support; empty if there is nothing."""
    if any(group.matters not in (ALL, WINDOW, STATE, COMPRESSED) for group in g.groups):
        return "matters"
    divided = g.ranks.world > 1 and (g.groups or (g.pcp > 1 and any(kind.whole for kind in g.others)))
    return "world" if divided else ""


def _contradiction(g: CacheGeometry) -> str:
    """Return what contradicts itself in a cache whose single fields are within their bounds; empty if nothing does."""
    drafts = set(g.drafts)
    layers, counts = g.layers, [len(g.regions), *(len(kind.regions) for kind in g.others)]
    if not (g.stages and all(counts)):
        return "it has no stage, or a kind without a component"
    if len(layers) > MAX_LAYERS or len(layers) * max(counts) > MAX_COMPONENTS_OF_ALL:
        return f"{len(layers)} layers of {max(counts)} components"
    if g.workers > MAX_WORKERS:
        return f"{g.workers} workers"
    if max(g.group_index, *(kind.group_index for kind in g.others), 0) >= len(g.tables):
        return "a kind is of a group that is not there"
    if any(group.n < 2 if group.matters in (WINDOW, COMPRESSED) else group.n for group in g.groups):
        return "a window of no tokens before the next, an entry for one token, or a number where there is neither"
    if g.groups and (g.block_size != g.group.entries or [group.matters for group in g.groups] == [ALL]):
        return "its blocks are not those of its groups"
    if len(g.kind_of) != (len(layers) if g.others else 0):
        return f"the kinds of {len(g.kind_of)} layers of {len(layers)}"
    if g.others and set(g.kind_of) != set(range(len(counts))):
        return "of one of its kinds there is no layer, or a layer is of a kind that is not there"
    if len(set(layers)) != len(layers):
        return "two of its layers have one name"
    if g.drafts != tuple(name for name in layers if name in drafts):
        return "its draft layers are not some of its layers, in order"
    if bool(g.drafter) != bool(g.drafts):
        return "it has draft layers without a draft model, or one without"
    return ""


def _contradiction_of_parts(g: CacheGeometry) -> str:
    """Return what is impossible about the division of tokens among ranks; empty if nothing is."""
    world = g.ranks.world
    if any(kind.whole for kind in g.others) and g.dcp == 1:
        return "a kind is whole where nothing is divided"
    parts = [g.kv_heads * g.dcp, *(kind.kv_heads * (1 if kind.whole else g.dcp) for kind in g.others)]
    if g.dcp > 1 and any(g.tp_size % part for part in parts):
        return f"tokens in {world} parts for {g.workers} workers"
    if g.block_size % g.interleave if world > 1 else g.interleave > 1:
        return f"blocks of {g.block_size} tokens in runs of {g.interleave}"
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
