# SPDX-License-Identifier: Apache-2.0
"""Definitions of operators of torch_npu (npu::) and ATB (atb::) in plain torch, by their documentation.

Only those that a model here uses; a missing one stops the process with its name (operators.cpp). An argument that no
model has used is refused instead of ignored. Arguments are CPU tensors over the device's memory: writing into them
writes to the device. test_reference.py compares each with an independent definition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MEANINGS: dict[str, Callable[..., Any]] = {}
TRACED: dict[str, Callable[..., Any]] = {}  # of what torch.compile traces and no library declares
_registered: list[torch.library.Library] = []


def of(
    *operators: str, traced: bool = False, shapes: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the definition of these operators.

    `traced`: it does not look at values, so it gives a trace the shapes of its results as well. `shapes` gives these
    where it cannot, because a trace does not know all sizes of the arguments.
    """

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        MEANINGS.update(dict.fromkeys(operators, function))
        if traced or shapes is not None:
            TRACED.update(dict.fromkeys(operators, shapes or function))
        return function

    return note


def declare(schemas: dict[str, str]) -> None:
    """Declare operators that no library here declares."""
    for name, schema in schemas.items():
        space, _, operator = name.partition("::")
        library = torch.library.Library(space, "FRAGMENT")
        library.define(operator + schema)
        _registered.append(library)


def register() -> None:
    """Register the definitions as the operators' kernels for the CPU."""
    for name, function in MEANINGS.items():
        space, _, operator = name.partition("::")
        library = torch.library.Library(space, "IMPL")
        library.impl(operator, function, "CPU")
        if name in TRACED:
            library.impl(operator, TRACED[name], "Meta")
        _registered.append(library)


def refuse(operator: str, **given: Any) -> None:
    """Refuse arguments whose meaning is not defined here."""
    named = sorted(name for name, value in given.items() if value is not None)
    if named:
        raise NotImplementedError(f"the reference of {operator} does not know {', '.join(named)}")


# ---- norms, activations, products


