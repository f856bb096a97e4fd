# SPDX-License-Identifier: Apache-2.0
"""The ops of the regroup: gather, assemble, scatter. Importing this file loads the compiled extension.

A row of work copies a box of `heads` x `tokens` cells; rows are planned once per step and serve every layer. The ops
write into what they are given and allocate nothing; docs/ops.md has the columns and the orders.

    gather    paged caches -> send buffer       rows of CACHE_ROW
    assemble  receive buffer -> staging         rows of BUFFER_ROW
    scatter   buffer -> paged caches            rows of CACHE_ROW, for tests

`Gather` and `Assemble` hold a table prepared for its device. On the CPU that is the rows themselves. On the NPU it is
torch_npu's ops and copies or, if `use_own_kernels` chose so, the launch program that the host has tiled from the rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.images import Rows
from vllm_ascend_pd.geometry.layout import Region
from vllm_ascend_pd.regroup.copies import AssembleCopies, GatherCopies, Pages, View

NAMES = ("gather", "assemble", "scatter")
NAMESPACE = "vllm_ascend_pd"

PROGRAM_WORDS = 12

_PACKAGE = Path(__file__).resolve().parent.parent
_EXTENSION = _PACKAGE / "_C.abi3.so"
# The NPU's part is a separate library, because it needs torch_npu and CANN. Tests of other builds set the variable.
_NPU_LIBRARY = Path(os.environ.get("VLLM_ASCEND_PD_NPU_LIBRARY", _PACKAGE / "_C_npu.so"))


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise PdError("PD-OPS-001", library=library.name, why=error) from error


def has_kernel(name: str, device_type: str) -> bool:
    """Return whether op `name` has a kernel for that device. Without one torch_npu silently runs the CPU's."""
    key = {"cpu": "CPU", "npu": "PrivateUse1"}.get(device_type, device_type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key))


def require_kernel(name: str, device_type: str) -> None:
    if not has_kernel(name, device_type):
        raise PdError("PD-OPS-002", name=name, device=device_type)


def enable_npu() -> None:
    """Load the NPU kernels; torch_npu must have been imported. Raise PdError if an op is not registered then."""
    _load(_NPU_LIBRARY)
    for name in NAMES:
        require_kernel(name, "npu")


_load(_EXTENSION)
for _name in NAMES:
    require_kernel(_name, "cpu")
if "torch_npu" in sys.modules and _NPU_LIBRARY.is_file():
    enable_npu()


