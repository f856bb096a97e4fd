# SPDX-License-Identifier: Apache-2.0
"""Small random models with a local tokenizer, written once as safetensors and reused.

Weights come from a seed, so P, D and the reference load identical files whatever their TP size. They are scaled so
that greedy tokens depend on every block of the cache: a model that ignores its context would hide a lost push.

    python -m tools.support.models gqa mla        # writes models/gqa and models/mla, prints their paths
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # MLA with an indexer that picks 2,048 tokens
INDEX_DIM = 24  # a size that nothing else has
FORMAT = 3  # increase when a recipe's meaning changes, so that old directories are rewritten


@dataclass(frozen=True)
class Recipe:
    """Shape of a model. `kv_heads` has no effect on MLA's cache, which keeps one latent per token."""

    family: str  # a key of `families` in `_write`, paligemma, or a draft's: eagle | eagle3 | dflash
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int = 512
    max_len: int = 4096
    spread: float = 0.08  # standard deviation of the initial weights
    seed: int = 0
    # The last layer decides most, so that a draft model made from it is often right, but only with a correct cache of
    # its own.
    one_layer_decides: bool = False
    drafts: bool = False  # an MTP layer although no layer decides: drafts are seldom right
    target: str = ""  # the target's recipe, for a separate draft model
    indexers: int = 0  # the first so many layers have one; `latent` only
    int8: bool = False  # of the cache; `latent`, and with scales of its own under vllm-ascend qwen3
    window: int = 0  # tokens that a layer attends to, in all layers or some, depending on the family
    steady: bool = False  # no router and no indexer chooses by rounded numbers; DeepSeek-V4 only

    @property
    def mla(self) -> bool:
        return self.family in ("deepseek_v2", "deepseek_v3", *SPARSE)

    @property
    def recomputes_last(self) -> bool:
        """Return whether D can load a prompt's last token only if it begins with P's first token."""
        from tools.support.states import FAMILIES

        return self.window > 0 or self.family in FAMILIES

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """Return the size in the whole model, all ranks together, replicas counted once."""
        per_layer = 576 if self.mla else 2 * self.kv_heads * self.head_dim
        return self.layers * per_layer * dtype_bytes


