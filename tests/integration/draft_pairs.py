# SPDX-License-Identifier: Apache-2.0
"""Drafts of a pair, beside those of a D that computes each prompt itself.

Right text proves nothing here: a draft model without its cache of the prompt only drafts worse. So the reference is D
itself, asked without a transfer, which computes the prompt with its draft model, too. The models
(tools/support/drafts.py) are made so that drafts are mostly right with that cache, and mostly wrong without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from continued import answers_of_another
from pairs import Pair, fresh_prompt, reference_answers

from tools.support.checks import Drafted, drafted, eventually, first_tokens, fresh_salt
from tools.support.client import body_of, complete
from tools.support.engine import RunningServer
from tools.support.models import ensure
from tools.support.spec import EngineSpec

TOKENS = 32
LENGTHS = (1, 15, 16, 17, 100, 333, 700)  # blocks of 16; drafts follow each prompt
ENOUGH = 100  # drafted tokens, enough for a rate


def drafts_of(
    engine: RunningServer, url: str, prompts: Sequence[Sequence[int]], *, behind: int = 0, **more: Any
) -> Drafted:
    """Return the engine's drafts for these prompts, sent to `url` one after the other: in a batch they would wait.

    The first `behind` tokens of each answer are a part of its prompt.
    """
    with drafted(engine) as drafts:
        for prompt in prompts:
            tokens = TOKENS - behind if len(prompt) > 1 else TOKENS  # nothing is loaded of a prompt of one token
            complete(url, body_of(prompt, tokens, cache_salt=fresh_salt("drafts"), **more))
    return drafts()


def started(d: RunningServer, prompts: Sequence[Sequence[int]]) -> Drafted:
    """Return D's own drafts for requests that begin with P's token: none in the step that computes it."""
    firsts = [complete(d.url, body_of(prompt, 1, cache_salt=fresh_salt("first"))).tokens for prompt in prompts]
    begun = [[*prompt, *first] if len(prompt) > 1 else prompt for prompt, first in zip(prompts, firsts, strict=True)]
    return drafts_of(d, d.url, begun, behind=1)


def padded(alone: Drafted, prompts: Sequence[Sequence[int]]) -> Drafted:
    """Return the same drafts as vLLM counts them for loaded prompts.

    The step that computes one token is padded to the size of a step with drafts, and the padding counts as drafts that
    were not accepted.
    """
    loaded = sum(len(prompt) > 1 for prompt in prompts)
    return Drafted(alone.steps + loaded, alone.tokens + loaded * alone.tokens // alone.steps, alone.accepted)


def check(
    pair: Pair, lengths: Sequence[int], name: str, progress: Callable[[str], None], *, chunked: bool = False
) -> None:
    """Check for a single engine's tokens, and for drafts as good as those of a D that has computed the prompt itself.

    `chunked`: at the ends of P's chunks vLLM's drafter takes a prompt's last token for the next one, which differs in
    the prompt that D is asked alone.
    """
    (d,) = pair.decode
    prompts = [fresh_prompt(length) for length in lengths]
    alone, taken = started(d, prompts), first_tokens(d)
    with drafted(d) as drafts:
        for prompt in prompts:
            pair.check([prompt], TOKENS, name=name)
    pushed = drafts()
    progress(
        f"figure: {name}: {pushed.accepted} of {pushed.tokens} drafted tokens accepted, {alone.accepted} of {alone.tokens} alone"
    )
    assert alone.tokens > ENOUGH and alone.rate > 0.2, f"drafts that are never right prove nothing: {alone}"
    if chunked:
        assert abs(pushed.accepted - alone.accepted) <= 0.1 * alone.accepted, (pushed, alone)
    else:
        assert pushed == padded(alone, prompts), f"with the prompt's KV from P {pushed}, alone {alone}"
    loaded = sum(len(prompt) > 1 for prompt in prompts)
    eventually(lambda: first_tokens(d) - taken == loaded, f"{loaded} first tokens of P")
    batch = [fresh_prompt(25 + 40 * i) for i in range(8)]
    pair.check(batch, TOKENS, name=f"{name}, 8 at once")


def check_goes_on(pair: Pair, port: int) -> None:
    """Behind what another engine has begun D accepts as many as where it has computed all of that itself."""
    (d,) = pair.decode
    prompts = [fresh_prompt(length) for length in (16, 65, 200)]
    expected = reference_answers(pair.prefill, prompts, TOKENS)
    for count in (1, 2, 15, 16):
        begun = [[*prompt, *want.tokens[:count]] for prompt, want in zip(prompts, expected, strict=True)]
        alone = drafts_of(d, d.url, begun, behind=count)
        with answers_of_another(pair.prefill, port) as router, drafted(d) as drafts:
            for prompt, want in zip(prompts, expected, strict=True):
                got = complete(d.url, router.body(body_of(prompt, TOKENS), prompt, list(want.tokens[:count])))
                assert got.tokens[:count] == want.tokens[:count]
                pair.judge_all(f"behind {count} tokens", prompt, want, got)
            router.check(len(prompts))
        assert drafts() == padded(alone, prompts), count


def mtp(name: str, tokens: int, **more: Any) -> EngineSpec:
    return EngineSpec(name, ensure("mtp"), draft={"method": "mtp", "num_speculative_tokens": tokens}, **more)


def draft_config(method: str, draft: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "model": str(ensure(draft)), **more}
