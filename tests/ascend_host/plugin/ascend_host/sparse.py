# SPDX-License-Identifier: Apache-2.0
"""Definitions of what MLA with a sparse indexer asks for, in bfloat16 and in int8 with scales.

An indexer scores every token before a query by its index key. Attention sees the tokens with the best scores. The
operators of `_C_ascend` belong to vllm-ascend's compiled library, which is missing here: their schemas are declared as
in that library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_host.reference import FULL, RIGHT_DOWN, attend, of, read_tokens, refuse, softmax_parts, visible

_PAGED = (
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_{keys}=None, "
    "str layout_query='BSND', str layout_{keys}='BSND', int sparse_mode=3"
)
_BAND = "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807"
_OF_KEYS, _OF_KV = _PAGED.format(keys="key"), _PAGED.format(keys="kv")
_QUANTISED = tuple(f"_C_ascend::npu_kv_quant_sparse_flash_attention{end}" for end in ("", "_vllm"))  # 0.30's name
SCHEMAS = {
    "_C_ascend::npu_lightning_indexer": f"(Tensor query, Tensor key, Tensor weights, *, {_OF_KEYS}, "
    f"int sparse_count=2048, {_BAND}, bool return_value=False) -> (Tensor, Tensor)",
    "_C_ascend::npu_lightning_indexer_quant": "(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    f"Tensor key_dequant_scale, *, {_OF_KEYS}, int query_quant_mode=0, int key_quant_mode=0, int sparse_count=2048) "
    "-> Tensor",
    "_C_ascend::npu_sparse_flash_attention": "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    f"float scale_value, *, {_OF_KV}, Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, "
    f"{_BAND}, int attention_mode=2, bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)",
    **dict.fromkeys(
        _QUANTISED,
        "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
        f"float scale_value, *, {_OF_KV}, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None, "
        f"Tensor? value_dequant_scale=None, int sparse_block_size=1, {_BAND}, int attention_mode=2, "
        "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, bool return_softmax_lse=False) "
        "-> (Tensor, Tensor, Tensor)",
    ),
    "_C_ascend::store_kv_block_metadata": "(Tensor slot_mapping_npu, Tensor group_len, Tensor group_key_idx, "
    "Tensor group_key_cache_idx, int block_size=0) -> ()",
    "_C_ascend::store_kv_block": "(Tensor key_in, Tensor key_cache_in, Tensor group_len, Tensor group_key_idx, "
    "Tensor group_key_cache_idx, int block_size=0) -> ()",
}
EVERYWHERE = 9223372036854775807
ABSORBED = 2  # attention mode: the latent is both key and value
PER_TILE, COMBINED = 2, 1  # a scale for each tile of a latent, stored behind it
NO_TOKEN = -1  # an index behind the last chosen token


def _as_here(operator: str, layouts: tuple[str, str], mode: int, more: dict[str, Any]) -> None:
    """Refuse what no model here has asked for: other layouts and masks, bands, further results."""
    if layouts != ("TND", "PA_BSND") or mode not in (FULL, RIGHT_DOWN):
        raise NotImplementedError(f"{operator} of layouts {layouts} and sparse mode {mode}")
    refuse(operator, **{name: value for name, value in more.items() if value not in (False, EVERYWHERE)})


def _sequences(ends: Tensor, counts: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor, int]]:
    """Yield each sequence's queries, its row of the block table, and how many tokens it has."""
    start = 0
    for row, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        if end > start:
            yield slice(start, end), table[row], count
        start = end


