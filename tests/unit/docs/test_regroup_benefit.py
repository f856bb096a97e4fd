# SPDX-License-Identifier: Apache-2.0
"""The figures in docs/regroup.md: what the planners write to the wire, with and without regroup; how it is counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.bench_regroup import CASES, HEAD_BYTES, KIB, MIB, LayerWrites, cache, direct, regrouped, scattered
from unit.kits.watching import running
from unit.regroup.common import EngineCache, RegroupDecodeSite, config
from unit.regroup.prefill import engine
from vllm_ascend_pd.geometry.decide import decide
from vllm_ascend_pd.geometry.plan import Job

PAGE = Path(__file__).resolve().parents[3] / "docs" / "regroup.md"
TOKENS, BLOCK = 32768, 128


def shown() -> dict[tuple[str, int, int], tuple[str, str, str, str]]:
    """Return the page's table."""
    row = re.compile(r"\| (\S+) (\d+) → (\d+)(?: \(MLA\))? \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|")
    rows = [match.groups() for line in PAGE.read_text().splitlines() if (match := row.match(line))]
    return {(name, int(p), int(d)): (never, always, sent, auto) for name, p, d, never, always, sent, auto in rows}


def words(load: LayerWrites) -> str:
    span = f"{load.span // KIB} KiB" if load.span >= KIB else f"{load.span} B"
    return f"{load.descriptors:,} × {span}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name} {case[1]} to {case[2]}")
def test_the_page_tells_what_the_planners_say(case: tuple) -> None:  # type: ignore[type-arg]
    model, p_tp, d_tp = case
    p, d = cache(model, p_tp, BLOCK, "token"), cache(model, d_tp, BLOCK, "token")
    job = Job(d, 0, 0, TOKENS, scattered(TOKENS, BLOCK, 1), scattered(TOKENS, BLOCK, 2))
    one, other = (max(how(p, job), key=lambda load: load.descriptors) for how in (direct, regrouped))
    never, always, sent, auto = shown()[model.name, p_tp, d_tp]
    assert never == words(one)
    assert always == words(other) if always != "the same" else words(other) == words(one)
    assert sent == f"{other.exchanged // MIB} MiB" if other.exchanged else sent.startswith("nothing")
    assert auto == ("regroups" if decide(p, d).regroup else "writes directly")


@pytest.mark.parametrize("how", [direct, regrouped])
def test_every_byte_is_written_once(how: object) -> None:
    for model, p_tp, d_tp in CASES:
        if model.heads > 1:
            p, d = cache(model, p_tp, BLOCK, "token"), cache(model, d_tp, BLOCK, "token")
            job = Job(d, 0, 0, 1000, scattered(1000, BLOCK, 1), scattered(1000, BLOCK, 2))
            copies = max(1, d_tp // model.heads)
            assert sum(load.nbytes for load in how(p, job)) == 1000 * model.heads * HEAD_BYTES * 2 * copies  # type: ignore[operator]


@pytest.mark.parametrize(("mode", "d_tp"), [("always", 1), ("auto", 2)], ids=["exchanged", "an exchange gains nothing"])
def test_what_is_written_without_an_exchange_is_counted(mode: str, d_tp: int) -> None:
    p, d = (
        engine(EngineCache(tp=2, heads=8), push=config(regroup=mode)),
        RegroupDecodeSite(EngineCache(tp=d_tp, heads=8), push=config()),
    )
    with running(p, d):
        prompt = d.reserve(40)
        d.step()
        p.admit(prompt)
        p.compute((prompt, 40))
        assert p.ended(prompt)
        d.check(prompt)
        p.finished(prompt)
        sums = [(rank.runtime.tally.take() or {"sums": {}})["sums"] for rank in p.ranks]
    written, without = (sum(one.get(name, 0) for one in sums) for name in ("bytes_transferred", "bytes_direct"))
    assert written and without == (written if mode == "auto" else 0)
