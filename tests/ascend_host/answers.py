# SPDX-License-Identifier: Apache-2.0
"""One engine in this process answers prompts, and writes each answer's tokens and log-probabilities.

    python tests/ascend_host/answers.py MODEL_DIRECTORY '{"more": "arguments of vllm.LLM"}' QUESTIONS.json ANSWERS.json

QUESTIONS.json is a list of batches; a batch is a list of [prompt, tokens, begun], which are asked at once. Afterwards
the prompt with the first n tokens of its answer is asked alone, for each n of `begun`.

ANSWERS.json has the `answers`, how many `cached` tokens each found, and of how many `drafted` tokens were `accepted`.
An answer is a list of steps, [token, {token: log-probability} of the best]: its own, then one for each of `begun`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

BEST = 20
DRAFTS = "vllm:spec_decode_num"


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model, more, questions, written = sys.argv[1:]
    common = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
    memory = {"kv_cache_memory_bytes": 128 << 20, "disable_log_stats": False}
    engine = LLM(model, **(common | memory | json.loads(more)))

    def ask(prompts: list[Any], tokens: list[int]) -> list[tuple[Any, int]]:
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=BEST) for n in tokens]
        return [_steps(one) for one in engine.generate(given, wanted, use_tqdm=False)]

    answers, cached = [], []
    for batch in json.loads(Path(questions).read_text()):
        prompts, tokens, begun = zip(*batch, strict=True)
        for prompt, (steps, hits), counts in zip(prompts, ask(list(prompts), list(tokens)), begun, strict=True):
            answer = [token for token, _ in steps]
            for count in counts:
                steps.extend(ask([prompt + answer[:count]], [1])[0][0])
            answers.append(steps)
            cached.append(hits)
    counted = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    drafts = {
        "drafted": counted.get(f"{DRAFTS}_draft_tokens", 0),
        "accepted": counted.get(f"{DRAFTS}_accepted_tokens", 0),
    }
    Path(written).write_text(json.dumps({"answers": answers, "cached": cached, **drafts}))


def _steps(done: Any) -> tuple[Any, int]:
    """Return an answer's steps, and how many of its prompt's tokens were in the cache."""
    one = done.outputs[0]
    best = [{str(token): each.logprob for token, each in step.items()} for step in one.logprobs]
    return [list(step) for step in zip(one.token_ids, best, strict=True)], done.num_cached_tokens


if __name__ == "__main__":
    main()
