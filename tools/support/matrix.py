# SPDX-License-Identifier: Apache-2.0
"""Rows of docs/matrix.md: each mode of engines, and the tests that show it with real engines or the reason for none."""

from __future__ import annotations

from typing import NamedTuple

from tools.support.environments import NEWEST, RELEASES

INTEGRATION = "tests/integration/test_"
ONE = "tokens of one engine"
PAIRS = "tests/ascend_host/test_pairs.py"
FOUR_SETS = "no: four sets of engines are, in the row vllm-ascend"
ASCEND = "tokens of one vllm-ascend engine; bytes"


class Row(NamedTuple):
    name: str
    mode: str
    tests: tuple[str, ...]  # arguments of pytest
    how: str = ONE
    vllm: str = NEWEST
    ci: str = "one"  # which of its tests: all, one (a representative), or none and the reason


def _file(name: str, *words: str) -> tuple[str, ...]:
    return f"{INTEGRATION}{name}.py", *words


def _release(release: str) -> Row:
    over = f" (its Python over {NEWEST}'s compiled parts)" if release > NEWEST else ""
    mode = f"vLLM {release}{over}: P and D, and either beside {NEWEST}"
    return Row(
        f"vllm-{release}",
        mode,
        _file("releases_real", "-k", release),
        vllm=release,
        ci="no: an environment for each release",
    )


