# SPDX-License-Identifier: Apache-2.0
"""A small random DeepSeek-V4: layers with a window alone, with an entry for 4 tokens and an indexer, and for 128.

Sizes that engines compare literally are the real ones: heads of 512 channels, 64 of them rotated, index keys of 128,
four streams. transformers makes the model; its checkpoint then gets the names and the configuration of DeepSeek's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILY = "deepseek_v4"
RATIOS = (0, 4, 128, 4)  # tokens of a layer's compressed entries; 0: none
DRAFTED_RATIOS = (4, 128, 4, 0)  # of a model whose draft layer is made from its last one: that has a window alone
EXPERTS, OF_A_TOKEN = 8, 2
HASHED = 3  # so many layers choose experts by the token itself, as in the checkpoints
FEW = 3.0  # factor of entries for 128 tokens, of which a prompt here has one or two beside a window of tokens
CHOSEN, EVERY = 16, 512  # entries that an indexer chooses; so many that prompts of 2,048 tokens have no more
# Weights that engines keep in float32. The others are rounded, so that every engine has the same.
WIDE = (".ape", "attn_sink", "gate.bias", "_fn", "_base", "_scale", "tid2eid")
# Without a factor, so that a layer without entries rotates the same whether an engine scales its rotation or not.
ROTATION = {"type": "yarn", "factor": 1, "beta_fast": 32, "beta_slow": 1}


def model(sizes: dict[str, Any], head_dim: int, window: int, ratios: tuple[int, ...], *, steady: bool) -> Any:
    """Return the model with random weights, in float32.

    `steady`: nothing in it chooses by rounded numbers. Each token has all experts, and each query all entries. (An
    engine's draft layer never chooses experts by the token, so to let all layers do so would be no way.)
    """
    import torch
    import transformers

    library: Any = transformers
    config = {**sizes, "moe_intermediate_size": sizes["intermediate_size"]}
    config.pop("intermediate_size")
    made = library.DeepseekV4ForCausalLM(
        library.DeepseekV4Config(
            **config,
            head_dim=head_dim,
            qk_rope_head_dim=64,
            q_lora_rank=128,
            o_groups=4,
            o_lora_rank=64,
            n_routed_experts=OF_A_TOKEN if steady else EXPERTS,
            n_shared_experts=1,
            num_experts_per_tok=OF_A_TOKEN,
            compress_ratios=list(ratios),
            num_hash_layers=HASHED,
            index_n_heads=16,  # so many that few entries have no score at all, among which the choice would be arbitrary
            index_topk=EVERY if steady else CHOSEN,
            sliding_window=window,
            swiglu_limit=2.0,  # so low that it matters
        )
    ).float()
    with torch.no_grad():
        for name, weight in (*made.named_parameters(), *made.named_buffers()):
            _fill(name, weight, made.config.n_routed_experts)
            if name.endswith(".compressor.kv_norm.weight") and ratios[int(name.split(".")[2])] == 128:
                weight.mul_(FEW)
            if not _stays_wide(name):
                weight.copy_(weight.bfloat16())
    return made


def _fill(name: str, weight: Any, experts: int) -> None:
    """Put random values where transformers puts the same everywhere, which would hide a weight that is not used."""
    import torch

    if name.endswith("norm.weight"):
        weight.copy_(1 + 0.1 * torch.randn(weight.shape))
    elif name.endswith("tid2eid"):
        weight.copy_(torch.rand(len(weight), experts).argsort(-1)[:, : weight.shape[1]])
    elif name.endswith(("position_bias", "sinks", "base")):
        weight.copy_(0.5 * torch.randn(weight.shape))
    elif name.endswith("scale"):
        weight.copy_(0.5 + 0.5 * torch.rand(weight.shape))
    elif name.endswith("e_score_correction_bias"):
        weight.copy_(0.1 * torch.randn(weight.shape))


def _stays_wide(name: str) -> bool:
    """Return whether a weight under transformers' name is one of `WIDE`."""
    wide = ("position_bias", "sinks", "e_score_correction_bias", ".fn", "hc_fn", "base", "scale", "tid2eid", "inv_freq")
    return name.endswith(wide)


def as_deepseek(directory: Path, ratios: tuple[int, ...], *, drafts: bool) -> None:
    """Give a checkpoint of transformers DeepSeek's names and configuration, and a draft layer if it is to have one."""
    import torch
    from safetensors.torch import load_file, save_file

    path, config = directory / "model.safetensors", directory / "config.json"
    weights = {}
    for name, weight in load_file(path).items():
        ours = name.replace(".attn.norm.", ".attn.kv_norm.").replace("model.hc_head.hc_", "hc_head_")
        weights[ours] = weight if ours.endswith(WIDE) else weight.to(torch.bfloat16)
    if drafts:
        weights |= _draft(weights, len(ratios) - 1)
    save_file(weights, path, metadata={"format": "pt"})
    facts = json.loads(config.read_text())
    for key in ("compress_rates", "layer_types", "mlp_layer_types", "partial_rotary_factor", "rope_parameters"):
        facts.pop(key)
    more = {
        "compress_ratios": [*ratios, 0],  # the last is of a draft layer
        "num_hash_layers": HASHED,
        "rope_scaling": {**ROTATION, "original_max_position_embeddings": facts["max_position_embeddings"]},
        "dtype": "bfloat16",
    }
    config.write_text(json.dumps(facts | more, indent=1))


def _draft(weights: dict[str, Any], last: int) -> dict[str, Any]:
    """Return the draft layer, which is the model's last layer over embeddings alone: see tools/support/drafts.py."""
    import torch

    from tools.support.drafts import EMBEDDING

    hidden = weights["model.norm.weight"].shape[0]
    draft = {name.split(f"layers.{last}.")[1]: weight for name, weight in weights.items() if f"layers.{last}." in name}
    draft |= {f"hc_head_{part}": weights[f"hc_head_{part}"] for part in ("fn", "base", "scale")}
    more = {
        "e_proj.weight": torch.eye(hidden),
        "h_proj.weight": torch.zeros(hidden, hidden),
        "enorm.weight": torch.full((hidden,), EMBEDDING),
        "hnorm.weight": torch.ones(hidden),
        "norm.weight": weights["model.norm.weight"],
        "head.weight": weights["head.weight"],
        "emb.tok_emb.weight": weights["model.embed_tokens.weight"],
    }
    draft |= {name: weight.to(torch.bfloat16) for name, weight in more.items()}
    return {f"mtp.0.{name}": weight.clone() for name, weight in draft.items()}
