# SPDX-License-Identifier: Apache-2.0
"""Geometry of an engine's cache from a model's configuration, as vllm-ascend allocates it. No engine is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from vllm_ascend_pd.cli import compressed
from vllm_ascend_pd.cli.flag_values import refuse
from vllm_ascend_pd.cli.model import Model, read_model
from vllm_ascend_pd.geometry.layout import STATE, WINDOW, CacheGeometry, Group, LayerKind, Region, index_of, section_of
from vllm_ascend_pd.geometry.states import DELTA_NET, PACKING
from vllm_ascend_pd.protocol.layouts import MAX_WORKERS

ITEM = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
BLOCK = 128  # vllm-ascend's block size, and its kernels'


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The model, its cache, and the prompt."""

    model: Model
    block_size: int  # 0: what an engine takes by itself
    item: int
    layout: str
    tokens: int
    drafts: int = 0  # layers of a draft model, behind the model's own
    scale: int = 0  # bytes of a scale for each token, head and component

    @property
    def attention_layers(self) -> frozenset[int]:
        states, layers = self.model.states, self.model.layers
        with_attention = frozenset(range(layers)) if states is None else states.attention_layers
        return with_attention.union(range(layers, layers + self.drafts))

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """Name of each tensor of an attention layer, and the bytes of a token's cell in it."""
        model = self.model
        if self.layout != "mla":
            cells = [("k", model.dim), ("v", model.dim)]
        else:
            cells = [("latent", model.dim - model.rope), ("rope", model.rope)] if model.rope else [("kv", model.dim)]
        scales = [(f"{name}_scale", self.scale) for name, _ in cells if self.scale]
        return (*((name, elements * self.item) for name, elements in cells), *scales)

    def names(self, index: int) -> tuple[str, ...]:
        """Return the caches of an attention layer: its own, and its indexer's."""
        name = f"layers.{index}.attn"
        return (name, index_of(name)) if self.model.index else (name,)

    def block_of(self, tp: int) -> int:
        """Return the block size of an engine.

        With Gated DeltaNet vllm-ascend 0.23 makes K of a block as long as the recurrence: both have one place.
        """
        states = self.model.states
        if self.block_size or states is None or states.recurrence != DELTA_NET:
            return self.block_size or BLOCK
        k = max(1, self.model.heads // tp) * self.model.dim * self.item
        return BLOCK * -(-states.at(tp, self.item).nbytes[1] // (BLOCK * k))

    @property
    def parts(self) -> list[tuple[set[str], int, int]]:
        """Layers with attention, and the tokens [begin, end) of them that are pushed to a D that begins with P's first
        token.
        """
        windowed = self.model.windowed
        group = Group(self.block_of(1), WINDOW, self.model.window)
        begin = group.begins(0, self.tokens) if windowed else 0
        unbounded = {name for index in self.attention_layers - windowed for name in self.names(index)}
        in_windows = {name for index in windowed for name in self.names(index)}
        return [part for part in ((unbounded, 0, self.tokens), (in_windows, begin, self.tokens)) if part[0]]


def geometry_of_model(
    model: str, tp: int, block_size: int, dtype: str, divided: tuple[int, int, int | None] = (1, 1, None)
) -> CacheGeometry:
    """Return the geometry that an engine of this model would report, as far as the model's configuration says.

    `divided`: DCP, PCP and the interleave. Raise ConfigError for a model or a size that no engine has.
    """
    read = read_model(model)
    shape = PlanInput(read, block_size, ITEM[dtype], "mla" if read.mla else "token-major", 1)
    return with_context(geometry(shape, "-", tp, 1), shape, "-", *divided)


def geometry(shape: PlanInput, flag: str, tp: int, pp: int) -> CacheGeometry:
    """Return an engine's geometry. Raise ConfigError for a size that no engine has.

    All ranks' caches are alike, so heads divide evenly among ranks, or ranks among heads.
    """
    model = shape.model
    if model.ratios:
        return compressed.geometry(model, flag, tp, pp, shape.block_of(tp), shape.item, shape.drafts)
    if pp > model.layers:
        refuse(f"{flag}-pp", pp, f"there are {model.layers} layers", "Give each stage one at least.")
    if model.heads % tp and tp % model.heads:
        why = f"{model.heads} KV heads do not come out even on {tp} ranks"
        refuse(f"{flag}-tp", tp, why, f"Give a divisor or a multiple of {model.heads}: vLLM starts with no other.")
    if (model.states is not None or model.windowed) and pp > 1:
        why = f"the model has {'recurrent states' if model.states is not None else 'windows'}"
        refuse(f"{flag}-pp", pp, why, "Give 1: an engine does not start with more.")
    if model.states is not None and model.states.heads % tp:
        why = f"{model.states.heads} heads of the recurrence do not come out even on {tp} ranks"
        refuse(f"{flag}-tp", tp, why, f"Give a divisor of {model.states.heads}: vLLM starts with no other.")
    heads, size = max(1, model.heads // tp), shape.block_of(tp)
    token_major = shape.layout == "token-major"

    def region(name: str, cell: int) -> Region:
        head_stride = 0 if heads == 1 else cell if token_major else size * cell
        return Region(name, heads * size * cell, head_stride, heads * cell if token_major else cell, cell)

    drafts = tuple(name for index in range(shape.drafts) for name in shape.names(model.layers + index))
    stages = tuple(
        (*(name for index in range(a, b) for name in _names(shape, index)), *(drafts if b == model.layers else ()))
        for a, b in pairwise(_cuts(model.layers, pp))
    )
    others = dict([*_indexers(shape, 1), *_sections(shape, tp)])
    tails = ("", *others)
    kind_of = [max(n for n, tail in enumerate(tails) if name.endswith(tail)) for stage in stages for name in stage]
    return CacheGeometry(
        block_size=size,
        kv_heads=model.heads,
        tp_size=tp,
        dtype=f"{shape.item}-byte",
        packing="plain",
        regions=tuple(region(*cell) for cell in shape.tensors),
        stages=stages,
        drafter="a draft model" if drafts else "",
        drafts=drafts,
        others=tuple(others.values()),
        kind_of=tuple(kind_of) if others else (),
        groups=(Group(size), Group(size, STATE)) if model.states is not None else (),
    )


def with_context(
    g: CacheGeometry, shape: PlanInput, flag: str, dcp: int, pcp: int, interleave: int | None
) -> CacheGeometry:
    """Return a geometry with its tokens divided among ranks. Raise ConfigError for sizes that no engine has."""
    if dcp * pcp == 1:
        if interleave is not None:
            refuse(f"{flag}-interleave", interleave, "the tokens are not divided", f"Give {flag}-dcp, or leave it out.")
        return g
    divisor_flag, value = (f"{flag}-dcp", dcp) if dcp > 1 else (f"{flag}-pcp", pcp)
    if shape.model.windowed or shape.model.ratios or shape.model.states is not None:
        refuse(divisor_flag, value, "not all of the model's layers keep all tokens", "Give 1.")
    if len(g.stages) > 1:
        refuse(divisor_flag, value, "an engine with a pipeline does not start with it", "Give 1.")
    if g.tp_size % (g.kv_heads * dcp) and dcp > 1:
        why = f"{g.tp_size} ranks have {g.kv_heads} KV heads: there are not {dcp} for each"
        refuse(divisor_flag, value, why, "Give a divisor of the ranks that hold one head.")
    interleave = interleave or g.block_size
    if g.block_size % interleave:
        refuse(f"{flag}-interleave", interleave, f"a block has {g.block_size} tokens", "Give a divisor of them.")
    if g.tp_size * pcp > MAX_WORKERS:
        refuse(divisor_flag, value, f"an engine has at most {MAX_WORKERS} workers", "Give less.")
    if shape.model.index and pcp > 1:
        refuse(divisor_flag, value, "an engine with a sparse indexer does not start with PCP", f"Give {flag}-pcp 1.")
    others = tuple(dict(_indexers(shape, dcp)).values())
    return msgspec.structs.replace(g, others=others, dcp=dcp, pcp=pcp, interleave=interleave)


def _names(shape: PlanInput, index: int) -> list[str]:
    names = list(shape.names(index)) if index in shape.attention_layers else []
    states = shape.model.states
    if states is not None and index in states.layers:
        names += [section_of(f"layers.{index}", section.name) for section in states.at(1, 1).sections("", 1)]
    return names


def _indexers(shape: PlanInput, dcp: int) -> Iterator[tuple[str, LayerKind]]:
    """Yield how names of indexers' layers end, and their kind, of which each rank of DCP has all."""
    if shape.model.index:
        cell, size = shape.model.index * shape.item, shape.block_of(1) * dcp
        cells = (("index key", cell), *((("index key_scale", shape.scale),) if shape.scale else ()))
        regions = tuple(Region(name, size * cell, 0, cell, cell) for name, cell in cells)
        yield index_of(""), LayerKind(1, f"{shape.item}-byte", "plain", regions, whole=dcp > 1)


def _sections(shape: PlanInput, tp: int) -> Iterator[tuple[str, LayerKind]]:
    """Yield how names of layers end that states are made of, one behind the other, and their kinds."""
    states = shape.model.states
    if states is None:
        return
    recurrent = states.at(tp, shape.item)
    for section in recurrent.sections(f"layers.{min(states.layers)}", tp):
        each = section.heads > tp
        regions = tuple(
            Region(one.name, recurrent.nbytes[one.state], one.cell_bytes if each else 0, 0, one.cell_bytes)
            for one in section.regions
        )
        yield section_of("", section.name), LayerKind(section.heads, "-", PACKING, regions, 1)


def _cuts(layers: int, pp: int) -> list[int]:
    """Return the stages' boundaries as vLLM cuts: left-over layers go to the stages before the last, from the end."""
    each, rest = divmod(layers, pp)
    sizes = [each + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]
    return [0, *accumulate(sizes)]
