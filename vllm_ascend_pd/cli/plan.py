# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan`: what each rank of P sends to each rank of D, for two engines that need not be started.

Runs the production planners on one prompt and prints the mode and why, descriptors and bytes per link, the staging
memory, and a rough time for a given link. `--svg FILE` draws it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise, product
from typing import Any

import msgspec
import numpy as np

from vllm_ascend_pd.cli.given import at_least, at_most, positive, refuse, write_text
from vllm_ascend_pd.cli.model import States, read_model
from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.geometry.decide import MIN_SPAN, Decision, decide
from vllm_ascend_pd.geometry.layout import STATE, WINDOW, CacheGeometry, Group, LayerKind, Region, index_of, section_of
from vllm_ascend_pd.geometry.pairing import Pairing, contributors, pairings
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlanner
from vllm_ascend_pd.geometry.states import PACKING
from vllm_ascend_pd.protocol.layouts import MAX_WORKERS
from vllm_ascend_pd.regroup.core.world import EngineWorld, slot_bytes

ITEM = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
LAYOUTS = ("token-major", "head-major", "mla")
# A plan's memory grows with these sizes. A larger one is a typing error, or no engine that exists.
MAXIMA = {
    "p_tp": 1024,
    "d_tp": 1024,
    "p_pp": 64,
    "d_pp": 64,
    "p_dcp": 1024,
    "d_dcp": 1024,
    "p_pcp": 1024,
    "p_interleave": 65_536,
    "d_interleave": 65_536,
    "kv_heads": 4096,
    "head_dim": 65_536,
    "layers": 4096,
    "draft_layers": 64,
    "scale_bytes": 65_536,
    "block_size": 65_536,
    "tokens": 4_194_304,
    "step_tokens": 4_194_304,
}
_BUFFERS = 2  # of the exchange, each as large as two slots


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The model and the prompt."""

    kv_heads: int
    head_dim: int
    layers: int
    block_size: int
    item: int
    layout: str
    tokens: int
    window: int = 0
    windowed: frozenset[int] = frozenset()  # layers with that window
    states: States | None = None
    drafts: int = 0  # layers of a draft model, behind the model's own
    scale: int = 0  # bytes of a scale for each token, head and component
    index: int = 0  # elements of an indexer's key in each layer

    @property
    def attention_layers(self) -> frozenset[int]:
        own = frozenset(range(self.layers)) if self.states is None else self.states.attention_layers
        return own.union(range(self.layers, self.layers + self.drafts))

    def names(self, index: int) -> tuple[str, ...]:
        """Return the caches of an attention layer: its own, and its indexer's."""
        name = f"layers.{index}.attn"
        return (name, index_of(name)) if self.index else (name,)

    @property
    def parts(self) -> list[tuple[set[str], int, int]]:
        """Layers with attention, and the tokens [begin, end) of them that are pushed to a D that begins with P's first
        token.
        """
        begin = Group(self.block_size, WINDOW, self.window).begins(0, self.tokens) if self.windowed else 0
        whole = {name for index in self.attention_layers - self.windowed for name in self.names(index)}
        some = {name for index in self.windowed for name in self.names(index)}
        return [part for part in ((whole, 0, self.tokens), (some, begin, self.tokens)) if part[0]]


