# SPDX-License-Identifier: Apache-2.0
"""Sets of engines under vllm-ascend (tests/ascend_host) that stand for a configuration of other sizes.

A set stands for the kinds of cache and the draft of a configuration. For its modes one set may not be enough.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tools.support.from_tests import engine_sets
from tools.support.models import RECIPES

if TYPE_CHECKING:
    from engine_sets import Engines

COMPRESSED = "compressed"
# By the family of a recipe, as field_models.json names them.
KINDS = {
    "deepseek_v2": {"mla"},
    "deepseek_v3": {"mla"},
    "deepseek_v32": {"indexer"},
    "deepseek_v4": {COMPRESSED},
    "glm_moe_dsa": {"indexer"},
    "llama": {"full"},
    "qwen2": {"full"},
    "qwen3": {"full"},
    "qwen3_moe": {"full"},
    "qwen3_next": {"full", "gdn"},
}
ITS = "VLLM_ASCEND_"  # the beginning of its variables' names
INT8, EXCHANGE, RECOMPUTES = " in int8", "exchange", "recompute_scheduler_enable"


@dataclass(frozen=True)
class Needs:
    """Features of a configuration, or of a set of engines that shows them."""

    kinds: frozenset[str] = frozenset()
    draft: str = ""  # its method
    modes: frozenset[str] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.kinds | other.kinds, self.draft or other.draft, self.modes | other.modes)


def needs(
    kinds: set[str],
    draft: str,
    *,
    ranks: int = 1,
    divided: int = 1,
    graphs: str = "",
    exchange: bool = False,
    switches: Collection[str] = (),
) -> Needs:
    """Return an engine's needs: data-parallel ranks, ranks that divide the tokens, a graph mode, switches."""
    modes = {
        "data parallelism": ranks > 1,
        "context parallelism": divided > 1,
        "full graphs": "FULL" in graphs,
        "piecewise graphs": graphs == "PIECEWISE",
        EXCHANGE: exchange,
        "recompute scheduler": RECOMPUTES in switches,
    }
    return Needs(frozenset(kinds), draft, frozenset(name for name, there in modes.items() if there))


def switched(additional: Mapping[str, Any]) -> set[str]:
    """Return the switches that are on in vllm-ascend's --additional-config, with those of its parts."""
    inner = {f"{name}.{key}" for name, part in additional.items() if isinstance(part, dict) for key in switched(part)}
    return inner | {name for name, value in additional.items() if value and not isinstance(value, dict)}


def stands(wanted: Needs, sets: Mapping[str, Needs]) -> str:
    """Return the sets that show a configuration in small, or what none shows.

    The first has its kinds of cache, its draft, and as many of its modes as one has. Sets for the other modes follow,
    if possible of the same kinds.
    """
    alike = {title: one for title, one in sets.items() if (one.kinds, one.draft) == (wanted.kinds, wanted.draft)}
    if not alike:
        draft = f" with {wanted.draft}" if wanted.draft else ""
        return f"–: {' and '.join(sorted(wanted.kinds))}{draft}"
    first = min(alike, key=lambda title: (len(wanted.modes - alike[title].modes), len(alike[title].modes)))
    set_words, left = [f"`{first}`"], wanted.modes - alike[first].modes
    for mode in sorted(left):
        others = {title: one for title, one in sets.items() if mode in one.modes}
        other = min(
            others, key=lambda title: (others[title].kinds != wanted.kinds, len(others[title].modes)), default=""
        )
        set_words.append(f"{mode} `{other}`" if other else f"–: {mode}")
    return "; ".join(set_words)


@lru_cache(maxsize=4)
def sets(release: str = "") -> dict[str, Needs]:
    """Return what the sets show, by title: those that run under a release of vllm-ascend (0.30), or all."""
    return {str(engines): shown(engines) for engines in engine_sets() if release in ("", engines.release)}


def shown(engines: Engines) -> Needs:
    kinds = KINDS[RECIPES[engines.model].family]
    flags = " ".join((*engines.flags, *engines.p.flags, *engines.d.flags))
    heads_in_int8 = RECIPES[engines.model].int8
    if "_c8" in flags or "indexer_kv_dtype" in flags or heads_in_int8:  # by release
        kinds = {kind + INT8 for kind in kinds}
    draft = str(engines.draft.get("method", ""))
    each = [
        needs(
            kinds,
            draft,
            ranks=side.dp,
            divided=side.dcp * side.pcp,
            graphs=side.graphs,
            exchange=side.keys.get("regroup") == "always" or heads_in_int8,
            switches=switches_of((*engines.flags, *side.flags)),
        )
        for side in (engines.p, engines.d)
    ]
    return each[0] | each[1]


def switches_of(flags: Sequence[str]) -> set[str]:
    """Return the switches of the last --additional-config among an engine's arguments, which is the one that counts."""
    given = [json.loads(value) for flag, value in itertools.pairwise(flags) if flag == "--additional-config"]
    return switched(given[-1]) if given else set()


def covered() -> set[str]:
    """Return the switches that some set of engines has."""
    return {
        name
        for engines in engine_sets()
        for side in (engines.p, engines.d)
        for name in (*switches_of((*engines.flags, *side.flags)), *side.switches)
    }
