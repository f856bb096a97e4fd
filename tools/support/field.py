# SPDX-License-Identifier: Apache-2.0
"""Admission of the P/D configurations in vllm-ascend's tests by this package.

vLLM's own parser reads a command line, in which this package's connector has replaced theirs as docs/migration.md says.
With neither a checkpoint nor an NPU at hand, the rest of what admission reads from vLLM's configuration comes from the
model's entry in field_models.json. No rule of admission is repeated here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import yaml
from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from tools.support import ascend_specs, compressed, small
from tools.support.bases import UNNAMED, Base
from tools.support.small import COMPRESSED, EXCHANGE, INT8, ITS, RECOMPUTES, Needs, needs
from vllm_ascend_pd import admission
from vllm_ascend_pd.admission import drafts, quantised
from vllm_ascend_pd.admission.kinds import index_tensors
from vllm_ascend_pd.cli.checkup.engine import our_connector
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.device.base import PLAIN, Packing
from vllm_ascend_pd.device.caches import CacheShape, describe
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import ConfigError, PdError
from vllm_ascend_pd.geometry.decide import MIN_SPAN, decide
from vllm_ascend_pd.geometry.layout import CacheGeometry, index_of
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.plugin import CONNECTOR
from vllm_ascend_pd.regroup.quantise import describe_for_decode
from vllm_ascend_pd.vllm_patches import compat, first_token, older_groups, tried

MODELS = Path(__file__).with_name("field_models.json")
MULTI = "MultiConnector"
# children of a MultiConnector that this package's connector replaces
PEER_CONNECTORS = re.compile(r"Mooncake|Llmdatadist|Nixl|P2p")
ADDRESS = "10.0.0.1"  # for every address that a configuration takes from its environment
BLOCK_SIZE = 128  # vllm-ascend's default, and that of its kernels
BLOCKS = 2  # of the described tensors
# With a release that has it so, these ask for int8: of latents with an indexer (sfa), and of an indexer's keys (li).
# vllm-ascend adds this value to those that vLLM knows.
INT8_FLAGS = {"sfa": "--kv-cache-dtype", "li": "--attention-config.indexer_kv_dtype"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ROLES = {"kv_producer": "P", "kv_consumer": "D"}


# ---- configurations


@dataclass(frozen=True)
class Command:
    """One engine's command line and environment, with variables replaced by values."""

    model: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, compare=False)


def commands(text: str) -> list[Command]:
    """Return all engines of a configuration file; of the ranks on one node only the first."""
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    by_node = {entry["node_index"]: entry for entry in content.get("config", [])}
    engines = []
    for entry in content.get("deployment") or content.get("templates") or []:
        node = by_node.get(entry.get("node_index"), {})
        values = {"LOCAL_IP": ADDRESS, "MASTER_IP": ADDRESS, "PORT": str(node.get("port_start", 8000))}
        values |= {key.upper(): str(value) for key, value in node.items()}
        values |= {"DP_RANK": values.get("DP_RANK_START", "0"), "DP_ADDRESS": ADDRESS}
        environment = {key: _filled(str(value), values) for key, value in (entry.get("envs") or {}).items()}
        words = entry.get("server_cmd_template") or shlex.split(entry.get("server_cmd") or "")
        words = [_filled(str(word), {**environment, **values}) for word in words]
        model = str(content["model"])
        if words[:2] == ["vllm", "serve"]:
            model, words = words[2], words[3:]
        engines.append(Command(model, tuple(words), environment))
    return engines


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], match[0]), text)


# ---- command lines


class NotUnderstood(Exception):
    """vLLM's parser rejects the value of a flag."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NotUnderstood(message)


@lru_cache(maxsize=1)
def _parser() -> _Parser:
    parser = _Parser()  # type: ignore[no-untyped-call]
    make_arg_parser(parser)
    return parser


@dataclass(frozen=True)
class ParsedLine:
    """Result of vLLM's parser for a command line, and the flags that it does not know or rejects."""

    parsed: Any
    unknown: tuple[str, ...]
    int8: frozenset[str] = frozenset()  # what INT8_FLAGS asks for