ROWS = (
    Row("tp", "GQA, TP 1→1 and 2→1: chunks, prefixes, preemption, aborts, failed loads", _file("gqa"), ci="all"),
    Row("tp-wide", "GQA, TP 4→2, 2→4, 3→2, 2→3", _file("wide"), ci="no: TP 2→1 is in the first row, plans of all sizes are in unit tests"),
    Row("regroup", "the exchange between P's ranks, forced", _file("regroup"), ci="no: `gqa 2to1 regrouped` of the row vllm-ascend is"),
    Row("one-head", "MQA TP 2→1, 1→2; MLA 1→1, 1→2, 2→1", _file("one_head"), ci="all"),
    Row("pp", "pipelines on P, on D, on both, cut unequally; TP beside them", _file("stages"), ci="no: a pipeline on both sides is in the first row"),
    Row("dp-ep", "data parallelism with expert parallelism, internal, hybrid and external", _file("ranks")),
    Row("hosts", "a D whose ranks are on two hosts: network namespaces of one machine, each with a loopback of its own", _file("hosts"), ci="no: not each machine allows network namespaces; addresses of ranks are in the row above"),
    Row("drafts", "draft models: MTP, also beside states, Eagle, Eagle3, DFlash, a model, ngram", _file("drafts")),
    Row("indexer", "sparse indexers, unlike layers, int8 with scales", _file("kinds")),
    Row("windows", "sliding windows, several groups", _file("windows")),
    Row("states", "recurrent states: Mamba-2, Gated DeltaNet", _file("states"), f"{ONE}; by gap in bfloat16"),
    Row("fp8", "fp8 caches", _file("quantised")),
    Row("modes", "async scheduling, prefix caches, chunks that cut blocks, bfloat16, LoRA", _file("modes", "-k", "not UniProc and not priorities"), ci="no: chunks and prefixes are in the first row, both kinds of scheduling and bfloat16 in the row vllm-ascend; LoRA is a part of a prompt's identity in unit tests"),
    Row("uniproc", "the one worker in the scheduler's process: UniProc, which vLLM chooses for TP 1 × PP 1 (on a CPU only with `VLLM_ENABLE_V1_MULTIPROCESSING=0`)", _file("modes", "-k", "UniProc"), ci="no: that worker's code is the same, vLLM calls it from another place"),
    Row("priorities", "priority scheduling on P and D (`--scheduling-policy priority`): D preempts, and an urgent request overtakes loads", _file("modes", "-k", "priorities"), ci="no: D's preemption is in the first row"),
    Row("pictures", "pictures in a prompt (a small PaliGemma)", _file("pictures"), ci="no: a picture's hash in a prompt's identity is in unit tests"),
    Row("hot-blocks", "prefixes on P that the very step computes; a planted fault", _file("hot_blocks"), ci="no: the simulator has this rule and its fault"),
    Row("first-token", "P's first token: sampling, log-probabilities, penalties, grammars, stops, n", _file("first_token")),
    Row("orders", "P first, both at once: routers of others", _file("routers")),
    Row("both", "both roles in one engine", _file("both")),
    Row("multi", "behind a MultiConnector, beside other connectors", _file("beside")),
    Row("aggregator", "MLA, TP 4→2: vLLM's aggregator of four workers' reports, without a model", _file("aggregator"), "requests, blocks", ci="all"),
    Row("ray", "workers of a Ray cluster (`--distributed-executor-backend ray`), TP 2→1", _file("ray"), ci="no: an environment of its own"),
    *map(_release, RELEASES),
    Row("releases", "schedulers and hooks of vLLM 0.23, 0.26, 0.29, 0.31, 0.33, without a model", ("tests/unit/releases/test_releases.py",), "scenarios", "0.23.0–0.33.0", "no: an environment for each release"),
    Row("groups-0.23", "sliding windows and recurrent states under vLLM 0.23", _file("releases_groups"), f"{ONE}; by gap in bfloat16", "0.23.0", "no: an environment of its own; the row vllm-ascend is vLLM 0.23 too"),
    Row("lifecycle", "vLLM's own tests of a connector's life cycle, with this one in NIXL's place", _file("vllm_lifecycle"), "their assertions", "0.32.0, 0.33.0", "no: vLLM's source distributions, and an environment for 0.33"),
    Row("around", "vLLM's own tests of the handshake across stages, of MultiConnector, and of the scheduler beside a connector, with this one in them", _file("vllm_around"), "their assertions", "0.32.0, 0.33.0", "no: vLLM's source distributions, and an environment for 0.33"),
    Row("rollout", "an earlier state of this package on P or on D", _file("rollout")),
    Row("previous", "the same without engines: each reads what the other writes", ("tests/unit/releases/test_previous.py",), "every message", "–", "all"),
    Row("vllm-ascend", "vllm-ascend 0.23.0.post1 on a CANN in host memory: GQA, MHA, MQA, MLA; pipelines, graphs, the recompute scheduler", (PAIRS, "-k", "(gqa or mha or mqa or mla) and not dcp and not pcp and not multi"), ASCEND, "0.23.0"),
    Row("vllm-ascend-experts", "the same with experts apart, data parallelism, MTP (P and D with other numbers of drafts), Eagle3 and DFlash, with MLA too", (PAIRS, "-k", "(moe or mtp or eagle3 or dflash) and not qwen3next and not dsa and not dsv4 and not dcp"), ASCEND, "0.23.0", FOUR_SETS),
    Row("vllm-ascend-deltanet", "the same with recurrent states: Qwen3-Next 1→1, 2→1, 1→2, with MTP, with prefix caching", (PAIRS, "-k", "qwen3next"), ASCEND, "0.23.0", FOUR_SETS),
    Row("vllm-ascend-dsa", "the same with a sparse indexer: DeepSeek-V3.2 1→1, 2→1, 1→2, with MTP, in int8, both; GLM-5", (PAIRS, "-k", "dsa"), ASCEND, "0.23.0", FOUR_SETS),
    Row("vllm-ascend-compressed", "the same with compressed latents: DeepSeek-V4 1→1, 2→1, 1→2, with MTP (1 token on P, 3 on D)", (PAIRS, "-k", "dsv4"), ASCEND, "0.23.0", FOUR_SETS),
    Row("vllm-ascend-dcp", "the same with context parallelism: DCP 1→2, 2→1, 4→2, PCP 2→DCP 2", (PAIRS, "-k", "(dcp or pcp) and not both"), ASCEND, "0.23.0", "no: bytes are, with the workers of both sides (`tests/unit/runtime/test_runtime_context.py`); a set of engines takes 2.5 minutes"),
    Row("vllm-ascend-dcp-both", "the same with DCP on both sides alike: MLA 2→2, GQA 4→4", (PAIRS, "-k", "dcp and both"), ASCEND, "0.23.0", "no: as in the row above"),
    Row("vllm-ascend-multi", "the same behind AscendMultiConnector, beside RecomputeCPUOffloadConnector, which keeps on the host what D preempts: GQA 2→1", (PAIRS, "-k", "multi"), ASCEND, "0.23.0", FOUR_SETS),
    Row("vllm-ascend-pool", "the same beside AscendStoreConnector, a pool of prefixes (its memcache backend, over a client of the tests' own): GQA 1→1; P pushes what the pool has, also from D", ("tests/ascend_host/test_pool.py",), ASCEND, "0.23.0", FOUR_SETS),
)  # fmt: skip

