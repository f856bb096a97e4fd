# SPDX-License-Identifier: Apache-2.0
"""Planted faults in a P or a D, to show that they are seen.

ASCEND_HOST_FAULTS names a file. While it holds one of these names, that fault is there:

computed    direct: the writer does not wait for a layer's event before it writes
written     a layer gets the event of the layer before it
hold        exchange: the side stream does not wait for the model's stream
staged      exchange: the writer does not wait for the event after the exchange
layers      direct: the first two layers are read from each other's memory
order       exchange: the process group has its ranks in the reverse order
hook        the second layer's hook is never called
elsewhere … direct: caches with this name are read from the block behind the right one
gate        D: it opens a request's blocks for writes although its own work with them may not be over
token       D: behind a load whose sums were right, one token in the middle of the prompt (or the entry that stands for
            it and its neighbours) has no keys and values in one layer in the middle of the model
device      from the start: the package's threads do not set their device
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Caches of DeepSeek-V4: the compressed latents, the index keys, what both are made of, the window.
CACHES = (
    "self_attn.attn",
    "indexer.k_cache",
    "self_attn.compressor.state_cache",
    "indexer.compressor.state_cache",
    "swa_cache",
)
ELSEWHERE = tuple(f"elsewhere {name}" for name in CACHES)


class _Past:
    """An event that counts as reached."""

    def done(self) -> bool:
        return True


def install() -> None:
    """Make each fault possible in this process, if it is given such a file."""
    if "ASCEND_HOST_FAULTS" in os.environ:
        for replace in (_events, _written, _hold, _layers, _elsewhere, _order, _hook, _gate, _token, _device):
            replace()


def _now(fault: str) -> bool:
    file = Path(os.environ["ASCEND_HOST_FAULTS"])
    return file.is_file() and file.read_text() == fault


def _instead(owner: Any, name: str, fault: str, other: Callable[..., Any]) -> None:
    """Call `other` with the original function and its arguments, while `fault` is there."""
    original = getattr(owner, name)

    def either(*args: Any, **more: Any) -> Any:
        return other(original, *args, **more) if _now(fault) else original(*args, **more)

    setattr(owner, name, either)


def _events() -> None:
    from vllm_ascend_pd.prefill.worker.core.exchanges import Staged
    from vllm_ascend_pd.prefill.worker.writer import Computed, Writer

    for fault, kind in (("computed", Computed), ("staged", Staged)):

        def forgetful(put: Any, writer: Writer, item: Any, kind: Any = kind) -> None:
            put(writer, dataclasses.replace(item, event=_Past()) if isinstance(item, kind) else item)

        _instead(Writer, "put", fault, forgetful)


def _written() -> None:
    from vllm_ascend_pd.prefill.worker.steps import Steps

    last: list[Any] = []

    def before(written: Any, steps: Steps, name: str) -> None:
        written(steps, name)
        last.append(steps._written)
        steps._written = last.pop(0) if len(last) > 1 else last[0]

    _instead(Steps, "written", "written", before)


def _hold() -> None:
    from vllm_ascend_pd.device.npu import _StreamEvent

    _instead(_StreamEvent, "hold", "hold", lambda hold, event, stream: None)


def _layers() -> None:
    from vllm_ascend_pd.prefill.worker.core import batches

    def swapped(spans_of: Any, push: Any, claim: Any, layer_bases: Any, theirs: Any) -> Any:
        return spans_of(push, claim, (layer_bases[1], layer_bases[0], *layer_bases[2:]), theirs)

    _instead(batches, "spans_of", "layers", swapped)


def _elsewhere() -> None:
    from vllm_ascend_pd.prefill.worker.core import batches

    def behind(spans_of: Any, push: Any, claim: Any, layer_bases: Any, theirs: Any, name: str) -> Any:
        layers, of = push.reservation.geometry.layers, push.layer_index
        moved = tuple(
            tuple(base + region.block_stride for base, region in zip(bases, push.d_kind(layer).regions, strict=True))
            if of[layer] is not None and layers[of[layer]].endswith(name)
            else bases
            for layer, bases in enumerate(layer_bases)
        )
        return spans_of(push, claim, moved, theirs)

    for fault, name in zip(ELSEWHERE, CACHES, strict=True):
        _instead(batches, "spans_of", fault, functools.partial(behind, name=name))


def _gate() -> None:
    from vllm_ascend_pd.decode.worker.core.loads import Loads

    def open_at_once(step: Any, loads: Loads, now: float, metadata: Any, gate: Any) -> None:
        step(loads, now, metadata, gate and _Past())

    _instead(Loads, "step", "gate", open_at_once)


def _token() -> None:
    from vllm_ascend_pd.decode.worker.core.loads import Loads
    from vllm_ascend_pd.decode.worker.role import DecodeWorker

    binds: dict[str, Any] = {}
    step, reports = Loads.step, DecodeWorker.reports

    def noting(loads: Loads, now: float, metadata: Any, gate: Any) -> None:
        binds.update({bind.request_id: bind for bind in metadata.binds})
        step(loads, now, metadata, gate)

    def but_one(worker: DecodeWorker) -> list[Any]:
        reported = reports(worker)
        for report in reported:
            bind = binds.pop(report.request_id, None)
            if report.ok and bind is not None and _now("token"):
                _forget_one(worker.runtime._caches, worker.runtime._tails._rank, bind)  # type: ignore[union-attr]
        return reported

    Loads.step = noting  # type: ignore[assignment, method-assign]
    DecodeWorker.reports = but_one  # type: ignore[assignment, method-assign]


def _forget_one(caches: Any, rank: int, bind: Any) -> None:
    """Write zeros in the place of a token, on the ranks that hold it. The caches are in the host's memory."""
    geometry = caches.geometry
    of_tokens = [
        place
        for place, (name, kind) in enumerate(zip(geometry.layers, geometry.by_layer, strict=True))
        if kind.group.matters in ("all", "compressed") and name in geometry.targets and "indexer" not in name
    ]
    middle = of_tokens[len(of_tokens) // 2]
    kind = geometry.by_layer[middle]
    token = np.array([(bind.first + bind.end) // 2 // kind.group.per_entry])
    split = kind.token_split
    if split.holder(token).item() != kind.ranks.part(rank):
        return
    index, entry = (place.item() for place in split.locate(token))
    block = int(bind.blocks[kind.group_index][index - kind.group.blocks(bind.first, bind.end).start])
    print(f"planted: {geometry.layers[middle]}, block {block}, token {entry} of it", flush=True)
    for base, region in zip(caches.bases[middle], kind.regions, strict=True):
        for head in range(max(1, kind.kv_heads // kind.tp_size)):
            place = base + block * region.block_stride + head * region.head_stride + entry * region.token_stride
            ctypes.memset(place, 0, region.cell_bytes)


def _device() -> None:
    import torch_npu

    def not_ours(set_device: Any, index: Any) -> None:
        if not threading.current_thread().name.startswith("pd-"):
            set_device(index)

    _instead(torch_npu.npu, "set_device", "device", not_ours)


def _order() -> None:
    """Reverse what the collective sends and receives: torch itself sorts the ranks of a group."""
    import torch

    from vllm_ascend_pd.regroup.exchange import GroupExchange

    def turn(buffer: torch.Tensor, sizes: list[int]) -> None:
        used = buffer[: sum(sizes)]
        used.copy_(torch.cat(used.split(sizes)[::-1]))

    def reversed_order(all_to_all: Any, exchange: GroupExchange, rows: Any) -> None:
        turn(exchange._send, rows.send_splits)
        send, receive = rows.send_splits[::-1], rows.receive_splits[::-1]
        all_to_all(exchange, dataclasses.replace(rows, send_splits=send, receive_splits=receive))
        turn(exchange._receive, receive)

    _instead(GroupExchange, "_all_to_all", "order", reversed_order)


def _hook() -> None:
    from vllm_ascend_pd.prefill.worker.role import PrefillWorker

    def but_one(save_layer: Any, worker: PrefillWorker, name: str) -> None:
        if ".layers.1." not in name:
            save_layer(worker, name)

    _instead(PrefillWorker, "save_layer", "hook", but_one)
