# SPDX-License-Identifier: Apache-2.0
"""The ops of the regroup: gather, assemble, scatter. Importing this file loads the compiled extension.

A row of work copies a box of `heads` x `tokens` cells; rows are planned once per step and serve every layer. The ops
write into what they are given and allocate nothing; docs/ops.md has the columns and the orders.

    gather    paged caches -> send buffer       rows of CACHE_ROW
    assemble  receive buffer -> staging         rows of BUFFER_ROW
    scatter   buffer -> paged caches            rows of CACHE_ROW, for tests
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import Region

CACHE_ROW = ("region", "block", "head", "token", "heads", "tokens", "offset", "head_stride", "token_stride")
BUFFER_ROW = (
    "cell",
    "heads",
    "tokens",
    "source",
    "source_head_stride",
    "source_token_stride",
    "destination",
    "destination_head_stride",
    "destination_token_stride",
)
NAMES = ("gather", "assemble", "scatter")
NAMESPACE = "vllm_ascend_pd"

_EXTENSION = Path(__file__).resolve().parent.parent / "_C.abi3.so"


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise PdError("PD-OPS-001", library=library.name, why=error) from error


def has_kernel(name: str, device_type: str) -> bool:
    """Whether `name` has a kernel of our own on that device: without one torch_npu runs the CPU's, silently."""
    key = {"cpu": "CPU", "npu": "PrivateUse1", "meta": "Meta"}.get(device_type, device_type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key))


def require_kernel(name: str, device_type: str) -> None:
    if not has_kernel(name, device_type):
        raise PdError("PD-OPS-002", name=name, device=device_type)


_load(_EXTENSION)
for _name in NAMES:
    require_kernel(_name, "cpu")


def gather(caches: Sequence[torch.Tensor], rows: torch.Tensor, out: torch.Tensor) -> None:
    """Cells of `caches` (each [block, head, token, cell]) -> the bytes of `out`. Unnamed bytes stay as they are."""
    if out.device.type != "cpu":
        require_kernel("gather", out.device.type)
    torch.ops.vllm_ascend_pd.gather(caches, rows, out)


def assemble(received: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Bytes of `received` -> bytes of `out`."""
    if out.device.type != "cpu":
        require_kernel("assemble", out.device.type)
    torch.ops.vllm_ascend_pd.assemble(received, rows, out)


def scatter(buffer: torch.Tensor, rows: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
    """The inverse of `gather`: bytes of `buffer` -> cells of `caches`."""
    if buffer.device.type != "cpu":
        require_kernel("scatter", buffer.device.type)
    torch.ops.vllm_ascend_pd.scatter(buffer, rows, caches)


def cell_view(cache: torch.Tensor, region: Region, heads: int, tokens: int) -> torch.Tensor:
    """One registered tensor as the ops want it, [block, head, token, cell]: a view, whatever its own shape is.

    `tokens` is the block size, or 1 where the token axis is opaque.
    """
    item = cache.element_size()
    strides = (region.block_stride, region.head_stride, region.token_stride)
    if any(stride % item for stride in strides) or region.cell_bytes % item:
        raise PdError("PD-OPS-003", region=region.name, strides=strides, cell=region.cell_bytes, item=item)
    size = (cache.shape[0], heads, tokens, region.cell_bytes // item)
    return cache.as_strided(size, (*(stride // item for stride in strides), 1), cache.storage_offset())


# ---- fake kernels: shapes only, so that the ops can be traced and compiled


def _fake_rows(op: str, rows: torch.Tensor) -> None:
    if rows.dtype != torch.int64:
        raise RuntimeError(f"{op}: rows must be int64, not {rows.dtype}")
    if rows.dim() == 2 and rows.shape[1] != len(CACHE_ROW):
        raise RuntimeError(f"{op}: rows has shape {list(rows.shape)}, but it must be [n, {len(CACHE_ROW)}]")


def _fake_caches(op: str, caches: Sequence[torch.Tensor]) -> None:
    for index, cache in enumerate(caches):
        if cache.dim() != 4:
            raise RuntimeError(
                f"{op}: caches[{index}] has {cache.dim()} dimensions, but it must be [block, head, token, cell]"
            )


def _fake_gather(caches: Sequence[torch.Tensor], rows: torch.Tensor, out: torch.Tensor) -> None:
    _fake_caches("gather", caches)
    _fake_rows("gather", rows)


def _fake_assemble(received: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    _fake_rows("assemble", rows)


def _fake_scatter(buffer: torch.Tensor, rows: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
    _fake_caches("scatter", caches)
    _fake_rows("scatter", rows)


torch.library.register_fake(f"{NAMESPACE}::gather", _fake_gather)
torch.library.register_fake(f"{NAMESPACE}::assemble", _fake_assemble)
torch.library.register_fake(f"{NAMESPACE}::scatter", _fake_scatter)
