# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU as a device. The only file that imports torch_npu. Never run on hardware so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_npu

from vllm_ascend_pd.device.base import Event

ACL_FORMAT_ND = 2


class _StreamEvent:
    def __init__(self) -> None:
        self._event = torch_npu.npu.Event()
        self._event.record(torch_npu.npu.current_stream())

    def done(self) -> bool:
        return bool(self._event.query())

    def hold(self, stream: torch_npu.npu.Stream) -> None:
        """What `stream` gets from now on waits for this event."""
        stream.wait_event(self._event)


class NpuDevice:
    name = "npu"
    collectives = "hccl"
    exchanges_inline = True
    token_major = True

    def __init__(self) -> None:
        self._index = torch_npu.npu.current_device()
        self._side: torch_npu.npu.Stream | None = None

    def record(self) -> _StreamEvent:
        return _StreamEvent()

    @contextmanager
    def side_stream(self, after: Event) -> Iterator[None]:
        if self._side is None:
            self._side = torch_npu.npu.Stream()
        if isinstance(after, _StreamEvent):
            after.hold(self._side)
        with torch_npu.npu.stream(self._side):
            yield

    def attach_thread(self) -> None:
        # The transfer engine takes the device from the ACL context of the calling thread.
        torch_npu.npu.set_device(self._index)

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> tuple[str, bool]:
        layout = int(torch_npu.get_npu_format(cache))
        # Fractal formats interleave tokens and channels: whole planes can be moved, single tokens cannot.
        return ("plain", False) if layout == ACL_FORMAT_ND else (f"npu-format-{layout}", True)

    def view(self, address: int, length: int) -> memoryview:
        raise NotImplementedError("verify: full needs host-readable memory; device memory is copied by the caller")
