# SPDX-License-Identifier: Apache-2.0
"""Modes in docs/matrix.md and the READMEs: the tests that show one, or why none does."""

from __future__ import annotations

from typing import NamedTuple

from tools.support.environments import NEWEST, RELEASES

INTEGRATION = "tests/integration/test_"
ONE = "tokens of one engine"
PAIRS = "tests/ascend_host/test_pairs.py"
APART = "switches or shapes or field or others or sizes or multi or older"  # first words of sets that have rows of their own
FIVE_SETS = "no: five sets of engines are, in the rows vllm-ascend and vllm-ascend-dcp"
ASCEND = "tokens of one vllm-ascend engine; bytes"


class MatrixRow(NamedTuple):
    name: str
    mode: str
    tests: tuple[str, ...]  # arguments of pytest
    how: str = ONE
    vllm: str = NEWEST
    ci: str = "one"  # which of its tests: all, one (a representative), or none and the reason


def _file(name: str, *words: str) -> tuple[str, ...]:
    return f"{INTEGRATION}{name}.py", *words


def _release(release: str) -> MatrixRow:
    mixed = f" (its Python over {NEWEST}'s compiled parts)" if release > NEWEST else ""
    mode = f"vLLM {release}{mixed}: P and D, and either beside {NEWEST}; grammars, drafts"
    return MatrixRow(
        f"vllm-{release}",
        mode,
        _file("releases_real", "-k", release),
        vllm=release,
        ci="no: an environment for each release",
    )