def parse(words: Sequence[str], base: Base = UNNAMED) -> ParsedLine:
    flags, unknown = flags_of(words), []
    known = _parser()._option_string_actions
    int8 = {part for part, flag in INT8_FLAGS.items() if base.int8_by_flags and flags.get(flag) == ["int8"]}
    for part in int8:
        del flags[INT8_FLAGS[part]]
    for name in [name for name in flags if name.split(".")[0] not in known]:
        unknown.append(name)
        del flags[name]
    while True:
        try:
            parsed = _parser().parse_args([word for name, values in flags.items() for word in (name, *values)])
            if "sfa" in int8:
                parsed.kv_cache_dtype = "int8"
            return ParsedLine(parsed, tuple(unknown), frozenset(int8))
        except NotUnderstood as problem:
            named = re.match(r"argument (\S+?)(?:/\S+)?:", str(problem))
            rejected = [name for name in flags if named is not None and name.partition(".")[0] == named[1]]
            if not rejected:
                raise
            unknown += [f"{name} {' '.join(flags.pop(name))}" for name in rejected]


def flags_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values by flag; of a repeated flag the last, as in vLLM."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = re.sub(r"^-O(?=\d$)", "--optimization-level=", word).partition("=")
            flag, dot, key = name.partition(".")
            values = flags[flag.replace("_", "-") + dot + key] = [value] if equals else []
        else:
            values.append(word)
    return flags


# ---- the connector


