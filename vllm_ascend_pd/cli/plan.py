# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan`: what each rank of P sends to each rank of D, for two engines that need not be started.

Runs the production planners on one prompt and prints the mode and why, descriptors and bytes per link, a rough time for
each side's links, and memory: what P allocates beside its cache, and how many prompts D holds. `--svg FILE` draws it.
Caches are as vllm-ascend allocates them.

`--load TRACE` answers another question: how many P for how many D (load/).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import product
from typing import Any

import msgspec
import numpy as np

from vllm_ascend_pd.cli import memory
from vllm_ascend_pd.cli.flag_values import at_least, at_most, positive, refuse, write_text
from vllm_ascend_pd.cli.load import flags as load
from vllm_ascend_pd.cli.model import Model, read_model
from vllm_ascend_pd.cli.shape import BLOCK, ITEM, PlanInput, geometry, with_context
from vllm_ascend_pd.geometry.decide import MIN_SPAN, Decision, decide
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.pairing import Pairing, contributors, pairings
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlanner

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
    "hccl_buffsize": 65_536,
}


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
    parser.add_argument("--p-tp", type=int, help="tensor-parallel size of prefill (needed, but for --load)")
    parser.add_argument("--d-tp", type=int, help="tensor-parallel size of decode (needed, but for --load)")
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
    parser.add_argument("--head-dim", type=int, help="elements of one head; with --layout mla latent and rope together")
    parser.add_argument(
        "--rope-dim",
        type=int,
        help="with MLA: elements of the rope, a tensor of its own (default: the model's, else 64; 0: one tensor for both)",
    )
    parser.add_argument("--layers", type=int, help="attention layers")
    parser.add_argument(
        "--draft-layers", type=int, help="layers of a draft model with the same heads, 1 for MTP (default: none)"
    )
    parser.add_argument(
        "--state-dtype",
        choices=("bf16", "fp16", "fp32"),
        help="--mamba-ssm-cache-dtype of the engines (default: what the model says, else its own)",
    )
    parser.add_argument(
        "--scale-bytes", type=int, help="bytes of a scale of each component, for each token and head (default: none)"
    )
    parser.add_argument(
        "--block-size", type=int, help=f"tokens per block (default: {BLOCK}; with Gated DeltaNet as vllm-ascend 0.23)"
    )
    parser.add_argument("--dtype", choices=tuple(ITEM), default="bf16", help="of the cache (default: %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="token-major", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length (default: %(default)s)")
    parser.add_argument("--regroup", choices=("auto", "always", "never"), default="auto")
    parser.add_argument(
        "--step-tokens", type=int, default=8192, help="--max-num-batched-tokens of prefill (default: %(default)s)"
    )
    parser.add_argument(
        "--link-gbps", type=float, default=25.0, help="GB/s of one rank's link, on both sides (default: %(default)s)"
    )
    parser.add_argument(
        "--descriptor-us", type=float, default=4.0, help="cost of one descriptor (default: %(default)s)"
    )
    memory.add_arguments(parser)
    load.add_arguments(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw what each rank sends")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.load:
        from vllm_ascend_pd.cli.load import command

        return command.run(args)
    for flag, size in (("--p-tp", args.p_tp), ("--d-tp", args.d_tp)):
        if size is None:
            refuse(flag, "", "it is needed", "Give it, or --load.")
    shape = _shape(args)
    cache_memory = memory.of_cache(args)
    p, d = (
        with_context(geometry(shape, f"--{side}", tp, pp), shape, f"--{side}", dcp, pcp, interleave)
        for side, tp, pp, dcp, pcp, interleave in (
            ("p", args.p_tp, args.p_pp, args.p_dcp, args.p_pcp, args.p_interleave),
            ("d", args.d_tp, args.d_pp, args.d_dcp, 1, args.d_interleave),
        )
    )
    beside, decision = memory.beside_cache(p, args), decide(p, d, args.regroup, MIN_SPAN)
    if decision.regroup and (why := beside.no_exchange_reason(p, d)):
        decision = msgspec.structs.replace(decision, regroup=False, why=why)
    links = _links(p, d, shape, decision)
    busiest, receives = _seconds(links, args.link_gbps, args.descriptor_us)
    room = memory.room(d, shape, cache_memory) if cache_memory else None
    if args.svg:
        write_text("--svg", args.svg, _svg(p, d, links, decision))
    if args.json:
        made = {
            "mode": decision.mode,
            "why": decision.why,
            "links": [{"p": x.p, "d": x.d, "descriptors": x.descriptors, "bytes": x.nbytes} for x in links],
            "busiest_rank_s": busiest,
            "busiest_decode_rank_s": receives,
            "block_sizes": [p.block_size, d.block_size],
            "staging": beside.staging,
            "exchange_buffers": beside.hccl,
            "decode_memory": asdict(room) if room else None,
            "layers_for_drafts": shape.model.drafts,
        }
        print(json.dumps(made))
    else:
        print("\n".join([*_table(p, d, shape, decision, links), *_times(links, busiest, receives)]))
        print("\n".join([*beside.lines(), *(room.lines(shape.tokens) if room else ())]))
        if shape.model.drafts and not shape.drafts and not shape.model.windowed and args.d_pp == 1:
            count = shape.model.drafts
            print(f"not counted: layers for drafts (MTP), which engines that draft have: --draft-layers {count}")
    return 0


def _shape(args: argparse.Namespace) -> PlanInput:
    for name, maximum in MAXIMA.items():
        flag, value = "--" + name.replace("_", "-"), getattr(args, name)
        if value is not None:
            at_most(flag, at_least(flag, value, 1), maximum)
    positive("--link-gbps", args.link_gbps, "GB/s")
    if not (args.descriptor_us >= 0 and math.isfinite(args.descriptor_us)):
        refuse("--descriptor-us", args.descriptor_us, "it must be at least 0", "Give microseconds.")
    model = read_model(args.model) if args.model else Model(0, 0, 0, mla=args.layout == "mla", rope=64)
    heads = 1 if model.mla else args.kv_heads or model.heads
    dim = model.dim or args.head_dim if model.mla else args.head_dim or model.dim
    model = dataclasses.replace(model, heads=heads, dim=dim or 0, layers=args.layers or model.layers)
    for name, amount in (("--kv-heads", model.heads), ("--head-dim", model.dim), ("--layers", model.layers)):
        if not amount:
            refuse(name, amount, "it is needed", "Give it, or --model.")
    model = _with_dtype(_with_rope(model, args.rope_dim), args.state_dtype)
    drafts, scale = args.draft_layers or 0, args.scale_bytes or 0
    if drafts and model.windowed:
        refuse("--draft-layers", drafts, "the model has windows", "Leave it out: an engine does not start with both.")
    if drafts and args.d_pp > 1:
        refuse("--draft-layers", drafts, "a D with a pipeline does not start with it", "Leave it out.")
    layout = "mla" if model.mla else args.layout
    return PlanInput(model, args.block_size or 0, ITEM[args.dtype], layout, args.tokens, drafts, scale)


def _with_rope(model: Model, rope: int | None) -> Model:
    """Return a model with MLA's rope as given. Raise ConfigError if there is none, or nothing beside it."""
    if not model.mla:
        if rope is not None:
            refuse("--rope-dim", rope, "the model has no MLA", "Leave it out.")
        return model
    rope = model.rope if rope is None else at_least("--rope-dim", rope, 0)
    if rope >= model.dim:
        refuse("--rope-dim", rope, f"latent and rope have {model.dim} elements together", "Give less.")
    return dataclasses.replace(model, rope=rope)


def _with_dtype(model: Model, dtype: str | None) -> Model:
    if dtype is None:
        return model
    if model.states is None:
        refuse("--state-dtype", dtype, "the model has no recurrent states", "Leave it out.")
    return dataclasses.replace(model, states=dataclasses.replace(model.states, item=ITEM[dtype]))


def _links(p: CacheGeometry, d: CacheGeometry, shape: PlanInput, decision: Decision) -> list[PairWrites]:
    """Return every link, for all layers. Block ids are scattered, as in engines that have run for a while."""
    smallest = min(group.block_size for side in (p, d) for group in side.tables)
    blocks = -(-shape.tokens // smallest)  # at most: parts of the tokens have longer ones
    table = (np.arange(blocks, dtype=np.int32) * 7919) % (blocks * 2 + 1)
    sums: dict[tuple[int, int], list[int]] = {}
    work: list[tuple[Pairing, frozenset[str], int, int]] = []
    for pair in pairings(p, d):
        if pair.p.group.stateful:
            work.append((pair, pair.layers, 0, 1))
        elif shape.model.ratios:
            work.append((pair, pair.layers, *pair.p.wanted_entries(0, shape.tokens)))
        else:
            work += [(pair, pair.layers & names, lo, hi) for names, lo, hi in shape.parts]
    for rank, (pair, names, lo, hi) in product(range(len(p.ranks)), work):
        job = Job(pair.d, lo, lo, hi, table, table[::-1][lo // pair.d.covers :].copy())
        if decision.regroup and not pair.p.group.stateful:
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
    return [PairWrites(*workers, *total) for workers, total in sorted(sums.items())]


def _seconds(links: Iterable[PairWrites], gbps: float, descriptor_us: float) -> tuple[float, float]:
    """Return the time of the busiest rank of P, and that of D. P issues descriptors; D's link only receives."""
    p, d = defaultdict[int, float](float), defaultdict[int, float](float)
    for link in links:
        received = link.nbytes / (gbps * 1e9)
        p[link.p] += max(received, link.descriptors * descriptor_us * 1e-6)
        d[link.d] += received
    return max(p.values(), default=0.0), max(d.values(), default=0.0)


def _times(links: Sequence[PairWrites], busiest: float, receives: float) -> list[str]:
    sources = max(Counter(link.d for link in links).values(), default=0)
    slower = f"{'decode' if receives > busiest else 'prefill'} is the slower side"
    return [
        f"busiest prefill rank: about {busiest * 1e3:.2f} ms on the wire, most of it behind the computation",
        f"busiest decode rank: about {receives * 1e3:.2f} ms, in which its link receives from {sources} prefill ranks: "
        f"{'both sides are as fast' if math.isclose(busiest, receives) else slower}",
    ]


def _table(
    p: CacheGeometry, d: CacheGeometry, shape: PlanInput, decision: Decision, links: list[PairWrites]
) -> list[str]:
    model = shape.model
    layers = model.layer_words(shape.item) + (f" and {shape.drafts} of a draft model" if shape.drafts else "")
    keys = f" and index keys of {model.index}" if model.index else ""
    lengths = f"; spans {decision.direct_span} B direct, {decision.regroup_span} B regrouped"
    lines = [
        f"prefill {sizes_of(p)} → decode {sizes_of(d)}, {model.heads} KV heads × {model.dim}{keys}, "
        f"{layers}, block {_each(str(p.block_size), str(d.block_size))}, {shape.layout}, {shape.tokens} tokens",
        f"tensors of a layer, by block: {_each(_tensors(p), _tensors(d))}",
        f"mode: {decision.mode} ({decision.why}{lengths if decision.direct_span else ''})",
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
    return lines


def _each(p: str, d: str) -> str:
    return p if p == d else f"{p} (decode: {d})"


def _tensors(g: CacheGeometry) -> str:
    """Return the bytes of a block in each tensor of an attention layer."""
    regions = [region for kind in g.kinds if not kind.group.stateful for region in kind.regions]
    return ", ".join(f"{region.name} {region.block_stride} B" for region in regions)


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
            y, heads, low = place(worker, engine.workers), engine.head_range(rank), engine.first_layer(stage)
            layers = f"layers {low}–{low + len(engine.stages[stage]) - 1}, " if len(engine.stages) > 1 else ""
            parts.append(
                f'<rect x="{x0}" y="{y - 18}" width="100" height="36" rx="6" fill="#eef3f8" stroke="#3b6ea5"/>'
                f'<text x="{x0 + 50}" y="{y - 2}" text-anchor="middle">{side}{_named(engine, worker)}</text>'
                f'<text x="{x0 + 50}" y="{y + 13}" text-anchor="middle" fill="#555" font-size="10">'
                f"{layers}heads {heads.start}–{heads.stop - 1}</text>"
            )
    return "\n".join([*parts, "</svg>\n"])
