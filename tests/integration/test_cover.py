# SPDX-License-Identifier: Apache-2.0
"""Kinds of caches combined with features of engines: for each kind all pairs of features, in few pairs of engines.

Every cell tests what a request can do: lengths, several at once, two choices, clients that disconnect, a failed load, a
common prefix, and preemption where D has few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from draft_pairs import draft_config
from kind_pairs import (
    DELTA,
    check_choices,
    check_computed_again,
    check_declared,
    check_failed_load,
    check_left,
    check_preempted,
    exercise,
    learn_of_first_tokens,
    rounding_limit,
    shows,
    spec,
)
from pairs import Pair, fresh_prompt
from test_indexers import tuples

from tools.support.client import body_of, complete
from tools.support.cluster import STRICT, Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.models import RECIPES
from tools.support.on_cpu import no_fp8
from tools.support.pairwise import Cell, cover
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


FEATURES = {
    "shape": ("1→1", "2→1 regrouped", "1→2"),
    "chunks": ("96", "whole"),
    "prefixes": ("on", "off"),
    "blocks": ("many", "few"),
    "policy": ("fail", "recompute"),
}
# On a CPU vLLM has neither chunks nor prefix caches with MLA. How many tokens a side drafts is a feature instead.
OF_MTP = {
    **{name: levels for name, levels in FEATURES.items() if name not in ("chunks", "prefixes")},
    "drafted": ("1 on P, 3 on D", "3 on P, 1 on D"),
}


@dataclass(frozen=True)
class CoveredKind:
    model: str
    few: int  # blocks for the prompts of eight requests, but not for their whole answers
    arguments: tuple[str, ...] = ()
    draft: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields of EngineSpec
    features: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FEATURES)
    title: str = ""  # in tools/kind_sizes.py, where it is not the model's name
    tokens: int = 200  # of answers that D has too few blocks for
    without: Mapping[str, str] | None = None  # levels that no cell may have together
    rounds: bool = False  # the cache keeps fewer bits than are computed with: see `judged`


EAGLE = {"method": "eagle3", "draft": "spec-eagle3", "num_speculative_tokens": 1}
OF_KINDS = {
    "fp8": CoveredKind("gqa", 60, ("--kv-cache-dtype", "fp8"), title="fp8", rounds=True),
    "windows": CoveredKind("gptoss", 110),
    # With states cached at the ends of blocks, vLLM's CPU kernel fails in a step that goes over one: "IndexError: index
    # 2 is out of bounds for dimension 0 with size 1", without a connector too.
    "states": CoveredKind("nemotronh", 38, without={"chunks": "whole", "prefixes": "on"}),
    "indexer": CoveredKind("indexed", 60),
    "drafts": CoveredKind("spec", 60, draft=EAGLE, title="spec-eagle3"),
    "int8": CoveredKind("indexed-int8", 60, more=tuples(), rounds=True),
    "deltanet": CoveredKind("qwen3next", 38, more={"plugins": (DELTA,)}, tokens=400),  # float32; blocks of 384
    "mtp": CoveredKind("mtp", 200, draft={"method": "mtp"}, features=OF_MTP),
}
LENGTHS = (20, 97, 159, 333)
LONGEST = 1024


def p_spec(kind: CoveredKind, cell: Cell, extra: dict[str, Any]) -> EngineSpec:
    regrouped = "regrouped" in cell["shape"]
    return _spec(
        kind, cell, "kv_producer", {**extra, **({"regroup": "always"} if regrouped else {})}, int(cell["shape"][0])
    )


def d_spec(kind: CoveredKind, cell: Cell, extra: dict[str, Any]) -> EngineSpec:
    few = ("--num-gpu-blocks-override", str(kind.few)) if cell["blocks"] == "few" else ()
    return _spec(kind, cell, "kv_consumer", extra, int(cell["shape"][2]), few, policy=cell["policy"])


def _spec(
    kind: CoveredKind,
    cell: Cell,
    role: str,
    extra: dict[str, Any],
    tp: int,
    arguments: tuple[str, ...] = (),
    **more: Any,
) -> EngineSpec:
    draft = dict(kind.draft)
    off = () if cell.get("prefixes") != "off" else ("--no-enable-prefix-caching",)
    if "draft" in draft:
        draft = draft_config(draft.pop("method"), draft.pop("draft"), **draft)
    if "drafted" in cell:
        draft["num_speculative_tokens"] = int(cell["drafted"].split(", ")[role == "kv_consumer"][0])
    chunk = 96 if cell.get("chunks") == "96" else LONGEST
    words = (*kind.arguments, *off, *arguments)
    more = {**kind.more, "draft": draft, **more}
    return spec(
        f"cover-{role[3]}", kind.model, role, extra, tp=tp, chunk=chunk, max_len=LONGEST, arguments=words, **more
    )


def cells() -> list[tuple[str, Cell]]:
    """Return the cells sorted by D, then by P, so that neighbours share engines."""

    def order(cell: Cell) -> tuple[str, ...]:
        of_both = (cell.get(name, "") for name in ("prefixes", "drafted", "chunks"))
        return *of_both, cell["shape"][2:3], cell["blocks"], cell["policy"], cell["shape"]

    return [
        (name, cell)
        for name, kind in OF_KINDS.items()
        for cell in sorted(cover(kind.features, kind.without), key=order)
    ]


def marks(name: str, cell: Cell) -> list[pytest.MarkDecorator]:
    kind, shape = OF_KINDS[name], cell["shape"]
    skip = [pytest.mark.skipif(bool(no_fp8()), reason=no_fp8())] if name == "fp8" else []
    return [shows(kind.title or kind.model, int(shape[0]), int(shape[2])), *skip]


class ReusedEngines:
    """At most one P and one D: those of the last cell, until the next one needs others."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._there = cluster, dict[str, tuple[EngineSpec, EngineProcess]]()

    def get(self, *specs: EngineSpec) -> list[EngineProcess]:
        for role, (had, engine) in list(self._there.items()):
            if had not in specs:
                self._cluster.stop(engine)
                del self._there[role]
        wanted = [one for one in specs if one.role not in self._there]
        for one, engine in zip(wanted, self._cluster.start(*wanted) if wanted else [], strict=True):
            self._there[one.role] = one, engine
        return [self._there[one.role][1] for one in specs]

    def clear(self) -> None:
        self.get()


