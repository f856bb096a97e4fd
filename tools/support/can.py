# SPDX-License-Identifier: Apache-2.0
"""The table "Can I?" of docs/matrix.md: features of P and D by kind of model and by base.

What ran under vllm-ascend is what the sets of engines have and the page's records say; what ran on a CPU has its tests'
file here. Of the rest admission itself says whether it would start, with a published model of the kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tools.support import field, sdist, small
from tools.support.bases import Base
from tools.support.environments import NEWEST
from tools.support.spec import CONNECTOR

if TYPE_CHECKING:
    from engine_sets import Engines

RAN, TESTED, STARTS, REFUSED = "●", "◐", "○", "✗"
NEW = Base(
    sdist.VLLM_ASCEND.version, "0.30.0", indexes_apart=True, in_tokens=True, takes_turns=True, int8_by_flags=True
)
OLD = Base(sdist.OLDER.version, "0.23.0")
CPU = Base("", NEWEST, ascend=False)
BASES = {f"vllm-ascend {NEW.version}": NEW, f"vllm-ascend {OLD.version}": OLD, f"vLLM {NEWEST} on a CPU": CPU}


class KindOfModel(NamedTuple):
    """A kind of model: what has it, as small.KINDS names its caches; a published model, and files of CPU tests."""

    title: str
    caches: frozenset[str]
    model: str
    cpu: str = ""  # for sizes, prefixes and preemption


KINDS = (
    KindOfModel("GQA: Qwen3, MiniMax-M2", frozenset({"full"}), "Qwen/Qwen3-235B-A22B", "gqa"),
    KindOfModel("MLA: DeepSeek-V3, Kimi-K2", frozenset({"mla"}), "vllm-ascend/DeepSeek-V3-W8A8", "one_head"),
    KindOfModel("DSA: DeepSeek-V3.2, GLM-5", frozenset({"indexer"}), "vllm-ascend/DeepSeek-V3.2-W8A8", "indexers"),
    KindOfModel("DeepSeek-V4", frozenset({small.COMPRESSED}), "Eco-Tech/DeepSeek-V4-Flash-w8a8-mtp"),
    KindOfModel("Gated DeltaNet: Qwen3-Next, Qwen3.5", frozenset({"full", "gdn"}), "Eco-Tech/Qwen3.5-397B-A17B-w8a8-mtp", "states"),
    KindOfModel("windows: gpt-oss, Gemma-3", frozenset({"full", "window"}), "windows", "windows"),
    KindOfModel("Mamba-2: Nemotron-H, Falcon-H1", frozenset({"full", "mamba2"}), "mamba2", "states"),
)  # fmt: skip


def first(kind: KindOfModel) -> str:
    return kind.title.partition(":")[0].split()[0]


def is_of(kind: KindOfModel, engines: Engines) -> bool:
    return {each.removesuffix(small.INT8) for each in small.shown(engines).kinds} == kind.caches


# Kinds that none of vllm-ascend's configurations has, in the words of field_models.json.
OTHERS = {
    "windows": field.FieldModel("", {"architecture": "GptOssForCausalLM", "layers": 36, "mtp": 0, "hidden": 2880, "vocab": 201088, "caches": ["window", "full"], "kv_heads": 8, "head_dim": 64}),
    "mamba2": field.FieldModel("", {"architecture": "NemotronHForCausalLM", "layers": 56, "mtp": 0, "hidden": 4480, "vocab": 131072, "caches": ["full", "mamba2"], "kv_heads": 8, "head_dim": 128, "mamba2": [8, 128, 64, 128, 4]}),
}  # fmt: skip
DRAFT = "draft"  # of its own heads


@dataclass(frozen=True)
class Feature:
    """A feature: the sets that have it, the arguments that ask for it, and the CPU tests' file of each kind."""

    title: str
    has: Callable[[Engines, tuple[str, ...]], bool]  # a set, and the names of what is asked of it
    p: tuple[str, ...] = ()
    d: tuple[str, ...] = ()
    cpu: Mapping[str, str] | None = None  # by the first word of a kind; None: each kind's own file
    never: frozenset[str] = frozenset()  # kinds that have no such thing, by the first word
    old: tuple[str, ...] | None = None  # in place of `p` and `d` where int8 is in --additional-config