def rms(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(x.dtype), scale


@of("npu::npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms(x, gamma, epsilon)


@of("npu::npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    both = x1 + x2
    y, scale = rms(both, gamma, epsilon)
    return y, scale, both


@of("npu::npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


@of("npu::npu_transpose_batchmatmul")
def transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    refuse("npu_transpose_batchmatmul", bias=bias, scale=scale, batch_split_factor=_unless(batch_split_factor, 1))
    left = x.permute(*perm_x1) if perm_x1 else x
    right = weight.permute(*perm_x2) if perm_x2 else weight
    y = product(left, right)
    return (y.permute(*perm_y) if perm_y else y).contiguous()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply with a single rounding, so that a row's product does not depend on the number of rows."""
    return (left.double() @ right.double()).to(left.dtype)


def _unless(value: Any, usual: Any) -> Any:
    """Return None if an argument has its usual value."""
    return None if value in (usual, None) else value


@of("atb::_npu_matmul_add_fp32")
def matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:  # noqa: N803
    """Compute C += xᵀ · weight, accumulated in float32."""
    C.add_(product(x.float().t(), weight.float()))


@of("npu::npu_format_cast", "npu::_npu_format_cast")
def format_cast(x: Tensor, acl_format: int, **kinds: Any) -> Tensor:
    """Return x: every format is row-major here, and only kernels see the difference."""
    refuse("npu_format_cast", **kinds)
    return x.clone()


# ---- rotary embeddings


def rotate_planes(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Rotate planes by cos and sin, which are as wide as x.

    The two channels of a plane are neighbours (`pairs`) or half of the width apart.
    """
    if pairs:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return (x * cos + turned * sin).to(x.dtype)


@of("npu::npu_rotary_mul")
def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    refuse("npu_rotary_mul", rotate=rotate)
    return rotate_planes(x, r1, r2, rotary_mode == "interleave")


@of("npu::npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reorder neighbours into two halves, then rotate."""
    return rotate_planes(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin, pairs=False)


@of("atb::_npu_rotary_embedding")
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """Rotate in place the first `cos_sin_cache.shape[1]` channels of each head."""
    width = cos_sin_cache.shape[-1]
    parts = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, -1)
    if is_neox_style:
        cos, sin = (torch.cat((part, part), -1) for part in parts)
    else:
        cos, sin = (part.repeat_interleave(2, -1) for part in parts)
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)[..., :width]
        heads.copy_(rotate_planes(heads, cos, sin, pairs=not is_neox_style))


@of("npu::npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Return both rotated, by one position for each token: a section of three zeros is the plain embedding."""
    if any(mrope_section or ()) or positions.dim() != 1 or cache_mode != "default":
        raise NotImplementedError("npu_mrope by positions in several dimensions")
    rotated = query.clone(), key.clone()
    rotary_embedding(positions, *rotated, head_size, cos_sin_cache, rotary_mode == "half")
    return rotated


# ---- the paged cache: [block, token of the block, head, channel]; a slot is a token's place in it


def _write_slots(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows into their slots. Tokens with negative slots are padding.

    Blocks need not lie one behind the other: K and V of vllm-ascend 0.30 take turns.
    """
    wanted = slots.flatten() >= 0
    at, size = slots.flatten()[wanted].long(), cache.shape[1]
    cache[at // size, at % size] = rows.reshape(-1, *cache.shape[2:])[wanted]


def read_tokens(cache: Tensor, table: Tensor, first: int, count: int) -> Tensor:
    """Return `count` tokens of one sequence, from token `first` on."""
    at = torch.arange(first, first + count)
    return cache[table[at // cache.shape[1]].long(), at % cache.shape[1]]


def _in_token_order(cache: Tensor) -> Tensor:
    """View a cache in fractals, [block, head, fractal, token, channel], as [block, token, head, fractal, channel]."""
    return cache.permute(0, 3, 1, 2, 4)


@of("atb::_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    _write_slots(key_cache, slot_indices, key)
    _write_slots(value_cache, slot_indices, value)


@of("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **compressed: Any,
) -> None:
    """Write tokens. In mode PA_NZ a block is [head, channels by 32, token, 32 channels]."""
    refuse("npu_scatter_pa_kv_cache", **compressed)
    if cache_mode == "PA_NZ":
        if key_cache.dim() != 5 or key.dtype != key_cache.dtype:
            raise NotImplementedError(f"npu_scatter_pa_kv_cache: {key.dtype} into {tuple(key_cache.shape)} in fractals")
        key_cache, value_cache = (_in_token_order(cache) for cache in (key_cache, value_cache))
        key, value = (rows.view(len(rows), *key_cache.shape[2:]) for rows in (key, value))
    elif cache_mode not in (None, "Norm"):
        raise NotImplementedError(f"npu_scatter_pa_kv_cache: a cache of mode {cache_mode}")
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


@of("npu::npu_gather_pa_kv_cache")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Copy the sequences' tokens, one sequence after the other."""
    counts = (seq_lens.diff() if is_seq_lens_cumsum else seq_lens).tolist()
    starts = [0] * len(counts) if seq_offset is None else seq_offset.tolist()
    for cache, out in ((key_cache, key), (value_cache, value)):
        done = 0
        for table, start, count in zip(block_tables, starts, counts, strict=False):
            out[done : done + count] = read_tokens(cache, table, start, count)
            done += count


@of("atb::npu_paged_cache_load.out")
def paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cumsum: bool = False,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    gather_pa_kv_cache(
        key_cache, value_cache, block_table, context_lens, key, value, seq_offset=seq_starts, is_seq_lens_cumsum=cumsum
    )
    return key, value


@of("npu::npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **quantised: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split [batch, 1, tokens, latent + rotary], norm the latent part, rotate the other, write both to their slots."""
    refuse("npu_kv_rmsnorm_rope_cache", **quantised)
    if cache_mode not in ("PA", "PA_BNSD"):
        raise NotImplementedError(f"npu_kv_rmsnorm_rope_cache: a cache of mode {cache_mode}")
    latent, _ = rms(kv[..., : len(gamma)], gamma, epsilon)
    rotary = interleave_rope(kv[..., len(gamma) :], cos, sin)
    _write_slots(k_cache, index, rotary)
    _write_slots(ckv_cache, index, latent)
    if is_output_kv:
        return k_cache, ckv_cache, rotary, latent
    return k_cache, ckv_cache, kv.new_empty(0), kv.new_empty(0)


@of("npu::npu_mla_prolog_v3")
def mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    query_norm_flag: bool = False,
    tile_size: int = 128,
    cache_mode: str = "PA_BSND",
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the queries of MLA against latents, and their rotary parts; latents and rotary keys go into the caches.

    That is down, norm and up again for queries, down and norm for latents, in one operator. It rounds where the
    operators do that compute the same one by one, so that a D that has it continues what a P without it has computed.
    The third result and the last are scales, the fourth is the normed query before it goes up, if it is asked for.
    """
    refuse("npu_mla_prolog_v3", **{name: value for name, value in more.items() if isinstance(value, Tensor) or value})
    if cache_mode != "PA_BSND" or (qc_qr_scale, kc_scale) != (1.0, 1.0):
        raise NotImplementedError(f"npu_mla_prolog_v3 with a cache of mode {cache_mode}, or with scales")
    heads, width, latent = weight_uk.shape
    low, _ = rms(product(token_x, weight_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
    query, rotary = product(low, weight_uq_qr).view(len(token_x), heads, -1).split((width, rope_cos.shape[-1]), -1)
    absorbed = product(query.transpose(0, 1), weight_uk).transpose(0, 1).contiguous()
    kv = product(token_x, weight_dkv_kr)
    _write_slots(kv_cache, cache_index, rms(kv[:, :latent], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0])
    _write_slots(kr_cache, cache_index, interleave_rope(kv[:, latent:], rope_cos, rope_sin))
    turned = interleave_rope(rotary, rope_cos.unsqueeze(1), rope_sin.unsqueeze(1))
    nothing = token_x.new_zeros(1)
    return absorbed, turned, nothing.float(), low if query_norm_flag else nothing, nothing.float()


# ---- attention

FULL, LEFT_UP, RIGHT_DOWN, BAND = 0, 2, 3, 4  # sparse modes


def visible(queries: int, keys: int, mode: int, before: int, after: int) -> Tensor:
    """Return which keys each query sees. Except with LEFT_UP the last query is at the last key's position."""
    offset = 0 if mode == LEFT_UP else keys - queries
    ahead = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - offset
    if mode == FULL:
        return torch.ones(queries, keys, dtype=torch.bool)
    if mode in (LEFT_UP, RIGHT_DOWN):
        return ahead <= 0
    if mode == BAND:
        return (ahead <= after) & (ahead >= -before)
    raise NotImplementedError(f"attention of sparse mode {mode}")


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over [tokens, heads, channels], and the logarithm of each row's sum [tokens, heads, 1].

    A query that sees no key has the result 0, and no weight where results are merged.
    """
    scores = _scores(query, key, scale, seen)
    sums = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - sums).nan_to_num(0.0)
    result = torch.einsum("hqk,khc->qhc", weights, _for_heads(value, query))
    return result.to(query.dtype), sums.transpose(0, 1).float()


def softmax_parts(query: Tensor, key: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest score, and the sum of exponentials over it, as [tokens, heads].

    For a query that sees no key these are -inf and 0.
    """
    scores = torch.nn.functional.pad(_scores(query, key, scale, seen), (0, 1), value=-math.inf)
    largest = scores.amax(-1, keepdim=True)
    total = torch.exp(scores - largest).nan_to_num(0.0).sum(-1)
    return largest.squeeze(-1).t().float(), total.t().float()


def _scores(query: Tensor, key: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Return the scores [heads, queries, keys]; -inf for a key that a query does not see."""
    scores = torch.einsum("qhc,khc->hqk", query.double(), _for_heads(key, query)) * scale
    return scores.masked_fill(~seen, -math.inf)


def _for_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.double().repeat_interleave(query.shape[1] // x.shape[1], 1)


def _paged(cache: Tensor, table: Tensor, count: int, heads: int) -> Tensor:
    """Return the first tokens of a sequence.

    The cache is [block, token, heads * channels], or with four dimensions heads before tokens, or with five in
    fractals.
    """
    if cache.dim() == 5:
        return read_tokens(_in_token_order(cache), table, 0, count).flatten(2)
    if cache.dim() == 3:
        return read_tokens(cache, table, 0, count).unflatten(-1, (heads, -1))
    return read_tokens(cache.transpose(1, 2), table, 0, count)


def _sequences(x: Tensor, layout: str, heads: int, ends: Sequence[int] | None) -> Iterator[Tensor]:
    """Yield each sequence of a batch as [tokens, heads, channels]."""
    if layout == "TND":
        assert ends is not None
        starts = [0, *ends]
        yield from (x[start:end] for start, end in zip(starts, ends, strict=False))
    elif layout == "BNSD":
        yield from x.transpose(1, 2)
    else:
        yield from (x.unflatten(-1, (heads, -1)) if layout == "BSH" else x)


def _put_together(parts: list[Tensor], layout: str) -> Tensor:
    if layout in ("TND", "NTD"):
        whole = torch.cat(parts)
        return whole if layout == "TND" else whole.transpose(0, 1).contiguous()
    batch = torch.stack(parts)
    order = {"BSH": (0, 1, 2, 3), "BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "NBSD": (2, 0, 1, 3)}[layout]
    batch = batch.permute(*order).contiguous()
    return batch.flatten(2) if layout == "BSH" else batch


@of("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,  # precision of the device
    block_size: int = 0,  # the cache's shape gives it
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    key_antiquant_scale: Tensor | None = None,  # [head, 1, channel]: mode 0
    value_antiquant_scale: Tensor | None = None,
    softmax_lse_flag: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    refuse("npu_fused_infer_attention_score", **more)
    if (key.dtype == torch.int8) is not (key_antiquant_scale is not None) or key_antiquant_mode or value_antiquant_mode:
        raise NotImplementedError(
            "npu_fused_infer_attention_score: int8 without scales by channel, or scales without it"
        )
    if sparse_mode == FULL:
        refuse("npu_fused_infer_attention_score with sparse mode 0", atten_mask=atten_mask)
    kv_heads = num_key_value_heads or num_heads
    layout, _, layout_out = input_layout.partition("_")
    queries = list(_sequences(query, layout, num_heads, actual_seq_lengths))
    ropes: Any = [None] * len(queries)
    if query_rope is not None:
        ropes = list(_sequences(query_rope, layout, num_heads, actual_seq_lengths))

    def of_sequence(x: Tensor, row: int) -> Tensor:
        if block_table is not None:
            assert actual_seq_lengths_kv is not None
            return _paged(x, block_table[row], actual_seq_lengths_kv[row], kv_heads)
        whole = list(_sequences(x, layout, kv_heads, actual_seq_lengths_kv))[row]
        return whole if layout == "TND" or actual_seq_lengths_kv is None else whole[: actual_seq_lengths_kv[row]]

    results, sums = [], []
    for row, (q, rope) in enumerate(zip(queries, ropes, strict=True)):
        k, v = of_sequence(key, row), of_sequence(value, row)
        if key_antiquant_scale is not None and value_antiquant_scale is not None:
            scales = (key_antiquant_scale, value_antiquant_scale)
            k, v = (x.to(query.dtype) * scale.squeeze(1) for x, scale in zip((k, v), scales, strict=True))
        # A single query is at the last key's position, and without a rotary part its mask has no effect.
        mode = FULL if len(q) == 1 and rope is None else sparse_mode
        seen = visible(len(q), len(k), mode, pre_tokens, next_tokens)
        if rope is not None:
            assert key_rope is not None
            k = torch.cat((k, of_sequence(key_rope, row)), -1)
        result, log_sum = attend(q if rope is None else torch.cat((q, rope), -1), k, v, scale, seen)
        results.append(result)
        sums.append(log_sum)
    if not softmax_lse_flag:
        together = torch.zeros(1)
    else:
        together = torch.cat(sums) if layout == "TND" else torch.stack(sums).transpose(1, 2)
    return _put_together(results, layout_out or layout), together


_RENAMED = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}
_USUALLY_ZERO = ("query_quant_mode", "key_quant_mode", "value_quant_mode")


@of("npu::npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    for name in _USUALLY_ZERO:
        given[name] = _unless(given.get(name), 0)
    return fused_infer_attention_score(query, key, value, **{_RENAMED.get(n, n): x for n, x in given.items()})


def into(attention: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the same attention with given tensors for its two results, as within a graph."""

    @functools.wraps(attention)
    def written(
        *given: Tensor, out: Sequence[Tensor], workspace: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        result, log_sum = attention(*given, **more)
        out[0].copy_(result.view_as(out[0]))
        if more.get("softmax_lse_flag") or more.get("return_softmax_lse"):
            out[1].copy_(log_sum.view_as(out[1]))
        return out[0], out[1]

    return written


of("npu::npu_fused_infer_attention_score.out")(into(fused_infer_attention_score))
of("npu::npu_fused_infer_attention_score_v2.out")(into(fused_infer_attention_score_v2))


@of(
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
)
def get_max_workspace(*_given: Any, **_more: Any) -> Tensor:
    """Return room for intermediate results on the device; here there are none."""
    return torch.empty(1, dtype=torch.uint8)


@of("atb::_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    """Compute one query for each sequence, which sees all its tokens; caches are [block, token, head, channel]."""
    for row, count in enumerate(context_lens.tolist()):
        k, v = (read_tokens(cache, block_table[row], 0, count) for cache in (key_cache, value_cache))
        result, _ = attend(query[row : row + 1], k, v, scale_value, visible(1, count, FULL, 0, 0))
        out[row] = result[0].view_as(out[row])


@of("npu::npu_attention_update")
def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys into attention over all."""
    parts = torch.stack(list(lse)).float()
    whole = parts.logsumexp(0)
    weights = torch.exp(parts - whole)
    out = (weights.unsqueeze(-1) * torch.stack(list(local_out)).float()).sum(0)
    return out.to(local_out[0].dtype), whole


# ---- sampling


@of("npu::npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Set logits outside the k best, or in the tail beyond p, to -inf; the best one stays."""
    values, order = logits.sort(dim=-1, stable=True)
    if k is not None:
        least = values.gather(-1, values.shape[-1] - k.long().unsqueeze(-1))
        values = values.masked_fill(values < least, -math.inf)
    if p is not None:
        tail = values.softmax(-1).cumsum(-1) <= 1 - p.unsqueeze(-1)
        tail[..., -1] = False
        values = values.masked_fill(tail, -math.inf)
    return torch.empty_like(logits).scatter_(-1, order, values)
