# SPDX-License-Identifier: Apache-2.0
"""Given tokens in vLLM's front end, which makes text, reasoning and tool calls of them.

A streaming parser finds what ends within one delta only if that delta is small. So the engine core puts each of these
tokens out by itself, marked, and what is made of one is not merged with the next, although the client's task has had no
time to read yet. vLLM lets other tasks run after each 128 outputs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections import deque
from typing import Any

from vllm_ascend_pd.vllm_patches import token_reports
from vllm_ascend_pd.vllm_patches.wrapping import wrap

GIVEN = "pd_given"  # in the transfer parameters of an engine core's output, which clients cannot set
_STATE = "pd_unmerged"  # on a queue
_COLLECTOR = ("put", "get", "get_nowait")


def unfit() -> str:
    """Return why the queues of vLLM's output processor cannot be wrapped; empty: they can."""
    try:
        from vllm.outputs import RequestOutput
        from vllm.v1.engine.output_processor import RequestOutputCollector
    except ImportError as missing:
        return f"this vLLM has {missing.name} elsewhere"
    if "kv_transfer_params" not in inspect.signature(RequestOutput).parameters or any(
        not hasattr(RequestOutputCollector, name) for name in _COLLECTOR
    ):
        return "this vLLM's queues of outputs differ"
    return ""


def install() -> str:
    """Wrap these queues, once. Return why not; empty: they are wrapped."""
    if why := unfit():
        return why
    from vllm.v1.engine.output_processor import RequestOutputCollector

    for name, around in zip(_COLLECTOR, (_put, _get, _get_nowait), strict=True):
        wrap(RequestOutputCollector, name, around)
    return ""


@dataclasses.dataclass(slots=True)
class _Unmerged:
    """Outputs that wait behind the one that a queue holds."""

    merges: bool = False  # the newest output is of sampled tokens, and so may be merged with the next
    waiting: deque[Any] = dataclasses.field(default_factory=deque)


def _put(original: Any) -> Any:
    def put(self: Any, output: Any) -> None:
        given = _is_given(output)
        unmerged = getattr(self, _STATE, None)
        if given and unmerged is None:
            unmerged = _Unmerged()
            setattr(self, _STATE, unmerged)
        if unmerged is None or isinstance(output, Exception) or (self.output is None and not unmerged.waiting):
            original(self, output)
        elif unmerged.merges and not given:
            (unmerged.waiting[-1] if unmerged.waiting else self.output).add(output, aggregate=self.aggregate)
        else:
            unmerged.waiting.append(output)
        if unmerged is not None:
            unmerged.merges = not given

    return put


def _is_given(output: Any) -> bool:
    """Return whether an output is of a given token, and take that mark from it."""
    params = getattr(output, "kv_transfer_params", None)
    if not params or params.get(GIVEN) is not True:
        return False
    output.kv_transfer_params = {name: value for name, value in params.items() if name != GIVEN} or None
    return True


def _get(original: Any) -> Any:
    async def get(self: Any) -> Any:
        output = await original(self)
        token_reports.note(output)
        _next(self)
        return output

    return get


def _get_nowait(original: Any) -> Any:
    def get_nowait(self: Any) -> Any:
        output = original(self)
        token_reports.note(output)
        _next(self)
        return output

    return get_nowait


def _next(queue: Any) -> None:
    """Let a queue that was read hold what waits behind it, soon: its client's task would run on without other tasks."""
    unmerged = getattr(queue, _STATE, None)
    if unmerged is not None and unmerged.waiting:
        asyncio.get_running_loop().call_soon(_hand_over, queue, unmerged.waiting)


def _hand_over(queue: Any, waiting: deque[Any]) -> None:
    if queue.output is None and waiting:
        queue.output = waiting.popleft()
        queue.ready.set()