RECIPES = {
    # integration tests: four layers, so that a pipeline of two has two each
    "gqa": Recipe("llama", layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512),
    "gqa5": Recipe("llama", layers=5, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512),
    "gqa2": Recipe("llama", layers=4, heads=8, kv_heads=2, head_dim=32, hidden=256, intermediate=512),
    "mqa": Recipe("llama", layers=4, heads=8, kv_heads=1, head_dim=32, hidden=256, intermediate=512),
    # 576: vLLM divides the vocabulary by TP, and pads it to multiples of 64
    "mha6": Recipe("llama", layers=4, heads=6, kv_heads=6, head_dim=32, hidden=192, intermediate=384, vocab=576),
    "mha8": Recipe("llama", layers=4, heads=8, kv_heads=8, head_dim=32, hidden=256, intermediate=512),
    "mla": Recipe("deepseek_v2", layers=4, heads=8, kv_heads=8, head_dim=128, hidden=256, intermediate=512),
    "qwen2": Recipe("qwen2", layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512),
    "qwen3": Recipe("qwen3", layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512),
    # DeepSeek-V3 without its draft layer: one dense layer, then two of experts, one of them shared
    "dsv3": Recipe("deepseek_v3", layers=3, heads=8, kv_heads=8, head_dim=128, hidden=256, intermediate=512),
    "moe": Recipe("qwen3_moe", layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512),
    # targets and their drafts; `mtp` contains its draft layer
    "mla-eagle3": Recipe("eagle3", 1, 8, 8, head_dim=32, hidden=256, intermediate=512, target="mla"),
    "gqa-eagle3": Recipe("eagle3", 1, 8, 8, head_dim=32, hidden=256, intermediate=512, target="gqa"),
    "moe-eagle3": Recipe("eagle3", 1, 8, 8, head_dim=32, hidden=256, intermediate=512, target="moe"),
    "mla-dflash": Recipe("dflash", 1, 8, 8, head_dim=32, hidden=256, intermediate=512, target="mla"),
    "mtp": Recipe("deepseek_v3", 3, 8, 8, head_dim=128, hidden=256, intermediate=512, one_layer_decides=True),
    "mtp-even": Recipe("deepseek_v3", 3, 8, 8, head_dim=128, hidden=256, intermediate=512, drafts=True),
    # MLA with a sparse indexer; GLM-5.2's third layer uses the choice of the second
    "dsv32": Recipe("deepseek_v32", 3, 4, 4, head_dim=128, hidden=256, intermediate=512),
    "dsv32-mtp": Recipe("deepseek_v32", 3, 4, 4, 128, hidden=256, intermediate=512, one_layer_decides=True),
    "dsv32-mtp-even": Recipe("deepseek_v32", 3, 4, 4, head_dim=128, hidden=256, intermediate=512, drafts=True),
    # the engines' sizes are literal; `intermediate` is an expert's
    "dsv4": Recipe("deepseek_v4", 4, 4, 1, head_dim=512, hidden=256, intermediate=64, max_len=8192, window=128),
    "dsv4-steady": Recipe("deepseek_v4", 4, 4, 1, 512, 256, 64, max_len=8192, window=128, steady=True),
    "dsv4-mtp": Recipe("deepseek_v4", 4, 4, 1, 512, 256, 64, max_len=8192, window=128, one_layer_decides=True),
    "dsv4-mtp-steady": Recipe(
        "deepseek_v4", 4, 4, 1, 512, 256, 64, max_len=8192, window=128, one_layer_decides=True, steady=True
    ),
    "glm5": Recipe("glm_moe_dsa", 4, 4, 4, head_dim=128, hidden=256, intermediate=512),
    "glm5-mtp": Recipe("glm_moe_dsa", 4, 4, 4, head_dim=128, hidden=256, intermediate=512, one_layer_decides=True),
    # one KV head, kept like MLA's latent; in plain torch (tests/integration/plugins/kinds)
    "indexed": Recipe("latent", 4, 8, 1, head_dim=32, hidden=256, intermediate=512, indexers=3),
    "indexed-int8": Recipe("latent", 4, 8, 1, head_dim=32, hidden=256, intermediate=512, indexers=3, int8=True),
    "spec-indexed": Recipe("latent", 4, 8, 1, 32, hidden=256, intermediate=512, one_layer_decides=True, indexers=2),
    "spec-indexed-eagle3": Recipe("eagle3", 1, 8, 8, head_dim=32, hidden=256, intermediate=512, target="spec-indexed"),
    # sliding windows: in five of six layers, in every other layer, in all
    "gemma3": Recipe("gemma3", 6, 8, 4, head_dim=32, hidden=256, intermediate=512, window=64),
    "gptoss": Recipe("gpt_oss", 4, 8, 4, head_dim=32, hidden=256, intermediate=128, window=128),
    "windowed": Recipe("mistral", 4, 8, 4, head_dim=32, hidden=256, intermediate=512, window=64),
    # the last two of six layers read the cache of the two before them, one of which has a window
    "gemma3n": Recipe("gemma3n", 6, 8, 4, head_dim=32, hidden=256, intermediate=512, window=64),
    # recurrent states: Mamba-2 before attention (in Granite with experts), beside it in every layer, alone;
    # Gated DeltaNet in three of four layers
    "granite": Recipe("granite_hybrid", 4, 8, 4, head_dim=32, hidden=256, intermediate=128),
    "nemotronh": Recipe("nemotron_h", 4, 8, 4, head_dim=32, hidden=256, intermediate=512),
    "falconh1": Recipe("falcon_h1", 3, 8, 4, head_dim=32, hidden=256, intermediate=512),
    "mamba2": Recipe("mamba2", 3, 8, 8, head_dim=64, hidden=256, intermediate=512),
    "qwen3next": Recipe("qwen3_next", 4, 8, 2, head_dim=64, hidden=256, intermediate=512),
    "qwen3next-mtp": Recipe("qwen3_next", 4, 8, 2, 64, hidden=256, intermediate=512, one_layer_decides=True),
    "spec": Recipe("llama", 4, 8, 4, head_dim=32, hidden=256, intermediate=512, one_layer_decides=True),
    # D has its heads in int8 under vllm-ascend, with scales by channel
    "qwen3-c8": Recipe("qwen3", layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512, int8=True),
    "moe-c8": Recipe("qwen3_moe", layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512, int8=True),
    "spec-flash": Recipe("qwen3", 4, 8, 4, head_dim=32, hidden=256, intermediate=512, one_layer_decides=True),
    "spec-flash-dflash": Recipe("dflash", 1, 8, 4, 32, hidden=256, intermediate=512, target="spec-flash"),
    "spec-eagle": Recipe("eagle", 1, 8, 4, head_dim=32, hidden=256, intermediate=512, target="spec"),
    "spec-eagle3": Recipe("eagle3", 1, 8, 8, head_dim=32, hidden=256, intermediate=512, target="spec"),
    "paligemma": Recipe("paligemma", 4, 8, 4, head_dim=32, hidden=256, intermediate=512),
    # long prompts, of which a processor computes the last tokens in some milliseconds
    "narrow": Recipe("llama", layers=2, heads=2, kv_heads=1, head_dim=32, hidden=64, intermediate=128, max_len=140_000),
    # quickstart and benchmarks: 16 layers; `base16` has 50 million parameters and 32 KiB of KV per token in fp32
    "tiny16": Recipe("llama", layers=16, heads=8, kv_heads=4, head_dim=64, hidden=512, intermediate=512),
    "base16": Recipe("llama", layers=16, heads=8, kv_heads=4, head_dim=64, hidden=512, intermediate=1472, vocab=1024),
}


