# SPDX-License-Identifier: Apache-2.0
"""A plug-in of vLLM for tests only: the transfer engine claims that every write landed and writes nothing.

Put this folder in front of PYTHONPATH of a prefill engine. What must happen then: wrong tokens where nothing checks,
a failed transfer where `verify` is `full`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.mooncake import MooncakeTransport

_handles = itertools.count(1)


def install() -> None:
    MooncakeTransport.submit = _submit  # type: ignore[method-assign]
    MooncakeTransport.poll = _poll  # type: ignore[method-assign]


def _submit(self: MooncakeTransport, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
    return next(_handles)


def _poll(self: MooncakeTransport, handle: int) -> WriteState:
    return WriteState.LANDED
