# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: all work is done when its call returns."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import torch

from vllm_ascend_pd.device.base import PLAIN, Packing
from vllm_ascend_pd.shared.event import Event
from vllm_ascend_pd.vllm_patches import compat


class _DoneEvent:
    def done(self) -> bool:
        return True


class CpuDevice:
    name = "cpu"
    collectives = "gloo"
    exchanges_inline = False
    token_major = False
    _done = _DoneEvent()

    def record(self) -> _DoneEvent:
        return self._done

    def side_stream(self, after: Event) -> AbstractContextManager[None]:
        return nullcontext()

    def planning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def attach_thread(self) -> None:
        return None

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        if cache.dim() == 3 or (cache.shape[1] == 1 and cache.shape[-1] != 2 * head_size):
            return PLAIN  # MLA: one latent per token, in token order
        # The attention kernels keep K transposed inside the plane. The form depends on the instruction set and on the
        # dtype of the computation. A cache of one-byte elements does not show that dtype: then the forms of both
        # possible dtypes are named.
        dtypes = (torch.float32, torch.bfloat16) if cache.element_size() == 1 else (cache.dtype,)
        forms = {compat.attention_isa(dtype, block_size, head_size): None for dtype in dtypes}
        return Packing(f"cpu-{'+'.join(forms)}", opaque=True)

    def view(self, address: int, length: int) -> memoryview:
        return memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
