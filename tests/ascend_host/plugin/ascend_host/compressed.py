# SPDX-License-Identifier: Apache-2.0
"""Definitions of what DeepSeek-V4's attention asks for: compressed entries, an indexer over them, attention over both.

A layer keeps a window of latents, one for each token, and with a ratio of 4 or 128 also one compressed entry for that
many tokens. What an entry is made of is kept for each token in a state cache until its entry is complete. The operators
of `_C_ascend` belong to vllm-ascend's compiled library, which is missing here: their schemas are declared as in that
library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_host.reference import RIGHT_DOWN, attend, of, read_tokens, refuse, rms, rotate_planes
from ascend_host.sparse import EVERYWHERE, NO_TOKEN, chosen

_ENDS = "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None"
_CHOICE = (
    "int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
    "int next_tokens=9223372036854775807, int cmp_ratio=1"
)
_LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
    "Tensor? seqused_q=None, Tensor? seqused_kv=None"
)
_MASKS = (
    "int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q='BSND', "
    "str layout_kv='PA_ND'"
)
_USED = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? cmp_residual_k=None"
)
_LAYOUTS = "str layout_q='TND', str layout_k='PA_BBND', int mask_mode=3"
SCHEMAS = {
    "_C_ascend::compressor": "(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, "
    "Tensor norm_weight, Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, "
    "Tensor? seqused, Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, "
    "int cache_mode) -> Tensor",
    "_C_ascend::compressor_metadata": "(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, "
    "Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, int num_compressed_tokens, "
    "int num_reqs_actual) -> (Tensor, Tensor, Tensor)",
    "_C_ascend::compressor_metadata_out": "(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, "
    "Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, int num_reqs_actual, "
    "Tensor(a!) compress_cos, Tensor(b!) compress_sin, Tensor(c!) slot_mapping) "
    "-> (Tensor(a!), Tensor(b!), Tensor(c!))",
    "_C_ascend::npu_vllm_quant_lightning_indexer": "(Tensor query, Tensor key, Tensor weights, "
    "Tensor query_dequant_scale, Tensor key_dequant_scale, int query_quant_mode=0, int key_quant_mode=0, "
    f"{_ENDS}, Tensor? block_table=None, Tensor? metadata=None, str layout_query='BSND', str layout_key='BSND', "
    f"{_CHOICE}, bool return_value=False) -> (Tensor, Tensor)",
    "_C_ascend::npu_vllm_quant_lightning_indexer_metadata": "(int num_heads_q, int num_heads_k, int head_dim, "
    f"int query_quant_mode, int key_quant_mode, {_ENDS}, int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, "
    f"str layout_query='BSND', str layout_key='BSND', {_CHOICE}, str device='npu') -> Tensor",
    "_C_ascend::npu_sparse_attn_sharedkv": "(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, "
    "Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, "
    f"Tensor? cmp_block_table=None, {_LENGTHS}, Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=0, "
    f"int cmp_ratio=0, {_MASKS}, bool return_softmax_lse=False) -> (Tensor, Tensor)",
    "_C_ascend::npu_sparse_attn_sharedkv_metadata": f"(int num_heads_q, int num_heads_kv, int head_dim, {_LENGTHS}, "
    "int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=4, "
    f"{_MASKS}, bool has_ori_kv=True, bool has_cmp_kv=True, str device='npu') -> Tensor",
    "_C_ascend::inplace_partial_rotary_mul": "(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, "
    "int[] partial_slice, bool negate_sin=False) -> ()",  # 0.23: without the last
    "_C_ascend::npu_scatter_nd_update_v2": "(Tensor(a!) var, Tensor indices, Tensor update) -> ()",
    # 0.30 has these in place of the indexer and the update above.
    "_C_ascend::npu_quant_lightning_indexer_v2": "(Tensor query, Tensor key, Tensor weights, "
    "Tensor query_dequant_scale, Tensor key_dequant_scale, int topk, int quant_mode, *, "
    f"{_USED}, Tensor? block_table=None, Tensor? output_idx_offset=None, Tensor? metadata=None, int max_seqlen_q=-1, "
    f"{_LAYOUTS}, int cmp_ratio=4, int return_value=0) -> (Tensor, Tensor)",
    "_C_ascend::npu_quant_lightning_indexer_v2_metadata": "(int num_heads_q, int num_heads_k, int head_dim, int topk, "
    f"int quant_mode, *, {_USED}, int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, {_LAYOUTS}, "
    "int cmp_ratio=1, str device='npu') -> Tensor",
    "_C_ascend::npu_scatter_nd_update_sk": "(Tensor(a!) var, Tensor indices, Tensor update) -> ()",
}
INTERLEAVED, PAGED = 2, 1  # rotary mode: neighbours are a plane; cache mode: by the block table, not a ring
BLOCK_AND_OFFSET = 2  # format of a slot
BAND, CAUSAL = 4, 3  # masks of the window and of the compressed entries
NULL_BLOCK = 0
INT8_BY_HEAD = 2  # 0.30's number for the scales of vectors in int8


# ---- compressed entries


@of("_C_ascend::compressor")
def compressor(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    state_cache: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    state_block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    start_pos: Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
) -> Tensor:
    """Return the entries that these tokens complete, all sequences' one after the other; rows behind them are zero.

    A token's state is its value and its score, with the bias for its place in its entry. All are kept: the next call
    continues with those of its first entry, and with overlap (`coff` 2) also of the entry before.
    """
    refuse("compressor", seqused=seqused)
    if state_block_table is None or cu_seqlens is None or start_pos is None:
        raise NotImplementedError("compressor of other sequences than those of a table")
    if (rotary_mode, cache_mode) != (INTERLEAVED, PAGED):
        raise NotImplementedError(f"compressor of rotary mode {rotary_mode}, and a cache of mode {cache_mode}")
    values, scores = ((x.double() @ weight.double().t()).float() for weight in (wkv, wgate))
    out, done = torch.zeros(len(rope_sin), len(norm_weight), dtype=x.dtype), 0
    bounds = cu_seqlens.tolist()
    for sequence, start in enumerate(start_pos.tolist()):
        rows, table = slice(bounds[sequence], bounds[sequence + 1]), state_block_table[sequence]
        at = torch.arange(start, start + rows.stop - rows.start)
        new = torch.cat((values[rows], scores[rows] + ape[at % cmp_ratio]), -1)
        first = max(0, (start // cmp_ratio - (coff - 1)) * cmp_ratio)
        known = torch.cat((read_tokens(state_cache, table, first, start - first), new))
        _keep_states(state_cache, table, at, new)
        pooled = _pool(known, first, start // cmp_ratio, cmp_ratio, coff)
        here = slice(done, done + len(pooled))
        normed = rms(pooled, norm_weight, norm_eps)[0]
        normed[:, -rope_head_dim:] = rotate_planes(
            normed[:, -rope_head_dim:], rope_cos[here], rope_sin[here], pairs=True
        )
        out[here] = normed.to(x.dtype)
        done = here.stop
    return out


def _keep_states(cache: Tensor, table: Tensor, at: Tensor, states: Tensor) -> None:
    """Write tokens' states; tokens whose block is the null block will not be read."""
    blocks = table[at // cache.shape[1]].long()
    kept = blocks != NULL_BLOCK
    cache[blocks[kept], at[kept] % cache.shape[1]] = states[kept]


def _pool(known: Tensor, first: int, entry: int, ratio: int, coff: int) -> Tensor:
    """Return the complete entries from `entry` on, before norm and rotation; `known` begins with token `first`.

    Each channel is the mean of its tokens' values by the softmax of their scores. With overlap an entry also takes the
    tokens of the entry before it, whose first half of channels is for that. The first entry has none before it.
    """
    total, count = len(known) // ratio, (first + len(known)) // ratio - entry
    width = known.shape[-1] // (2 * coff)
    groups = known[: total * ratio].double().view(total, ratio, 2, coff, width)
    parts = groups[total - count :, :, :, coff - 1]
    if coff == 2:
        before = groups[:, :, :, 0]
        if entry == 0:
            nothing = torch.zeros(1, ratio, 2, width, dtype=torch.float64)
            nothing[:, :, 1] = -torch.inf
            before = torch.cat((nothing, before))
        parts = torch.cat((before[:count], parts), 1)
    return (parts[:, :, 0] * parts[:, :, 1].softmax(1)).sum(1)


@of("_C_ascend::compressor_metadata")
def compressor_metadata(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each entry that is completed the rotation by its first token's position, and its slot.

    Rows behind the last entry have no rotation and block -1.
    """
    if slot_mapping_format != BLOCK_AND_OFFSET:
        raise NotImplementedError(f"compressor_metadata with slots of format {slot_mapping_format}")
    slots = torch.tensor([[-1, kv_block_size - 1]], dtype=torch.int32).repeat(num_compressed_tokens, 1)
    cos = torch.ones(num_compressed_tokens, 1, 1, rope_cos.shape[-1], dtype=rope_cos.dtype)
    sin, done = torch.zeros_like(cos), 0
    lengths = cu_seqlens.diff().tolist()
    for request, start in enumerate(start_pos.tolist()[:num_reqs_actual]):
        entries = torch.arange(start // compress_ratio, (start + lengths[request]) // compress_ratio)
        rows = slice(done, done + len(entries))
        cos[rows, 0, 0], sin[rows, 0, 0] = rope_cos[entries * compress_ratio], rope_sin[entries * compress_ratio]
        slots[rows, 0] = kv_block_table[request, entries // kv_block_size].int()
        slots[rows, 1] = (entries % kv_block_size).int()
        done = rows.stop
    return cos, sin, slots


@of("_C_ascend::compressor_metadata_out")
def compressor_metadata_out(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Write the same into given tensors, of which there are as many rows as may be wanted (0.30)."""
    *inputs, requests, cos, sin, slots = given
    for out, values in zip((cos, sin, slots), compressor_metadata(*inputs, len(slots), requests), strict=True):
        out.copy_(values.view_as(out))
    return cos, sin, slots


@of("_C_ascend::npu_scatter_nd_update_v2", "_C_ascend::npu_scatter_nd_update_sk")
def scatter_nd_update_v2(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Write rows where the indices say. Rows of padding have a negative index in front."""
    wanted = indices[:, 0] >= 0
    positions = tuple(indices[wanted].long().unbind(-1))
    var[positions] = update.reshape(len(indices), *var.shape[indices.shape[-1] :])[wanted]


@of("_C_ascend::inplace_partial_rotary_mul")
def inplace_partial_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: list[int], negate_sin: bool = False
) -> None:
    """Rotate some channels by their cosines and sines, in place; back again with `negate_sin`."""
    if rotary_mode != "interleave":
        raise NotImplementedError(f"inplace_partial_rotary_mul of mode {rotary_mode}")
    part = x[..., partial_slice[0] : partial_slice[1]]
    sin = -r2.float() if negate_sin else r2.float()
    part.copy_(rotate_planes(part.float(), r1.float(), sin, pairs=True))


# ---- which entries, and attention


def _sequences(bounds: list[int], counts: Tensor) -> Iterator[tuple[int, slice, int, Tensor]]:
    """Yield each sequence's number, its queries, how many tokens it has, and its queries' positions."""
    for sequence, count in enumerate(counts.tolist()):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        asked = rows.stop - rows.start
        if asked:
            yield sequence, rows, count, torch.arange(count - asked, count)


@of("_C_ascend::npu_vllm_quant_lightning_indexer")
def vllm_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    metadata: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = RIGHT_DOWN,
    pre_tokens: int = EVERYWHERE,
    next_tokens: int = EVERYWHERE,
    cmp_ratio: int = 1,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return for each query the complete entries with the best scores, best first, then -1; and no scores.

    Lengths are of tokens. Scores are those of the indexer over tokens.
    """
    if (query_quant_mode, key_quant_mode, sparse_mode, return_value) != (0, 0, RIGHT_DOWN, False):
        raise NotImplementedError("npu_vllm_quant_lightning_indexer with other scales, masks or results")
    if (layout_query, layout_key, pre_tokens, next_tokens) != ("TND", "PA_BSND", EVERYWHERE, EVERYWHERE):
        raise NotImplementedError(f"npu_vllm_quant_lightning_indexer of layouts {layout_query} and {layout_key}")
    assert actual_seq_lengths_query is not None and actual_seq_lengths_key is not None and block_table is not None
    best = torch.full((len(query), 1, sparse_count), NO_TOKEN, dtype=torch.int32)
    whole = query.double() * query_dequant_scale.double().unsqueeze(-1)
    bounds = [0, *actual_seq_lengths_query.tolist()]
    for sequence, rows, count, at in _sequences(bounds, actual_seq_lengths_key):
        table, entries = block_table[sequence], count // cmp_ratio
        keys = read_tokens(key, table, 0, entries)[:, 0].double()
        keys = keys * read_tokens(key_dequant_scale, table, 0, entries).double()
        hidden = _hidden(at, entries, cmp_ratio)
        indices = chosen(whole[rows], keys, weights[rows].double(), hidden, sparse_count)
        best[rows, 0, : indices.shape[1]] = indices
    return best, torch.zeros(0)


@of("_C_ascend::npu_quant_lightning_indexer_v2")
def quant_lightning_indexer_v2(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    topk: int,
    quant_mode: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cmp_residual_k: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_q: str = "TND",
    layout_k: str = "PA_BBND",
    mask_mode: int = CAUSAL,
    cmp_ratio: int = 4,
    return_value: int = 0,
    metadata: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Return the same with lengths of keys in complete entries, and the number of tokens behind the last of them."""
    refuse("npu_quant_lightning_indexer_v2", **more)
    if (quant_mode, layout_k, mask_mode, return_value) != (INT8_BY_HEAD, "PA_BBND", CAUSAL, 0):
        raise NotImplementedError("npu_quant_lightning_indexer_v2 of other scales, layouts, masks or results")
    assert cu_seqlens_q is not None and seqused_k is not None and cmp_residual_k is not None
    return vllm_quant_lightning_indexer(
        query,
        key,
        weights,
        query_dequant_scale,
        key_dequant_scale,
        actual_seq_lengths_query=cu_seqlens_q[1:],
        actual_seq_lengths_key=seqused_k * cmp_ratio + cmp_residual_k,
        block_table=block_table,
        layout_query=layout_q,
        layout_key="PA_BSND",
        sparse_count=topk,
        cmp_ratio=cmp_ratio,
    )


def _hidden(at: Tensor, entries: int, ratio: int) -> Tensor:
    """Return which entries queries at these positions do not see: those with a token behind the query's."""
    return torch.arange(entries) >= ((at + 1) // ratio).unsqueeze(1)


@of("_C_ascend::npu_sparse_attn_sharedkv")
def sparse_attn_sharedkv(
    q: Tensor,
    *,
    ori_kv: Tensor,
    ori_block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_kv: Tensor,
    sinks: Tensor,
    softmax_scale: float,
    cmp_ratio: int = 0,
    cmp_kv: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    ori_mask_mode: int = BAND,
    cmp_mask_mode: int = CAUSAL,
    ori_win_left: int = 128,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
    return_softmax_lse: bool = False,
    ori_sparse_indices: Tensor | None = None,
    **_without_effect: Any,  # lengths that mean nothing with pages, and how cores share the work
) -> tuple[Tensor, Tensor]:
    """Return attention over a window of tokens, and over compressed entries: all of them, or those chosen.

    An entry of either is key and value. A head's sink takes a share of the weights, and has no value.
    """
    refuse("npu_sparse_attn_sharedkv", ori_sparse_indices=ori_sparse_indices)
    if (layout_q, layout_kv, ori_mask_mode, cmp_mask_mode) != ("TND", "PA_ND", BAND, CAUSAL) or return_softmax_lse:
        raise NotImplementedError(f"npu_sparse_attn_sharedkv of layouts {layout_q} and {layout_kv}, or other masks")
    out = torch.zeros_like(q)
    for sequence, rows, count, at in _sequences(cu_seqlens_q.tolist(), seqused_kv):
        first = max(0, int(at[0]) - ori_win_left)
        keys = read_tokens(ori_kv, ori_block_table[sequence], first, count - first)
        ahead = torch.arange(first, count) - at.unsqueeze(1)
        seen = (ahead >= -ori_win_left) & (ahead <= ori_win_right)
        if cmp_kv is not None:
            assert cmp_block_table is not None
            entries = count // cmp_ratio
            visible = ~_hidden(at, entries, cmp_ratio)
            if cmp_sparse_indices is not None:
                visible &= _among(cmp_sparse_indices[rows, 0], entries)
            keys = torch.cat((keys, read_tokens(cmp_kv, cmp_block_table[sequence], 0, entries)))
            seen = torch.cat((seen, visible), 1)
        attended, sums = attend(q[rows].double(), keys, keys, softmax_scale, seen)
        out[rows] = (attended * torch.sigmoid(sums - sinks.view(1, -1, 1))).to(q.dtype)
    return out, torch.zeros(0)


def _among(indices: Tensor, entries: int) -> Tensor:
    """Return which entries are among each row's indices; -1 stands for none."""
    chosen = torch.zeros(len(indices), entries + 1, dtype=torch.bool)  # the last column takes the -1
    return chosen.scatter(1, indices.long().masked_fill(indices == NO_TOKEN, entries), True)[:, :entries]


@of(
    "_C_ascend::npu_sparse_attn_sharedkv_metadata",
    "_C_ascend::npu_vllm_quant_lightning_indexer_metadata",
    "_C_ascend::npu_quant_lightning_indexer_v2_metadata",
)
def shared_among_cores(*_given: Any, **_named: Any) -> Tensor:
    """Return how a device's cores would share the work, which nothing here reads."""
    return torch.zeros(1024, dtype=torch.int32)
