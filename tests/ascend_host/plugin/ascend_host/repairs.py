# SPDX-License-Identifier: Apache-2.0
"""Repairs of vllm-ascend, one for each release, for tests that ask for it: ASCEND_HOST_REPAIRED.

0.23.0.post1: DeepSeek-V4's attention (`dsa_v1.py`) takes uninitialised memory for its result and fills the rows of real
tokens; MLA's begins with zeros. With data parallelism and graphs, a rank that decodes while another prefills gets that
one's number of rows. The other rows hold what was in memory before, and go to the experts too. For a token whose expert
is on another rank, vllm-ascend takes the second row of the experts' results, times zero: NaN, if that row is NaN.

0.30.0rc2 has that for attention with heads: there vLLM itself takes uninitialised memory for the result, and with data
parallelism a rank that has fewer tokens than another has rows of padding. With experts apart answers of an engine by
itself end in NaN (its token 0). DeepSeek-V4's attention begins with zeros there.

0.30.0rc2, too: behind rejected drafts, all drafts of a step but the first attend to too many keys. The drafter
subtracts the rejected tokens from the lengths on the NPU alone (`llm_base_proposer.py`); attention with heads takes its
lengths from their copy on the host (`_select_seq_lens`), which counts them.

And without Triton, DFlash's keys of the context have no positions there, and hardly a draft is right: they are to be
rotated where they are, as Triton's kernel does, and `npu_mrope` returns them elsewhere (`patch_qwen3_dflash.py`).
"""

from __future__ import annotations

import os
from typing import Any


def install(release: str) -> None:
    if "ASCEND_HOST_REPAIRED" in os.environ:
        for repair in {"0.23": (_padded_rows,), "0.30": (_padded_rows_of_heads, _lengths_of_drafts, _rotations)}[
            release
        ]:
            repair()


def _padded_rows() -> None:
    import vllm_ascend.ops  # noqa: F401  first: the attention's module imports it in a circle
    from vllm_ascend.attention.dsa_v1 import AscendDSAImpl

    forward = AscendDSAImpl.forward

    def with_zeros(*args: Any, **more: Any) -> Any:
        result = forward(*args, **more)
        metadata = args[4]
        if metadata is not None:
            first = metadata[0] if isinstance(metadata, list) else metadata
            result[first.num_actual_tokens :] = 0
        return result

    AscendDSAImpl.forward = with_zeros


def _padded_rows_of_heads() -> None:
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

    forward = AscendAttentionBackendImpl.forward

    def with_zeros(self: Any, layer: Any, query: Any, *args: Any, **more: Any) -> Any:
        result = forward(self, layer, query, *args, **more)
        metadata = args[3]
        if metadata is not None:
            result[metadata.num_actual_tokens :] = 0
        return result

    AscendAttentionBackendImpl.forward = with_zeros


def _lengths_of_drafts() -> None:
    import torch
    from vllm_ascend.attention import attention_v1

    select = attention_v1._select_seq_lens

    def without_rejected(common: Any, **more: Any) -> Any:
        chosen = select(common, **more)
        real = common.seq_lens[: len(chosen)].to("cpu", chosen.dtype)
        return torch.where(real > 0, torch.minimum(real, chosen), chosen)  # 0: a row that only fills a graph

    attention_v1._select_seq_lens = without_rejected


def _rotations() -> None:
    from vllm_ascend.ops.rotary_embedding import AscendRotaryEmbedding

    forward = AscendRotaryEmbedding.forward_oot

    def in_place(self: Any, positions: Any, query: Any, key: Any = None, *args: Any, **more: Any) -> Any:
        rotated = forward(self, positions, query, key, *args, **more)
        for given, result in zip((query, key), rotated, strict=True):
            if given is not None:
                given.copy_(result)
        return rotated

    AscendRotaryEmbedding.forward_oot = in_place
