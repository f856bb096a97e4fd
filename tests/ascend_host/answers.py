# SPDX-License-Identifier: Apache-2.0
"""One engine in this process answers prompts, and writes each answer's tokens and log-probabilities.

    python tests/ascend_host/answers.py MODEL_DIRECTORY '{"more": "arguments of vllm.LLM"}' QUESTIONS.json ANSWERS.json

QUESTIONS.json is a list of batches; a batch is a list of [prompt, tokens, again], which are asked at once. Afterwards
the prompt with the first n tokens of its answer is asked alone, for each n of `again`. An answer is a list of steps,
[token, {token: log-probability} of the best]: those of the answer, then one for each of `again`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

BEST = 20


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model, more, questions, written = sys.argv[1:]
    common = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
    engine = LLM(model, **(common | {"kv_cache_memory_bytes": 128 << 20} | json.loads(more)))

    def ask(prompts: list[Any], tokens: list[int]) -> list[Any]:
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=BEST) for n in tokens]
        done = [one.outputs[0] for one in engine.generate(given, wanted, use_tqdm=False)]
        return [
            [
                [token, {str(other): each.logprob for other, each in best.items()}]
                for token, best in zip(one.token_ids, one.logprobs or (), strict=True)
            ]
            for one in done
        ]

    answers = []
    for batch in json.loads(Path(questions).read_text()):
        prompts, tokens, again = zip(*batch, strict=True)
        for prompt, steps, counts in zip(prompts, ask(list(prompts), list(tokens)), again, strict=True):
            answer = [token for token, _ in steps]
            for count in counts:
                steps.extend(ask([prompt + answer[:count]], [1])[0])
            answers.append(steps)
    Path(written).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
