# SPDX-License-Identifier: Apache-2.0
"""A small model for pictures: PaliGemma, in which a picture of 56 × 56 is 16 tokens of the prompt.

Words are tokens: `w6` to `w511`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIDE, PATCH = 56, 14
PICTURE_TOKENS = (SIDE // PATCH) ** 2
SPECIAL = ("<unk>", "<bos>", "<eos>", "<pad>", "<image>", "\n")
FIRST_WORD = len(SPECIAL)
_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write(sizes: dict[str, Any], head_dim: int, directory: Path) -> None:
    """Write the model and its processor. `sizes` are those of the language model."""
    import torch
    import transformers

    library: Any = transformers
    eyes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    eyes |= {"image_size": SIDE, "patch_size": PATCH, "projection_dim": sizes["hidden_size"], "vision_use_head": False}
    config = library.PaliGemmaConfig(
        vision_config=library.SiglipVisionConfig(**eyes).to_dict(),
        text_config=library.GemmaConfig(**{**sizes, "tie_word_embeddings": True}, head_dim=head_dim).to_dict(),
        image_token_index=SPECIAL.index("<image>"),
        projection_dim=sizes["hidden_size"],
        hidden_size=sizes["hidden_size"],
    )
    model = library.PaliGemmaForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # with its usual weights the model repeats the last token, whatever the prompt is
                deep = "multi_modal" in name or ("language_model" in name and ".layers." in name)
                weight.normal_(
                    0, 0.03 if "embed_tokens" in name else 0.5 if "multi_modal" in name else 0.25 if deep else 0.2
                )
    model.save_pretrained(directory, safe_serialization=True)
    _rename(directory)
    _write_processor(sizes["vocab_size"], directory)


def _rename(directory: Path) -> None:
    """Rename weights to the names in checkpoints, which vLLM expects and transformers 5 does not write.

    vLLM has no pooling head, so its weights are dropped.
    """
    from safetensors.torch import load_file, save_file

    path, renamed = directory / "model.safetensors", {}
    for name, weight in load_file(path).items():
        short = name.removeprefix("model.")
        tower, _, rest = short.partition(".")
        if tower == "vision_tower" and not rest.startswith("vision_model."):
            short = f"{tower}.vision_model.{rest}"
        if ".head." not in short:
            renamed[short] = weight
    save_file(renamed, path, metadata={"format": "pt"})


def _write_processor(vocab: int, directory: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    library: Any = transformers
    words = {word: index for index, word in enumerate((*SPECIAL, *(f"w{i}" for i in range(FIRST_WORD, vocab))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    fast = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<image>"], **special)
    fast.chat_template = _TEMPLATE
    pictures = library.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    pictures.image_seq_length = PICTURE_TOKENS
    library.PaliGemmaProcessor(pictures, fast).save_pretrained(directory)
