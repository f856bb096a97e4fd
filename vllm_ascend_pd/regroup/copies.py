# SPDX-License-Identifier: Apache-2.0
"""Gather and assemble without this package's kernels: torch_npu's gather of whole pages, then torch copies.

An NPU runs this until the package's kernels have been proven on hardware. It is slower: one launch per box, and an
extra pass over the pages. But it consists of operations that vllm-ascend itself relies on. The boxes are those of the
rows, joined where they continue each other on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
View = tuple[int, ...]  # blocks, heads, tokens, cell, strides of block, head, token; bytes
# (key cache, value cache, block table, lengths, keys, values): pages of one sequence, end to end
Pages = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

BASE, CELL, HEADS, TOKENS, SRC, SRC_HEAD, SRC_TOKEN, DST, DST_HEAD, DST_TOKEN = range(10)
_BYTES = [CELL, SRC, SRC_HEAD, SRC_TOKEN, DST, DST_HEAD, DST_TOKEN]
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_PAGED_DTYPES = (torch.bfloat16, torch.float16, torch.int8)
_FEW_BOXES = 8  # up to this number, copies are cheaper than a pass over the pages


def boxes_of_cache_rows(rows: Ints, views: Sequence[View]) -> Ints:
    """Convert rows of CACHE_ROW to boxes, with the cache's side in bytes. BASE is the region."""
    facts = np.array(views, dtype=np.int64).reshape(-1, 7)[rows[:, 0]]
    boxes = np.empty((len(rows), 10), dtype=np.int64)
    boxes[:, BASE], boxes[:, CELL] = rows[:, 0], facts[:, 3]
    boxes[:, HEADS], boxes[:, TOKENS] = rows[:, 4], rows[:, 5]
    boxes[:, SRC] = rows[:, 1] * facts[:, 4] + rows[:, 2] * facts[:, 5] + rows[:, 3] * facts[:, 6]
    boxes[:, SRC_HEAD], boxes[:, SRC_TOKEN] = facts[:, 5], facts[:, 6]
    boxes[:, DST:] = rows[:, 6:]
    return boxes


def boxes_of_buffer_rows(rows: Ints) -> Ints:
    boxes = np.zeros((len(rows), 10), dtype=np.int64)
    boxes[:, CELL:] = rows
    return boxes


def joined(boxes: Ints) -> Ints:
    """Join boxes to fewer, longer ones: contiguous heads become one cell, boxes that continue each other become one."""
    boxes = boxes.copy()
    together = (boxes[:, SRC_HEAD] == boxes[:, CELL]) & (boxes[:, DST_HEAD] == boxes[:, CELL])
    together |= boxes[:, HEADS] == 1
    boxes[together, CELL] *= boxes[together, HEADS]
    boxes[together, HEADS] = 1
    boxes[together, SRC_HEAD] = boxes[together, DST_HEAD] = boxes[together, CELL]
    if len(boxes) < 2:
        return boxes
    same = [BASE, CELL, HEADS, SRC_HEAD, SRC_TOKEN, DST_HEAD, DST_TOKEN]
    before, after = boxes[:-1], boxes[1:]
    goes_on = (before[:, same] == after[:, same]).all(axis=1)
    for place, stride in ((SRC, SRC_TOKEN), (DST, DST_TOKEN)):
        goes_on &= before[:, place] + before[:, TOKENS] * before[:, stride] == after[:, place]
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    kept = boxes[first]
    kept[:, TOKENS] = np.add.reduceat(boxes[:, TOKENS], first)
    return kept


def unit_of(boxes: Ints, *sizes: int) -> int:
    """Return the widest element (8, 4, 2 or 1 bytes) that divides all places, strides and sizes."""
    return int(np.gcd(8, np.gcd.reduce(np.concatenate((boxes[:, _BYTES].ravel(), np.array(sizes, dtype=np.int64))))))


def _measures(tensor: torch.Tensor) -> list[int]:
    """Return length, place and strides in bytes: a view of another type needs them to be whole elements."""
    item = tensor.element_size()
    return [
        int(tensor.nbytes),
        int(tensor.storage_offset()) * item,
        *(stride * item for stride in tensor.stride()[:-1]),
    ]


