# SPDX-License-Identifier: Apache-2.0
"""Answers of a pair under a grammar, beside a single engine's."""

from __future__ import annotations

from typing import Any

from pairs import Pair, fresh_prompt

from tools.support.checks import eventually, first_tokens, fresh_salt
from tools.support.client import body_of, post

KEYS = ("token_ids", "text", "finish_reason")
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no"]},
    {"regex": "[a-z]{3}[0-9]{3}"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
)


def check_grammars(pair: Pair, *, first: bool) -> None:
    """Check answers under a grammar: a single engine's, with its end. `first`: P's token begins each of them."""
    (d,) = pair.decode
    before = first_tokens(d)
    for grammar in GRAMMARS:
        body = body_of(fresh_prompt(70), 12, structured_outputs=grammar, ignore_eos=False)
        alone, got = (
            post(one.url, {**body, "cache_salt": fresh_salt("grammar")})["choices"][0]
            for one in (pair.reference, pair.front)
        )
        assert [got[key] for key in KEYS] == [alone[key] for key in KEYS], grammar
    wanted = len(GRAMMARS) if first else 0
    eventually(lambda: first_tokens(d) - before == wanted, f"P's token begins {wanted} of them")
