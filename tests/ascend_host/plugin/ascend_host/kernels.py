# SPDX-License-Identifier: Apache-2.0
"""Host versions of the Triton kernels that vllm-ascend starts although there is no Triton here.

Without Triton a kernel is a plain function, which cannot be started: the engine stops with a trace that names it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from ascend_host import context


def on_host(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the device's memory in place of its tensors, called when the stream is done."""

    def start(*arguments: Any, **constants: Any) -> None:
        torch.npu.current_stream().synchronize()
        function(*map(_seen, arguments), **{name: _seen(one) for name, one in constants.items()})

    return start


class OnHost:
    """A kernel's interface, `kernel[grid](...)`, over a function on the tensors' memory."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._start = on_host(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._start, grid)


def _seen(argument: Any) -> Any:
    return torch.ops.ascend_host.host_view(argument) if isinstance(argument, torch.Tensor) else argument


def slot_mapping(
    grid: tuple[int, ...],
    tokens: int,
    room: int,
    starts: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    _stride: int,
    block_size: int,
    slots: torch.Tensor,
    *,
    PAD_ID: int,  # noqa: N803
    **_constants: Any,
) -> None:
    """Set each token's slot in the paged cache; tokens of request i begin at `starts[i]`. The last program pads.

    A group with entries for several tokens has a shorter table, and never asks for a token's slot: so it has none.
    """
    requests = grid[0] - 1
    counts = starts[: requests + 1].diff().long()
    request = torch.arange(requests).repeat_interleave(counts)
    at = positions[: len(request)].long()
    column = at // block_size
    blocks = table[request, column.clamp(max=table.shape[1] - 1)].long()
    mapped = torch.where(column < table.shape[1], blocks * block_size + at % block_size, PAD_ID)
    slots[: len(request)] = mapped.to(slots.dtype)
    slots[tokens:room] = PAD_ID


def slot_mappings(
    groups: int,
    requests: int,
    tokens: int,
    room: int,
    starts: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    widths: torch.Tensor,
    block_sizes: torch.Tensor,
    _smallest_block: int,
    *,
    pad_id: int,
    is_circular_ptr: torch.Tensor | None = None,
) -> None:
    """Set the slots of several groups; their tables and slots are given by their addresses, in int32."""
    if is_circular_ptr is not None and bool(is_circular_ptr.any()):
        raise NotImplementedError("slots of a ring")
    of_groups = zip(*(one.tolist() for one in (tables, slots, widths, block_sizes)), strict=True)
    for table, slot, width, size in list(of_groups)[:groups]:
        rows, out = _at(table, requests * width).view(requests, width), _at(slot, room)
        slot_mapping((requests + 1,), tokens, room, starts, positions, rows, width, size, out, PAD_ID=pad_id)


def _at(address: int, count: int) -> torch.Tensor:
    """Return int32 values in memory."""
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)


def lay_out_queries(
    _grid: tuple[int, ...],
    *,
    HAS_NUM_REJECTED: bool = False,  # noqa: N803
    SAMPLE_FROM_ANCHOR: bool = False,  # noqa: N803
    DCP_SIZE: int = 1,  # noqa: N803
    **given: Any,
) -> None:
    """Lay out what DFlash asks in its one pass: for each request its next token and a mask for each token to draft.

    Their positions and slots are behind the request's accepted tokens: without one, where the step began (0.30). The
    context's are copied.
    """
    if SAMPLE_FROM_ANCHOR or DCP_SIZE > 1:
        raise NotImplementedError("queries of DSpark, or with context parallelism")
    starts, size, queries = given["query_start_loc_ptr"].tolist(), given["block_size"], given["num_query_per_req"]
    ahead = torch.arange(queries)
    for request, (begin, end) in enumerate(pairwise(starts[: given["batch_size"] + 1])):
        context, asked = slice(begin, end), slice(request * queries, (request + 1) * queries)
        given["out_context_positions_ptr"][context] = given["target_positions_ptr"][context]
        given["out_context_slot_mapping_ptr"][context] = given["context_slot_mapping_ptr"][context]
        rejected = int(given["num_rejected_tokens_ptr"][request]) if HAS_NUM_REJECTED else 0
        known = given["target_positions_ptr"][begin:end]
        behind = known[-rejected - 1] + 1 if rejected < end - begin else known[0]
        given["out_query_positions_ptr"][asked] = behind + ahead
        at = given["seq_lens_ptr"][request] - rejected + ahead
        blocks = given["block_table_ptr"][request, (at // size).long()]
        given["out_query_slot_mapping_ptr"][asked] = blocks * size + at % size
        given["out_input_ids_ptr"][asked] = given["parallel_drafting_token_id"]
        given["out_input_ids_ptr"][asked.start] = given["next_token_ids_ptr"][request]
        drafts = given["num_speculative_tokens"]
        given["out_token_indices_ptr"][request * drafts : (request + 1) * drafts] = asked.start + ahead[1:]


def batch_memcpy(
    grid: tuple[int, ...],
    sources: torch.Tensor,
    targets: torch.Tensor,
    sizes: torch.Tensor,
    *,
    BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Copy bytes between addresses of the device, which are the host's."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def keep_block_ends(
    grid: tuple[int, int],
    accepted: torch.Tensor,
    running: torch.Tensor,
    scheduled: torch.Tensor,
    computed: torch.Tensor,
    drafted: torch.Tensor,
    tables: torch.Tensor,
    stride: int,
    bases: torch.Tensor,
    block_strides: torch.Tensor,
    element_sizes: torch.Tensor,
    inner_sizes: torch.Tensor,
    widths: torch.Tensor,
    groups: torch.Tensor,
    accepted_out: torch.Tensor,
    requests: int,
    *,
    block_size: int,
    COPY_BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Copy the states behind the last token of a block to that block, where accepted drafts go beyond its end.

    A step leaves the states behind each of its tokens: a convolution's in the rows of one block, a recurrence's in one
    block a token, from that of the running state on.
    """

    def block(table: int, index: int) -> int:
        return ctypes.c_int32.from_address(table + 4 * index).value

    for request in range(min(grid[0], requests)):
        first = int(computed[request]) + int(scheduled[request]) - int(drafted[request])
        end = (first + int(accepted[request]) - 1) // block_size * block_size
        source, target, behind = int(running[request]), end // block_size - 1, end - first
        if behind < 0:
            continue
        if source == target:
            accepted_out[request] = 1
            if behind == 0:
                continue
        for state in range(grid[1]):
            table = int(tables[groups[state]]) + 4 * stride * request
            row = int(inner_sizes[state]) * int(element_sizes[state])
            base, block_bytes, rows = int(bases[state]), int(block_strides[state]), int(widths[state])
            to = base + block(table, target) * block_bytes
            if rows:
                begin = base + block(table, source) * block_bytes + behind * row
                ctypes.memmove(to, begin, (rows - behind) * row)
            else:
                ctypes.memmove(to, base + block(table, source + behind) * block_bytes, row)