def _drafts(method: str, model: str = "") -> tuple[str, ...]:
    config = {"method": method, "num_speculative_tokens": 1, **({"model": model} if model else {})}
    return "--speculative-config", json.dumps(config)


def _sides(flag: str, p: int, d: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"{flag}={p}",), (f"{flag}={d}",)


def _with_switch(one: Engines, switch: str) -> bool:
    return switch in small.switches_of((*one.flags, *one.d.flags))


_TP, _PP, _DP = "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"
_DCP = ("--decode-context-parallel-size=2", "--cp-kv-cache-interleave-size=128")
_INT8 = ("--attention-config.indexer_kv_dtype", "int8")
_EXPERTS = ("--enable-expert-parallel",)
_FULL = ("--compilation-config", json.dumps({"cudagraph_mode": "FULL_DECODE_ONLY"}))
_NO_EXCHANGE = frozenset({"MLA", "DSA", "DeepSeek-V4"})
FEATURES = (
    Feature("TP alike", lambda one, _: one.p.tp == one.d.tp),
    Feature("P's TP larger", lambda one, _: one.p.tp > one.d.tp, *_sides(_TP, 8, 4)),
    Feature("D's TP larger", lambda one, _: one.p.tp < one.d.tp, *_sides(_TP, 4, 8),
        {**{first(kind): kind.cpu for kind in KINDS}, "GQA": "wide"}),
    Feature("heads exchanged between P's ranks", lambda one, _: one.p.keys.get("regroup") == "always",
        *_sides(_TP, 8, 4), {"GQA": "regroup", "windows": "windows", "Gated": "cover", "Mamba-2": "cover"}, _NO_EXCHANGE),
    Feature("a pipeline on P", lambda one, _: one.p.pp > 1, *_sides(_PP, 2, 1), {"GQA": "stages"}),
    Feature("a pipeline on D", lambda one, _: one.d.pp > 1, *_sides(_PP, 1, 2), {"GQA": "stages", "MLA": "stages"}),
    Feature("data parallelism on D", lambda one, _: one.d.dp > 1, *_sides(_DP, 1, 2), {"GQA": "ranks"}),
    Feature("experts apart", lambda one, _: any("expert" in flag for flag in one.flags), _EXPERTS, _EXPERTS, {"GQA": "ranks"}),
    Feature("DCP", lambda one, _: max(one.p.dcp, one.d.dcp) > 1, _DCP, cpu={}),
    Feature("PCP on P", lambda one, _: one.p.pcp > 1, ("--prefill-context-parallel-size=2", *_DCP[1:]), cpu={}),
    Feature("MTP", lambda one, _: one.draft.get("method") == "mtp", _drafts("mtp"), _drafts("mtp"),
        {"MLA": "drafts", "Gated": "drafts"}),
    Feature("Eagle3", lambda one, _: one.draft.get("method") == "eagle3", _drafts("eagle3", DRAFT), _drafts("eagle3", DRAFT),
        {"GQA": "drafts", "DSA": "indexers"}, frozenset({"DeepSeek-V4"})),
    Feature("DFlash", lambda one, _: one.draft.get("method") == "dflash", _drafts("dflash", DRAFT), _drafts("dflash", DRAFT),
        {"GQA": "drafts"}, frozenset({"DeepSeek-V4"})),
    Feature("index keys in int8 (C8)", lambda one, _: any(small.INT8 in kind for kind in small.shown(one).kinds) or small.shown(one).kinds == {small.COMPRESSED},
        _INT8, _INT8, {"DSA": "indexers"}, frozenset({"GQA", "MLA", "Gated", "windows", "Mamba-2"}),
        ("--additional-config", json.dumps({"enable_sparse_li_c8": True}))),
    Feature("K and V in fp8", lambda one, _: False, ("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype", "fp8"),
        dict.fromkeys(("GQA", "windows", "Mamba-2"), "quantised")),
    Feature("prefixes in P's and D's caches", lambda _, asked: any("prefixes" in name for name in asked),
        cpu={"GQA": "gqa", "windows": "windows", "Gated": "cover", "Mamba-2": "cover"}),
    Feature("D preempts", lambda _, asked: "preempted" in asked,
        cpu={"GQA": "gqa", **dict.fromkeys(("DSA", "Gated", "windows", "Mamba-2"), "cover")}),
    Feature("full graphs on D", lambda one, _: "FULL" in one.d.graphs, (), _FULL, {}),
    Feature("vllm-ascend's recompute scheduler on D", lambda one, _: _with_switch(one, small.RECOMPUTES),
        (), ("--additional-config", json.dumps({small.RECOMPUTES: True})), {}),
)  # fmt: skip