def replaced(transfer: Mapping[str, Any], secret: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return their --kv-transfer-config with our connector, and the connectors that stay beside it.

    Follows docs/migration.md.
    """
    extra = dict(transfer.get("kv_connector_extra_config") or {})
    if transfer.get("kv_connector") == MULTI:
        children = list(extra.get("connectors") or [])
        index = next((i for i, child in enumerate(children) if PEER_CONNECTORS.search(child["kv_connector"])), None)
        if index is None:
            return dict(transfer), ()
        ours, _ = replaced({"kv_role": transfer.get("kv_role"), **children.pop(index)}, secret)
        return ours, tuple(child["kv_connector"] for child in children)
    kept = {key: value for key, value in extra.items() if key not in ("prefill", "decode")}
    ours = {**kept, "secret_file": secret, "side_channel_host": ADDRESS}
    if transfer.get("kv_role") == "kv_consumer":
        ours["metaserver_urls"] = [f"http://{ADDRESS}:8000"]
    same = {key: transfer[key] for key in ("kv_role", "engine_id", "kv_load_failure_policy") if key in transfer}
    return {"kv_connector": CONNECTOR, **same, "kv_connector_extra_config": ours}, ()


# ---- the model's cache


class PlainDevice:
    """An NPU's answers about the layout of a plain cache."""

    token_major = True

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        return PLAIN


def _full(total: int, size: int, tp: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=max(1, total // tp), head_size=size, head_size_v=size, dtype=dtype
    )


def tensors(spec: Any, base: Base = UNNAMED) -> tuple[torch.Tensor, ...]:
    """Return the tensors that vllm-ascend registers for a layer."""
    if isinstance(spec, MambaSpec):
        return tuple(
            torch.empty((BLOCKS, *shape), dtype=dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
    kind, dcp = type(spec).__name__, getattr(spec, "sfa_dcp_replicated_indexer_size", 1)
    if kind in ("FullAttentionSpec", "SlidingWindowSpec"):
        return _keys_and_values(spec, base)
    if kind == "AscendSFAIndexerCacheSpec":
        parts, copies = [(spec.head_size, spec.dtype), *[(1, torch.float16)] * spec.scale_dim], [dcp, dcp]
    elif kind == "AscendMLAAttentionSpec":
        parts = [(size, spec.dtype) for size in spec.parts if size]
        if getattr(spec, "cache_sparse_li_c8", False):
            parts[2:] = [(spec.parts[2], torch.int8), (1, torch.float16)]
        if spec.cache_sparse_sfa_c8:
            parts[:2] = [(_packed(*spec.parts[:2]), torch.int8)]
        keys = index_tensors(spec)
        copies = [1] * (len(parts) - keys) + [dcp] * keys
    else:
        raise NotImplementedError(f"{kind}: admission takes it, and its tensors are not described here")
    return tuple(
        torch.empty((count * BLOCKS, spec.block_size, 1, size), dtype=dtype)
        for count, (size, dtype) in zip(copies, parts, strict=False)
    )


def _keys_and_values(spec: FullAttentionSpec, base: Base) -> tuple[torch.Tensor, ...]:
    """Return K and V of a layer in blocks of the kernels, of which one of the group's is one or several."""
    size = spec.block_size if spec.block_size % BLOCK_SIZE else BLOCK_SIZE
    dims = (BLOCKS * (spec.block_size // size), size, spec.num_kv_heads)
    if base.takes_turns:
        both = torch.empty((dims[0], 2, *dims[1:], spec.head_size), dtype=spec.dtype)
        return both[:, 0], both[:, 1]
    return tuple(torch.empty((*dims, width), dtype=spec.dtype) for width in (spec.head_size, spec.head_size_v))


def _packed(latent: int, rope: int) -> int:
    """Return the bytes of a latent in int8: with its rope in bfloat16, and a scale for each 128."""
    return latent + 2 * rope + 4 * latent // 128


@dataclass(frozen=True)
class FieldModel:
    """An entry of field_models.json."""

    family: str
    facts: Mapping[str, Any]
    c8: str = ""  # the role with an int8 cache

    @property
    def kv_heads(self) -> int:
        return int(self.facts.get("kv_heads", 1))

    @property
    def head_size(self) -> int:
        return int(self.facts["head_dim"]) if "head_dim" in self.facts else sum(self.facts.get("mla", ()))

    @property
    def ratios(self) -> list[int]:
        """Tokens of an entry in each layer of a model that compresses them: first layers with a window alone."""
        alone = self.facts["windows"]
        return [0] * alone + [4 if n % 2 == 0 else 128 for n in range(self.facts["layers"] - alone)]

    def block_size(self, asked: int, tp: int) -> int:
        """Return the tokens of a block: beside states, as many kernels' blocks as a state's bytes take."""
        if "gdn" not in self.facts["caches"]:
            return asked
        states = self._delta_net(tp, asked)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(states.shapes, states.dtypes, strict=True))
        token = 2 * 2 * max(1, self.kv_heads // tp) * self.head_size
        return BLOCK_SIZE * max(1, -(-size // (token * BLOCK_SIZE)))

    def scales(self) -> dict[str, Any]:
        """Return the layers that have scales for heads in int8, whose cache P makes of its own."""
        one = dict.fromkeys(quantised.SCALES, torch.ones(self.kv_heads * self.head_size)) if self.c8 else {}
        return {name: SimpleNamespace(**one) for name in self.layers(drafts=False) if one}

    def spec(
        self, kind: str, tp: int, block_size: int, role: str, c8: Collection[str] = (), base: Base = UNNAMED
    ) -> Any:
        dtype = torch.int8 if self.c8 == role else torch.bfloat16
        if kind == "full":
            return _full(self.kv_heads, self.head_size, tp, block_size, dtype)
        if kind == "gdn":
            return self._delta_net(tp, block_size)
        if kind == "window":
            plain = _full(self.kv_heads, self.head_size, tp, block_size)
            return SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=plain.num_kv_heads,
                head_size=plain.head_size,
                dtype=plain.dtype,
                sliding_window=BLOCK_SIZE,
            )
        if kind == "mamba2":
            return self._mamba2(tp, block_size)
        if kind.endswith("Spec"):  # admission knows it by its name
            return type(kind, (), {"block_size": block_size})()
        return self._latent(kind, tuple(self.facts["mla"]), block_size, dtype, c8, base)

    def _delta_net(self, tp: int, block_size: int) -> MambaSpec:
        """Return Gated DeltaNet's states: the convolution's rows over q, k and v, and a matrix for each head of v."""
        keys, values, size, width = self.facts["gdn"]
        rows = (width - 1, (2 * keys + values) * size // tp)
        return MambaSpec(
            block_size=block_size,
            shapes=(rows, (values // tp, size, size)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        )

    def _mamba2(self, tp: int, block_size: int) -> MambaSpec:
        """Return Mamba-2's states: the convolution's rows over heads and groups, and a matrix for each head."""
        groups, heads, size, state, width = self.facts["mamba2"]
        rows = (width - 1, (heads * size + 2 * groups * state) // tp)
        return MambaSpec(
            block_size=block_size,
            shapes=(rows, (heads // tp, size, state)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=MambaAttentionBackendEnum.MAMBA2,
        )

    def by_layer(
        self, names: Sequence[str], spec: Any, c8: Collection[str] = (), base: Base = UNNAMED, dcp: int = 1
    ) -> dict[str, Any]:
        """Return the spec of each layer: layers without an indexer of their own have only latent and rope."""
        if len(self.facts.get("mla", ())) < 3:
            return dict.fromkeys(names, spec)
        every = self.facts.get("index_every", 1)
        with_indexer = [name for name in names if max(int(name.split(".")[2]) - 1, 0) % every == 0]
        if base.indexes_apart:
            keys = self._index(spec.block_size, "li" in c8, dcp)
            return dict.fromkeys(names, spec) | {index_of(name): keys for name in with_indexer}
        shared = self._latent("indexer", (*spec.parts[:2], 0), spec.block_size, spec.dtype, {*c8} - {"li"})
        return dict.fromkeys(names, shared) | dict.fromkeys(with_indexer, spec)

    def _latent(
        self,
        kind: str,
        parts: tuple[int, ...],
        block_size: int,
        dtype: torch.dtype,
        c8: Collection[str],
        base: Base = UNNAMED,
    ) -> Any:
        if not base.indexes_apart:
            indexer: dict[str, Any] = {"sparse_head_dim": parts, **{f"cache_sparse_{one}_c8": True for one in c8}}
            return ascend_specs.latent(block_size, parts, dtype, **(indexer if kind == "indexer" else {}))
        packed = kind == "indexer" and "sfa" in c8
        return ascend_specs.NewerMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=_packed(*parts[:2]) if packed else sum(parts[:2]),
            dtype=torch.int8 if packed else dtype,
            parts=parts[:2],
            cache_sparse_sfa_c8=packed,
        )

    def _index(self, block_size: int, int8: bool, dcp: int) -> Any:
        return ascend_specs.AscendSFAIndexerCacheSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.facts["mla"][2],
            dtype=torch.int8 if int8 else torch.bfloat16,
            scale_dim=int(int8),
            sfa_dcp_replicated_indexer_size=dcp,
        )

    def layers(self, *, drafts: bool) -> list[str]:
        count = self.facts["layers"] + (self.facts["mtp"] if drafts else 0)
        return [f"model.layers.{index}.self_attn.attn" for index in range(count)]


@dataclass(frozen=True)
class Known:
    """Contents of field_models.json: models by name, and separate draft models. And the release that has them."""

    models: Mapping[str, FieldModel]
    drafts: Mapping[str, Mapping[str, Any]]
    base: Base = UNNAMED

    @classmethod
    def read(cls, text: str) -> Known:
        content = json.loads(text)
        families = content["families"]
        models = {
            name: FieldModel(entry["family"], families[entry["family"]], entry.get("c8", ""))
            for name, entry in content["models"].items()
        }
        return cls(models, content["drafts"])


@lru_cache(maxsize=1)
def known_models() -> Known:
    return Known.read(MODELS.read_text())


# ---- one engine


@dataclass(frozen=True)
class Judged:
    """One engine with admission's refusals, first the one that the engine would raise. Without any it would start."""

    role: str
    tp: int
    dp: int
    refusals: tuple[PdError, ...]
    unknown: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    geometry: CacheGeometry | None = field(default=None, compare=False)
    needs: Needs = field(default_factory=Needs, compare=False)
    switches: frozenset[str] = field(default=frozenset(), compare=False)  # of vllm-ascend, that are on
    no_first: str = ""  # why no request starts with P's first token here


def judge(command: Command, known: Known) -> Judged:
    """Return admission's result for one engine. Raise KeyError for a model or a draft without an entry."""
    model, base = known.models[command.model], known.base
    flags = flags_of(command.words)
    with _surroundings(command) as secret, _under(base):
        ours, beside = replaced(json.loads(flags["--kv-transfer-config"][0]), secret)
        words = [*command.words, "--kv-transfer-config", json.dumps(ours)]
        if model.c8 and ours.get("kv_role") != model.c8:
            words += ["--kv-cache-dtype", "auto"]  # docs/migration.md
        line = parse(words, base)
        switches = small.switched(line.parsed.additional_config or {})
        asked = line.parsed.speculative_config
        draft = known.drafts[asked["model"]] if asked and "model" in asked else {}
        config = as_configured(line.parsed, model, draft)
        if RECOMPUTES in switches and config.kv_transfer_config.is_kv_consumer and base.schedulers:
            config.scheduler_config.schedulers = base.schedulers
        c8 = line.int8 if base.int8_by_flags else _c8(line.parsed)
        groups = SimpleNamespace(kv_cache_groups=_groups(config, model, draft, c8, base))
        refusals, geometry = _refusals(config, groups, base)
        no_first = _no_first(config)
    parallel = config.parallel_config
    role = _ROLES.get(config.kv_transfer_config.kv_role, "?")
    size, ranks = parallel.tensor_parallel_size, parallel.data_parallel_size
    wanted = _needs(config, model, c8, switches)
    switches |= {name for name, value in command.environment.items() if name.startswith(ITS) and value not in ("", "0")}
    return Judged(role, size, ranks, refusals, line.unknown, beside, geometry, wanted, frozenset(switches), no_first)


@contextmanager
def _under(base: Base) -> Iterator[None]:
    """Let this package take the installed vLLM for that of a release of vllm-ascend."""
    versions = {tried.VLLM: base.vllm, tried.VLLM_ASCEND: base.version}
    with (
        patch.object(compat, "is_vllm_ascend", lambda: base.ascend),
        patch.object(tried, "installed", versions.__getitem__),
        patch.object(older_groups, "unproven", lambda: base.no_groups),
    ):
        yield


def _no_first(config: Any) -> str:
    """Return why this engine neither takes nor sends P's first token, by each scheduler that it may have."""
    reasons = []
    for scheduler in config.scheduler_config.schedulers:
        config.scheduler_config.get_scheduler_cls = lambda one=scheduler: one
        reasons.append(first_token.unproven(config))
    return next(filter(None, reasons), "")


def _needs(config: Any, model: FieldModel, c8: Collection[str], switches: Collection[str]) -> Needs:
    """Return what a set of engines in small has to have. GDN's states stand for one kind, however many groups.

    Compressed latents have their index keys in int8 always, whether a flag asks for it or not.
    """
    parallel, drafting = config.parallel_config, config.speculative_config
    return needs(
        {kind + (INT8 if (c8 or model.c8) and kind != "compressed" else "") for kind in model.facts["caches"]},
        (drafting.method or "") if drafting is not None else "",
        ranks=parallel.data_parallel_size,
        divided=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        graphs=config.compilation_config.cudagraph_mode.name,
        switches=switches,
    )


def as_configured(parsed: Any, model: FieldModel, draft: Mapping[str, Any] = MappingProxyType({})) -> SimpleNamespace:
    """Return what admission reads of vLLM's configuration, made from the result of vLLM's parser."""
    rank = parsed.data_parallel_rank if parsed.data_parallel_rank is not None else parsed.data_parallel_start_rank or 0
    parallel = SimpleNamespace(
        tensor_parallel_size=parsed.tensor_parallel_size,
        pipeline_parallel_size=parsed.pipeline_parallel_size,
        data_parallel_size=parsed.data_parallel_size,
        data_parallel_index=rank,
        data_parallel_size_local=parsed.data_parallel_size_local or parsed.data_parallel_size,
        prefill_context_parallel_size=parsed.prefill_context_parallel_size,
        decode_context_parallel_size=parsed.decode_context_parallel_size,
        cp_kv_cache_interleave_size=parsed.cp_kv_cache_interleave_size or 1,
        use_ubatching=parsed.enable_dbo or (parsed.ubatch_size or 0) > 1,
        enable_fault_tolerance=parsed.enable_fault_tolerance,
    )
    facts = model.facts
    text = SimpleNamespace(num_hidden_layers=facts["layers"], hidden_size=facts["hidden"], vocab_size=facts["vocab"])
    text.n_groups = facts.get("mamba2", [0])[0]
    return SimpleNamespace(
        kv_transfer_config=parsed.kv_transfer_config,
        parallel_config=parallel,
        compilation_config=SimpleNamespace(cudagraph_mode=_graphs(parsed), static_forward_context=model.scales()),
        speculative_config=_drafting(parsed.speculative_config, model, draft),
        cache_config=SimpleNamespace(
            cache_dtype=parsed.kv_cache_dtype,
            block_size=model.block_size(parsed.block_size or BLOCK_SIZE, parsed.tensor_parallel_size),
        ),
        scheduler_config=SimpleNamespace(schedulers=(Scheduler,)),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[facts["architecture"]]),
            hf_text_config=text,
            quantization=parsed.quantization,
            dtype=torch.bfloat16,
            use_mla="full" not in facts["caches"],
            logits_processors=parsed.logits_processors,
            get_total_num_kv_heads=lambda: model.kv_heads,
            get_head_size=lambda: model.head_size,
        ),
    )


def _drafting(configured: Mapping[str, Any] | None, model: FieldModel, draft: Mapping[str, Any]) -> Any:
    """Return vLLM's speculative configuration, with the parts of the draft model's that admission reads."""
    if configured is None:
        return None
    speculative = drafts.described({**draft, **configured})
    config = SimpleNamespace(num_nextn_predict_layers=model.facts["mtp"])
    speculative.num_speculative_tokens = int(configured.get("num_speculative_tokens", 1))
    speculative.draft_model_config = SimpleNamespace(
        hf_config=config,
        quantization=None,
        get_hidden_size=lambda: model.facts["hidden"],
        get_total_num_kv_heads=lambda: draft.get("kv_heads", model.kv_heads),
        get_head_size=lambda: draft.get("head_dim", model.head_size),
    )
    return speculative


def _graphs(parsed: Any) -> Any:
    """Return the graph mode that vLLM chooses.

    None with eager mode, else the configured one, else the default of the optimization level; full graphs become
    piecewise where the connector requires it.
    """
    levels: Any = OPTIMIZATION_LEVEL_TO_CONFIG
    eager = levels[0]["compilation_config"]["cudagraph_mode"]
    default = levels[int(parsed.optimization_level)]["compilation_config"]["cudagraph_mode"]
    configured = parsed.compilation_config.cudagraph_mode
    mode = eager if parsed.enforce_eager else default if configured is None else configured
    extra = parsed.kv_transfer_config.kv_connector_extra_config
    piecewise = AscendPushConnector.requires_piecewise_for_cudagraph(extra)
    return type(mode).PIECEWISE if mode.has_full_cudagraphs() and piecewise else mode


def _c8(parsed: Any) -> set[str]:
    """Return the quantised parts of an indexer's cache in vllm-ascend's configuration: latent (sfa), index key (li)."""
    additional = parsed.additional_config or {}
    return {one for one in ("sfa", "li") if additional.get(f"enable_sparse_{one}_c8")}


def _with_drafts(spec: MambaSpec, tokens: int) -> MambaSpec:
    """Return a state as vLLM makes it with speculative decoding: a row and a block more for each drafted token."""
    (rows, dim), *rest = spec.shapes
    return dataclasses.replace(spec, shapes=((rows + tokens, dim), *rest), num_speculative_blocks=tokens)


def _groups(
    config: Any, model: FieldModel, draft: Mapping[str, Any], c8: Collection[str], base: Base
) -> list[SimpleNamespace]:
    """Return the groups as vLLM makes them.

    Layers that differ but need equally many blocks are one group with a spec for each layer.
    """
    parallel, size = config.parallel_config, config.cache_config.block_size
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    if model.facts["caches"] == [COMPRESSED]:
        drafted = model.facts["mtp"] if config.speculative_config is not None else 0
        made = compressed.groups(model.ratios, size, drafted, base.in_tokens)
        return list(compressed.made(made, BLOCKS).kv_cache_groups)
    names = model.layers(drafts=config.speculative_config is not None and not draft)
    groups: list[SimpleNamespace] = []
    kinds = model.facts["caches"]
    for index, kind in enumerate(kinds):
        spec = model.spec(kind, tp, size, config.kv_transfer_config.kv_role, c8, base)
        if kind == "gdn" and config.speculative_config is not None:
            spec = _with_drafts(spec, config.speculative_config.num_speculative_tokens)
        if kind in ("mla", "indexer") and str(config.cache_config.cache_dtype).startswith("fp8"):
            spec = dataclasses.replace(spec, dtype=torch.uint8)
        if kind == "indexer" and not base.indexes_apart:
            spec = dataclasses.replace(spec, sfa_dcp_replicated_indexer_size=dcp)
        specs = model.by_layer(names[index :: len(kinds)], spec, c8, base, dcp)
        if draft and not groups:
            specs[f"model.layers.{len(names)}.self_attn.attn"] = _full(draft["kv_heads"], draft["head_dim"], tp, size)
        if any(one != spec for one in specs.values()):
            spec = UniformTypeKVCacheSpecs(block_size=size, kv_cache_specs=specs)
        groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=list(specs)))
    return groups


def _refusals(config: Any, groups: Any, base: Base) -> tuple[tuple[PdError, ...], CacheGeometry | None]:
    """Return an engine's refusals in its order (configuration, the cache's groups, tensors), and the geometry."""
    try:
        our_connector(config.kv_transfer_config.kv_connector)
        push = PushConfig.parse(config.kv_transfer_config.kv_connector_extra_config)
    except ConfigError as refused:
        return (refused,), None
    problems: list[PdError] = [*admission.engine_refusals(config, push), *admission.group_refusals(groups)]
    try:
        Engine.of(config)
        admission.check_groups(groups)
        shape: CacheShape = admission.cache_shape(config, groups)
        caches = _caches([specs_of(group) for group in groups.kv_cache_groups], config.cache_config.block_size, base)
        device: Any = PlainDevice()
        if config.kv_transfer_config.is_kv_producer:
            made, _ = describe_for_decode(caches, shape, device, 0)
        else:
            made = describe(caches, shape, device)
    except ConfigError as refused:
        rest = [other for other in problems if str(other) != str(refused)]
        return (refused, *rest), None
    return tuple(problems), made.geometry


def specs_of(group: Any) -> dict[str, Any]:
    """Return the specs of a group's layers."""
    of = group.kv_cache_spec
    return dict(getattr(of, "kv_cache_specs", dict.fromkeys(group.layer_names, of)))


def _caches(groups: Sequence[dict[str, Any]], size: int, base: Base) -> dict[str, Any]:
    """Return the tensors of all layers."""
    specs = {name: spec for group in groups for name, spec in group.items()}
    if any(isinstance(spec, ascend_specs.AscendSlidingWindowMLASpec) for spec in specs.values()):
        return dict(compressed.tensors(groups, size, BLOCKS))
    return {name: tensors(spec, base) for name, spec in specs.items()}


@contextmanager
def _surroundings(command: Command) -> Iterator[str]:
    """Set the environment of a configuration, and yield the name of a file with a secret, which two hosts need.

    None of this process's own variables apply.
    """
    ours = ("VLLM_HOST_IP", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION")
    with tempfile.NamedTemporaryFile() as secret, patch.dict("os.environ"):
        for name in ours:
            os.environ.pop(name, None)
            if name in command.environment:
                os.environ[name] = command.environment[name]
        secret.write(b"s" * 32)
        secret.flush()
        yield secret.name


# ---- one configuration


@dataclass(frozen=True)
class FieldVerdict:
    """One configuration: its P's, its D's, and whether their caches fit each other."""

    name: str
    model: str
    p: tuple[Judged, ...]
    d: tuple[Judged, ...]
    pair: str  # the mode of P's pushes, or the mismatch; empty if a side does not start

    def refusals(self, side: str) -> tuple[PdError, ...]:
        """Return the refusals of all engines of "P" or "D", each once."""
        engines = self.p if side == "P" else self.d
        return tuple({str(refused): refused for engine in engines for refused in engine.refusals}.values())

    def starts(self, side: str) -> bool:
        return bool(self.p if side == "P" else self.d) and not self.refusals(side)

    @property
    def needs(self) -> Needs:
        """Return what a set of engines in small has to have to stand for this configuration."""
        each = [engine.needs for engine in (*self.p, *self.d)]
        return reduce(Needs.__or__, each, Needs(modes=frozenset({EXCHANGE} if self.pair == "regroup" else ())))

    @property
    def no_first(self) -> str:
        """Return why D does not begin with P's first token; empty: it does."""
        return next((engine.no_first for engine in (*self.d, *self.p) if engine.no_first), "")

    @property
    def both(self) -> bool:
        return self.starts("P") and self.starts("D") and not self.pair.startswith("PD-")


def verdict(name: str, text: str, known: Known) -> FieldVerdict:
    all_commands = commands(text)
    engines = list(dict.fromkeys(judge(command, known) for command in all_commands))
    p, d = (tuple(engine for engine in engines if engine.role == role) for role in ("P", "D"))
    strays = [engine for engine in engines if engine.role == "?"]  # with both roles: they count on both sides
    p, d = (*p, *strays), (*d, *strays)
    return FieldVerdict(name, all_commands[0].model, p, d, pair_of(p, d))


def pair_of(p: Sequence[Judged], d: Sequence[Judged]) -> str:
    ours, theirs = ([engine.geometry for engine in side] for side in (p, d))
    if not ours or not theirs or ours[0] is None or theirs[0] is None:
        return ""
    differing = mismatches(ours[0], theirs[0])
    if differing:
        return f"{differing[0].error().code}: {differing[0]}"
    return decide(ours[0], theirs[0], "auto", MIN_SPAN).mode