ROWS = (
    MatrixRow("tp", "GQA, TP 1→1 and 2→1: chunks, prefixes, preemption, aborts, failed loads", _file("gqa"), ci="all"),
    MatrixRow("tp-wide", "GQA, TP 4→2, 2→4, 3→2, 2→3", _file("wide"), ci="no: TP 2→1 is in the first row, plans of all sizes are in unit tests"),
    MatrixRow("regroup", "the exchange between P's ranks, forced", _file("regroup"), ci="no: `gqa 2to1 regrouped` of the row vllm-ascend is"),
    MatrixRow("one-head", "MQA TP 2→1, 1→2; MLA 1→1, 1→2, 2→1", _file("one_head"), ci="all"),
    MatrixRow("pp", "pipelines on P, on D, on both, cut unequally; TP beside them", _file("stages"), ci="no: a pipeline on both sides is in the first row"),
    MatrixRow("dp-ep", "data parallelism with expert parallelism, internal, hybrid and external", _file("ranks")),
    MatrixRow("hosts", "a D whose ranks are on two hosts: network namespaces of one machine, each with a loopback of its own", _file("hosts"), ci="no: not each machine allows network namespaces; addresses of ranks are in the row above"),
    MatrixRow("headless", "P and D with one server each and a second rank on a host without one (`--headless`), started by the scripts", _file("headless"), ci="no: command lines are in unit tests, a server for two ranks is in the row of data parallelism"),
    MatrixRow("drafts", "draft models: MTP, also beside states, Eagle, Eagle3, DFlash, a model, ngram", _file("drafts")),
    MatrixRow("indexer", "sparse indexers, unlike layers, int8 with scales", _file("indexers")),
    MatrixRow("windows", "sliding windows, several groups", _file("windows")),
    MatrixRow("states", "recurrent states: Mamba-2, Gated DeltaNet", _file("states"), f"{ONE}; by gap in bfloat16"),
    MatrixRow("fp8", "fp8 caches", _file("quantised")),
    MatrixRow("modes", "async scheduling, prefix caches, chunks that cut blocks, bfloat16, LoRA", _file("modes", "-k", "not UniProc and not priorities")),
    MatrixRow("uniproc", "the one worker in the scheduler's process: UniProc, which vLLM chooses for TP 1 × PP 1 (on a CPU only with `VLLM_ENABLE_V1_MULTIPROCESSING=0`)", _file("modes", "-k", "UniProc"), ci="all"),
    MatrixRow("priorities", "priority scheduling on P and D (`--scheduling-policy priority`): D preempts, and an urgent request overtakes loads", _file("modes", "-k", "priorities"), ci="all"),
    MatrixRow("pictures", "pictures in a prompt (a small PaliGemma)", _file("pictures"), ci="all"),
    MatrixRow("hot-blocks", "prefixes on P that the very step computes; a planted fault", _file("hot_blocks"), ci="no: the simulator has this rule and its fault"),
    MatrixRow("first-token", "P's first token: sampling, log-probabilities, penalties, grammars, stops, n", _file("first_token")),
    MatrixRow("orders", "P first, both at once: routers of others", _file("routers")),
    MatrixRow("multi", "behind a MultiConnector, beside other connectors", _file("beside")),
    MatrixRow("aggregator", "MLA, TP 4→2: vLLM's aggregator of four workers' reports, without a model", _file("aggregator"), "requests, blocks", ci="all"),
    MatrixRow("ray", "workers of a Ray cluster (`--distributed-executor-backend ray`), TP 2→1", _file("ray"), ci="no: an environment of its own"),
    *map(_release, RELEASES),
    MatrixRow("second-runner", "vLLM's second model runner, its kernels in Triton's interpreter: on D, and on both; P's first token, prefixes, preemption on D", _file("second_runner"), vllm="0.33.0", ci="no: an environment of its own, and an interpreter is slow"),
    MatrixRow("releases", "schedulers and hooks of vLLM 0.23, 0.30, 0.33, for either model runner, without a model", ("tests/unit/releases/test_releases.py",), "scenarios", "0.23.0–0.33.0", "no: an environment for each release"),
    MatrixRow("groups-0.23", "sliding windows and recurrent states under vLLM 0.23", _file("releases_groups"), f"{ONE}; by gap in bfloat16", "0.23.0", "no: an environment of its own; the row vllm-ascend-older is vLLM 0.23 too"),
    MatrixRow("lifecycle", "vLLM's own tests of a connector's life cycle, with this one in NIXL's place", _file("vllm_lifecycle"), "their assertions", "0.32.0, 0.33.0", "no: vLLM's source distributions, and an environment for 0.33"),
    MatrixRow("around", "vLLM's own tests of the handshake across stages, of MultiConnector, and of the scheduler beside a connector, with this one in them", _file("vllm_around"), "their assertions", "0.32.0, 0.33.0", "no: vLLM's source distributions, and an environment for 0.33"),
    MatrixRow("rollout", "an earlier state of this package on P or on D", _file("rollout")),
    MatrixRow("previous", "the same without engines: each reads what the other writes", ("tests/unit/releases/test_previous.py",), "every message", "–", "all"),
    MatrixRow("vllm-ascend", "vllm-ascend on a CANN in host memory: GQA (Llama, Qwen2, Qwen3), MHA, MQA, MLA (DeepSeek-V2, V3); pipelines, graphs, the recompute scheduler", (PAIRS, "-k", f"(gqa or qwen2 or qwen3 or mha or mqa or mla or dsv3) and not (qwen3next or dcp or pcp or {APART})"), ASCEND, "0.30.0"),
    MatrixRow("vllm-ascend-older", "the same under the release before: GQA 1→1 and 2→1 through an exchange, MLA, DeepSeek-V3, MTP with the recompute scheduler and full graphs, Qwen3-Next, DeepSeek-V4, heads in int8 on D", (PAIRS, "-k", "older"), ASCEND, "0.23.0", "no: an environment for each release"),
    MatrixRow("vllm-ascend-experts", "the same with experts apart, data parallelism, MTP (P and D with other numbers of drafts), Eagle3 and DFlash, with MLA too", (PAIRS, "-k", f"(moe or mtp or eagle3 or dflash) and not (qwen3next or dsa or dsv4 or dcp or {APART})"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-deltanet", "the same with recurrent states: Qwen3-Next 1→1, 2→1, 1→2, with MTP, with prefix caching", (PAIRS, "-k", f"qwen3next and not ({APART})"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-dsa", "the same with a sparse indexer: DeepSeek-V3.2 1→1, 2→1, 1→2, with MTP, in int8, both; GLM-5", (PAIRS, "-k", f"dsa and not (dcp or {APART})"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-int8", "the same with heads in int8 on D alone (C8 of Qwen3 and GLM-4.7), which P makes of its own cache: 1→1, 2→1 by either kernels, 1→2 with full graphs; what loses its blocks goes on through P", (PAIRS, "-k", f"c8 and not ({APART})"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-compressed", "the same with compressed latents: DeepSeek-V4 1→1, 2→1, 1→2, with MTP (1 token on P, 3 on D)", (PAIRS, "-k", f"dsv4 and not ({APART})"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-dcp", "the same with context parallelism: DCP 1→2, 2→1, 4→2, PCP 2→DCP 2", (PAIRS, "-k", "(dcp or pcp) and not (both or dsa or shapes or field)"), ASCEND, "0.23.0, 0.30.0"),
    MatrixRow("vllm-ascend-dcp-both", "the same with DCP on both sides alike: MLA 2→2, GQA 4→4", (PAIRS, "-k", "dcp and both"), ASCEND, "0.30.0", "no: one set is, in the row vllm-ascend-dcp; bytes of all sizes are, with the workers of both sides (`tests/unit/runtime/test_runtime_context.py`)"),
    MatrixRow("vllm-ascend-dcp-dsa", "the same with a sparse indexer, whose keys each rank has whole: DeepSeek-V3.2, DCP 2→1, also in int8, 1→2, 4→2", (PAIRS, "-k", "dcp and dsa"), ASCEND, "0.30.0", "no: as in the row above"),
    MatrixRow("vllm-ascend-switches", "the same with switches of vllm-ascend's own configurations: flash communication, tokens divided on P (DSA-CP), a shared expert apart, a divided output head, balanced experts", (PAIRS, "-k", "switches"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-shapes", "the same in other shapes: PCP 2→1 (GQA, MLA); MTP PP 2→1, 1→2, 4→2, and 2→2 without async scheduling, with prefixes; Eagle3 1→2, 2→2, 4→2; MLA that D preempts; Qwen3-Next 2→2, 4→2, and its prefixes with the recompute scheduler; DeepSeek-V4 2→2, and its prefixes", (PAIRS, "-k", "shapes and not dsa"), ASCEND, "0.23.0, 0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-shapes-dsa", "the same with a sparse indexer in other shapes: PP 2→1; TP 2→2 without async scheduling, with prefixes; 4→2; 2→1 with MTP (1 token on P, 3 on D) and prefixes, in int8 with prefixes, GLM-5; preemption", (PAIRS, "-k", "shapes and dsa"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-sizes", "the same in the sizes that the rows above have not of each kind: MHA and MQA 1→1, 2→1, 1→2, 2→2, 4→2, MoE with experts apart 1→1, 1→2, 4→2, MLA 4→2; a pipeline on P with each; an exchange of MHA; prefixes and preemption of MHA, MQA, MoE", (PAIRS, "-k", "sizes and not (dsa or dsv4 or qwen3next)"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-sizes-dsa", "the same with a sparse indexer: DeepSeek-V3.2 in int8 and with MTP, GLM-5 1→2, 2→2, 4→2", (PAIRS, "-k", "sizes and dsa"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-sizes-groups", "the same with several groups: DeepSeek-V4 4→2, with MTP 1→2, 2→2, 4→2; Qwen3-Next with MTP 1→2, 2→2, 4→2", (PAIRS, "-k", "sizes and (dsv4 or qwen3next)"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-field", "vllm-ascend's own configurations in small, with their kinds of cache, their drafts and their modes ([field.md](field.md)): experts apart, data parallelism on D or on both, D's full graphs and recompute scheduler, an exchange on P where P is one that would make one", (PAIRS, "-k", "field"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-others", "the same with what none of vllm-ascend's own configurations has: a pipeline on D and on both, Eagle, ngram", (PAIRS, "-k", "others"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-multi", "the same behind AscendMultiConnector, beside PreemptOffloadConnector, which keeps on the host what D preempts: GQA 2→1, DeepSeek-V3.2 in int8", (PAIRS, "-k", "multi"), ASCEND, "0.30.0", FIVE_SETS),
    MatrixRow("vllm-ascend-pool", "the same beside AscendStoreConnector, a pool of prefixes (its memcache backend, over a client of the tests' own): GQA and DeepSeek-V4 1→1, each also layer by layer, MLA, DeepSeek-V3.2 in int8; P pushes what the pool has, also from D", ("tests/ascend_host/test_ascend_store.py",), ASCEND, "0.30.0", FIVE_SETS),
)  # fmt: skip


class RefusedFeature(NamedTuple):
    """Feature that an engine refuses to start with (PD-CONF-005), the reason, and the names in errors.not_proven."""

    mode: str
    why: str
    features: tuple[str, ...]  # as in the code; … stands for what it inserts


CONTEXT = "[decisions](decisions/context-parallelism.md)"
GROUPED = "A model with sliding windows, states or several KV cache groups"

REFUSED = (
    RefusedFeature("context parallelism without vllm-ascend", f"which rank keeps which tokens is vllm-ascend's rule. In vLLM the backend and the release decide, and its CPU backends refuse DCP ({CONTEXT})", ("Context parallelism without vllm-ascend",)),
    RefusedFeature("context parallelism as PCP on D, or beside a pipeline, vLLM's fp8, windows, states or several groups; PCP beside a sparse indexer", f"none of these was tried with engines. Windows and states are not divided; with PCP an indexer's keys are ({CONTEXT})", ("Prefill context parallelism on decode", "Context parallelism with pipeline parallelism", "Context parallelism with a quantised KV cache", "Context parallelism with sliding windows, states or several groups", "Prefill context parallelism with a sparse indexer", "A sparse indexer whose keys are not whole on each of … ranks of DCP")),
    RefusedFeature("context parallelism beside speculative decoding", f"MTP has it from vllm-ascend 0.30 on; with more than one drafted token 0.23.0.post1 ends by itself at its first prefill ({CONTEXT})", ("Speculative decoding with context parallelism (…)",)),
    RefusedFeature("DCP among ranks that do not hold one head, or in runs of tokens that do not end with a block", f"the rule of which rank holds which token is that of ranks with one head, and vllm-ascend wants runs of whole blocks beside a connector ({CONTEXT})", ("Decode context parallelism of … among … ranks that do not hold one head", "Context parallelism in runs of … tokens, which do not end with a block of …,")),
    RefusedFeature("a pipeline beside a draft model or a sparse indexer, except on P under vllm-ascend with MTP or an indexer", "these two have run there (sets `shapes … pp`). vllm-ascend itself refuses MTP with a pipeline on D. Of other drafts no engine has shown that their hooks fire on the last stage alone, and once; of an indexer on D's stages, and without vllm-ascend, the simulator alone ran ([decisions](decisions/stages-of-d.md))", ("A draft model with pipeline parallelism", "A sparse indexer with pipeline parallelism")),
    RefusedFeature("a pipeline on D under vllm-ascend with asynchronous scheduling", "0.30.0rc2 by itself gives wrong tokens behind a prompt that D computes in several steps, as it does after a failed load: an older step's end takes away the mark that keeps a request from its next step until its token is known (`patch_pp_mtp.py`), so the first stage computes with token 0. With `--no-async-scheduling` they are right", ("Asynchronous scheduling with pipeline parallelism on decode under vllm-ascend",)),
    RefusedFeature("a pipeline beside windows, states, several groups or an fp8 cache", "no pair has shown it: which stage has which group, only a pair can show", ("A cache with sliding windows, states or several groups, with pipeline parallelism", "A quantised KV cache with pipeline parallelism")),
    RefusedFeature("windows, states or several groups with a vLLM before 0.30 other than 0.23; behind a MultiConnector with one before 0.30", "these releases do not give a connector what it must know of groups. For 0.23 that is added around its scheduler ([kinds.md](kinds.md#recurrent-states))", (GROUPED, f"{GROUPED} (…)", f"{GROUPED} behind a MultiConnector")),
    RefusedFeature("windows, states or several groups under vllm-ascend, except Gated DeltaNet beside one group of full attention, and DeepSeek-V4", "only these two were tried with vllm-ascend", (f"{GROUPED} under vllm-ascend",)),
    RefusedFeature("windows beside states", "no pair has shown it, and none of vllm-ascend's configurations has them", ("A model with sliding windows beside recurrent states",)),
    RefusedFeature("windows or states beside MLA (except DeepSeek-V4), chunked local attention whose blocks are freed, and every other kind of cache", "none has been shown. Of a chunk that was freed nothing may be wanted at all ([kinds.md](kinds.md#sliding-windows))", ("A KV cache of kind …", "A KV cache of kind … in one of several groups")),
    RefusedFeature("DeepSeek-V4.1", "its rings of states are one block for each request, written over in turn, and its Engram layers keep hashes of a request's last tokens beside the cache: no plan here describes either ([kinds.md](kinds.md#deepseek-v4-under-vllm-ascend))", ("DeepSeek-V4.1 (rings of states, Engram's hashes beside the cache, dspark drafts)",)),
    RefusedFeature("windows with retained tokens before them; groups that vLLM does not transfer", "no pair has shown it", ("A sliding window with retained tokens before it", "A KV cache group that vLLM does not transfer")),
    RefusedFeature("recurrences other than Mamba-2 and Gated DeltaNet; states that every rank has whole; a `mamba_cache_mode` other than `none` and `align`", "which rank holds which part, and which block has the state after the prompt, is known of these alone ([kinds.md](kinds.md#recurrent-states))", ("A recurrent state of kind … with … parts", "A recurrent state that every rank has whole", "mamba_cache_mode …")),
    RefusedFeature("speculative decoding beside windows, Mamba-2 or several groups of attention; beside Gated DeltaNet other drafts than MTP", "what a drafter reads there, only a pair can show, and none of vllm-ascend's configurations has it. DeepSeek-V4 with MTP starts", ("Speculative decoding with sliding windows, Mamba-2 or several groups of attention", "A recurrent state of kind … with drafts", "A draft model other than MTP beside states")),
    RefusedFeature("MTP with prefix caching beside Gated DeltaNet, without vllm-ascend", "vLLM moves such states by a kernel that CPUs lack, so it was not shown there", ("A recurrent state with drafts in mamba_cache_mode …",)),
    RefusedFeature("drafts other than MTP, Eagle, Eagle3, DFlash, a separate draft model and ngram; under vllm-ascend a separate draft model", "none has been shown ([kinds.md](kinds.md#draft-models)). The last was tried: vllm-ascend's operator for its inputs (`npu_copy_and_expand_eagle_inputs`) is missing here", ("Speculative decoding with …", "A separate draft model under vllm-ascend")),
    RefusedFeature("several MTP layers; numbers of draft tokens by batch size", "vLLM computes the prompt for the first layer alone, and with 0 draft tokens for none: D would lack the KV of these layers", ("A draft model of … MTP layers", "num_speculative_tokens_per_batch_size")),
    RefusedFeature("`disable_padded_drafter_batch`; `parallel_drafting` without DFlash; a draft model with MLA for a target without", "none has been shown ([kinds.md](kinds.md#draft-models))", ("disable_padded_drafter_batch", "parallel_drafting", "A draft model with MLA for a target without")),
    RefusedFeature("quantised caches, except vLLM's fp8 without MLA, vllm-ascend's C8, and DeepSeek-V4's", "`int8_per_token_head` gives wrong answers on a CPU by itself, the others have no kernel there. vLLM's fp8 has not run under vllm-ascend ([kinds.md](kinds.md#quantised-caches))", ("A quantised KV cache (…)", "A quantised KV cache (…) under vllm-ascend")),
    RefusedFeature("vllm-ascend's int8 of heads on P, or in some layers only; on D, and on its P, beside drafts, states, several groups, context parallelism, a pipeline, other connectors, or with the second model runner; with `kv_load_failure_policy` recompute", "vllm-ascend writes it on D alone, whose attention beside a connector is only defined for steps of one token per request ([kinds.md](kinds.md#quantised-caches))", ("A prefill engine with its heads in int8", "A prefill engine for heads in int8 where …", "Heads in int8 with …", "Heads in int8 behind a MultiConnector", "Heads in int8 where …", "A cache of heads in int8 without scales of its checkpoint (…)")),
    RefusedFeature("fp8 beside speculative decoding", "no pair has shown it", ("A quantised KV cache with speculative decoding",)),
    RefusedFeature("fp8 with scales that an engine computes (`--calculate-kv-scales`), with several scales for a layer's keys or values, in some layers only, or in several formats", "P's and D's computed scales would differ; of the others P and D could not compare what a byte means ([kinds.md](kinds.md#quantised-caches))", ("A quantised KV cache with scales that an engine computes by itself", "A quantised KV cache with more than one scale for a layer's keys or values (…)", "A cache that is quantised in some layers only (…)", "A quantised KV cache whose layers do not say one format (…)")),
    RefusedFeature("a plain dtype of the cache that is not the model's", "vLLM's kernels for a CPU write values of the model's dtype into such a cache, over the next block", ("A KV cache in … under a model in …",)),
    RefusedFeature("layers with unlike heads, MLA in some layers only, entries for several tokens outside DeepSeek-V4", "of layers that differ, only latents of several sizes and a draft model's own heads have been shown ([kinds.md](kinds.md#kinds-of-caches-what-is-pushed-when))", ("A model whose layers have unlike heads", "A model with MLA in some layers only", "A compressed KV cache (one entry for several tokens)")),
    RefusedFeature("an indexer without MLA in its layer", "its own write has no hook: nothing would report when its keys are computed", ("An indexer's cache without MLA in the same layer (…)",)),
    RefusedFeature("micro-batching (DBO)", "a layer's hook fires before all of the step's tokens have passed the layer. No hook says which micro-batch it is of, and vLLM turns DBO off on a CPU, so counting them could not be tried", ("Micro-batching (DBO)",)),
    RefusedFeature("sleep mode", "it takes the cache's memory away, into which or from which others write; vLLM asks connectors only from 0.33 on. Nothing here could show it: vLLM has no sleep mode on a CPU, and vllm-ascend's allocator for it is in its compiled library", ("Sleep mode",)),
    RefusedFeature("full graphs on P", "they would skip the layers' hooks. On D they stay", ("cudagraph_mode … on prefill",)),
    RefusedFeature("ranks that come and go in a running engine (`--enable-elastic-ep`, `--enable-fault-tolerance`)", "a reservation has the addresses of the ranks, and an exchange the process groups, that there were at the start", ("…",)),
    RefusedFeature("`enable_kv_nz` of vllm-ascend", "D's MLA would read its cache as fractals, which P does not write", ("enable_kv_nz",)),
    RefusedFeature("`hamming_sparse` of vllm-ascend", "D would choose blocks by hashes of keys, in a cache that no connector is given", ("hamming_sparse",)),
    RefusedFeature("`dyntra_lb_config` of vllm-ascend", "its scheduler moves requests between ranks of D, and beside states counts a prefix as computed of which D has attention alone; no pair has run with it. Its balance scheduling (`enable_balance_scheduling`) vllm-ascend itself refuses for P and D", ("dyntra_lb_config",)),
    RefusedFeature("`xlite_graph_config` of vllm-ascend on P", "its graphs run without the layers' hooks", ("xlite_graph_config on prefill",)),
    RefusedFeature("platforms other than CPU and NPU", "there is no code that waits for the device's kernels before a layer is read", ("Platform …",)),
    RefusedFeature("request ids without a random part (`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`)", "two requests with one id would share blocks", ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",)),
)  # fmt: skip

NOT_RUN = {
    "a layer's cache on one rank alone (KVPP of a later vllm-ascend)": "no engine here has it, so plans do not know such "
    "layers, and what workers would report of memory that they do not have is not built ([decisions](decisions/context-parallelism.md))",
    "vLLM's `test_kv_load_failure_recovery`, `test_invalid_blocks_correctness`, `test_error_propagation` and `test_output_aggregator`": "they show "
    "nothing of a connector: the first three put a mock in its place, the last has vLLM's aggregator alone. Failed loads with this connector are in the "
    "first row, its workers' reports through that aggregator in the row MLA, TP 4→2",
    "vLLM's second model runner with more than heads, with drafts, and under vllm-ascend": "here Triton's interpreter runs its kernels, "
    "and vLLM's wheels for CPUs have no Triton; vllm-ascend's stops at its configuration without one",
    "sound (multimodal)": "its hash is part of a prompt's identity, as a picture's; no model was run",
    "vLLM 0.34 and later": "the package index has none yet; `.github/workflows/newest.yml` runs the newest each week",
    "OffloadingConnector's own copies": 'vLLM stops the start on a CPU: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs". '
    "Beside ours its scheduler and its worker ran with copies of the tests' own (`spec_module_path`), in the row of other connectors",
    "AscendStoreConnector's other backends beside ours": 'not run: its Mooncake backend takes the protocol of NPUs alone ("MooncakeBackend does '
    "not support protocol 'tcp'.\"), Yuanrong and memcache itself want servers. In its source it sends no handshake and no transfer parameters, and has no hook that a "
    "MultiConnector would ask of ours. One pool for engines of unequal TP is its own limit: a block's name has the rank, and not how many heads that rank has",
}


class Shown(NamedTuple):
    how: str  # a word of HOW
    what: str = ""  # sizes and kinds, for docs/matrix.md


class Combination(NamedTuple):
    """A line of the READMEs' table, and with its sizes of docs/matrix.md: direct pushes, and with an exchange in P."""

    rows: tuple[str, ...]  # rows of docs/matrix.md by name
    english: str
    chinese: str
    direct: Shown
    regrouped: Shown


HOW = {  # English, Chinese
    "real pair": "真实的引擎对",
    "CANN stand-in": "CANN 替身",
    "byte-exact": "逐字节一致",
    "not needed": "不需要",
    "not done": "未做",
}
NOT_NEEDED = Shown("not needed")

COMBINATIONS = (
    Combination(("tp", "tp-wide", "regroup"), "GQA, TP sizes equal or not", "GQA，TP 相等或不等",
        Shown("real pair", "TP 1→1, 2→1, 1→2, 2→2, 4→2, 2→4, 3→2, 2→3"), Shown("real pair", "2→1, 4→2")),
    Combination(("pp",), "pipelines, cut alike or not", "流水线并行，切分相同或不同",
        Shown("real pair", "PP 2→1, 1→2, 2→2, TP 2 → PP 2; MLA PP 1→2"), Shown("real pair", "TP 2 → PP 2")),
    Combination(("dp-ep",), "expert parallelism, with data parallelism", "专家并行，含数据并行",
        Shown("real pair", "2×1→1×2, 1×2→1×2, 1×2→2×1, 2×2→1×2 (TP × DP)"), Shown("real pair", "P of TP 2")),
    Combination(("vllm-ascend-dcp", "vllm-ascend-dcp-both", "vllm-ascend-dcp-dsa"), "context parallelism, under vllm-ascend", "上下文并行，在 vllm-ascend 下",
        Shown("CANN stand-in", "DCP with MQA 2→1, 1→2, 4→2, MLA 2→1, 1→2, 2→2, GQA 4→4, on P alone 4→2; PCP 2 → DCP 2 with MQA. With a sparse indexer DCP 2→1, also in int8, 1→2, 4→2. More sizes are byte-exact against a reference"), Shown("not done")),
    Combination(("one-head", "tp-wide"), "MQA and MLA", "MQA 和 MLA",
        Shown("real pair", "MQA 2→1, 1→2; MLA 1→1, 2→1, 1→2, 4→2"), NOT_NEEDED),
    Combination(("drafts",), "draft models: MTP, Eagle, Eagle3, DFlash, a separate draft model, ngram", "草稿模型：MTP、Eagle、Eagle3、DFlash、独立的草稿模型、ngram",
        Shown("real pair", "MTP with MLA and Eagle3 with other heads than its target 1→1, 2→1, 1→2, 4→2; MTP beside Gated DeltaNet 1→1, 2→1; DFlash 1→1, 2→1; Eagle, a separate draft model, ngram 1→1"), Shown("real pair", "Eagle3, DFlash 2→1")),
    Combination(("indexer",), "MLA with a sparse indexer", "带稀疏索引器的 MLA",
        Shown("real pair", "1→1, 2→1, 1→2, 4→2, also in int8; with Eagle3 beside it 2→1"), Shown("not needed", "MLA is whole on each rank. An Eagle3's layer beside it is exchanged, real pair 2→1")),
    Combination(("vllm-ascend-int8",), "heads in int8 on D, under vllm-ascend", "D 上以 int8 保存的各头，在 vllm-ascend 下",
        NOT_NEEDED, Shown("CANN stand-in", "Qwen3 1→1, 2→1, 1→2; with experts and data parallelism 1→1: P makes D's int8 in its exchange")),
    Combination(("vllm-ascend-compressed", "vllm-ascend-shapes", "vllm-ascend-sizes-groups"), "DeepSeek-V4, under vllm-ascend", "DeepSeek-V4，在 vllm-ascend 下",
        Shown("CANN stand-in", "1→1, 2→1, 1→2, 2→2, 4→2, with compressed latents, windows and an indexer; with MTP 1→1, 1→2, 2→2, 4→2"), NOT_NEEDED),
    Combination(("fp8",), "caches in fp8", "fp8 缓存",
        Shown("real pair", "GQA 1→1, 2→1, 1→2, 4→2 (e4m3, e5m2); with windows or states 1→2"), Shown("real pair", "2→1")),
    Combination(("windows", "groups-0.23"), "sliding windows in some layers or all", "部分或全部层带滑动窗口",
        Shown("real pair", "1→1, 2→1, 1→2, 4→2 (gpt-oss, Gemma-3, Mistral), with vLLM 0.23 and 0.32"), Shown("real pair", "2→1")),
    Combination(("states", "groups-0.23"), "recurrent states: Mamba-2, Gated DeltaNet", "循环状态：Mamba-2、Gated DeltaNet",
        Shown("real pair", "1→1, 2→1, 1→2 (Nemotron-H, also 4→2, Falcon-H1, Mamba-2, Qwen3-Next), with vLLM 0.23 and 0.32"), NOT_NEEDED),
    Combination((), "any two TP sizes, layouts and block sizes", "任意两个 TP 大小、布局和块大小",
        Shown("byte-exact", "against a reference: 3→2, 6→4, 8→1, …; token-major and head-major; different block sizes"), Shown("byte-exact", "over gloo")),
)  # fmt: skip
