# SPDX-License-Identifier: Apache-2.0
"""Draft models for the small random models: one layer, made from the target's last layer.

That layer decides most in the target. The draft sees the next token's embedding as its target does, attends over its
own cache as the target's last layer does, and so mostly proposes the target's token. With a wrong or missing cache of
the prompt it does not, which is what tests detect. The target's other layers add to the embedding what they attend to,
and nothing else: so much that answers show their cache, and so little that most drafts, which lack it, are right. A
draft with heads for a target with MLA is the exception: its attention is random, so that its drafts say nothing about
its cache, whose bytes are compared instead.

DFlash drafts all tokens in one pass, from their future positions: it sees none of the tokens before, only those in its
cache. So its target's last layer has the same query for every token, and only the position differs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

EMBEDDING = 0.08  # root mean square of an embedding; a norm with this weight leaves an embedding as it was
OF_ATTENTION = ("o_proj", "o_b_proj", "out_proj")
OUTPUTS = (*OF_ATTENTION, "down_proj")
# What the attention of the other layers adds to the residual stream, as a standard deviation, for heads of one. The
# draft's token is then the target's in 66 (DFlash) to 84 of 100 places, at half as much more in 52 to 77.
OTHER_LAYERS = 0.004
LAST_LAYER = 4.0  # the factor of what it adds
MASK, SHARPLY = 3, 4.0  # DFlash's token for a position to draft; the factor of its target's queries
LATENT = "self_attn.kv_a_proj_with_mqa.weight"  # of MLA
EXPERT = "mlp.experts.0.down_proj.weight"
OF_LLAMA = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def let_one_layer_decide(model: Any) -> None:
    layers = model.model.layers
    for layer in layers:
        for name, weight in layer.named_parameters():
            output = name.removesuffix(".weight")
            if output.endswith(OUTPUTS) and layer is layers[-1]:
                weight.mul_(LAST_LAYER)
            elif output.endswith(OUTPUTS):
                added = OTHER_LAYERS if output.endswith(OF_ATTENTION) else 0.0
                weight.mul_(added / (weight.std() * weight.shape[-1] ** 0.5))


def let_every_token_ask_alike(model: Any) -> None:
    """Give all embeddings a common part, and let the last layer's queries depend on that part alone.

    Its keys and values depend on all but that part; the factor on the queries makes its attention sharp.
    """
    import torch

    common = torch.nn.functional.normalize(torch.randn(model.config.hidden_size), dim=0)
    embeddings = model.model.embed_tokens.weight
    embeddings -= torch.outer(embeddings @ common, common)
    embeddings += EMBEDDING * common * model.config.hidden_size**0.5
    embeddings[MASK] = EMBEDDING * common * model.config.hidden_size**0.5
    attention = model.model.layers[-1].self_attn
    attention.q_proj.weight.copy_(torch.outer(attention.q_proj.weight @ common, common))
    attention.q_norm.weight.fill_(SHARPLY)
    for projection in (attention.k_proj, attention.v_proj):
        projection.weight -= torch.outer(projection.weight @ common, common)


def add_mtp_layer(directory: Path) -> None:
    """Add DeepSeek's MTP layer: of the model's own shape, numbered after the last one."""
    import torch

    weights, config = _read(directory)
    n, hidden = config["num_hidden_layers"], config["hidden_size"]
    prefix = f"model.layers.{n}."
    for name in [name for name in weights if name.startswith(f"model.layers.{n - 1}.")]:
        weights[name.replace(f"layers.{n - 1}.", f"layers.{n}.")] = weights[name]
    weights[prefix + "enorm.weight"] = torch.full((hidden,), EMBEDDING)
    weights[prefix + "hnorm.weight"] = torch.ones(hidden)
    weights[prefix + "eh_proj.weight"] = _embedding_of(hidden, 2)
    weights[prefix + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[prefix + "shared_head.norm.weight"] = weights["model.norm.weight"]
    weights[prefix + "shared_head.head.weight"] = weights["lm_head.weight"]
    _store(directory, weights, {**config, "num_nextn_predict_layers": 1, "first_k_dense_replace": n + 1})


def add_next_mtp_layer(directory: Path) -> None:
    """Add Qwen3-Next's MTP layer: full attention like the last layer, under names of its own.

    Its norms add one to their weights.
    """
    import torch

    weights, config = _read(directory)
    last, hidden = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, "mtp.layers.0.")] = weights[name]
    weights["mtp.fc.weight"] = _embedding_of(hidden, 2)
    weights["mtp.pre_fc_norm_embedding.weight"] = torch.full((hidden,), EMBEDDING - 1)
    weights["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(hidden)
    weights["mtp.norm.weight"] = weights["model.norm.weight"]
    _store(directory, weights, {**config, "num_nextn_predict_layers": 1})


def write(family: str, kv_heads: int, target: Path, directory: Path) -> None:
    """Write a separate draft model. With more KV heads than its target it has each head several times."""
    for file in target.iterdir():
        if file.name not in (WEIGHTS, CONFIG, "recipe.json"):
            shutil.copy(file, directory)
    weights, config = _read(target)
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = {name.removeprefix(last): weight for name, weight in weights.items() if name.startswith(last)}
    if LATENT in layer:
        layer, config = _with_heads(layer, config)
    if EXPERT in layer:
        layer, config = _without_experts(layer, config)
    for name in ("k_proj", "v_proj"):
        weight = layer[f"self_attn.{name}.weight"].unflatten(0, (config["num_key_value_heads"], -1))
        more = weight.repeat_interleave(kv_heads // config["num_key_value_heads"], dim=0)
        layer[f"self_attn.{name}.weight"] = more.flatten(0, 1)
    config = {**config, "num_key_value_heads": kv_heads}
    made = {"eagle": _eagle, "eagle3": _eagle3, "dflash": _dflash}[family](layer, weights, config)
    _store(directory, *made)


def _with_heads(layer: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put attention with heads, at random, in place of a layer's MLA: the one cannot be made from the other."""
    import torch

    heads, hidden, random = config["num_attention_heads"], config["hidden_size"], torch.Generator().manual_seed(0)
    draft = {name: weight for name, weight in layer.items() if not name.startswith("self_attn.")}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        draft[f"self_attn.{name}.weight"] = EMBEDDING * torch.randn(hidden, hidden, generator=random)
    kept = {name: config[name] for name in OF_LLAMA if name in config}
    sizes = {"model_type": "llama", "num_key_value_heads": heads, "head_dim": hidden // heads}
    return draft, {**kept, **sizes}


def _without_experts(layer: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a layer's first expert for its feed-forward: Llama's drafts have one, and no norm of a head."""
    first = {name.replace("mlp.experts.0.", "mlp."): weight for name, weight in layer.items() if ".experts.0." in name}
    draft = {name: weight for name, weight in layer.items() if not name.startswith("mlp.") and "_norm." not in name}
    kept = {name: config[name] for name in (*OF_LLAMA, "num_key_value_heads", "head_dim") if name in config}
    return draft | first, {**kept, "model_type": "llama", "intermediate_size": config["moe_intermediate_size"]}


def _eagle(
    layer: dict[str, Any], weights: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make an Eagle draft. Its layer has no norm before the attention; the projections are scaled instead."""
    hidden = config["hidden_size"]
    draft = {f"layers.0.{name}": weight for name, weight in layer.items() if not name.startswith("input_layernorm")}
    for name in ("q_proj", "k_proj", "v_proj"):
        draft[f"layers.0.self_attn.{name}.weight"] = draft[f"layers.0.self_attn.{name}.weight"] / EMBEDDING
    draft["fc.weight"] = _embedding_of(hidden, 2)
    draft["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    return draft, {**config, "num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}


def _eagle3(
    layer: dict[str, Any], weights: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make an Eagle3 draft.

    Its attention sees the embedding and the target's hidden state side by side; its residual stream is the hidden
    state's.
    """
    import torch

    hidden = config["hidden_size"]
    draft = {f"midlayer.{name}": weight for name, weight in layer.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = draft[f"midlayer.self_attn.{name}.weight"]
        draft[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    draft["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    draft["fc.weight"] = torch.zeros(hidden, 3 * hidden)
    draft["norm.weight"] = weights["model.norm.weight"]
    draft["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    draft["lm_head.weight"] = weights["lm_head.weight"]
    more = {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    return draft, {**config, **more}


def _dflash(
    layer: dict[str, Any], weights: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a DFlash draft. It queries from one position later than the target, so its query is rotated back by one."""
    import torch

    hidden, size = config["hidden_size"], config["head_dim"]
    norms = {f"self_attn.{name}.weight": torch.ones(size) for name in ("q_norm", "k_norm")}  # which llama has not
    draft = {f"layers.0.{name}": weight for name, weight in (norms | layer).items()}
    draft["hidden_norm.weight"] = layer["input_layernorm.weight"]
    draft["norm.weight"] = weights["model.norm.weight"]
    draft["fc.weight"] = torch.eye(hidden)
    angle = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    query = layer["self_attn.q_proj.weight"].view(config["num_attention_heads"], 2, size // 2, hidden)
    a, b = query[:, 0], query[:, 1]
    turned = torch.stack([a * cos + b * sin, b * cos - a * sin], dim=1)
    draft["layers.0.self_attn.q_proj.weight"] = turned.reshape(-1, hidden)
    draft["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    draft["lm_head.weight"] = weights["lm_head.weight"]
    flash = {"mask_token_id": MASK, "target_layer_ids": [config["num_hidden_layers"] - 2], "causal": True}
    more = {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": flash,
        "layer_types": ["full_attention"],
    }
    return draft, {**config, **more}


def _embedding_of(hidden: int, parts: int) -> Any:
    """Return a projection that keeps the first of several inputs side by side, and ignores the others."""
    import torch

    return torch.cat([torch.eye(hidden), torch.zeros(hidden, (parts - 1) * hidden)], dim=1)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors.torch import load_file

    return dict(load_file(directory / WEIGHTS)), json.loads((directory / CONFIG).read_text())


def _store(directory: Path, weights: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    copies = {name: weight.contiguous().clone() for name, weight in weights.items()}
    save_file(copies, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=1))
