# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU as a device. The only file that imports torch_npu. Never run on hardware so far."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_npu

from vllm_ascend_pd.device.base import PLAIN, Packing
from vllm_ascend_pd.shared.event import Event

# aclFormat: NCHW, ND, NCDHW. torch_npu names a plain tensor by its number of dimensions; all of them are row-major.
PLAIN_FORMATS = (0, 2, 30)
_DEVICE_TO_HOST = 2  # aclrtMemcpyKind


class _StreamEvent:
    def __init__(self) -> None:
        self._event = torch_npu.npu.Event()
        self._event.record(torch_npu.npu.current_stream())

    def done(self) -> bool:
        return bool(self._event.query())

    def hold(self, stream: torch_npu.npu.Stream) -> None:
        """Let work that is enqueued on `stream` from now on wait for this event."""
        stream.wait_event(self._event)


class NpuDevice:
    name = "npu"
    collectives = "hccl"
    exchanges_inline = True
    token_major = True

    def __init__(self) -> None:
        self._index = torch_npu.npu.current_device()
        self._side: torch_npu.npu.Stream | None = None
        self._planning: torch_npu.npu.Stream | None = None
        self._model = threading.get_ident()  # the thread that runs the model
        self._of_thread = threading.local()

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

    @contextmanager
    def planning(self) -> Iterator[None]:
        # Copies from the host wait for their stream. On the model's stream, every step would wait for the one before.
        if self._planning is None:
            self._planning = torch_npu.npu.Stream()
        with torch_npu.npu.stream(self._planning):
            yield

    def attach_thread(self) -> None:
        # The transfer engine takes the device from the ACL context of the calling thread.
        torch_npu.npu.set_device(self._index)
        if threading.get_ident() == self._model or hasattr(self._of_thread, "stream"):
            return
        # Without a stream of its own, a thread that reads device memory would wait for all work of the model.
        self._of_thread.stream = torch_npu.npu.Stream()
        torch_npu.npu.set_stream(self._of_thread.stream)

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        layout = int(torch_npu.get_npu_format(cache))
        # Fractal formats interleave tokens and channels: whole planes can be moved, single tokens cannot.
        return PLAIN if layout in PLAIN_FORMATS else Packing(f"npu-format-{layout}", opaque=True)

    def view(self, address: int, length: int) -> memoryview:
        """Return a copy: the host cannot read device memory. It waits for no stream, so the bytes must be complete."""
        host = bytearray(length)
        to = (ctypes.c_char * length).from_buffer(host)
        acl = ctypes.CDLL("libascendcl.so")  # torch_npu has loaded it
        sizes = ctypes.c_size_t(length)
        error = acl.aclrtMemcpy(to, sizes, ctypes.c_void_p(address), sizes, ctypes.c_int(_DEVICE_TO_HOST))
        if error:
            raise RuntimeError(f"aclrtMemcpy of {length} bytes at {address:#x} from the device: {error}")
        return memoryview(host)