@pytest.fixture(scope="module")
def reused(cluster: Cluster) -> Iterator[ReusedEngines]:
    reused = ReusedEngines(cluster)
    yield reused
    reused.clear()


def judged(
    kind: CoveredKind, p: EngineProcess, d: EngineProcess, tally: AnswerTally, progress: Callable[[str], None]
) -> AnswerTally:
    """Return the measure of answers of this pair."""
    if not kind.rounds or p.spec.tp == d.spec.tp:
        return tally
    limit = rounding_limit(p, d, 8 * LENGTHS)
    progress(f"figure: {kind.title or kind.model}: a token may be {limit:.2e} worse than the best")
    return AnswerTally(tie=limit, excused_share=0.1)


@pytest.mark.parametrize(
    ("name", "cell"),
    [pytest.param(name, cell, marks=marks(name, cell)) for name, cell in cells()],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value.values()),
)
def test_a_cell(
    name: str,
    cell: Cell,
    cluster: Cluster,
    reused: ReusedEngines,
    allowed: list[str],
    ports: list[int],
    tally: AnswerTally,
    progress: Callable[[str], None],
) -> None:
    kind = OF_KINDS[name]
    specs = p_spec(kind, cell, cluster.push_config()), d_spec(kind, cell, cluster.push_config(*allowed))
    p, d = reused.get(*specs)
    check_declared(p, d)
    front = cluster.metaserver([p], [d], ports[-3], STRICT)
    pair = Pair(cluster, front, p, (d,), judged(kind, p, d, tally, progress))
    try:
        if RECIPES[kind.model].recomputes_last:
            learn_of_first_tokens(pair)
        check_all(pair, kind, cell, ports[-1], f"{name}, {', '.join(cell.values())}")
    finally:
        cluster.stop(front)


def check_all(pair: Pair, kind: CoveredKind, cell: Cell, port: int, title: str) -> None:
    exercise(pair, title, LENGTHS)
    if not kind.draft:  # on a CPU vLLM's sampler fails with top_k and drafts; greedy sampling makes one choice
        check_choices(pair, 97)
    check_left(pair, 159, longest=LONGEST)
    head = fresh_prompt(200)
    for prompt in (head, [*head, *fresh_prompt(60)], [*head[:96], *fresh_prompt(30)]):
        pair.compare([prompt], [complete(pair.front.url, body_of(prompt, 12))], f"{title}, a common prefix")
    (check_failed_load if cell["policy"] == "fail" else check_computed_again)(pair, port, (97, 250))
    if cell["blocks"] == "few":
        check_preempted(pair, [250 + 30 * i for i in range(8)], kind.tokens)