def gather(caches: Sequence[torch.Tensor], rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy cells of `caches` (each [block, head, token, cell]) to `out`. Bytes that no row names stay as they are."""
    if out.device.type != "cpu":
        require_kernel("gather", out.device.type)  # else torch_npu silently runs the CPU's on copies
    torch.ops.vllm_ascend_pd.gather(caches, rows, out)


def assemble(received: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy bytes of `received` to `out`. Bytes that no row names stay as they are."""
    if out.device.type != "cpu":
        require_kernel("assemble", out.device.type)  # else torch_npu silently runs the CPU's on copies
    torch.ops.vllm_ascend_pd.assemble(received, rows, out)


def scatter(buffer: torch.Tensor, rows: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
    """Copy bytes of `buffer` to cells of `caches`: the inverse of `gather`."""
    if buffer.device.type != "cpu":
        require_kernel("scatter", buffer.device.type)  # else torch_npu silently runs the CPU's on copies
    torch.ops.vllm_ascend_pd.scatter(buffer, rows, caches)


def cell_view(cache: torch.Tensor, region: Region, heads: int, tokens: int) -> torch.Tensor:
    """Return a registered tensor of any shape as the view that the ops need, [block, head, token, cell].

    `tokens` is the block size, or 1 where the token axis is opaque.
    """
    item = cache.element_size()
    strides = (region.block_stride, region.head_stride, region.token_stride)
    if any(stride % item for stride in strides) or region.cell_bytes % item:
        raise PdError("PD-OPS-003", region=region.name, strides=strides, cell=region.cell_bytes, item=item)
    size = (cache.shape[0], heads, tokens, region.cell_bytes // item)
    return cache.as_strided(size, (*(stride // item for stride in strides), 1), cache.storage_offset())


# ---- tables prepared for a device


def _view(cache: torch.Tensor) -> View:
    """Return the seven numbers of csrc/rows.h's CacheView."""
    if cache.dim() != 4:
        raise PdError("PD-OPS-004", expected="a cache [block, head, token, cell]", actual=f"shape {list(cache.shape)}")
    item = cache.element_size()
    blocks, heads, tokens, cell = cache.shape
    return (blocks, heads, tokens, cell * item, *(stride * item for stride in cache.stride()[:3]))


def _same(expected: object, actual: object) -> None:
    if expected != actual:
        raise PdError("PD-OPS-004", expected=expected, actual=actual)


_own_kernels = False


def use_own_kernels(wanted: bool) -> None:
    """Choose what tables made from now on run on an NPU: this package's kernels, or torch_npu's ops and copies.

    The kernels have never run on hardware, so they run only if configured. Raise here, at start, if they are missing.
    """
    global _own_kernels
    if wanted and not all(has_kernel(name, "npu") for name in NAMES):
        enable_npu()
    _own_kernels = wanted


def _pages() -> Pages | None:
    """Return torch_npu's gather of whole pages, if it has one."""
    return getattr(torch.ops.npu, "npu_gather_pa_kv_cache", None)


def _program(name: str, device: torch.device, *arguments: object, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows, tiled into a launch program in device memory. Refuse what the CPU's op refuses."""
    require_kernel(name, device.type)
    tile = getattr(torch.ops.vllm_ascend_pd, f"tile_{name}")
    cores = torch.ops.vllm_ascend_pd.vector_cores()
    program = torch.empty((64 + 4 * len(rows), PROGRAM_WORDS), dtype=torch.int64)
    needed = tile(*arguments, cores, program)
    if needed > len(program):
        program = torch.empty((needed, PROGRAM_WORDS), dtype=torch.int64)
        tile(*arguments, cores, program)
    return program[:needed].to(device)


class Gather:
    """Gather that is run for each layer. All caches have the layout of `caches`, all buffers the length of `out`.

    On the NPU a call enqueues on the current stream and checks nothing but the shapes.
    """

    def __init__(self, rows: Rows, caches: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._views = [_view(cache) for cache in caches]
        self._device, self._bytes = out.device, out.nbytes
        self.rows = torch.from_numpy(np.ascontiguousarray(rows))
        self._copies: GatherCopies | None = None
        if self._device.type != "cpu":
            words = [word for view in self._views for word in view]
            if _own_kernels:
                self.rows = _program("gather", self._device, words, self.rows, self._bytes, rows=self.rows)
            else:
                # Tiling for one core into an empty program: it only checks the rows.
                torch.ops.vllm_ascend_pd.tile_gather(words, self.rows, self._bytes, 1, _no_program())
                self._copies = GatherCopies(rows, self._views, caches, _pages())

    def __call__(self, caches: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if self._device.type != "cpu":
            _same(self._views, [_view(cache) for cache in caches])
            _same((self._device, self._bytes), (out.device, out.nbytes))
        if self._copies is None:
            gather(caches, self.rows, out)
        else:
            self._copies(caches, out)


class Assemble:
    """Assemble that is run for each layer, between buffers of the lengths of `received` and `out`."""

    def __init__(self, rows: Rows, received: torch.Tensor, out: torch.Tensor) -> None:
        self._device, self._bytes = out.device, (received.nbytes, out.nbytes)
        self.rows = torch.from_numpy(np.ascontiguousarray(rows))
        self._copies: AssembleCopies | None = None
        if self._device.type != "cpu":
            if _own_kernels:
                self.rows = _program("assemble", self._device, self.rows, *self._bytes, rows=self.rows)
            else:
                torch.ops.vllm_ascend_pd.tile_assemble(self.rows, *self._bytes, 1, _no_program())
                self._copies = AssembleCopies(rows)

    def __call__(self, received: torch.Tensor, out: torch.Tensor) -> None:
        if self._device.type != "cpu":
            _same((self._device, self._bytes), (out.device, (received.nbytes, out.nbytes)))
        if self._copies is None:
            assemble(received, self.rows, out)
        else:
            self._copies(received, out)


def _no_program() -> torch.Tensor:
    return torch.empty((0, PROGRAM_WORDS), dtype=torch.int64)