def ensure(name: str, directory: Path | None = None) -> Path:
    """Return the path of model `name`, written now unless a complete one is there."""
    recipe = RECIPES[name]
    target = (directory or ROOT / "models") / name
    mark = target / "recipe.json"
    wanted = {"format": FORMAT, **asdict(recipe)}
    if mark.exists() and json.loads(mark.read_text()) == wanted:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    _write(recipe, scratch)
    (scratch / "recipe.json").write_text(json.dumps(wanted, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return target


def recipe_of(model: Path) -> Recipe | None:
    """Return the recipe of a directory, or None if it was not made here."""
    mark = model / "recipe.json"
    if not mark.exists():
        return None
    facts = json.loads(mark.read_text())
    facts.pop("format")
    return Recipe(**facts)


def _write(recipe: Recipe, directory: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from tools.support import deepseek4, drafts, states, vision

    torch.manual_seed(recipe.seed)
    if recipe.family == "paligemma":
        vision.write(_sizes(recipe), recipe.head_dim, directory)
        return
    if recipe.target:
        drafts.write(recipe.family, recipe.kv_heads, ensure(recipe.target, directory.parent), directory)
        return
    with torch.no_grad():
        families = {
            "llama": _llama,
            "latent": _llama,
            "deepseek_v2": _deepseek,
            "deepseek_v3": _deepseek,
            **dict.fromkeys(SPARSE, _deepseek),
            deepseek4.FAMILY: _deepseek4,
            "qwen2": _qwen,
            "qwen3": _qwen,
            "qwen3_moe": _qwen3_moe,
            "gemma3": _windowed,
            "gemma3n": _windowed,
            "gpt_oss": _windowed,
            "mistral": _windowed,
            **dict.fromkeys(states.FAMILIES, _recurrent),
        }
        model = families[recipe.family](recipe).to(torch.float32)
        if recipe.one_layer_decides:
            drafts.let_one_layer_decide(model)
        if recipe.family == "qwen3" and recipe.one_layer_decides:
            drafts.let_every_token_ask_alike(model)
    model.save_pretrained(directory, safe_serialization=True)
    write_tokenizer(directory, recipe.vocab)
    if recipe.family in ("deepseek_v3", *SPARSE) and (recipe.one_layer_decides or recipe.drafts):
        drafts.add_mtp_layer(directory)
    if recipe.family == "qwen3_next" and recipe.one_layer_decides:
        drafts.add_next_mtp_layer(directory)
    if recipe.family == "latent":
        _make_latent(recipe, directory)
    elif recipe.int8:
        _describe_heads(recipe, directory)
    if recipe.family == deepseek4.FAMILY:
        deepseek4.as_deepseek(directory, _ratios(recipe), drafts=recipe.one_layer_decides)


def _sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that every family's configuration has under the same names."""
    return {
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "max_position_embeddings": recipe.max_len,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": recipe.spread,
    }


def _llama(recipe: Recipe) -> Any:
    import transformers

    library: Any = transformers
    return library.LlamaForCausalLM(
        library.LlamaConfig(
            **_sizes(recipe),
            head_dim=recipe.head_dim,
        )
    )


def _make_latent(recipe: Recipe, directory: Path) -> None:
    """Keep the llama's own weights, and add an indexer's two to the first layers."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, config = load_file(directory / "model.safetensors"), directory / "config.json"
    for layer in range(recipe.indexers):
        for name in ("wq", "wk"):
            weight = torch.randn(INDEX_DIM, recipe.hidden) * recipe.spread
            weights[f"model.layers.{layer}.self_attn.indexer.{name}.weight"] = weight
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    more = {"indexers": list(range(recipe.indexers)), "index_dim": INDEX_DIM, "int8": recipe.int8}
    content = {**json.loads(config.read_text()), **more, "architectures": ["PdTestLatentForCausalLM"]}
    config.write_text(json.dumps(content, indent=1))


def _describe_heads(recipe: Recipe, directory: Path) -> None:
    """Add scales of keys and values by channel, and the description in which vllm-ascend finds them."""
    import torch
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    weights = load_file(file)
    said = {"version": "1.0.0", "model_quant_type": "FLOAT", "kv_cache_type": "C8", **dict.fromkeys(weights, "FLOAT")}
    for layer in range(recipe.layers):
        for which in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{which}_proj.kv_cache"
            size = recipe.kv_heads * recipe.head_dim
            weights[f"{name}_scale"] = torch.rand(size) * 0.02 + 0.02  # of 127 steps the values fill a part
            weights[f"{name}_offset"] = torch.zeros(size)
            said |= {f"{name}_scale": "C8", f"{name}_offset": "C8"}
    save_file(weights, file, metadata={"format": "pt"})
    (directory / "quant_model_description.json").write_text(json.dumps(said, indent=1))


def _deepseek(recipe: Recipe) -> Any:
    import transformers

    library: Any = transformers
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "deepseek_v2": ("DeepseekV2", {"q_lora_rank": None}),
        "deepseek_v3": (
            "DeepseekV3",
            {"q_lora_rank": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        ),
        "deepseek_v32": ("DeepseekV32", {"q_lora_rank": 128, "index_n_heads": 2}),
        "glm_moe_dsa": ("GlmMoeDsa", {"q_lora_rank": 128, "index_n_heads": 2, "index_topk_pattern": "FFSF"}),
    }
    name, more = kinds[recipe.family]
    # Else dense layers only: experts add nothing to a test of the cache.
    experts = recipe.family == "deepseek_v3" and not (recipe.one_layer_decides or recipe.drafts)
    model, config = getattr(library, f"{name}ForCausalLM"), getattr(library, f"{name}Config")
    return model(
        config(
            **_sizes(recipe),
            moe_intermediate_size=128,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=4 if experts else 2,  # of four, so that rounding changes no choice
            first_k_dense_replace=1 if experts else recipe.layers,
            n_group=1,
            topk_group=1,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=recipe.head_dim,
            v_head_dim=recipe.head_dim,
            **more,
        )
    )


def _deepseek4(recipe: Recipe) -> Any:
    from tools.support import deepseek4

    return deepseek4.model(_sizes(recipe), recipe.head_dim, recipe.window, _ratios(recipe), steady=recipe.steady)


def _ratios(recipe: Recipe) -> tuple[int, ...]:
    from tools.support import deepseek4

    return deepseek4.DRAFTED_RATIOS if recipe.one_layer_decides else deepseek4.RATIOS


def _qwen(recipe: Recipe) -> Any:
    import transformers

    library: Any = transformers
    if recipe.family == "qwen2":  # its heads' size follows from the others; its projections have a bias
        return library.Qwen2ForCausalLM(library.Qwen2Config(**_sizes(recipe)))
    return library.Qwen3ForCausalLM(library.Qwen3Config(**_sizes(recipe), head_dim=recipe.head_dim))


def _qwen3_moe(recipe: Recipe) -> Any:
    import transformers

    library: Any = transformers
    return library.Qwen3MoeForCausalLM(
        library.Qwen3MoeConfig(
            **_sizes(recipe),
            moe_intermediate_size=128,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            head_dim=recipe.head_dim,
        )
    )


def _windowed(recipe: Recipe) -> Any:
    import transformers

    library: Any = transformers
    names, more = {
        "gemma3": (("Gemma3ForCausalLM", "Gemma3TextConfig"), {"query_pre_attn_scalar": recipe.head_dim}),
        "gemma3n": (("Gemma3nForCausalLM", "Gemma3nTextConfig"), _shared(recipe)),
        "gpt_oss": (("GptOssForCausalLM", "GptOssConfig"), {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "mistral": (("MistralForCausalLM", "MistralConfig"), {}),
    }[recipe.family]
    model, config = (getattr(library, name) for name in names)
    sizes = {**_sizes(recipe), "head_dim": recipe.head_dim, "sliding_window": recipe.window}
    return model(config(**{**sizes, **more}))


def _shared(recipe: Recipe) -> dict[str, Any]:
    """Return what makes the last two layers of Gemma-3n read the cache of the last layers of their kind before them."""
    return {
        "tie_word_embeddings": True,  # as always in this family
        "layer_types": ["sliding_attention", "full_attention"] * (recipe.layers // 2),
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": recipe.vocab,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * recipe.layers,
    }


def _recurrent(recipe: Recipe) -> Any:
    from tools.support import states

    return states.model(recipe.family, _sizes(recipe), recipe.head_dim)


def write_tokenizer(directory: Path, vocab: int, more: Sequence[str] = ()) -> Path:
    """Write a byte tokenizer without merges: a text of n bytes is a prompt of n tokens. `more`: its last tokens."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<extra_{i}>" for i in range(vocab - len(words) - len(more))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    library: Any = transformers
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.add_tokens([AddedToken(word, normalized=False) for word in more])
    fast.save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(RECIPES), help=f"recipes: {', '.join(sorted(RECIPES))}")
    parser.add_argument("--directory", type=Path, default=None, help="default: models/ in the repository")
    args = parser.parse_args()
    for name in args.names:
        if name not in RECIPES:
            parser.error(f"no recipe {name!r}; known: {', '.join(sorted(RECIPES))}")
        print(ensure(name, args.directory))


if __name__ == "__main__":
    main()