@of("_C_ascend::npu_lightning_indexer", "npu::npu_lightning_indexer")
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = RIGHT_DOWN,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Return for each query the tokens with the best scores, best first, then -1; and no scores.

    A token's score is the sum over the indexer's heads of weight · max(0, query · key).
    """
    _as_here("npu_lightning_indexer", (layout_query, layout_key), sparse_mode, more)
    best = torch.full((len(query), key.shape[2], sparse_count), NO_TOKEN, dtype=torch.int32)
    for rows, table, count in _sequences(actual_seq_lengths_query, actual_seq_lengths_key, block_table):
        keys = read_tokens(key, table, 0, count)[:, 0].double()
        hidden = ~visible(rows.stop - rows.start, count, sparse_mode, 0, 0)
        indices = chosen(query[rows].double(), keys, weights[rows].double(), hidden, sparse_count)
        best[rows, 0, : indices.shape[1]] = indices
    return best, torch.zeros(0, dtype=query.dtype)


def chosen(query: Tensor, keys: Tensor, weights: Tensor, hidden: Tensor, count: int) -> Tensor:
    """Return for each query the best of the keys that it sees, best first, then NO_TOKEN.

    A key's score is the sum over the heads of weight · max(0, query · key).
    """
    scores = torch.zeros(hidden.shape, dtype=torch.float64)
    for head in range(query.shape[1]):
        scores += weights[:, head : head + 1] * (query[:, head] @ keys.t()).relu()
    order = scores.masked_fill(hidden, -torch.inf).sort(descending=True, stable=True).indices[:, :count]
    return order.masked_fill(hidden.gather(1, order), NO_TOKEN).int()


@of("_C_ascend::npu_lightning_indexer_quant")
def lightning_indexer_quant(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    *,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    **paged: Any,
) -> Tensor:
    """Choose as with queries and keys in full: each vector times its own scale."""
    if query_quant_mode or key_quant_mode:
        raise NotImplementedError("npu_lightning_indexer_quant with other scales than one for each vector")
    whole_query, whole_key = (
        vectors.double() * scales.double().unsqueeze(-1)
        for vectors, scales in ((query, query_dequant_scale), (key, key_dequant_scale))
    )
    return lightning_indexer(whole_query, whole_key, weights, **paged)[0]


@of("_C_ascend::npu_sparse_flash_attention")
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = RIGHT_DOWN,
    attention_mode: int = ABSORBED,
    return_softmax_lse: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention over the chosen tokens that a query may see; rows behind the last sequence are zero.

    If asked, also each row's largest score, and the sum of exponentials over it, both [1, tokens, heads].
    """
    _as_here("npu_sparse_flash_attention", (layout_query, layout_kv), sparse_mode, more)
    if sparse_block_size != 1 or attention_mode != ABSORBED:
        raise NotImplementedError("npu_sparse_flash_attention over blocks of tokens, or not absorbed")
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    largest = torch.full((1, *query.shape[:2]) if return_softmax_lse else (0,), -torch.inf)
    total = torch.zeros(largest.shape)
    for rows, table, count in _sequences(actual_seq_lengths_query, actual_seq_lengths_kv, block_table):
        k, rope, v = (read_tokens(cache, table, 0, count) for cache in (key, key_rope, value))
        indices = sparse_indices[rows, 0].long()
        chosen = torch.zeros(len(indices), count + 1, dtype=torch.bool)  # the last column takes the -1
        chosen.scatter_(1, indices.masked_fill(indices == NO_TOKEN, count), True)
        seen = chosen[:, :count] & visible(len(indices), count, sparse_mode, 0, 0)
        asked, keys = torch.cat((query[rows], query_rope[rows]), -1), torch.cat((k, rope), -1)
        out[rows], _ = attend(asked, keys, v, scale_value, seen)
        if return_softmax_lse:
            largest[0, rows], total[0, rows] = softmax_parts(asked, keys, scale_value, seen)
    return out, largest, total


