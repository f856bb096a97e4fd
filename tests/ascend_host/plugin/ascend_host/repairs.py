# SPDX-License-Identifier: Apache-2.0
"""A repair of vllm-ascend 0.23.0.post1, for tests that ask for it: ASCEND_HOST_PADDED_ROWS=zeros.

DeepSeek-V4's attention (`dsa_v1.py`) takes uninitialised memory for its result and fills the rows of real tokens; MLA's
begins with zeros. With data parallelism and graphs, a rank that decodes while another prefills gets that one's number
of rows. The other rows hold what was in memory before, and go to the experts too. For a token whose expert is on
another rank, vllm-ascend takes the second row of the experts' results, times zero: NaN, if that row is NaN.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    if os.environ.get("ASCEND_HOST_PADDED_ROWS") != "zeros":
        return
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
