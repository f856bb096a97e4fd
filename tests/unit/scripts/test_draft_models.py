# SPDX-License-Identifier: Apache-2.0
"""A target that has a draft: each layer's cache shows in its answers, and the draft is mostly right."""

from __future__ import annotations

from typing import Any

import pytest

from tools.support.client import prompt
from tools.support.models import ensure

transformers: Any = pytest.importorskip("transformers")
torch: Any = pytest.importorskip("torch")

PROMPT, MORE = 256, 12
# Of a log-probability, by one token's keys and values. Sets of engines that compute alike allow 1e-4.
SEEN = 4e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(ensure("spec", tmp_path_factory.mktemp("models")))
    return model.eval().requires_grad_(requires_grad=False)


def chances(model: Any, tokens: Any, without: int | None = None) -> Any:
    """Return the best log-probability after each token behind the prompt.

    `without`: the layer whose keys and values of the token in the middle are gone when these tokens are computed.
    """
    cache = model(tokens[:, :PROMPT]).past_key_values
    if without is not None:
        cache.layers[without].keys[:, :, PROMPT // 2] = 0
        cache.layers[without].values[:, :, PROMPT // 2] = 0
    logits = model(tokens[:, PROMPT:], past_key_values=cache).logits[0]
    return logits.log_softmax(-1).amax(-1)


def test_one_token_of_any_layer_shows(target: Any) -> None:
    tokens = torch.tensor([prompt(PROMPT + MORE, 1)])
    whole = chances(target, tokens)
    apart = [float((whole - chances(target, tokens, layer)).abs().max()) for layer in range(len(target.model.layers))]
    assert min(apart) > SEEN, apart


def test_what_the_last_layer_makes_of_embeddings_is_mostly_the_targets_token(target: Any) -> None:
    tokens = torch.tensor([prompt(PROMPT + MORE, 2)])
    its = target(tokens).logits.argmax(-1)
    for layer in target.model.layers[:-1]:
        layer.self_attn.o_proj.weight.zero_()
    drafted = target(tokens).logits.argmax(-1)
    right = float((drafted == its).float().mean())
    assert 0.6 < right < 1, right
