# SPDX-License-Identifier: Apache-2.0
"""Draft models: those that are proven, what distinguishes them, and their layers.

vLLM runs a draft model after the target and puts its layers into the target's cache, in the same group. The number of
drafted tokens may differ between engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.errors import ConfigError, not_proven
from vllm_ascend_pd.vllm_patches import compat

_WITH_LAYERS = ("mtp", "eagle3", "eagle", "dflash", "draft_model")
_PROVEN = (*_WITH_LAYERS, "ngram")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def described(speculative: Mapping[str, Any]) -> Any:
    """Return a --speculative-config under vLLM's own names, for checks without a model.

    What it does not give is None or False.
    """
    method = speculative.get("method")
    flags = ("disable_padded_drafter_batch", "parallel_drafting", "num_speculative_tokens_per_batch_size")
    given = {name: speculative.get(name) not in (None, False, "false", "False") for name in flags}
    kind = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    return SimpleNamespace(method=kind, draft_model_config=None, **given)


def refusals(speculative: Any, parallel: Any, role: str) -> Iterator[ConfigError]:
    """Yield what is not proven of a draft model."""
    if speculative is None or speculative.method is None:
        return
    if speculative.method not in _PROVEN:
        yield not_proven(f"Speculative decoding with {speculative.method}", f"Use {', '.join(_PROVEN)}, or none.")
        return
    if speculative.method == "draft_model" and compat.is_vllm_ascend():
        known = ", ".join(method for method in _PROVEN if method != "draft_model")
        yield not_proven("A separate draft model under vllm-ascend", f"Use {known}, or none.")
    model = speculative.draft_model_config
    modules = (model and getattr(model.hf_config, "num_nextn_predict_layers", None)) or 1
    if speculative.method == "mtp" and modules > 1:
        # vLLM runs the second and later layers on drafted tokens only: their cache of the prompt is never computed.
        yield not_proven(f"A draft model of {modules} MTP layers", "Start without it.")
    if getattr(speculative, "disable_padded_drafter_batch", False):
        yield not_proven("disable_padded_drafter_batch", "Leave it out.")
    if speculative.method != "dflash" and getattr(speculative, "parallel_drafting", False):
        yield not_proven("parallel_drafting", "Leave it out.")
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        # For batch sizes with 0 tokens the draft model does not run, and a prompt prefilled then lacks its layers' KV.
        yield not_proven("num_speculative_tokens_per_batch_size", "Use one num_speculative_tokens.")
    # vllm-ascend has MTP beside a pipeline, on P alone: the last stage runs it.
    staged = speculative.method == "mtp" and role == "kv_producer" and compat.is_vllm_ascend()
    if parallel.pipeline_parallel_size > 1 and not staged:
        yield not_proven("A draft model with pipeline parallelism", "Start with -pp 1, or without a draft model.")


def drafter(speculative: Any) -> str:
    """Return a description of the draft model, which must be equal on both sides; empty without one with a cache."""
    if speculative is None or speculative.method not in _WITH_LAYERS:
        return ""
    model = speculative.draft_model_config
    facts = {
        "method": speculative.method,
        "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ["?"]),
        "layers": getattr(model.hf_config, "num_hidden_layers", "?"),
        "hidden": model.get_hidden_size(),
        "kv_heads": model.get_total_num_kv_heads(),
        "head": model.get_head_size(),
        "quantization": model.quantization or "none",
    }
    return " ".join(f"{key}={value}" for key, value in facts.items())


def layers(config: Any, names: Iterable[str]) -> frozenset[str]:
    """Return the draft model's layers. vLLM numbers them on from the target's, or puts a prefix before their names.

    A layer of the target must never be taken for one of these: P may lack a draft model's layers.
    """
    if not drafter(config.speculative_config):
        return frozenset()
    target_layers = int(config.model_config.hf_text_config.num_hidden_layers)

    def is_draft(name: str) -> bool:
        number = _LAYER.search(name)
        return name.startswith(("draft_model.", "mtp.")) or (number is not None and int(number[1]) >= target_layers)

    return frozenset(filter(is_draft, names))