def keep_block_ends_since_0_30(
    grid: tuple[int, ...],
    *given: Any,
    CONV_STATE_DIM_FIRST: bool = False,  # noqa: N803
    TEMPORAL_TILES: int = 1,  # noqa: N803
    **constants: int,
) -> None:
    """The same, with three more arguments, which are for a convolution's rows side by side and the second runner."""
    *same, _row_count, _row_stride, accepted_out, order, requests = given
    kernel: Callable[..., None] = keep_block_ends
    if CONV_STATE_DIM_FIRST or order is not None or TEMPORAL_TILES > 1:
        raise NotImplementedError("ends of blocks of states side by side, in tiles, or in another order of requests")
    kernel((grid[0], grid[1]), *same, accepted_out, requests, **constants)


IN_PLACE_OF: dict[str, dict[str, Any]] = {
    # The compiled library is missing. Where torch.compile traces the question, the import that fails would stop it.
    "vllm_ascend.utils": {"_CUSTOM_OP_ENABLED": False},
    "vllm_ascend.patch.worker.patch_mamba_utils": {"batch_memcpy_kernel": OnHost(batch_memcpy)},
}
# What one release has and the other has not.
IN_PLACE_OF_ONE: dict[str, dict[str, dict[str, Any]]] = {
    "0.23": {
        "vllm.v1.worker.block_table": {"_compute_slot_mapping_kernel": OnHost(slot_mapping)},
        "vllm_ascend.ops.triton.mamba.postprocess": {"postprocess_mamba_fused_kernel": OnHost(keep_block_ends)},
        "vllm_ascend.ops.triton.spec_decode.utils": {
            "copy_and_expand_dflash_inputs_kernel_single_grid": OnHost(lay_out_queries)
        },
    },
    "0.30": {
        "vllm_ascend.ops.triton.compute_slot_mapping": {
            "_compute_slot_mapping_kernel": OnHost(slot_mapping),
            "compute_slot_mapping_fused_groups": on_host(slot_mappings),
        },
        "vllm_ascend.ops.triton.spec_decode.utils": {
            "copy_and_expand_dflash_and_dspark_inputs_kernel": OnHost(lay_out_queries)
        },
        "vllm_ascend.ops.triton.mamba.postprocess": {
            "postprocess_mamba_fused_kernel": OnHost(keep_block_ends_since_0_30)
        },
        **context.IN_PLACE_OF,
        "vllm_ascend.ops.triton.triton_utils": {"_NUM_VECTORCORE": 1},  # of no device: kernels run as one program
    },
}


# ---- functions of modules that are imported later

Replacements = Mapping[str, Mapping[str, Any]]


def together(*parts: Replacements) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for module, functions in part.items():
            merged.setdefault(module, {}).update(functions)
    return merged


def replace_functions(by_module: Replacements) -> None:
    """Put functions and kernels in the place of others, by their names, in each module as soon as it is imported."""
    for name in by_module:
        if name in sys.modules:
            _put(sys.modules[name], by_module[name])
    sys.meta_path.insert(0, _Finder(by_module))


def _put(module: ModuleType, functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        if not hasattr(module, name):
            raise ImportError(f"{module.__name__} has no {name}, which this plug-in replaces")
        setattr(module, name, function)
        print(f"ascend_host: {module.__name__}.{name} runs on the host", file=sys.stderr)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in question as the other finders do, with another loader."""

    def __init__(self, by_module: Replacements) -> None:
        self._left = dict(by_module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        functions = self._left.pop(name, None)
        if functions is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, functions)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs a module with its own loader, then replaces its functions."""

    def __init__(self, loader: importlib.abc.Loader, functions: Mapping[str, Any]) -> None:
        self._loader, self._functions = loader, functions

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _put(module, self._functions)
