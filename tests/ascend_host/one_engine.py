# SPDX-License-Identifier: Apache-2.0
"""One engine in this process answers a few prompts; the last line is its answers as JSON.

    python tests/ascend_host/one_engine.py MODEL_DIRECTORY '{"more": "arguments of vllm.LLM"}'

Runs on whatever vLLM finds: the CPU in .venv, vllm-ascend's `npu:0` in .venv-ascend-host.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

LENGTHS = (5, 130, 700, 1500)
TOKENS = 16


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    common = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
    }
    engine = LLM(sys.argv[1], **(common | json.loads(sys.argv[2])))
    chance = random.Random(5)
    prompts: list[Any] = [{"prompt_token_ids": [chance.randrange(3, 500) for _ in range(n)]} for n in LENGTHS]
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers = engine.generate(prompts, wanted, use_tqdm=False)
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
