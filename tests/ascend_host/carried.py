# SPDX-License-Identifier: Apache-2.0
"""One engine with DeepSeek-V4: requests that continue with another request's entries; the last line is JSON.

    python tests/ascend_host/carried.py MODEL_DIRECTORY BLOCK_SIZE '[lengths of prompts]' '[lengths to leave out at]'

For each length, and behind all of the prompt or all but its last token: how far the log-probabilities of the answer are
from those of a request that has computed its prompt, by what was left out ("": nothing). Not a number and other tokens
are infinity.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from typing import Any

TOKENS = 12
LEFT_OUT = (  # layer 1 has entries of 4 tokens, layer 2 of 128
    "swa_cache",
    "layers.1.self_attn.attn",
    "layers.1.self_attn.compressor.state_cache",
    "layers.1.self_attn.indexer.k_cache",
    "layers.1.self_attn.indexer.compressor.state_cache",
    "layers.2.self_attn.attn",
    "layers.2.self_attn.compressor.state_cache",
)
Answer = tuple[list[int], list[dict[int, float]]]


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from ascend_host import carrier
    from vllm import LLM, SamplingParams

    model, block, lengths, at = sys.argv[1], *(json.loads(word) for word in sys.argv[2:])
    module = "ascend_host.carrier"
    engine = LLM(
        model,
        dtype="bfloat16",
        block_size=block,
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        kv_transfer_config={"kv_connector": "Carrier", "kv_connector_module_path": module, "kv_role": "kv_both"},
    )

    def ask(prompt: list[int], tokens: int) -> Answer:
        given: Any = [{"prompt_token_ids": prompt}]
        wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=20)
        one = engine.generate(given, wanted, use_tqdm=False)[0].outputs[0]
        return list(one.token_ids), [{t: each.logprob for t, each in best.items()} for best in one.logprobs or ()]

    def continued(prompt: list[int], behind: int, tokens: int, without: str = "") -> Answer:
        carrier.wipe()
        carrier.plan = carrier.NextRequest(load=behind, without=without)
        return ask(prompt, tokens)

    results = []
    for length in lengths:
        chance = random.Random(length)
        prompt = [chance.randrange(3, 500) for _ in range(length)]
        tokens, best = ask(prompt, TOKENS)
        for behind in (length - 1, length):
            carrier.kept.clear()
            carrier.plan = carrier.NextRequest(keep=behind, of=length)
            ask(prompt, 1)
            more = behind + 1 - length  # tokens of the answer that the request begins with
            whole, wanted = prompt + tokens[:more], (tokens[more:], best[more:])
            off = {
                left_out: _off(continued(whole, behind, TOKENS - more, left_out), wanted)
                for left_out in ("", *(LEFT_OUT if length in at else ()))
            }
            results.append([length, behind, off])
    print(json.dumps(results))


def _off(answer: Answer, wanted: Answer) -> float:
    if answer[0] != wanted[0]:
        return math.inf
    pairs = zip(answer[1], wanted[1], strict=True)
    worst = max(abs(one[token] - other.get(token, math.inf)) for one, other in pairs for token in one)
    return worst if worst < math.inf else math.inf


if __name__ == "__main__":
    main()
