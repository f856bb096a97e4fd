# SPDX-License-Identifier: Apache-2.0
"""Pictures in a prompt, with a small vision model whose placeholder tokens have the picture's KV.

P computes it. The same words with another picture are another prompt, also in the prefix caches of both sides.
"""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import pytest
from pairs import FORKED, Pair, PairMaker

from tools.support.checks import fresh_salt
from tools.support.client import post
from tools.support.cluster import Cluster
from tools.support.environments import beside
from tools.support.models import RECIPES, ensure
from tools.support.spec import EngineSpec
from tools.support.vision import FIRST_WORD, PICTURE_TOKENS, SIDE

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(1200)]

PLUGIN = Path(__file__).parent / "plugins" / "vision"
CHAT = "/v1/chat/completions"
TOKENS = 12


def picture(seed: int) -> str:
    from PIL import Image

    dice, image, file = random.Random(seed), Image.new("RGB", (SIDE, SIDE)), io.BytesIO()
    image.putdata([(dice.randrange(256), dice.randrange(256), dice.randrange(256)) for _ in range(SIDE * SIDE)])
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def chat(seed: int, count: int, **more: Any) -> dict[str, Any]:
    """Return a chat with the picture of a seed and `count` words, which depend on `count` alone."""
    dice = random.Random(count)
    words = " ".join(f"w{dice.randrange(FIRST_WORD, RECIPES['paligemma'].vocab)}" for _ in range(count))
    content = [{"type": "image_url", "image_url": {"url": picture(seed)}}, {"type": "text", "text": words}]
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "model", "messages": [{"role": "user", "content": content}], **sampling, **more}


def tokens_of(pair: Pair, seed: int, count: int, salt: str, name: str) -> list[int]:
    """Return the pair's tokens, after comparing them with one engine's."""
    alone = post(pair.reference.url, chat(seed, count, cache_salt=fresh_salt("alone")), CHAT)
    failed = pair.failed_transfers()
    answer = post(pair.front.url, chat(seed, count, cache_salt=salt), CHAT)
    assert pair.failed_transfers() == failed, "a transfer failed and D computed by itself"
    wanted, got = (one["choices"][0]["token_ids"] for one in (alone, answer))
    pair.tally.check(name, [], wanted, got, pair.reference.url)
    assert answer["usage"]["prompt_tokens"] > count + PICTURE_TOKENS
    return list(got)


def test_prompts_with_pictures(cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> None:
    same = {"python": beside("vision"), "plugins": (PLUGIN, *FORKED), "block_size": 32}
    p, d = cluster.start(
        EngineSpec(
            "pictures-p", ensure("paligemma"), role="kv_producer", chunk=256, extra=cluster.push_config(), **same
        ),
        EngineSpec("pictures-d", ensure("paligemma"), role="kv_consumer", extra=cluster.push_config(*allowed), **same),
    )
    pair = make_pair(p, d)
    try:
        loaded, whole = pair.loaded_tokens(), 0
        for count in (5, 50, 300):
            answers = []
            for seed in (1, 2):
                answers.append(tokens_of(pair, seed, count, fresh_salt("pictures"), f"picture {seed}, {count} words"))
                whole += count + PICTURE_TOKENS + 2  # with <bos>, and the end of the line
            assert answers[0] != answers[1], "the answer depends on the picture"
        assert pair.loaded_tokens() - loaded == whole, "all of it came from P"
        # One salt: both prefix caches have the prompt with the same words and the other picture.
        salt, loaded = fresh_salt("one for all"), pair.loaded_tokens()
        first = tokens_of(pair, 3, 100, salt, "in the caches")
        other = tokens_of(pair, 4, 100, salt, "another picture")
        third = tokens_of(pair, 3, 100, salt, "the first again")
        assert first == third != other
        length = 100 + PICTURE_TOKENS + 2
        assert pair.loaded_tokens() - loaded == 2 * length + length % 32, "D has whole blocks of the third"
    finally:
        cluster.stop(pair.front, d, p)