REFUSED = {
    "context parallelism under vLLM itself, PCP on D, and beside draft models or sparse indexers": "refused (PD-CONF-005). vLLM's CPU attention "
    "has none of it; which rank keeps what is the backend's rule ([decisions.md](decisions.md#context-parallelism-ranks-that-divide-the-tokens))",
    "micro-batching (DBO)": "refused (PD-CONF-005): a layer's hook fires before all of the step's tokens have passed the layer. No hook says "
    "which micro-batch it is of, and vLLM turns DBO off on a CPU, so counting them could not be tried",
    "sleep mode": "refused (PD-CONF-005): it takes the cache's memory away, into which or from which others write, and asks no connector",
    "full graphs on P": "refused (PD-CONF-005): they would skip the layers' hooks. On D they stay",
    "ranks that come and go in a running engine (`--enable-elastic-ep`, `--enable-fault-tolerance`)": "refused (PD-CONF-005): a reservation has the "
    "addresses of the ranks, and an exchange the process groups, that there were at the start",
    "drafts, pipelines or MLA beside windows or states, except MTP beside Gated DeltaNet and all of DeepSeek-V4 but a pipeline; windows beside states": "refused (PD-CONF-005): "
    "none of vllm-ascend's configurations has them, and what a drafter reads, and which stage has which group, only a pair can show. "
    "[kinds.md](kinds.md) has for each kind of cache what is refused beside it",
    "`enable_kv_nz` of vllm-ascend": "refused (PD-CONF-005): D's MLA would read its cache as fractals, which P does not write",
    "request ids without a random part (`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`)": "refused (PD-CONF-005): two requests with one id would share blocks",
    "both roles in one engine (`kv_both`) behind our metaserver": "refused (PD-CONF-005): two engines full of each other's reservations would wait "
    "for each other's prefills ([routers.md](routers.md#both-roles-in-one-engine))",
    "both roles in one engine beside vllm-ascend, vLLM before 0.32, the ascend transport, pipelines, data or context parallelism, drafts, windows, states, or a MultiConnector": "refused (PD-CONF-005): routers ask for it in plain engines "
    "([routers.md](routers.md#both-roles-in-one-engine)); each of these changes what a scheduler holds for a peer, and needs a pair that shows it in both directions",
    "a layer's cache on one rank alone (KVPP of a later vllm-ascend)": "plans know such layers; what workers would report of memory that they do not "
    "have is not built, because no engine here has it ([decisions.md](decisions.md#context-parallelism-ranks-that-divide-the-tokens))",
    "vLLM's `test_kv_load_failure_recovery`, `test_invalid_blocks_correctness`, `test_error_propagation` and `test_output_aggregator`": "they show "
    "nothing of a connector: the first three put a mock in its place, the last has vLLM's aggregator alone. Failed loads with this connector are in the "
    "first row, its workers' reports through that aggregator in the row MLA, TP 4→2",
    "vLLM's second model runner": 'vLLM 0.32 does not start with it on a CPU: "Model Runner V2 requires Triton"',
    "sound (multimodal)": "its hash is part of a prompt's identity, as a picture's; no model was run",
    "vLLM 0.34 and later": "the package index has none yet; `.github/workflows/newest.yml` runs the newest each week",
    "OffloadingConnector's own copies": 'vLLM stops the start on a CPU: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs". '
    "Beside ours its scheduler and its worker ran with copies of the tests' own (`spec_module_path`), in the row of other connectors",
    "AscendStoreConnector's other backends and its layerwise mode beside ours": 'not run: its Mooncake backend takes the protocol of NPUs alone ("MooncakeBackend does '
    "not support protocol 'tcp'.\"), Yuanrong and memcache itself want servers. In its source it sends no handshake and no transfer parameters, and has no hook that a "
    "MultiConnector would ask of ours. One pool for engines of unequal TP is its own limit: a block's name has the rank, and not how many heads that rank has",
}


