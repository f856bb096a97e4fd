# SPDX-License-Identifier: Apache-2.0
"""Kinds and shapes of the sets of engines under vllm-ascend (tests/ascend_host), for a table in docs/matrix.md."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from tools.support import field, small
from tools.support.models import RECIPES
from tools.support.spec import CONNECTOR

if TYPE_CHECKING:
    from engine_sets import Engines, Side

MODES = {
    "dcp": "--decode-context-parallel-size",
    "dp": "--data-parallel-size",
    "pcp": "--prefill-context-parallel-size",
    "pp": "--pipeline-parallel-size",
}
# By the family of a recipe; others are named by their heads.
NAMES = {
    "deepseek_v2": "MLA",
    "deepseek_v3": "MLA",
    "deepseek_v32": "DSA (DeepSeek-V3.2)",
    "deepseek_v4": "DeepSeek-V4",
    "glm_moe_dsa": "DSA (GLM-5)",
    "qwen3_moe": "GQA, experts apart",
    "qwen3_next": "GDN (Qwen3-Next)",
}
REFUSED = "refused"


def kind(engines: Engines) -> str:
    """Return the kind of cache, and the draft."""
    recipe, needs = RECIPES[engines.model], small.shown(engines)
    heads = {1: "MQA", recipe.heads: "MHA"}.get(recipe.kv_heads, "GQA")
    int8 = small.INT8 if any(small.INT8 in one for one in needs.kinds) else ""
    return NAMES.get(recipe.family, heads) + int8 + (f", `{needs.draft}`" if needs.draft else "")


def shape(engines: Engines) -> str:
    """Return TP of P and of D, or what divides each if it is not TP alone on both."""
    modes = ["+".join(name.upper() for name in MODES if getattr(side, name) > 1) for side in (engines.p, engines.d)]
    return "→".join(mode or "TP" for mode in modes) if any(modes) else f"{engines.p.tp}→{engines.d.tp}"


def grid(sets: Iterable[Engines], rows: Mapping[str, str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table's head and lines: how many sets have a kind and a shape, and in which rows, by title."""
    cells: dict[str, dict[str, list[Engines]]] = defaultdict(lambda: defaultdict(list))
    by_shape: dict[str, list[Engines]] = defaultdict(list)
    for one in sets:
        cells[kind(one)][shape(one)].append(one)
        by_shape[shape(one)].append(one)
    columns = sorted(by_shape, key=lambda name: (not name[0].isdigit(), name))

    def cell(of_kind: Mapping[str, list[Engines]], column: str) -> str:
        if there := of_kind.get(column):
            return f"{len(there)} ({', '.join(sorted({rows[one.title] for one in there}))})"
        engines = next(iter(of_kind.values()))[0]
        return REFUSED if all(refused(engines, like) for like in by_shape[column]) else ""

    return ("kind", *columns), [(name, *(cell(cells[name], column) for column in columns)) for name in sorted(cells)]


def refused(engines: Engines, like: Engines) -> bool:
    """Return whether admission refuses a side of these engines in the sizes of another set."""
    sides = ((engines.p, like.p, "kv_producer"), (engines.d, like.d, "kv_consumer"))
    draft = ("--speculative-config", json.dumps(dict(engines.draft))) if engines.draft else ()
    return any(
        _refused(engines.model, (*draft, *engines.flags, *side.flags, *_sizes(other), *_transfer(role)))
        for side, other, role in sides
    )


def _sizes(side: Side) -> tuple[str, ...]:
    sizes = (f"{flag}={getattr(side, name)}" for name, flag in MODES.items())
    return f"--tensor-parallel-size={side.tp}", *sizes, *side.divided


def _transfer(role: str) -> tuple[str, ...]:
    return "--kv-transfer-config", json.dumps({"kv_connector": CONNECTOR, "kv_role": role}), "--enforce-eager"


@cache
def _refused(recipe: str, words: tuple[str, ...]) -> bool:
    """Return whether admission refuses an engine with a published model of these kinds of cache.

    It has one KV head, so that ranks may divide a head's tokens whatever TP is, except MHA.
    """
    small_one, published = RECIPES[recipe], field.known_models().models.values()
    kinds, heads = small.KINDS[small_one.family], small_one.heads
    model = next(one for one in published if set(one.facts["caches"]) == kinds and not one.c8)
    model = replace(model, facts={**model.facts, "kv_heads": heads if small_one.kv_heads == heads else 1})
    drafts = {name: {"kv_heads": one.kv_heads, "head_dim": one.head_dim} for name, one in RECIPES.items() if one.target}
    return bool(field.judge(field.Command(recipe, words), field.Known({recipe: model}, drafts)).refusals)
