# SPDX-License-Identifier: Apache-2.0
"""Real pairs that regroup: GQA 2→1 and 4→2, chunked, 16 requests at once; and the descriptors that this saves.

On a CPU the token axis is opaque, so short spans are as long as a head's plane of a block; still, spans of several
ranks for one D block are merged into one. Too many engines for every change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import Pair, PairMaker, close_traces, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.models import RECIPES, ensure
from tools.support.spec import EngineSpec
from vllm_ascend_pd.viewer.timeline import Trace

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32
LENGTHS = (1, 20, BLOCK, BLOCK + 1, 333, 1500)
LAYERS = RECIPES["gqa"].layers


def pushed(traces: Path) -> tuple[int, int, int]:
    """Return (descriptors, bytes, exchanges) of all of P's workers."""
    events = [event for event in Trace(traces).events if event.source.startswith("prefill-worker")]
    writes = [event.facts for event in events if event.stage == "layer_pushed"]
    assert writes and all(facts["ok"] for facts in writes)
    exchanges = sum(event.stage == "exchanged" for event in events)
    return sum(facts["descriptors"] for facts in writes), sum(facts["bytes"] for facts in writes), exchanges


def exercise(pair: Pair, name: str) -> None:
    for length in LENGTHS:
        pair.check([fresh_prompt(length)], name=name)
    pair.check([fresh_prompt(30 + 37 * i) for i in range(16)], name=f"{name}, 16 at once")
    close_traces(pair)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (4, 2)])
def test_regrouped_tokens_are_the_single_engines_and_writes_are_fewer(
    p_tp: int,
    d_tp: int,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    model, totals = ensure("gqa"), {}
    extra = cluster.push_config(*allowed)
    (d,) = cluster.start(
        EngineSpec(f"regroup-d{d_tp}", model, role="kv_consumer", tp=d_tp, policy="fail", block_size=BLOCK, extra=extra)
    )
    for mode in ("never", "always"):
        begun, traces = time.monotonic(), cluster.directory / f"traces-{p_tp}-{mode}"
        traces.mkdir()
        keys = cluster.push_config(regroup=mode, trace_dir=str(traces))
        share = ("--long-prefill-token-threshold", "48")  # several prompts share a step of 96
        (p,) = cluster.start(
            EngineSpec(
                f"regroup-p{p_tp}-{mode}",
                model,
                role="kv_producer",
                tp=p_tp,
                chunk=96,
                block_size=BLOCK,
                extra=keys,
                arguments=share,
            )
        )
        pair = make_pair(p, d)
        exercise(pair, f"{p_tp}→{d_tp} {mode}")
        cluster.stop(pair.front, p)
        totals[mode] = pushed(traces)
        progress(f"{p_tp}→{d_tp} {mode}: {time.monotonic() - begun:.0f} s")
    cluster.stop(d)
    (direct, nbytes, none), (regrouped, as_many, exchanges) = totals["never"], totals["always"]
    progress(
        f"{p_tp}→{d_tp}, descriptors per layer: {direct / LAYERS:.0f} with never, {regrouped / LAYERS:.0f} with always "
        f"({exchanges} exchanges, {nbytes >> 20} and {as_many >> 20} MiB)"
    )
    assert none == 0 < exchanges
    assert as_many == nbytes
    assert regrouped < direct
