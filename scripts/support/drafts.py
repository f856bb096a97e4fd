# SPDX-License-Identifier: Apache-2.0
"""Draft models for the small random models: one layer, made of the target's last one, which is the one that decides there.

Such a draft sees the next token's embedding where the target saw it, attends over its own cache as the target's layer does, and
so says mostly what the target will say. With a wrong or missing cache of the prompt it does not: that is what it is for.

DFlash drafts all tokens in one pass, from the places where they will be: it does not know the tokens before, but those whose cache
it has. So the query of its target's last layer is the same for every token, and only its position tells one from another.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

EMBEDDING = 0.08  # root mean square of an embedding; a norm of this weight gives one back as it was
OUTPUTS = ("o_proj.weight", "down_proj.weight")
OTHER_LAYERS, LAST_LAYER = 0.0005, 4.0  # times what they would add to the residual stream
MASK, SHARPLY = 3, 4.0  # DFlash's token in the place of one that is drafted; the factor of its target's queries
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def let_one_layer_decide(model: Any) -> None:
    layers = model.model.layers
    for layer in layers:
        for name, weight in layer.named_parameters():
            if name.endswith(OUTPUTS):
                weight.mul_(LAST_LAYER if layer is layers[-1] else OTHER_LAYERS)


def let_every_token_ask_alike(model: Any) -> None:
    """Embeddings have a part in common. The last layer's queries see that part alone, its keys and values all but that, and what it
    looks for it looks for sharply."""
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
    """DeepSeek's: a layer of the model's own shape, one number behind the last."""
    import torch

    weights, config = _read(directory)
    n, hidden = config["num_hidden_layers"], config["hidden_size"]
    own = f"model.layers.{n}."
    for name in [name for name in weights if name.startswith(f"model.layers.{n - 1}.")]:
        weights[name.replace(f"layers.{n - 1}.", f"layers.{n}.")] = weights[name]
    weights[own + "enorm.weight"] = torch.full((hidden,), EMBEDDING)
    weights[own + "hnorm.weight"] = torch.ones(hidden)
    weights[own + "eh_proj.weight"] = _embedding_of(hidden, 2)
    weights[own + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[own + "shared_head.norm.weight"] = weights["model.norm.weight"]
    weights[own + "shared_head.head.weight"] = weights["lm_head.weight"]
    _store(directory, weights, {**config, "num_nextn_predict_layers": 1, "first_k_dense_replace": n + 1})


def write(family: str, kv_heads: int, target: Path, directory: Path) -> None:
    """A draft model of its own, beside its target. With more KV heads than that it has each of them several times."""
    for file in target.iterdir():
        if file.name not in (WEIGHTS, CONFIG, "recipe.json"):
            shutil.copy(file, directory)
    weights, config = _read(target)
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = {name.removeprefix(last): weight for name, weight in weights.items() if name.startswith(last)}
    for name in ("k_proj", "v_proj"):
        weight = layer[f"self_attn.{name}.weight"].unflatten(0, (config["num_key_value_heads"], -1))
        more = weight.repeat_interleave(kv_heads // config["num_key_value_heads"], dim=0)
        layer[f"self_attn.{name}.weight"] = more.flatten(0, 1)
    config = {**config, "num_key_value_heads": kv_heads}
    made = {"eagle": _eagle, "eagle3": _eagle3, "dflash": _dflash}[family](layer, weights, config)
    _store(directory, *made)


def _eagle(
    layer: dict[str, Any], weights: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its layer has no norm before the attention: the projections make up for it."""
    hidden = config["hidden_size"]
    own = {f"layers.0.{name}": weight for name, weight in layer.items() if not name.startswith("input_layernorm")}
    for name in ("q_proj", "k_proj", "v_proj"):
        own[f"layers.0.self_attn.{name}.weight"] = own[f"layers.0.self_attn.{name}.weight"] / EMBEDDING
    own["fc.weight"] = _embedding_of(hidden, 2)
    own["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    return own, {**config, "num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}


def _eagle3(
    layer: dict[str, Any], weights: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its attention sees the embedding and the target's hidden state side by side; its residual stream is the latter's."""
    import torch

    hidden = config["hidden_size"]
    own = {f"midlayer.{name}": weight for name, weight in layer.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = own[f"midlayer.self_attn.{name}.weight"]
        own[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    own["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    own["fc.weight"] = torch.zeros(hidden, 3 * hidden)
    own["norm.weight"] = weights["model.norm.weight"]
    own["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    own["lm_head.weight"] = weights["lm_head.weight"]
    more = {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    return own, {**config, **more}


def _dflash(
    layer: dict[str, Any], weights: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """It asks from one place further on than the target will, whose layer it is: its query is turned back by one position."""
    import torch

    hidden, size = config["hidden_size"], config["head_dim"]
    own = {f"layers.0.{name}": weight for name, weight in layer.items()}
    own["hidden_norm.weight"] = layer["input_layernorm.weight"]
    own["norm.weight"] = weights["model.norm.weight"]
    own["fc.weight"] = torch.eye(hidden)
    angle = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    query = layer["self_attn.q_proj.weight"].view(config["num_attention_heads"], 2, size // 2, hidden)
    a, b = query[:, 0], query[:, 1]
    turned = torch.stack([a * cos + b * sin, b * cos - a * sin], dim=1)
    own["layers.0.self_attn.q_proj.weight"] = turned.reshape(-1, hidden)
    own["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    own["lm_head.weight"] = weights["lm_head.weight"]
    flash = {"mask_token_id": MASK, "target_layer_ids": [config["num_hidden_layers"] - 2], "causal": True}
    more = {
        "num_hidden_layers": 1,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": flash,
        "layer_types": ["full_attention"],
    }
    return own, {**config, **more}


def _embedding_of(hidden: int, parts: int) -> Any:
    """Of several inputs side by side the first, unchanged."""
    import torch

    return torch.cat([torch.eye(hidden), torch.zeros(hidden, (parts - 1) * hidden)], dim=1)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors.torch import load_file

    return dict(load_file(directory / WEIGHTS)), json.loads((directory / CONFIG).read_text())


def _store(directory: Path, weights: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    own = {name: weight.contiguous().clone() for name, weight in weights.items()}
    save_file(own, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=1))