@dataclass(frozen=True, slots=True)
class PairWrites:
    """Writes of one P worker to one D worker for the whole prompt and all layers that both have."""

    p: int  # worker, stage by stage
    d: int
    descriptors: int
    nbytes: int


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="what each rank of P sends to each rank of D",
        description=__doc__.split("\n\n", 1)[0],
        epilog="With data parallelism each rank is an engine of its own here: a request goes from one rank to one rank.",
    )
    parser.add_argument("--p-tp", type=int, required=True, help="tensor-parallel size of prefill")
    parser.add_argument("--d-tp", type=int, required=True, help="tensor-parallel size of decode")
    parser.add_argument("--p-pp", type=int, default=1, help="pipeline stages of prefill (default: %(default)s)")
    parser.add_argument("--d-pp", type=int, default=1, help="pipeline stages of decode (default: %(default)s)")
    for side, role in (("p", "prefill"), ("d", "decode")):
        parser.add_argument(
            f"--{side}-dcp",
            type=int,
            default=1,
            help=f"--decode-context-parallel-size of {role} (default: %(default)s)",
        )
        parser.add_argument(
            f"--{side}-interleave",
            type=int,
            help=f"--cp-kv-cache-interleave-size of {role}, with context parallelism (default: the block size)",
        )
    parser.add_argument(
        "--p-pcp", type=int, default=1, help="--prefill-context-parallel-size of prefill (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="DIR", help="take heads, dimension and layers from DIR/config.json")
    parser.add_argument("--kv-heads", type=int, help="KV heads of the whole model")
    parser.add_argument("--head-dim", type=int, help="elements of one head")
    parser.add_argument("--layers", type=int, help="attention layers")
    parser.add_argument(
        "--draft-layers", type=int, help="layers of a draft model with the same heads, 1 for MTP (default: none)"
    )
    parser.add_argument(
        "--scale-bytes", type=int, help="bytes of a scale of each component, for each token and head (default: none)"
    )
    parser.add_argument("--block-size", type=int, default=128, help="tokens per block (default: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(ITEM), default="bf16", help="of the cache (default: %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="token-major", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length (default: %(default)s)")
    parser.add_argument("--regroup", choices=("auto", "always", "never"), default="auto")
    parser.add_argument(
        "--step-tokens", type=int, default=8192, help="--max-num-batched-tokens of prefill (default: %(default)s)"
    )
    parser.add_argument("--link-gbps", type=float, default=25.0, help="GB/s of one rank's link (default: %(default)s)")
    parser.add_argument(
        "--descriptor-us", type=float, default=4.0, help="cost of one descriptor (default: %(default)s)"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw what each rank sends")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    shape = _shape(args)
    p, d = (
        _with_context(_geometry(shape, f"--{side}", tp, pp), shape, f"--{side}", dcp, pcp, interleave)
        for side, tp, pp, dcp, pcp, interleave in (
            ("p", args.p_tp, args.p_pp, args.p_dcp, args.p_pcp, args.p_interleave),
            ("d", args.d_tp, args.d_pp, args.d_dcp, 1, args.d_interleave),
        )
    )
    decision = decide(p, d, args.regroup, MIN_SPAN)
    links = _links(p, d, shape, decision)
    seconds = _seconds(links, args.link_gbps, args.descriptor_us)
    staging = _staging(p, args.step_tokens) if decision.regroup else 0
    if args.svg:
        write_text("--svg", args.svg, _svg(p, d, links, decision))
    if args.json:
        rows = [{"p": x.p, "d": x.d, "descriptors": x.descriptors, "bytes": x.nbytes} for x in links]
        print(
            json.dumps(
                {
                    "mode": decision.mode,
                    "why": decision.why,
                    "links": rows,
                    "busiest_rank_s": seconds,
                    "staging": staging,
                }
            )
        )
    else:
        print("\n".join(_table(p, d, shape, decision, links, seconds)))
        print(
            f"staging on each prefill rank: {staging / 2**20:.1f} MiB" + ("" if staging else ", nothing is regrouped")
        )
    return 0


def geometry_of_model(
    model: str, tp: int, block_size: int, dtype: str, divided: tuple[int, int, int | None] = (1, 1, None)
) -> CacheGeometry:
    """Return the geometry that an engine of this model would report, as far as the model's configuration says.

    `divided`: DCP, PCP and the interleave. Raise ConfigError for a model or a size that no engine has.
    """
    found = read_model(model)
    layout = "mla" if found.mla else "token-major"
    sizes = found.heads, found.dim, found.layers, block_size, ITEM[dtype]
    shape = PlanInput(*sizes, layout, 1, states=found.states, index=found.index)
    return _with_context(_geometry(shape, "-", tp, 1), shape, "-", *divided)


def _shape(args: argparse.Namespace) -> PlanInput:
    for name, maximum in MAXIMA.items():
        flag, given = "--" + name.replace("_", "-"), getattr(args, name)
        if given is not None:
            at_most(flag, at_least(flag, given, 1), maximum)
    positive("--link-gbps", args.link_gbps, "GB/s")
    if not (args.descriptor_us >= 0 and math.isfinite(args.descriptor_us)):
        refuse("--descriptor-us", args.descriptor_us, "it must be at least 0", "Give microseconds.")
    heads, dim, layers, layout = args.kv_heads, args.head_dim, args.layers, args.layout
    window, windowed, states, index = 0, frozenset[int](), None, 0
    if args.model:
        found = read_model(args.model)
        heads, dim, layers = heads or found.heads, dim or found.dim, layers or found.layers
        window, windowed, states = found.window, found.windowed, found.states
        if found.mla:
            layout, dim, index = "mla", found.dim, found.index
    for name, value in (("--kv-heads", heads), ("--head-dim", dim), ("--layers", layers)):
        if not value and not (layout == "mla" and name == "--kv-heads"):
            refuse(name, value, "it is needed", "Give it, or --model.")
    sizes = 1 if layout == "mla" else heads, dim, layers, args.block_size, ITEM[args.dtype]
    drafts, scale = args.draft_layers or 0, args.scale_bytes or 0
    if drafts and windowed:
        refuse("--draft-layers", drafts, "the model has windows", "Leave it out: an engine does not start with both.")
    if drafts and args.d_pp > 1:
        refuse("--draft-layers", drafts, "a D with a pipeline does not start with it", "Leave it out.")
    return PlanInput(*sizes, layout, args.tokens, window, windowed, states, drafts, scale, index)


def _geometry(shape: PlanInput, flag: str, tp: int, pp: int) -> CacheGeometry:
    """Return an engine's geometry. Raise ConfigError for a size that no engine has.

    All ranks' caches are alike, so heads divide evenly among ranks, or ranks among heads.
    """
    if pp > shape.layers:
        refuse(f"{flag}-pp", pp, f"there are {shape.layers} layers", "Give each stage one at least.")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        why = f"{shape.kv_heads} KV heads do not come out even on {tp} ranks"
        refuse(f"{flag}-tp", tp, why, f"Give a divisor or a multiple of {shape.kv_heads}: vLLM starts with no other.")
    if shape.states is not None and pp > 1:
        refuse(f"{flag}-pp", pp, "the model has recurrent states", "Give 1: an engine does not start with more.")
    if shape.states is not None and shape.states.heads % tp:
        why = f"{shape.states.heads} heads of the recurrence do not come out even on {tp} ranks"
        refuse(f"{flag}-tp", tp, why, f"Give a divisor of {shape.states.heads}: vLLM starts with no other.")
    heads, size = max(1, shape.kv_heads // tp), shape.block_size
    token_major = shape.layout == "token-major"

    def region(name: str, cell: int) -> Region:
        head_stride = 0 if heads == 1 else cell if token_major else size * cell
        return Region(name, heads * size * cell, head_stride, heads * cell if token_major else cell, cell)

    names = ("kv",) if shape.layout == "mla" else ("k", "v")
    cells = [(name, shape.head_dim * shape.item) for name in names]
    cells += [(f"{name}_scale", shape.scale) for name in names if shape.scale]
    drafts = tuple(name for index in range(shape.drafts) for name in shape.names(shape.layers + index))
    cuts = list(pairwise(_cuts(shape.layers, pp)))
    return CacheGeometry(
        block_size=size,
        kv_heads=shape.kv_heads,
        tp_size=tp,
        dtype=f"{shape.item}-byte",
        packing="plain",
        regions=tuple(region(*cell) for cell in cells),
        stages=tuple(
            (*(name for index in range(a, b) for name in _names(shape, index)), *(drafts if b == shape.layers else ()))
            for a, b in cuts
        ),
        drafter="a draft model" if drafts else "",
        drafts=drafts,
        others=(*_indexers(shape, 1), *_sections(shape, tp)),
        groups=(Group(size), Group(size, STATE)) if shape.states is not None else (),
    )


def _with_context(
    g: CacheGeometry, shape: PlanInput, flag: str, dcp: int, pcp: int, interleave: int | None
) -> CacheGeometry:
    """Return a geometry with its tokens divided among ranks. Raise ConfigError for sizes that no engine has."""
    if dcp * pcp == 1:
        if interleave is not None:
            refuse(f"{flag}-interleave", interleave, "the tokens are not divided", f"Give {flag}-dcp, or leave it out.")
        return g
    given, value = (f"{flag}-dcp", dcp) if dcp > 1 else (f"{flag}-pcp", pcp)
    if shape.windowed or shape.states is not None:
        refuse(given, value, "not all of the model's layers keep all tokens", "Give 1.")
    if len(g.stages) > 1:
        refuse(given, value, "an engine with a pipeline does not start with it", "Give 1.")
    if g.tp_size % (g.kv_heads * dcp) and dcp > 1:
        why = f"{g.tp_size} ranks have {g.kv_heads} KV heads: there are not {dcp} for each"
        refuse(given, value, why, "Give a divisor of the ranks that hold one head.")
    interleave = interleave or g.block_size
    if g.block_size % interleave:
        refuse(f"{flag}-interleave", interleave, f"a block has {g.block_size} tokens", "Give a divisor of them.")
    if g.tp_size * pcp > MAX_WORKERS:
        refuse(given, value, f"an engine has at most {MAX_WORKERS} workers", "Give less.")
    if shape.index and pcp > 1:
        refuse(given, value, "an engine with a sparse indexer does not start with PCP", f"Give {flag}-pcp 1.")
    return msgspec.structs.replace(g, others=tuple(_indexers(shape, dcp)), dcp=dcp, pcp=pcp, interleave=interleave)


def _names(shape: PlanInput, index: int) -> list[str]:
    own = list(shape.names(index)) if index in shape.attention_layers else []
    if shape.states is not None and index in shape.states.layers:
        own += [section_of(f"layers.{index}", section.name) for section in shape.states.at(1, 1).sections("", 1)]
    return own


def _indexers(shape: PlanInput, dcp: int) -> Iterator[LayerKind]:
    """Yield the kind of indexers' keys, of which each rank of DCP has all."""
    if shape.index:
        cell, size = shape.index * shape.item, shape.block_size * dcp
        cells = (("kv", cell), *((("kv_scale", shape.scale),) if shape.scale else ()))
        regions = tuple(Region(name, size * cell, 0, cell, cell) for name, cell in cells)
        layers = tuple(index_of(f"layers.{index}.attn") for index in sorted(shape.attention_layers))
        yield LayerKind(1, f"{shape.item}-byte", "plain", regions, layers, whole=dcp > 1)


def _sections(shape: PlanInput, tp: int) -> Iterator[LayerKind]:
    """Yield the kinds of layers that states are made of, one behind the other."""
    if shape.states is None:
        return
    found = shape.states.at(tp, shape.item)
    for section in found.sections(f"layers.{min(shape.states.layers)}", tp):
        each = section.heads > tp
        regions = tuple(
            Region(one.name, found.nbytes[one.state], one.cell_bytes if each else 0, 0, one.cell_bytes)
            for one in section.regions
        )
        layers = tuple(section_of(f"layers.{index}", section.name) for index in sorted(shape.states.layers))
        yield LayerKind(section.heads, "-", PACKING, regions, layers, 1)


def _cuts(layers: int, pp: int) -> list[int]:
    """Return the stages' boundaries as vLLM cuts: left-over layers go to the stages before the last, from the end."""
    each, left = divmod(layers, pp)
    sizes = [each + (pp - 1 - left <= stage < pp - 1) for stage in range(pp)]
    return [0, *accumulate(sizes)]


def _links(p: CacheGeometry, d: CacheGeometry, shape: PlanInput, decision: Decision) -> list[PairWrites]:
    """Return every link, for all layers. Block ids are scattered, as in engines that have run for a while."""
    blocks = -(-shape.tokens // shape.block_size)  # at most: with context parallelism one covers more tokens
    table = (np.arange(blocks, dtype=np.int32) * 7919) % (blocks * 2 + 1)
    sums: dict[tuple[int, int], list[int]] = {}
    work: list[tuple[Pairing, frozenset[str], int, int]] = []
    for pair in pairings(p, d):
        if pair.p.own.stateful:
            work.append((pair, pair.layers, 0, 1))
        else:
            work += [(pair, pair.layers & names, lo, hi) for names, lo, hi in shape.parts]
    for rank, (pair, names, lo, hi) in product(range(len(p.ranks)), work):
        job = Job(pair.d, lo, lo, hi, table, table[::-1][lo // pair.d.covers :].copy())
        if decision.regroup and not pair.p.own.stateful:
            slots = RegroupPlanner(pair.p, rank).plan([job]).slots
            spans = {slot.d_rank: slot.writes.get(0, ()) for slot in slots}
        else:
            spans = dict(StepPlanner(pair.p, rank).plan([job])[0].by_rank)
        for d_rank, regions in spans.items():
            count, size = sum(len(s) for s in regions), sum(s.nbytes for s in regions)
            for (stage, ours), (d_stage, theirs) in product(enumerate(p.stages), enumerate(d.stages)):
                if layers := len(names.intersection(ours, theirs)):
                    total = sums.setdefault((p.worker(stage, rank), d.worker(d_stage, d_rank)), [0, 0])
                    total[0] += count * layers
                    total[1] += size * layers
    return [PairWrites(*places, *total) for places, total in sorted(sums.items())]


def _staging(p: CacheGeometry, step_tokens: int) -> int:
    """Return the bytes that a P rank allocates at start by default: slots and the exchange's two buffers."""
    config = RegroupConfig()
    slot = slot_bytes(p, EngineWorld(0, p.tp_size, 1, step_tokens))
    return slot * (config.staging_slots * config.staging_destinations + 2 * _BUFFERS)


def _seconds(links: Iterable[PairWrites], gbps: float, descriptor_us: float) -> float:
    by_rank: dict[int, float] = {}
    for link in links:
        cost = max(link.nbytes / (gbps * 1e9), link.descriptors * descriptor_us * 1e-6)
        by_rank[link.p] = by_rank.get(link.p, 0.0) + cost
    return max(by_rank.values(), default=0.0)


def _table(
    p: CacheGeometry, d: CacheGeometry, shape: PlanInput, decision: Decision, links: list[PairWrites], seconds: float
) -> list[str]:
    windows = f" ({len(shape.windowed)} with a window of {shape.window} tokens)" if shape.windowed else ""
    if shape.states is not None:
        kept, attends = len(shape.states.layers), len(shape.attention_layers)
        windows = f" ({attends} with attention, {kept} with a state of {sum(shape.states.at(1, shape.item).nbytes)} B)"
    windows += f" and {shape.drafts} of a draft model" if shape.drafts else ""
    keys = f" and index keys of {shape.index}" if shape.index else ""
    lines = [
        f"prefill {sizes_of(p)} → decode {sizes_of(d)}, {shape.kv_heads} KV heads × {shape.head_dim}{keys}, "
        f"{shape.layers} layers{windows}, block {shape.block_size}, {shape.layout}, {shape.tokens} tokens",
        f"mode: {decision.mode} ({decision.why}; spans {decision.direct_span} B direct, "
        f"{decision.regroup_span} B regrouped)",
        "",
        f"{'link':<12}{'descriptors':>12}{'MiB':>10}{'bytes each':>12}",
    ]
    for x in links:
        each = x.nbytes // max(1, x.descriptors)
        lines.append(
            f"{f'P{_named(p, x.p)} → D{_named(d, x.d)}':<12}{x.descriptors:>12}{x.nbytes / 2**20:>10.2f}{each:>12}"
        )
    for worker in range(d.workers):
        names = ", ".join(f"P{_named(p, p.worker(*source))}" for source in contributors(p, d, worker))
        lines.append(f"D{_named(d, worker)} is complete after a DONE of {names}")
    lines.append(f"busiest prefill rank: about {seconds * 1e3:.2f} ms on the wire, most of it behind the computation")
    return lines


def sizes_of(g: CacheGeometry) -> str:
    sizes = (("TP", g.tp_size), ("PP", len(g.stages)), ("DCP", g.dcp), ("PCP", g.pcp))
    return " × ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "TP")


def _named(g: CacheGeometry, worker: int) -> str:
    """Return a worker's name: its rank; in a pipeline its stage and rank."""
    stage, rank = g.stage_and_rank(worker)
    return f"{stage}.{rank}" if len(g.stages) > 1 else str(rank)


def _svg(p: CacheGeometry, d: CacheGeometry, links: list[PairWrites], decision: Decision) -> str:
    """Draw two columns of ranks; a line's width grows with its bytes."""
    width, step = 640, 56
    height = step * (max(p.workers, d.workers) + 1)
    largest = max((link.nbytes for link in links), default=1)

    def place(rank: int, size: int) -> float:
        return height / 2 + (rank - (size - 1) / 2) * step

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><title>{escape(decision.mode)}: {escape(decision.why)}</title>'
    ]
    for x in links:
        a, b = place(x.p, p.workers), place(x.d, d.workers)
        stroke = 1 + 7 * x.nbytes / largest
        parts.append(
            f'<line x1="130" y1="{a}" x2="{width - 130}" y2="{b}" stroke="#3b6ea5" stroke-opacity="0.55" '
            f'stroke-width="{stroke:.1f}"><title>P{_named(p, x.p)} → D{_named(d, x.d)}: {x.descriptors} descriptors, '
            f"{x.nbytes / 2**20:.2f} MiB</title></line>"
        )
    for side, x0, engine in (("P", 30, p), ("D", width - 130, d)):
        for worker in range(engine.workers):
            stage, rank = engine.stage_and_rank(worker)
            y, held, first = place(worker, engine.workers), engine.head_range(rank), engine.first_layer(stage)
            layers = f"layers {first}–{first + len(engine.stages[stage]) - 1}, " if len(engine.stages) > 1 else ""
            parts.append(
                f'<rect x="{x0}" y="{y - 18}" width="100" height="36" rx="6" fill="#eef3f8" stroke="#3b6ea5"/>'
                f'<text x="{x0 + 50}" y="{y - 2}" text-anchor="middle">{side}{_named(engine, worker)}</text>'
                f'<text x="{x0 + 50}" y="{y + 13}" text-anchor="middle" fill="#555" font-size="10">'
                f"{layers}heads {held.start}–{held.stop - 1}</text>"
            )
    return "\n".join([*parts, "</svg>\n"])
