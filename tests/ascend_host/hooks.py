# SPDX-License-Identifier: Apache-2.0
"""One P answers a prompt in this process; the last line is the model runner's calls of its connector as JSON.

python tests/ascend_host/hooks.py MODEL_DIRECTORY DTYPE ['{"more": "arguments of vllm.LLM"}']

As a process of an environment of vllm-ascend.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from ascend_host import recorder
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "Recorder",
        "kv_connector_module_path": "ascend_host.recorder",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    model, dtype, *more = sys.argv[1:]
    given: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
        "kv_transfer_config": transfer,
    }
    engine = LLM(model, **(given | (json.loads(more[0]) if more else {})))
    recorder.CALLS.clear()  # calls of the warm-up
    prompt: Any = {"prompt_token_ids": [3 + i % 400 for i in range(600)]}  # two steps, then two steps of one token
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    print(json.dumps({"caches": recorder.CACHES, "calls": recorder.CALLS}))


if __name__ == "__main__":
    main()