class Combination(NamedTuple):
    """A line of the README's table: its name, and what ran with direct pushes and with an exchange in P."""

    rows: tuple[str, ...]  # rows of docs/matrix.md by name
    english: tuple[str, str, str]
    chinese: tuple[str, str, str]


COMBINATIONS = (
    Combination(
        ("tp", "tp-wide", "regroup"),
        ("GQA, TP 1→1, 2→1, 1→2, 2→2, 4→2, 2→4", "real pair", "real pair (2→1, 4→2)"),
        ("GQA，TP 1→1、2→1、1→2、2→2、4→2、2→4", "真实的引擎对", "真实的引擎对（2→1、4→2）"),
    ),
    Combination(
        ("pp",),
        (
            "GQA, PP 2 → 1; any pipeline to any, cut alike or not: 1 → 2, 2 → 2, TP 2 → PP 2; MLA PP 1 → 2",
            "real pair",
            "real pair (TP 2 → PP 2)",
        ),
        (
            "GQA，PP 2 → 1；任意流水线到任意流水线，切分相同或不同：1 → 2、2 → 2、TP 2 → PP 2；MLA PP 1 → 2",
            "真实的引擎对",
            "真实的引擎对（TP 2 → PP 2）",
        ),
    ),
    Combination(
        ("dp-ep",),
        (
            "experts, P (TP × DP) → D (TP × DP): 2×1→1×2, 1×2→1×2, 1×2→2×1, 2×2→1×2",
            "real pair",
            "real pair (P of TP 2)",
        ),
        (
            "专家模型，P（TP × DP）→ D（TP × DP）：2×1→1×2、1×2→1×2、1×2→2×1、2×2→1×2",
            "真实的引擎对",
            "真实的引擎对（P 侧 TP 2）",
        ),
    ),
    Combination(
        ("vllm-ascend-dcp", "vllm-ascend-dcp-both"),
        (
            "context parallelism, under vllm-ascend: DCP on P, on D, on both; PCP on P",
            "byte-exact against a reference; vllm-ascend's engines on a CANN in host memory (DCP: MQA 2→1, 1→2, 4→2, MLA 2→1, 1→2, 2→2, GQA 2→1, 2→2; PCP: MQA)",
            "not done",
        ),
        (
            "上下文并行，需 vllm-ascend：P、D 或两侧的 DCP；P 侧的 PCP",
            "与参考结果逐字节一致；主机内存 CANN 上的 vllm-ascend 引擎（DCP：MQA 2→1、1→2、4→2，MLA 2→1、1→2、2→2，GQA 2→1、2→2；PCP：MQA）",
            "未做",
        ),
    ),
    Combination(
        ("one-head",),
        ("MQA 2→1, 1→2; MLA 1→1, 2→1, 1→2", "real pair", "not needed"),
        ("MQA 2→1、1→2；MLA 1→1、2→1、1→2", "真实的引擎对", "不需要"),
    ),
    Combination(
        ("drafts",),
        (
            "a draft model: MTP with MLA 1→1, 2→1, beside Gated DeltaNet 1→1, 2→1; Eagle3 with other heads than its target 1→1, 2→1; Eagle, a model of its own, ngram 1→1; DFlash 1→1, 2→1",
            "real pair",
            "real pair (Eagle3, DFlash 2→1)",
        ),
        (
            "草稿模型：MLA 的 MTP，1→1、2→1，Gated DeltaNet 旁的 MTP，1→1、2→1；与目标模型头数不同的 Eagle3，1→1、2→1；Eagle、独立的草稿模型、ngram 1→1；DFlash 1→1、2→1",
            "真实的引擎对",
            "真实的引擎对（Eagle3、DFlash 2→1）",
        ),
    ),
    Combination(
        ("indexer",),
        (
            "MLA with a sparse indexer 1→1, 2→1, 1→2; in int8 2→1; with Eagle3 beside it 2→1",
            "real pair",
            "real pair (Eagle3's layer)",
        ),
        ("带稀疏索引器的 MLA 1→1、2→1、1→2；int8 2→1；外加 Eagle3 2→1", "真实的引擎对", "真实的引擎对（Eagle3 的层）"),
    ),
    Combination(
        ("vllm-ascend-compressed",),
        (
            "DeepSeek-V4: compressed latents, windows, an indexer, 1→1, 2→1, 1→2; with MTP 1→1; under vllm-ascend",
            "vllm-ascend's engines on a CANN in host memory",
            "not needed",
        ),
        (
            "DeepSeek-V4：压缩的 latent、滑动窗口、索引器，1→1、2→1、1→2；MTP 1→1；需 vllm-ascend",
            "主机内存 CANN 上的 vllm-ascend 引擎",
            "不需要",
        ),
    ),
    Combination(
        ("fp8",),
        ("caches in fp8 (e4m3, e5m2): GQA 1→1, 2→1, 1→2; with windows or states 1→2", "real pair", "real pair (2→1)"),
        ("fp8 缓存（e4m3、e5m2）：GQA 1→1、2→1、1→2；带滑动窗口或循环状态 1→2", "真实的引擎对", "真实的引擎对（2→1）"),
    ),
    Combination(
        ("windows",),
        (
            "sliding windows in some layers or all (gpt-oss, Gemma-3, Mistral) 1→1, 2→1, 1→2, with vLLM 0.23, and 0.32 or later",
            "real pair",
            "real pair (2→1)",
        ),
        (
            "部分或全部层带滑动窗口（gpt-oss、Gemma-3、Mistral）1→1、2→1、1→2，需 vLLM 0.23，或 0.32 及更高版本",
            "真实的引擎对",
            "真实的引擎对（2→1）",
        ),
    ),
    Combination(
        ("states",),
        (
            "recurrent states beside attention or alone (Nemotron-H, Falcon-H1, Mamba-2, Qwen3-Next) 1→1, 2→1, 1→2, with vLLM 0.23, and 0.32 or later",
            "real pair",
            "not needed",
        ),
        (
            "循环状态，与注意力并存或单独使用（Nemotron-H、Falcon-H1、Mamba-2、Qwen3-Next）1→1、2→1、1→2，需 vLLM 0.23，或 0.32 及更高版本",
            "真实的引擎对",
            "不需要",
        ),
    ),
    Combination(
        (),
        (
            "any two TP sizes, 3→2, 6→4, 8→1, …; token-major and head-major; different block sizes",
            "byte-exact against a reference",
            "byte-exact over gloo",
        ),
        (
            "任意两个 TP 大小，3→2、6→4、8→1……；token-major 和 head-major；不同的块大小",
            "与参考结果逐字节一致",
            "经 gloo 逐字节一致",
        ),
    ),
)