@of(*_QUANTISED)
def kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    key_quant_mode: int = 1,
    value_quant_mode: int = 1,
    quant_scale_repo_mode: int = COMBINED,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    **paged: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as with latents in full. A token's entry: its latent in int8, its rotary part, a float32 for each tile."""
    refuse("npu_kv_quant_sparse_flash_attention", key=key_dequant_scale, value=value_dequant_scale)
    if (key_quant_mode, value_quant_mode, quant_scale_repo_mode) != (PER_TILE, PER_TILE, COMBINED):
        raise NotImplementedError("npu_kv_quant_sparse_flash_attention of scales that are not behind the latent")
    latent = query.shape[-1] - rope_head_dim
    rotary = rope_head_dim * query.element_size()
    vectors, rope, scales = key.split((latent, rotary, latent // tile_size * 4), -1)
    tiles = vectors.unflatten(-1, (-1, tile_size)).double()
    whole = (tiles * scales.contiguous().view(torch.float32).double().unsqueeze(-1)).flatten(-2)
    asked, turned = query.split((latent, rope_head_dim), -1)
    return sparse_flash_attention(
        asked,
        whole,
        whole,
        sparse_indices,
        scale_value,
        query_rope=turned,
        key_rope=rope.contiguous().view(query.dtype),
        **paged,
    )


@of("npu::npu_scatter_nd_update_")
def scatter_nd_update(cache: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write rows where the indices say. Rows of padding have negative indices."""
    if indices.shape[-1] != 1:
        raise NotImplementedError("npu_scatter_nd_update_ into more than one dimension")
    rows = indices.flatten().long()
    cache[rows[rows >= 0]] = updates[rows >= 0]
    return cache


# ---- int8 with scales

INT8 = 1  # torch_npu's number for the dtype
LARGEST = 127


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in int8, and the scale of each: its largest value becomes 127."""
    scale = x.float().abs().amax(-1, keepdim=True) / LARGEST
    return (x.float() / scale.where(scale > 0, 1.0)).round().to(torch.int8), scale.squeeze(-1)


@of("npu::npu_dynamic_quant")
def dynamic_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = INT8,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    refuse("npu_dynamic_quant", smooth_scales=smooth_scales, group_index=group_index)
    if (dst_type, quant_mode, dst_type_max) != (INT8, "pertoken", 0.0):
        raise NotImplementedError(f"npu_dynamic_quant to {dst_type}, {quant_mode}, {dst_type_max}")
    return _scaled(x)


@of("npu::npu_dynamic_block_quant")
def dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = INT8,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantise tiles of each row, each with its own scale."""
    if (min_scale, round_mode, dst_type, row_block_size, dst_type_max) != (0.0, "rint", INT8, 1, 0.0):
        raise NotImplementedError("npu_dynamic_block_quant with a least scale, other rounding, or over rows")
    tiles, scales = _scaled(x.unflatten(-1, (-1, col_block_size)))
    return tiles.flatten(-2), scales


@of("_C_ascend::store_kv_block_metadata")
def store_kv_block_metadata(
    slots: Tensor, lengths: Tensor, tokens: Tensor, firsts: Tensor, block_size: int = 0
) -> None:
    """Write how tokens lie together: runs of tokens with slots one behind the other in one block.

    Of each run: its length, its first token, and that token's slot. Tokens with a slot below 0 are in none; the rest of
    the three tensors is zero.
    """
    runs: list[tuple[int, int, int]] = []
    for token, slot in enumerate(slots.flatten().tolist()):
        if slot < 0:
            continue
        if runs:
            length, start, first = runs[-1]
            if (token, slot) == (start + length, first + length) and slot // block_size == first // block_size:
                runs[-1] = length + 1, start, first
                continue
        runs.append((1, token, slot))
    rows = torch.tensor(runs, dtype=lengths.dtype).reshape(-1, 3)
    for place, column in zip((lengths, tokens, firsts), rows.t(), strict=True):
        place.zero_()
        place[: len(column)] = column


@of("_C_ascend::store_kv_block")
def store_kv_block(
    key: Tensor, cache: Tensor, lengths: Tensor, tokens: Tensor, firsts: Tensor, block_size: int = 0
) -> None:
    """Copy each run of `store_kv_block_metadata` into the cache."""
    into, size = cache.flatten(), key[0].numel()
    assert into.data_ptr() == cache.data_ptr(), "a cache with gaps"
    for length, token, first in zip(lengths.tolist(), tokens.tolist(), firsts.tolist(), strict=True):
        into[first * size : (first + length) * size] = key[token : token + length].flatten()