def table(
    sets: Mapping[str, tuple[Engines, tuple[str, ...]]], recorded: Mapping[str, Iterable[str]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table's head and lines.

    `sets` are by title, with the names of what is asked of each; `recorded` has the releases of vllm-ascend with which
    a set's row ran well, according to the page.
    """
    lines = []
    for feature in FEATURES:
        cells = []
        for kind in KINDS:
            if first(kind) in feature.never:
                cells.append("–")
                continue
            of_kind = [title for title, (one, asked) in sets.items() if is_of(kind, one) and feature.has(one, asked)]
            cells.append("".join(mark(feature, kind, base, of_kind, sets, recorded) for base in BASES.values()))
        lines.append((feature.title, *cells))
    return ("", *(kind.title for kind in KINDS)), lines


def cpu_file(feature: Feature, kind: KindOfModel) -> str:
    """Return which file of tests/integration shows it on a CPU; empty: none."""
    return kind.cpu if feature.cpu is None else feature.cpu.get(first(kind), "")


def mark(
    feature: Feature,
    kind: KindOfModel,
    base: Base,
    of_kind: Iterable[str],
    sets: Mapping[str, tuple[Engines, tuple[str, ...]]],
    recorded: Mapping[str, Iterable[str]],
) -> str:
    """Return the mark of a base. `of_kind`: the sets of this kind that have the feature, by title."""
    if not base.ascend:
        if feature.title.startswith("vllm-ascend"):
            return "–"
        return RAN if cpu_file(feature, kind) else REFUSED if refused(feature, kind, base) else STARTS
    if any(base.minor in recorded[title] for title in of_kind):
        return RAN
    if any(base.minor == sets[title][0].release for title in of_kind):
        return TESTED
    return REFUSED if refused(feature, kind, base) else STARTS


@cache
def _judged(model: str, base: Base, words: tuple[str, ...]) -> bool:
    known = field.known_models()
    known = replace(
        known, models={**known.models, **OTHERS}, drafts={DRAFT: {"kv_heads": 8, "head_dim": 128}}, base=base
    )
    return bool(field.judge(field.Command(model, words), known).refusals)


def refused(feature: Feature, kind: KindOfModel, base: Base) -> bool:
    """Return whether admission refuses P or D."""
    sides = ((feature.p, "kv_producer"), (feature.d, "kv_consumer"))
    return any(
        _judged(kind.model, base, (*words, *_transfer(role)))
        for side_flags, role in sides
        for words in (_words(()), _words(_flags_for(feature, side_flags, base)))  # most often the kind alone is refused
    )


def _flags_for(feature: Feature, flags: tuple[str, ...], base: Base) -> tuple[str, ...]:
    return flags if feature.old is None or base.int8_by_flags else feature.old


def _words(flags: tuple[str, ...]) -> tuple[str, ...]:
    return flags if any(word.startswith(_TP) for word in flags) else (*flags, f"{_TP}=8")


def _transfer(role: str) -> tuple[str, ...]:
    return "--kv-transfer-config", json.dumps({"kv_connector": CONNECTOR, "kv_role": role})
