# SPDX-License-Identifier: Apache-2.0
"""One engine in this process answers prompts; the last line is each answer's tokens and log-probabilities as JSON.

    python tests/ascend_host/answers.py MODEL_DIRECTORY '{"more": "arguments of vllm.LLM"}' QUESTIONS.json

QUESTIONS.json is a list of batches; a batch is a list of [prompt, tokens], which are asked at once. An answer is a list
of steps: [token, {token: log-probability} of the best].
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

    model, more, path = sys.argv[1:]
    common = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
    engine = LLM(model, **(common | {"kv_cache_memory_bytes": 128 << 20} | json.loads(more)))
    answers = []
    for batch in json.loads(Path(path).read_text()):
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in batch]
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=BEST) for _, n in batch]
        for done in engine.generate(prompts, wanted, use_tqdm=False):
            steps = zip(done.outputs[0].token_ids, done.outputs[0].logprobs or (), strict=True)
            answers.append([[token, {t: each.logprob for t, each in best.items()}] for token, best in steps])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