def copy_boxes(boxes: Ints, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Copy the boxes, one copy each, in elements as wide as possible. BASE is the index in `sources`."""
    if not len(boxes):
        return
    tensors = (*sources, target)
    unit = unit_of(boxes, *(size for t in tensors for size in _measures(t)))
    elements = [t.view(_UNITS[unit]) for t in tensors]
    shapes = boxes.copy()
    shapes[:, _BYTES] //= unit
    for base, cell, heads, tokens, src, src_head, src_token, dst, dst_head, dst_token in shapes.tolist():
        size, a, b = (heads, tokens, cell), elements[base], elements[-1]
        source = a.as_strided(size, (src_head, src_token, 1), a.storage_offset() + src)
        b.as_strided(size, (dst_head, dst_token, 1), b.storage_offset() + dst).copy_(source)


@dataclass(frozen=True, slots=True)
class _PagedGather:
    """Gather, by one launch, of all pages that the rows of K and V touch."""

    table: torch.Tensor
    length: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gather: Pages

    def __call__(self, caches: Sequence[torch.Tensor]) -> None:
        key, value = (cache.permute(0, 2, 1, 3) for cache in caches[:2])
        if self.keys.device.type != "cpu":  # the current stream may differ from the one they were allocated on
            stream = torch.get_device_module(self.keys.device).current_stream()
            for tensor in (self.table, self.length, self.keys, self.values):
                tensor.record_stream(stream)
        self.gather(key, value, self.table, self.length, self.keys, self.values)


class GatherCopies:
    """Gather by rows of CACHE_ROW, from caches with the layout of `caches`."""

    def __init__(self, rows: Ints, views: Sequence[View], caches: Sequence[torch.Tensor], pages: Pages | None) -> None:
        self._direct = joined(boxes_of_cache_rows(rows, views))
        self._paged: _PagedGather | None = None
        self._from_pages = self._direct[:0]
        if pages is not None and _can_be_paged(views, caches):
            in_pages = self._direct[:, BASE] < 2
            if in_pages.sum() > _FEW_BOXES:
                paged = rows[:, 0] < 2
                self._direct = self._direct[~in_pages]
                self._page(rows[paged], views, caches, pages)

    def _page(self, rows: Ints, views: Sequence[View], caches: Sequence[torch.Tensor], pages: Pages) -> None:
        blocks, first = np.unique(rows[:, 1], return_index=True)
        blocks = blocks[np.argsort(first)]  # in the order of the rows, so that their boxes can be joined
        row_of = np.zeros(int(blocks.max()) + 1, dtype=np.int64)
        row_of[blocks] = np.arange(len(blocks))
        moved = rows.copy()
        moved[:, 1] = row_of[rows[:, 1]]
        self._from_pages = joined(boxes_of_cache_rows(moved, views))
        device, tokens = caches[0].device, views[0][2]

        def room(cache: torch.Tensor) -> torch.Tensor:
            _, heads, _, dim = cache.shape
            return torch.empty((len(blocks) * tokens, heads, dim), dtype=cache.dtype, device=device)

        self._paged = _PagedGather(
            torch.from_numpy(blocks.astype(np.int32)).view(1, -1).to(device),
            torch.tensor([len(blocks) * tokens], dtype=torch.int32).to(device),
            room(caches[0]),
            room(caches[1]),
            pages,
        )

    def __call__(self, caches: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        copy_boxes(self._direct, caches, out)
        if self._paged is not None:
            self._paged(caches)
            copy_boxes(self._from_pages, (self._paged.keys, self._paged.values), out)


def _can_be_paged(views: Sequence[View], caches: Sequence[torch.Tensor]) -> bool:
    """Return whether K and V are apart, token-major, without gaps, and of a dtype that torch_npu's op supports."""
    if len(views) < 2 or any(cache.dtype not in _PAGED_DTYPES for cache in caches[:2]):
        return False
    for _, heads, tokens, cell, block_stride, head_stride, token_stride in views[:2]:
        compact = token_stride == heads * cell and block_stride == tokens * token_stride
        if not compact or (heads > 1 and head_stride != cell):
            return False
    return views[0][:3] == views[1][:3]


class AssembleCopies:
    """Assemble by rows of BUFFER_ROW."""

    def __init__(self, rows: Ints) -> None:
        self._boxes = joined(boxes_of_buffer_rows(rows))

    def __call__(self, received: torch.Tensor, out: torch.Tensor) -> None:
        copy_boxes(self._boxes, (received,), out)
