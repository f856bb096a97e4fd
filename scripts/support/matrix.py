# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/matrix.md: each mode of engines, and the tests that show it with real engines or say why not."""

from __future__ import annotations

from typing import NamedTuple

from scripts.support.environments import NEWEST, RELEASES

INTEGRATION = "tests/integration/test_"
ONE = "tokens of one engine"


class Row(NamedTuple):
    name: str
    mode: str
    tests: tuple[str, ...]  # pytest's words
    how: str = ONE
    vllm: str = NEWEST
    ci: str = "one"  # of its tests: all, one (a representative), none


def _file(name: str, *words: str) -> tuple[str, ...]:
    return f"{INTEGRATION}{name}.py", *words


def _release(release: str) -> Row:
    mode = f"vLLM {release}: P and D, and either beside {NEWEST}"
    return Row(f"vllm-{release}", mode, _file("releases_real", "-k", release), vllm=release, ci="none")


ROWS = (
    Row("tp", "GQA, TP 1→1 and 2→1: chunks, prefixes, preemption, aborts, failed loads", _file("gqa"), ci="all"),
    Row("tp-wide", "GQA, TP 4→2, 2→4, 3→2, 2→3", _file("wide"), ci="none"),
    Row("regroup", "the exchange between P's ranks, forced", _file("regroup"), ci="none"),
    Row("one-head", "MQA TP 2→1, 1→2; MLA 1→1, 1→2, 2→1", _file("one_head"), ci="all"),
    Row("pp", "pipelines on P, on D, on both, cut unequally; TP beside them", _file("stages")),
    Row("dp-ep", "data parallelism with expert parallelism, internal, hybrid and external", _file("ranks")),
    Row("drafts", "draft models: MTP, Eagle, Eagle3, DFlash, a model, ngram", _file("drafts")),
    Row("indexer", "sparse indexers, unlike layers, int8 with scales", _file("kinds")),
    Row("windows", "sliding windows, several groups", _file("windows")),
    Row("states", "recurrent states: Mamba-2, Gated DeltaNet", _file("states"), f"{ONE}; by gap in bfloat16"),
    Row("fp8", "fp8 caches", _file("quantised")),
    Row("modes", "async scheduling, prefix caches, chunks that cut blocks, bfloat16, LoRA", _file("modes"), ci="none"),
    Row("hot-blocks", "prefixes on P that the very step computes; a planted fault", _file("hot_blocks"), ci="none"),
    Row("first-token", "P's first token: sampling, log-probabilities, penalties, grammars, stops, n", _file("first_token")),
    Row("orders", "P first, both at once: routers of others", _file("routers")),
    Row("both", "both roles in one engine", _file("both")),
    Row("multi", "behind a MultiConnector, beside other connectors", _file("beside"), ci="all"),
    Row("aggregator", "MLA, TP 4→2: vLLM's aggregator of four workers' reports, without a model", _file("aggregator"), "requests, blocks", ci="all"),
    Row("ray", "workers of a Ray cluster (`--distributed-executor-backend ray`), TP 2→1", _file("ray"), ci="none"),
    *map(_release, RELEASES),
    Row("releases", "schedulers and hooks of vLLM 0.23, 0.26, 0.29, 0.31, without a model", ("tests/unit/test_releases.py",), "scenarios", "0.23.0–0.31.0", "none"),
    Row("vllm-ascend", "vllm-ascend 0.23.0.post1 on a CANN in host memory", ("tests/ascend_host/test_pairs.py",), "tokens of one vllm-ascend engine; bytes", "0.23.0"),
)  # fmt: skip

REFUSED = {
    "decode context parallelism (DCP) on either side, prefill context parallelism (PCP)": "refused (PD-CONF-005). The rule which rank "
    "holds which token is there (`geometry/context.py`, with tests); planner and workers do not use it. vLLM's CPU attention has none of it",
    "micro-batching (DBO)": "refused (PD-CONF-005): a layer's hook fires before all of the step's tokens have passed the layer",
    "sleep mode": "refused (PD-CONF-005): it takes the cache's memory away, into which or from which others write, and asks no connector",
    "full graphs on P": "refused (PD-CONF-005): they would skip the layers' hooks. On D they stay",
    "drafts, pipelines or MLA beside windows or states": "refused (PD-CONF-005)",
    "vLLM's second model runner": "not run in a pair; D takes no first tokens there",
    "pictures and sound (multimodal)": "their hashes are part of a prompt's identity; no model was run",
    "vLLM 0.33 and later": "not run",
    "OffloadingConnector beside ours": "did not start on a CPU",
}
