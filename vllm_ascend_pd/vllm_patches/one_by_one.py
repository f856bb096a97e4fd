# SPDX-License-Identifier: Apache-2.0
"""Given tokens in vLLM's front end, which makes text, reasoning and tool calls of them.

The engine core puts all given tokens of a request out at once. A streaming parser finds what ends within one delta only
if that delta is small, so detokenizer and parsers get these tokens one by one, as if they had been sampled: the output
is divided, and what is made of it is not merged, although the client's task has had no time to read yet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_ascend_pd.vllm_patches.wrapping import wrap

GIVEN = "pd_given"  # in the transfer parameters of an engine core's output, which clients cannot set
_STATE = "pd_unmerged"  # on a queue
_COLLECTOR = ("put", "get", "get_nowait")


def install() -> str:
    """Wrap vLLM's output processor and its queues, once. Return why not; empty: they are wrapped."""
    try:
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    except ImportError as missing:
        return f"this vLLM has {missing.name} elsewhere"
    names = tuple(inspect.signature(OutputProcessor.process_outputs).parameters)
    if names[:2] != ("self", "engine_core_outputs") or any(
        not hasattr(RequestOutputCollector, name) for name in _COLLECTOR
    ):
        return "this vLLM's output processor differs"
    wrap(OutputProcessor, "process_outputs", _divided)
    for name, around in zip(_COLLECTOR, (_put, _get, _get_nowait), strict=True):
        wrap(RequestOutputCollector, name, around)
    return ""


def given_output(output: Any) -> bool:
    return bool(output.kv_transfer_params) and output.kv_transfer_params.get(GIVEN) is True


def _divided(original: Any) -> Any:
    def process_outputs(self: Any, engine_core_outputs: Any, *more: Any, **named: Any) -> Any:
        if any(map(given_output, engine_core_outputs)):
            engine_core_outputs = _divide(self, engine_core_outputs)  # vLLM puts each before it takes the next
        return original(self, engine_core_outputs, *more, **named)

    return process_outputs


def _divide(processor: Any, outputs: Iterable[Any]) -> Iterator[Any]:
    for output in outputs:
        if not given_output(output):
            yield output
            continue
        params = {name: value for name, value in output.kv_transfer_params.items() if name != GIVEN} or None
        state, unmerged = processor.request_states.get(output.request_id), _Unmerged()
        if state is not None and state.queue is not None:
            setattr(state.queue, _STATE, unmerged)
        yield from divide(output, params)
        unmerged.given = False


def divide(output: Any, params: dict[str, Any] | None) -> Iterator[Any]:
    """Return an output of the engine core as outputs of one token each. The last one has how the request ended."""
    from vllm.v1.engine import EngineCoreOutput

    tokens, rows = output.new_token_ids, output.new_logprobs
    for index, token in enumerate(tokens):
        one = EngineCoreOutput(output.request_id, [token])
        if rows is not None:
            one.new_logprobs = rows.slice_request(index, 1)
        if index == 0:
            one.events, one.prefill_stats, one.trace_headers = output.events, output.prefill_stats, output.trace_headers
        if index == len(tokens) - 1:
            one.finish_reason, one.stop_reason = output.finish_reason, output.stop_reason
            one.kv_transfer_params = params
        yield one


@dataclasses.dataclass(slots=True)
class _Unmerged:
    """Outputs that wait behind the one that a queue holds. `given`: those that come now are of given tokens."""

    given: bool = True
    merges: bool = False  # the newest output is of sampled tokens, and so may be merged with the next
    waiting: deque[Any] = dataclasses.field(default_factory=deque)


def _put(original: Any) -> Any:
    def put(self: Any, output: Any) -> None:
        unmerged = getattr(self, _STATE, None)
        if unmerged is None or isinstance(output, Exception) or (self.output is None and not unmerged.waiting):
            original(self, output)
        elif unmerged.merges:
            (unmerged.waiting[-1] if unmerged.waiting else self.output).add(output, aggregate=self.aggregate)
        else:
            unmerged.waiting.append(output)
        if unmerged is not None:
            unmerged.merges = not unmerged.given

    return put


def _get(original: Any) -> Any:
    async def get(self: Any) -> Any:
        output = await original(self)
        _next(self)
        return output

    return get


def _get_nowait(original: Any) -> Any:
    def get_nowait(self: Any) -> Any:
        output = original(self)
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
