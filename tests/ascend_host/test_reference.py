# SPDX-License-Identifier: Apache-2.0
"""Each reference operator against another definition: torch's own function, or a loop over the elements.

So that an error here is not taken for one of vllm-ascend's. Runs wherever torch is installed.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_host import context, delta, kernels, library, moe, reference, sparse
from fla_npu.ops import ascendc
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

MANY = settings(max_examples=20, derandomize=True)
sizes = st.integers(1, 7)
seeds = st.integers(0, 1000)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_every_reference_is_tested_here() -> None:
    others = vars(importlib.import_module("test_reference_deepseek4"))
    tested = {name.removeprefix("test_") for name in (*globals(), *others)}
    tested |= {"paged_cache_load"}  # with gather_pa_kv_cache
    tested |= {"compressor_metadata_out"}  # with compressor_metadata
    tested |= {"pack_dcp_output_lse", "fused_dcp_lse_combine"}  # as what ranks send each other
    # Tested as a layer of experts.
    tested |= {"moe_init_routing", "moe_init_routing_v2", "grouped_matmul", "moe_token_unpermute"}
    replacements = kernels.together(context.IN_PLACE_OF, delta.IN_PLACE_OF, *delta.IN_PLACE_OF_ONE.values())
    replaced = {name for functions in replacements.values() for name in functions}
    assert {function.__name__ for function in reference.MEANINGS.values()} | replaced <= tested


# ---- norms, activations, products


@MANY
@given(seeds, sizes, sizes)
def test_rms_norm(seed: int, rows: int, width: int) -> None:
    x, gamma = random(seed, rows, width), random(seed + 1, width)
    y, scale = reference.rms_norm(x, gamma, 1e-5)
    close(y, functional.rms_norm(x, (width,), gamma, 1e-5))
    close(scale, 1 / (x.pow(2).sum(-1, keepdim=True) / width + 1e-5).sqrt())


@MANY
@given(seeds, sizes, sizes)
def test_add_rms_norm(seed: int, rows: int, width: int) -> None:
    x, residual, gamma = random(seed, rows, width), random(seed + 1, rows, width), random(seed + 2, width)
    y, _, both = reference.add_rms_norm(x, residual, gamma, 1e-6)
    close(both, torch.add(x, residual))
    close(y, functional.rms_norm(x + residual, (width,), gamma, 1e-6))


@MANY
@given(seeds, sizes, sizes, st.booleans())
def test_add_rms_norm_bias(seed: int, rows: int, width: int, biased: bool) -> None:
    x, residual, gamma = random(seed, rows, width), random(seed + 1, rows, width), random(seed + 2, width)
    bias = random(seed + 3, width)
    y, scale, both = library.add_rms_norm_bias(x, residual, gamma, bias if biased else None, 1e-5)
    close(both, torch.add(x, residual))
    close(y, functional.rms_norm(x + residual, (width,), gamma, 1e-5) + (bias if biased else 0))
    close(scale[:, 0], 1 / ((x + residual).square().sum(-1) / width + 1e-5).sqrt())


@MANY
@given(seeds, sizes, sizes)
def test_swiglu(seed: int, rows: int, width: int) -> None:
    x = random(seed, rows, 2 * width)
    close(reference.swiglu(x), x[:, :width] * torch.sigmoid(x[:, :width]) * x[:, width:])


@MANY
@given(seeds, sizes, sizes, sizes, sizes)
def test_transpose_batchmatmul(seed: int, tokens: int, batch: int, inner: int, outer: int) -> None:
    x, weight = random(seed, tokens, batch, inner), random(seed + 1, batch, inner, outer)
    wanted = torch.einsum("tbi,bio->tbo", x, weight)
    close(reference.transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_y=(1, 0, 2)), wanted)
    close(reference.transpose_batchmatmul(x.transpose(0, 1), weight), wanted.transpose(0, 1))


@MANY
@given(seeds, sizes, sizes, sizes)
def test_matmul_add_fp32(seed: int, inner: int, rows: int, columns: int) -> None:
    x, weight, before = random(seed, inner, rows), random(seed + 1, inner, columns), random(seed + 2, rows, columns)
    total = before.clone()
    reference.matmul_add_fp32(x, weight, total)
    close(total, before + torch.einsum("ir,ic->rc", x, weight))


def test_format_cast() -> None:
    x = random(0, 3, 4)
    cast = reference.format_cast(x, 29)
    assert torch.equal(cast, x)
    assert cast.data_ptr() != x.data_ptr()


# ---- rotary embeddings


def turned(x: Tensor, angles: Tensor, pairs: bool) -> Tensor:
    """Return planes as complex numbers, multiplied by e^(i·angle). `angles` has half of the width."""
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    plane = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    if pairs:
        return torch.stack((plane.real, plane.imag), -1).flatten(-2)
    return torch.cat((plane.real, plane.imag), -1)


@MANY
@given(seeds, sizes, sizes, sizes, st.booleans())
def test_rotary_mul(seed: int, tokens: int, heads: int, planes: int, pairs: bool) -> None:
    x, angles = random(seed, tokens, 1, heads, 2 * planes), random(seed + 1, tokens, 1, 1, planes)
    wide = angles.repeat_interleave(2, -1) if pairs else torch.cat((angles, angles), -1)
    mode = "interleave" if pairs else "half"
    close(reference.rotary_mul(x, wide.cos(), wide.sin(), mode), turned(x, angles, pairs))


@MANY
@given(seeds, sizes, sizes, sizes)
def test_interleave_rope(seed: int, tokens: int, heads: int, planes: int) -> None:
    x, angles = random(seed, tokens, heads, 1, 2 * planes), random(seed + 1, tokens, 1, 1, planes)
    wide = torch.cat((angles, angles), -1)
    by_pairs = turned(x, angles, pairs=True)
    close(
        reference.interleave_rope(x, wide.cos(), wide.sin()), torch.cat((by_pairs[..., ::2], by_pairs[..., 1::2]), -1)
    )


@MANY
@given(seeds, sizes, sizes, st.integers(0, 3), st.booleans())
def test_rotary_embedding(seed: int, tokens: int, planes: int, rest: int, neox: bool) -> None:
    head = 2 * planes + rest
    table = random(seed, 50, planes)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    query, key = random(seed + 1, tokens, 3 * head), random(seed + 2, tokens, head)
    wanted = []
    for x in (query, key):
        heads = x.view(tokens, -1, head).clone()
        heads[..., : 2 * planes] = turned(heads[..., : 2 * planes], table[positions].unsqueeze(1), pairs=not neox)
        wanted.append(heads.view_as(x))
    reference.rotary_embedding(positions, query, key, head, torch.cat((table.cos(), table.sin()), -1), neox)
    close(query, wanted[0])
    close(key, wanted[1])


@MANY
@given(seeds, sizes, sizes, st.integers(0, 3), st.booleans())
def test_mrope(seed: int, tokens: int, planes: int, rest: int, neox: bool) -> None:
    head, angles = 2 * planes + rest, random(seed, 50, planes)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    query, key = random(seed + 1, tokens, 3 * head), random(seed + 2, tokens, head)
    before, mode = query.clone(), "half" if neox else "interleaved"
    rotated = reference.mrope(positions, query, key, table, head, mrope_section=[0, 0, 0], rotary_mode=mode)
    assert torch.equal(query, before)
    for x, got in zip((query, key), rotated, strict=True):
        for token, at in enumerate(positions.tolist()):
            for n, part in enumerate(x[token].view(-1, head)):
                wanted = torch.cat((turned(part[: 2 * planes], angles[at], pairs=not neox), part[2 * planes :]))
                close(got[token].view(-1, head)[n], wanted)
    with pytest.raises(NotImplementedError, match="several dimensions"):
        reference.mrope(positions, query, key, table, head, mrope_section=[1, 0, 0])


# ---- the paged cache

BLOCKS, TOKENS = 9, 4


def random_slots(seed: int, count: int) -> list[int]:
    return torch.randperm(BLOCKS * TOKENS, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def written(cache: Tensor, slots: list[int], rows: Tensor) -> Tensor:
    expected = cache.clone()
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            expected[slot // TOKENS, slot % TOKENS] = row
    return expected


@MANY
@given(seeds, sizes, st.integers(0, 3))
def test_reshape_and_cache(seed: int, count: int, padding: int) -> None:
    slots = [*random_slots(seed, count), *[-1] * padding]
    key, value = random(seed, len(slots), 2, 3), random(seed + 1, len(slots), 2, 5)
    caches = [random(seed + 2, BLOCKS, TOKENS, 2, 3), random(seed + 3, BLOCKS, TOKENS, 2, 5)]
    wanted = [written(cache, slots, rows) for cache, rows in zip(caches, (key, value), strict=True)]
    reference.reshape_and_cache(key, value, *caches, torch.tensor(slots, dtype=torch.int32))
    assert all(map(torch.equal, caches, wanted))


@MANY
@given(seeds, sizes)
def test_keys_and_values_may_take_turns_block_by_block(seed: int, count: int) -> None:
    slots, rows = random_slots(seed, count), [random(seed + i, count, 2, 3) for i in range(2)]
    memory = random(seed + 2, BLOCKS, 2, TOKENS, 2, 3)
    wanted = torch.stack([written(memory[:, i], slots, rows[i]) for i in range(2)], 1)
    reference.reshape_and_cache(*rows, memory[:, 0], memory[:, 1], torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(memory, wanted)


def test_scatter_pa_kv_cache() -> None:
    slots, key, value = random_slots(3, 5), random(0, 5, 2, 3), random(1, 5, 2, 3)
    caches = [random(2, BLOCKS, TOKENS, 2, 3), random(3, BLOCKS, TOKENS, 2, 3)]
    wanted = [written(cache, slots, rows) for cache, rows in zip(caches, (key, value), strict=True)]
    reference.scatter_pa_kv_cache(key, value, *caches, torch.tensor(slots), cache_mode="Norm")
    assert all(map(torch.equal, caches, wanted))
    with pytest.raises(NotImplementedError, match="in fractals"):
        reference.scatter_pa_kv_cache(key, value, *caches, torch.tensor(slots))
    with pytest.raises(NotImplementedError, match="mode PA_BNSD"):
        reference.scatter_pa_kv_cache(key, value, *caches, torch.tensor(slots), cache_mode="PA_BNSD")
    with pytest.raises(NotImplementedError, match="seq_lens"):
        reference.scatter_pa_kv_cache(key, value, *caches, torch.tensor(slots), cache_mode="Norm", seq_lens=key)


def in_int8(seed: int, *size: int) -> Tensor:
    return torch.randint(-128, 128, size, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@MANY
@given(seeds, sizes)
def test_a_cache_in_fractals_has_32_channels_of_all_tokens_together(seed: int, count: int) -> None:
    slots, rows = random_slots(seed, count), [in_int8(seed + i, count, 2, 64) for i in range(2)]
    caches = [in_int8(seed + 2 + i, BLOCKS, 2, 2, TOKENS, 32) for i in range(2)]
    wanted = [cache.clone() for cache in caches]
    for cache, tokens in zip(wanted, rows, strict=True):
        for slot, token in zip(slots, tokens, strict=True):
            for head in range(2):
                for channel in range(64):
                    if slot >= 0:
                        place = slot // TOKENS, head, channel // 32, slot % TOKENS, channel % 32
                        cache[place] = token[head, channel]
    reference.scatter_pa_kv_cache(*rows, *caches, torch.tensor(slots))
    assert all(map(torch.equal, caches, wanted))


counts = st.lists(st.integers(0, 2 * TOKENS), min_size=1, max_size=3)


def tables(seed: int, rows: int) -> Tensor:
    """Return three blocks for each sequence, all different."""
    return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).view(3, 3)[:rows].int()


@MANY
@given(seeds, counts, st.integers(0, TOKENS), st.booleans(), st.booleans())
def test_gather_pa_kv_cache(seed: int, lengths: list[int], start: int, sums: bool, load: bool) -> None:
    table = tables(seed, len(lengths))
    caches = [random(seed, BLOCKS, TOKENS, 1, 3), random(seed + 1, BLOCKS, TOKENS, 1, 2)]
    out = [torch.zeros(sum(lengths), 1, 3), torch.zeros(sum(lengths), 1, 2)]
    wanted = [
        [
            cache[table[row, at // TOKENS], at % TOKENS]
            for row, n in enumerate(lengths)
            for at in range(start, start + n)
        ]
        for cache in caches
    ]
    given_lengths = torch.tensor([0, *lengths]).cumsum(0) if sums else torch.tensor(lengths)
    offset = torch.full((len(lengths),), start) if start else None
    if load:
        reference.paged_cache_load(
            *caches, table, given_lengths, seq_starts=offset, cumsum=sums, key=out[0], value=out[1]
        )
    else:
        reference.gather_pa_kv_cache(*caches, table, given_lengths, *out, seq_offset=offset, is_seq_lens_cumsum=sums)
    for got, rows in zip(out, wanted, strict=True):
        assert torch.equal(got, torch.stack(rows) if rows else got)


@MANY
@given(seeds, sizes, st.booleans())
def test_kv_rmsnorm_rope_cache(seed: int, count: int, wanted_out: bool) -> None:
    kv, gamma = random(seed, count, 1, 1, 6 + 4), random(seed + 1, 6)
    angles = random(seed + 2, count, 1, 1, 2)
    wide = torch.cat((angles, angles), -1)
    slots = random_slots(seed, count)
    rope_cache, latent_cache = random(seed + 3, BLOCKS, TOKENS, 1, 4), random(seed + 4, BLOCKS, TOKENS, 1, 6)
    latent = functional.rms_norm(kv[..., :6], (6,), gamma, 1e-5)
    by_pairs = turned(kv[..., 6:], angles, pairs=True)
    rope = torch.cat((by_pairs[..., ::2], by_pairs[..., 1::2]), -1)
    wanted = written(rope_cache, slots, rope[:, 0]), written(latent_cache, slots, latent[:, 0])
    got = reference.kv_rmsnorm_rope_cache(
        kv,
        gamma,
        wide.cos(),
        wide.sin(),
        torch.tensor(slots),
        rope_cache,
        latent_cache,
        cache_mode="PA",
        is_output_kv=wanted_out,
    )
    close(rope_cache, wanted[0])
    close(latent_cache, wanted[1])
    if wanted_out:
        close(got[2], rope)
        close(got[3], latent)


@MANY
@given(seeds, sizes, st.booleans())
def test_mla_prolog_v3(seed: int, count: int, wanted_low: bool) -> None:
    """Two heads of 3 + 4 channels, latents of 6: a head's query times the up-projection of its keys."""
    x, down, up = random(seed, count, 5), random(seed + 1, 5, 8), random(seed + 2, 8, 2 * (3 + 4))
    keys, down_kv = random(seed + 3, 2, 3, 6), random(seed + 4, 5, 6 + 4)
    gammas = random(seed + 5, 8), random(seed + 6, 6)
    angles, slots = random(seed + 7, count, 2), random_slots(seed, count)
    wide = torch.cat((angles, angles), -1)
    caches = random(seed + 8, BLOCKS, TOKENS, 1, 6), random(seed + 9, BLOCKS, TOKENS, 1, 4)
    low = functional.rms_norm(functional.linear(x, down.t()), (8,), gammas[0], 1e-5)
    by_head = functional.linear(low, up.t()).view(count, 2, 7)
    kv = functional.linear(x, down_kv.t())

    def rotated(channels: Tensor, by: Tensor) -> Tensor:
        by_pairs = turned(channels, by, pairs=True)
        return torch.cat((by_pairs[..., ::2], by_pairs[..., 1::2]), -1)

    latents = functional.rms_norm(kv[:, :6], (6,), gammas[1], 1e-6)
    wanted = [
        written(cache, slots, rows.unsqueeze(1))
        for cache, rows in zip(caches, (latents, rotated(kv[:, 6:], angles)), strict=True)
    ]
    query, rotary, _, normed, _ = reference.mla_prolog_v3(
        *(x, down, up, keys, down_kv, *gammas, wide.sin(), wide.cos(), *caches),
        cache_index=torch.tensor(slots),
        rmsnorm_epsilon_ckv=1e-6,
        query_norm_flag=wanted_low,
        weight_quant_mode=0,
        dequant_scale_x=None,
    )
    close(query, torch.einsum("tnd,ndl->tnl", by_head[..., :3], keys))
    close(rotary, rotated(by_head[..., 3:], angles.unsqueeze(1)))
    close(normed, low if wanted_low else torch.zeros(1))
    for cache, rows in zip(caches, wanted, strict=True):
        close(cache, rows)
    with pytest.raises(NotImplementedError, match="kv_cache_quant_mode"):
        reference.mla_prolog_v3(
            *(x, down, up, keys, down_kv, *gammas, wide.sin(), wide.cos(), *caches),
            cache_index=torch.tensor(slots),
            kv_cache_quant_mode=3,
        )


# ---- attention


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """Return torch's attention; all are [tokens, heads, channels]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def sums_of(query: Tensor, key: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Return the logarithm of the sum of a row's exponentials, element by element."""
    out = torch.empty(query.shape[0], query.shape[1], 1)
    for q in range(query.shape[0]):
        for head in range(query.shape[1]):
            group = head // (query.shape[1] // key.shape[1])
            scores = [scale * float(query[q, head] @ key[k, group]) for k in range(len(key)) if seen[q, k]]
            out[q, head, 0] = math.log(sum(map(math.exp, scores)))
    return out


def lower_right(queries: int, keys: int) -> Tensor:
    return torch.tensor([[k <= keys - queries + q for k in range(keys)] for q in range(queries)])


lengths_of_two = st.lists(st.integers(1, 5), min_size=2, max_size=2)


@MANY
@given(seeds, lengths_of_two, lengths_of_two, st.sampled_from([1, 2]), st.booleans())
def test_fused_infer_attention_score(
    seed: int, queries: list[int], before: list[int], kv_heads: int, paged: bool
) -> None:
    """TND with a causal mask: keys given directly, or from a paged cache."""
    heads, width, scale = 2, 3, 0.7
    keys = [q + b - 1 for q, b in zip(queries, before, strict=True)]
    q = [random(seed + i, n, heads, width) for i, n in enumerate(queries)]
    k = [random(seed + 10 + i, n, kv_heads, width) for i, n in enumerate(keys)]
    v = [random(seed + 20 + i, n, kv_heads, width) for i, n in enumerate(keys)]
    masks = [lower_right(a, b) for a, b in zip(queries, keys, strict=True)]
    given_keys, given_values, table = torch.cat(k), torch.cat(v), None
    ends = torch.tensor(keys).cumsum(0).tolist()
    if paged:
        table, ends = tables(seed, 2), keys
        caches = [random(seed + 30, BLOCKS, TOKENS, kv_heads, width) for _ in range(2)]
        for cache, sequences in zip(caches, (k, v), strict=True):
            for row, tokens in enumerate(sequences):
                for at, token in enumerate(tokens):
                    cache[table[row, at // TOKENS], at % TOKENS] = token
        given_keys, given_values = (cache.flatten(2) for cache in caches)
    out, lse = reference.fused_infer_attention_score(
        torch.cat(q),
        given_keys,
        given_values,
        actual_seq_lengths=torch.tensor(queries).cumsum(0).tolist(),
        actual_seq_lengths_kv=ends,
        block_table=table,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout="TND",
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    close(out, torch.cat([plain(*each[:3], scale, each[3]) for each in zip(q, k, v, masks, strict=True)]))
    close(lse, torch.cat([sums_of(a, b, scale, mask) for a, b, mask in zip(q, k, masks, strict=True)]))


@MANY
@given(seeds, lengths_of_two)
def test_fused_infer_attention_score_of_int8_in_fractals(seed: int, keys: list[int]) -> None:
    """A decode step of two sequences: keys and values are numbers times the scale of their channel."""
    heads, kv_heads, width, scale = 4, 2, 64, 0.7
    q, table = random(seed, 2, heads, 1, width), tables(seed, 2)
    scales = [random(seed + 1 + i, kv_heads, 1, width).abs() / 50 for i in range(2)]
    tokens = [[in_int8(seed + 10 * i + row, n, kv_heads, width) for row, n in enumerate(keys)] for i in range(2)]
    caches = [in_int8(seed + 30 + i, BLOCKS, kv_heads, 2, TOKENS, 32) for i in range(2)]
    for cache, sequences in zip(caches, tokens, strict=True):
        for row, sequence in enumerate(sequences):
            for at, token in enumerate(sequence):
                cache[int(table[row, at // TOKENS]), :, :, at % TOKENS] = token.view(kv_heads, 2, 32)
    given_scales = {"key_antiquant_scale": scales[0], "value_antiquant_scale": scales[1]}
    sizes_of = {"num_heads": heads, "num_key_value_heads": kv_heads, "scale": scale, "input_layout": "BNSD"}
    out, _ = reference.fused_infer_attention_score(
        q, *caches, block_table=table, actual_seq_lengths_kv=keys, **sizes_of, **given_scales
    )
    wanted = []
    for row in range(2):
        k, v = (tokens[i][row].float() * scales[i].view(kv_heads, width) for i in range(2))
        wanted.append(plain(q[row].transpose(0, 1), k, v, scale).transpose(0, 1))
    close(out, torch.stack(wanted))
    with pytest.raises(NotImplementedError, match="int8 without scales"):
        reference.fused_infer_attention_score(q, *caches, block_table=table, actual_seq_lengths_kv=keys, **sizes_of)


@MANY
@given(seeds, st.integers(1, 5), st.sampled_from(["BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD"]))
def test_fused_infer_attention_score_v2(seed: int, keys: int, layout: str) -> None:
    """A decode step of MLA: heads of the query share one latent, whose rotary part is separate."""
    batch, heads, latent, rope = 2, 3, 4, 2
    q, q_rope = random(seed, batch, 1, heads, latent), random(seed + 1, batch, 1, heads, rope)
    k, k_rope = random(seed + 2, batch, keys, 1, latent), random(seed + 3, batch, keys, 1, rope)
    shape = {"BSH": lambda x: x.flatten(2), "BSND": lambda x: x, "BNSD": lambda x: x.transpose(1, 2)}
    of_given = shape[layout.split("_")[0]]
    out, _ = reference.fused_infer_attention_score_v2(
        *(of_given(x) for x in (q, k, k)),
        query_rope=of_given(q_rope),
        key_rope=of_given(k_rope),
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=0.5,
        input_layout=layout,
        actual_seq_kvlen=[keys] * batch,
        query_quant_mode=0,
    )
    whole_q, whole_k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1)
    wanted = torch.stack([plain(whole_q[b], whole_k[b], k[b], 0.5) for b in range(batch)])
    wanted = wanted.permute(2, 0, 1, 3) if layout.endswith("NBSD") else of_given(wanted)
    close(out, wanted)


@pytest.mark.parametrize("name", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
@pytest.mark.parametrize("sums", [False, True])
def test_get_max_workspace(name: str, sums: bool) -> None:
    """The forms of a graph: room for intermediate results, then results into given tensors."""
    q, k, v = (random(seed, 5, 2, 3) for seed in range(3))
    asked, heads = ("softmax_lse_flag", "num_heads") if name[-2:] != "v2" else ("return_softmax_lse", "num_query_heads")
    lengths = (
        ("actual_seq_lengths", "actual_seq_lengths_kv")
        if name[-2:] != "v2"
        else ("actual_seq_qlen", "actual_seq_kvlen")
    )
    given: dict[str, object] = {heads: 2, "input_layout": "TND", **dict.fromkeys(lengths, (2, 5)), asked: sums}
    result, log_sum = reference.MEANINGS[f"npu::{name}"](q, k, v, **given)
    room = reference.MEANINGS[f"npu::_{name}_get_max_workspace"](q, k, v, **given)
    out = torch.zeros(5, 6), torch.full_like(log_sum, 7.0)
    back = reference.MEANINGS[f"npu::{name}.out"](q, k, v, **given, workspace=room, out=out)
    assert back[0] is out[0] and torch.equal(out[0], result.view(5, 6))
    assert torch.equal(out[1], log_sum if sums else torch.full_like(log_sum, 7.0))


def test_attention_refuses_what_it_does_not_know() -> None:
    x = random(0, 2, 1, 3)
    with pytest.raises(NotImplementedError, match="dequant_scale1"):
        reference.fused_infer_attention_score(x, x, x, input_layout="BSND", dequant_scale1=x)
    with pytest.raises(NotImplementedError, match="query_quant_mode"):
        reference.fused_infer_attention_score_v2(x, x, x, query_quant_mode=3)
    with pytest.raises(NotImplementedError, match="sparse mode 1"):
        reference.visible(2, 2, 1, 0, 0)


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        (reference.FULL, ["1111", "1111"]),
        (reference.LEFT_UP, ["1000", "1100"]),
        (reference.RIGHT_DOWN, ["1110", "1111"]),
        (reference.BAND, ["0110", "0011"]),
    ],
)
def test_masks(mode: int, rows: list[str]) -> None:
    wanted = [[letter == "1" for letter in row] for row in rows]
    assert reference.visible(2, 4, mode, before=1, after=0).tolist() == wanted


@MANY
@given(seeds, st.integers(1, 11))
def test_paged_attention(seed: int, count: int) -> None:
    table = tables(seed, 2)
    caches = [random(seed + i, BLOCKS, TOKENS, 1, 3) for i in range(2)]
    query, out = random(seed + 2, 2, 2, 3), torch.zeros(2, 2, 3)
    reference.paged_attention(query, *caches, 1, 2, 0.3, table, torch.tensor([count, 1]), out)
    for row, n in enumerate((count, 1)):
        k, v = (torch.stack([cache[table[row, at // TOKENS], at % TOKENS] for at in range(n)]) for cache in caches)
        close(out[row : row + 1], plain(query[row : row + 1], k, v, 0.3))


@MANY
@given(seeds, st.integers(0, 4), st.integers(1, 4))
def test_attention_update(seed: int, first: int, second: int) -> None:
    """Attention merged from two parts of the keys equals attention over all; a part may be empty."""
    query, key = random(seed, 1, 2, 3), random(seed + 1, first + second, 2, 3)
    whole = plain(query, key, key, 1.0)
    results, sums = [], []
    for part in (key[:first], key[first:]):
        out, log_sum = reference.attend(query, part, part, 1.0, torch.ones(1, len(part), dtype=torch.bool))
        results.append(out.flatten(0, 1))
        sums.append(log_sum.flatten())
    got, _ = reference.attention_update(sums, results, 0)
    close(got, whole[0])


# ---- experts


@MANY
@given(seeds, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_moe_gating_top_k(seed: int, tokens: int, k: int, renorm: bool, sigmoid: bool, biased: bool) -> None:
    x = random(seed, tokens, 6)
    bias = random(seed + 1, 6) if biased else None
    weights, experts, _ = moe.moe_gating_top_k(x, k, 1, 1, 1, int(renorm), int(sigmoid), False, 1.5, 1e-20, bias)
    for row in range(tokens):
        if sigmoid:
            chances = [1 / (1 + math.exp(-float(v))) for v in x[row]]
        else:
            chances = [math.exp(float(v)) / sum(math.exp(float(w)) for w in x[row]) for v in x[row]]
        rank = [c + (float(bias[i]) if bias is not None else 0.0) for i, c in enumerate(chances)]
        best = sorted(range(6), key=lambda i: -rank[i])[:k]
        assert experts[row].tolist() == best
        whole = sum(chances[i] for i in best) if renorm or sigmoid else 1.0
        close(weights[row], torch.tensor([1.5 * chances[i] / whole for i in best]))


@pytest.mark.parametrize("routing", [moe.moe_init_routing, moe.moe_init_routing_v2])
@MANY
@given(seeds, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_a_layer_of_experts(routing: Any, seed: int, tokens: int, k: int, first: int, fewer: int) -> None:
    """Routing, grouped product and merging: each token is the weighted sum of the results of its experts here.

    The index of an expert on another rank is -1, which vllm-ascend makes positive, with the weight 0.
    """
    end = 6 - fewer
    x, weights = random(seed, tokens, 4), random(seed + 1, end - first, 4, 3)
    experts = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(seed + i))[:k] for i in range(tokens)]
    )
    shares = random(seed + 2, tokens, k)
    rows, place, counts, _ = routing(
        x,
        experts.int(),
        expert_num=6,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        **({"quant_mode": -1} if routing is moe.moe_init_routing else {}),
        active_expert_range=[first, end],
    )
    assert counts.tolist() == [int((experts == e).sum()) for e in range(first, end)]
    [made] = moe.grouped_matmul([rows], [weights], group_list=counts, split_item=2, group_type=0, group_list_type=1)
    here = (experts >= first) & (experts < end)
    got = moe.moe_token_unpermute(made, place.abs().clamp(max=len(rows) - 1), shares * here)
    wanted = torch.zeros(tokens, 3)
    for token in range(tokens):
        for choice in range(k):
            expert = int(experts[token, choice])
            if first <= expert < end:
                wanted[token] += shares[token, choice] * (x[token] @ weights[expert - first])
    close(got, wanted)


# ---- context parallelism


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scatter_dim", [0, 1])
@pytest.mark.parametrize("local", [False, True])
def test_ranks_that_divide_tokens_merge_their_attention(dtype: torch.dtype, scatter_dim: int, local: bool) -> None:
    """Two ranks with four queries and six heads. One row has no key on rank 1, and one none anywhere."""
    parts = [random(i, 4, 6, 5, dtype=dtype) for i in range(2)]
    sums = [3 * random(2 + i, 4, 6, 1) for i in range(2)]
    sums[1][1, 4], parts[1][1, 4] = -math.inf, math.nan
    for rank in range(2):
        sums[rank][3, 5] = math.inf
    sent = [context.pack_dcp_output_lse(part, logs, 2, scatter_dim) for part, logs in zip(parts, sums, strict=True)]
    for rank in range(2):
        mine = [slice(None), slice(None)]
        size = parts[0].shape[scatter_dim] // 2
        mine[scatter_dim] = slice(rank * size, (rank + 1) * size)
        rank_parts = (random(7, *parts[0][tuple(mine)].shape, dtype=dtype), random(8, *sums[0][tuple(mine)].shape))
        more = {"local_output": rank_parts[0], "local_lse": rank_parts[1]} if local else {}
        received = torch.stack([each[rank] for each in sent])
        got = context.fused_dcp_lse_combine(received, 5, scatter_dim, **more)
        assert got.dtype == dtype and got.shape == rank_parts[0].shape
        given_ = [(parts[i][tuple(mine)], sums[i][tuple(mine)]) for i in range(2)] + ([rank_parts] if local else [])
        for token, head in itertools.product(*map(range, got.shape[:2])):
            pairs = [(float(logs[token, head]), part[token, head].double()) for part, logs in given_]
            pairs = [(log, row) for log, row in pairs if math.isfinite(log)]
            total = sum(math.exp(log) for log, _ in pairs)
            wanted = sum((row * (math.exp(log) / total) for log, row in pairs), torch.zeros(5).double())
            torch.testing.assert_close(
                got[token, head].double(), wanted, rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5
            )
            if dtype == torch.float32 and pairs:
                whole = context.fused_dcp_lse_combine(received, 5, scatter_dim, return_lse=True, **more)[token, head]
                close(whole, torch.cat((got[token, head], torch.tensor([math.log(total)]))))


# ---- Gated DeltaNet


@MANY
@given(seeds, sizes, sizes)
def test_gemma_rms_norm(seed: int, rows: int, width: int) -> None:
    x, gamma = random(seed, rows, width), random(seed + 1, width)
    close(delta.gemma_rms_norm(x, gamma, 1e-5)[0], functional.rms_norm(x, (width,), gamma + 1, 1e-5))


@MANY
@given(seeds, sizes, sizes)
def test_fused_gdn_gating(seed: int, tokens: int, heads: int) -> None:
    decay, bias = random(seed, heads), random(seed + 1, heads)
    a, b = random(seed + 2, tokens, heads) * 20, random(seed + 3, tokens, heads)
    g, beta = delta.fused_gdn_gating(decay, a, b, bias)
    for token in range(tokens):
        for head in range(heads):
            x = float(a[token, head] + bias[head])
            step = math.log1p(math.exp(x)) if x <= 20 else x
            close(g[0, token, head], torch.tensor(-math.exp(float(decay[head])) * step))
            close(beta[0, token, head], torch.tensor(1 / (1 + math.exp(-float(b[token, head])))))


ROWS = 3  # of a convolution's state: four taps


def convolved(before: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, active: bool) -> Tensor:
    """Return torch's own convolution, each channel by itself, over the rows behind those before them."""
    inputs = torch.cat((before, rows)).t().unsqueeze(0)
    out = functional.conv1d(inputs, weight.t().unsqueeze(1), bias, groups=weight.shape[1])[0].t()
    return functional.silu(out) if active else out


@MANY
@given(seeds, st.lists(st.integers(0, 6), min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_causal_conv1d(seed: int, lengths: list[int], active: bool, biased: bool, table: bool) -> None:
    """A prefill of several sequences, some from a state and some from nothing, one of which is padding."""
    x, weight = random(seed, sum(lengths), 5), random(seed + 1, ROWS + 1, 5)
    bias = random(seed + 2, 5) if biased else None
    chance = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(6, generator=chance)[: len(lengths)]
    begun = torch.randint(0, 2, (len(lengths),), generator=chance).bool()
    blocks[-1] = -1
    state = random(seed + 3, 6, ROWS, 5)
    wanted, out, kept, done = torch.full((len(x), 5), 7.0), torch.full((len(x), 5), 7.0), state.clone(), 0
    for block, length, begins in zip(blocks[:-1].tolist(), lengths[:-1], begun.tolist(), strict=False):
        rows = x[done : done + length]
        before = state[block] if begins else torch.zeros(ROWS, 5)
        if length:
            wanted[done : done + length] = convolved(before, rows, weight, bias, active)
            kept[block] = torch.cat((before, rows))[-ROWS:]
        done += length
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    block_table = torch.stack((blocks, blocks + 1), 1) if table else blocks  # of a table, the first column
    delta.causal_conv1d(out, x, weight, state, bias, starts, block_table, begun, None, int(active), -1, delta.PREFILL)
    close(out, wanted)
    assert torch.equal(state, kept)


@MANY
@given(seeds, st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4))
def test_a_convolution_with_drafts_goes_on_behind_what_was_accepted(seed: int, steps: list[tuple[int, int]]) -> None:
    """Each step has some right tokens and some drafts that the next one drops."""
    weight, state, block = random(seed, ROWS + 1, 2), random(seed + 1, 4, ROWS + 2, 2), torch.tensor([2])
    before, accepted = state[2, :ROWS].clone(), 1
    right = random(seed + 2, sum(good for good, _ in steps), 2)
    wanted, done = convolved(before, right, weight, None, active=True), 0
    for good, drafts in steps:
        x = torch.cat((right[done : done + good], random(seed + done, min(drafts, 3 - good), 2)))
        out = torch.zeros_like(x)
        starts, counts = torch.tensor([0, len(x)]), torch.tensor([accepted])
        delta.causal_conv1d(out, x, weight, state, None, starts, block, None, counts, 1, -1, delta.UPDATE)
        close(out[:good], wanted[done : done + good])
        done, accepted = done + good, good


def by_matrices(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and states behind each token: S' = e^g · S (1 - β k kᵀ) + β v kᵀ, head by head in doubles."""
    heads, out, states = v.shape[1], torch.empty(v.shape), torch.empty(len(q), *state.shape)
    for head in range(heads):
        of = head // (heads // q.shape[1])
        matrix = state[head].double()
        for token in range(len(q)):
            key, value, share = k[token, of].double(), v[token, head].double(), float(beta[token, head])
            rest = torch.eye(len(key), dtype=torch.double) - share * torch.outer(key, key)
            matrix = math.exp(float(g[token, head])) * matrix @ rest + share * torch.outer(value, key)
            states[token, head] = matrix
            out[token, head] = matrix @ q[token, of].double() * scale
    return out, states


def recurrence(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries and keys of two heads, values, decays and shares of four."""
    q, k = (functional.normalize(random(seed + i, tokens, 2, 3), dim=-1) for i in range(2))
    g, beta = -random(seed + 3, tokens, 4).abs(), random(seed + 4, tokens, 4).sigmoid()
    return q, k, random(seed + 2, tokens, 4, 5), g, beta


@MANY
@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_gated_delta_rule(seed: int, lengths: list[int]) -> None:
    given_, before = recurrence(seed, sum(lengths)), random(seed + 5, len(lengths), 4, 5, 3)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    out, after = delta.gated_delta_rule(*given_, 0.5, before, starts)
    for seq, length in enumerate(lengths):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        wanted, states = by_matrices(*(x[rows] for x in given_), 0.5, before[seq])
        close(out[rows], wanted)
        close(after[seq], states[-1] if length else before[seq])


def recurrent(
    given_: tuple[Tensor, ...], state: Tensor, blocks: list[int], accepted: int | None, before: int = 0
) -> Tensor:
    """Run a step of one sequence behind `before` rows of others."""
    q, k, v, g, beta = given_
    return delta.recurrent_gated_delta_rule(
        q,
        k,
        v,
        state,
        g=g,
        beta=beta,
        scale=0.5,
        actual_seq_lengths=torch.tensor([before, len(q) - before]),
        ssm_state_indices=torch.tensor([0] * before + blocks),
        num_accepted_tokens=None if accepted is None else torch.tensor([accepted]),
    )


@MANY
@given(seeds, st.integers(0, 2))
def test_recurrent_gated_delta_rule(seed: int, before: int) -> None:
    given_, state = recurrence(seed, before + 1), random(seed + 9, 8, 4, 5, 3)
    kept = state.clone()
    wanted, [kept[3]] = by_matrices(*(x[before:] for x in given_), 0.5, state[3])
    close(recurrent(given_, state, [3], None, before)[before:], wanted)
    close(state, kept)


@MANY
@given(seeds, st.integers(1, 3), st.integers(1, 3))
def test_a_recurrence_with_drafts_goes_on_behind_what_was_accepted(seed: int, length: int, good: int) -> None:
    """Two steps of one sequence, the second behind the accepted tokens of the first."""
    good, blocks = min(good, length), [3, 5, 6][:length]
    one, other, state = recurrence(seed, length), recurrence(seed + 20, length), random(seed + 9, 8, 4, 5, 3)
    wanted, states = by_matrices(*one, 0.5, state[3])
    close(recurrent(one, state, blocks, 1), wanted)
    close(state[blocks], states)
    wanted, _ = by_matrices(*other, 0.5, states[good - 1])
    close(recurrent(other, state, blocks, good), wanted)


@pytest.fixture(scope="module")
def own_operator() -> Iterator[None]:
    library = torch.library.Library("ascend_host", "FRAGMENT")
    library.define("gated_delta_rule" + delta.SCHEMAS["ascend_host::gated_delta_rule"])
    library.impl("gated_delta_rule", delta.gated_delta_rule, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("own_operator")
def test_chunk_gated_delta_rule() -> None:
    """States lie the other way round than in the cache, and the vectors are made unit vectors on the way."""
    q, k, v, g, beta = recurrence(3, 6)
    before = random(4, 2, 4, 3, 5)
    starts = torch.tensor([0, 2, 6])
    out, after = delta.chunk_gated_delta_rule(
        *((x * 3).unsqueeze(0) for x in (q, k)),
        *(x.unsqueeze(0) for x in (v, g, beta)),
        initial_state=before,
        output_final_state=True,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )
    for seq, rows in enumerate((slice(0, 2), slice(2, 6))):
        wanted, states = by_matrices(*(x[rows] for x in (q, k, v, g, beta)), 3**-0.5, before[seq].transpose(-1, -2))
        close(out[0, rows], wanted)
        close(after[seq], states[-1].transpose(-1, -2))
    with pytest.raises(NotImplementedError, match="tokens first"):
        delta.chunk_gated_delta_rule(q, k, v, g, beta, head_first=True)


@MANY
@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_npu_chunk_gated_delta_rule(seed: int, lengths: list[int]) -> None:
    (q, k, v, g, beta), before = recurrence(seed, sum(lengths)), random(seed + 5, len(lengths), 4, 5, 3)
    out, after = delta.npu_chunk_gated_delta_rule(
        q, k, v, beta=beta, g=g, scale=0.5, initial_state=before, actual_seq_lengths=torch.tensor(lengths)
    )
    done = 0
    for seq, length in enumerate(lengths):
        rows = slice(done, done + length)
        wanted, states = by_matrices(*(x[rows] for x in (q, k, v, g, beta)), 0.5, before[seq])
        close(out[rows], wanted)
        close(after[seq], states[-1] if length else before[seq])
        done += length


@pytest.fixture(scope="module")
def compiled() -> Iterator[None]:
    """Declare the operators that stand under fla_npu's functions."""
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    for name in ("npu_causal_conv1d_custom", "npu_fused_gdn_gating", "npu_recurrent_gated_delta_rule"):
        library.define(name + delta.SCHEMAS[f"_C_ascend::{name}"])
        library.impl(name, reference.MEANINGS[f"_C_ascend::{name}"], "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("compiled")
def test_functions_of_fla_npu() -> None:
    """A prompt, then a step with drafts of which some are right, then a step behind those."""
    weight, bias, states, block = random(0, ROWS + 1, 2), random(1, 2), random(2, 4, ROWS + 2, 2), torch.tensor([2])
    x = random(3, 9, 2)
    wanted = convolved(torch.zeros(ROWS, 2), x, weight, bias, active=True)
    ends = torch.tensor([0, 4])
    begun = torch.tensor([False])
    given = {"query_start_loc": ends, "cache_indices": block, "has_initial_state": begun}
    close(ascendc.causal_conv1d_fn(x[:4], weight, bias, conv_states=states, **given), wanted[:4])
    drafts = torch.cat((x[4:6], random(4, 1, 2)))
    for rows, accepted, first, into in ((drafts, 1, 4, None), (x[6:8], 2, 6, torch.zeros(2, 2))):
        step = {"query_start_loc": torch.tensor([0, len(rows)]), "num_accepted_tokens": torch.tensor([accepted])}
        got = ascendc.causal_conv1d_update(
            rows, states, weight, bias, "silu", conv_state_indices=block, out=into, **step
        )
        close(got[:2], wanted[first : first + 2])
        assert into is None or got is into
    (q, k, v, g, beta), state = recurrence(5, 1), random(6, 8, 4, 5, 3)
    out, [after] = by_matrices(q, k, v, g, beta, 0.5, state[3])
    one = {"actual_seq_lengths": torch.tensor([0, 1]), "ssm_state_indices": torch.tensor([3])}
    close(ascendc.recurrent_gated_delta_rule(q, k, v, state, g=g, beta=beta, scale=0.5, **one), out)
    close(state[3], after)
    with pytest.raises(NotImplementedError, match="with relu"):
        ascendc.causal_conv1d_fn(x, weight, conv_states=states, activation="relu", **given)
    with pytest.raises(NotImplementedError, match="Kimi"):
        ascendc.recurrent_kda(q)


@pytest.mark.usefixtures("compiled")
def test_fused_gdn_gating_patch() -> None:
    decay, bias, a, b = random(0, 2), random(1, 2), random(2, 3, 2), random(3, 3, 2)
    g, beta = delta.fused_gdn_gating_patch(decay, a, b, bias)
    close(g[0], -decay.exp() * torch.log1p((a + bias).exp()))
    close(beta[0], 1 / (1 + (-b).exp()))


def test_gather_ssm_states() -> None:
    memory = random(0, 6, 2 * 3 + 5)  # pages longer than what is in them
    states = memory[:, :6].view(6, 2, 3)
    states[4] = math.nan  # of a sequence that begins: what the block had
    gathered = delta.gather_ssm_states(states, torch.tensor([5, 4, 0]), torch.tensor([True, False, True]))
    assert torch.equal(gathered, torch.stack((states[5], torch.zeros(2, 3), states[0])))
    assert delta.gather_ssm_states(states, *torch.ones(2, 1).int(), output_dtype=torch.half).dtype == torch.half


def test_scatter_ssm_states_() -> None:
    memory, source = random(0, 6, 2 * 3 + 5), random(1, 2, 2, 3, dtype=torch.bfloat16)
    wanted = memory.clone()
    for row, at in enumerate((3, 1)):
        wanted[at, :6] = source[row].flatten().float()
    delta.scatter_ssm_states_(memory[:, :6].view(6, 2, 3), torch.tensor([3, 1]), source)
    assert torch.equal(memory, wanted)


@MANY
@given(seeds, sizes, sizes)
def test_l2norm_fwd(seed: int, rows: int, width: int) -> None:
    x = random(seed, rows, 2, width)
    close(delta.l2norm_fwd(x, eps=0.0), functional.normalize(x, dim=-1))
    assert torch.equal(delta.l2norm_fwd(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_clear_ssm_states() -> None:
    states = random(0, 3, 2, 4, 4)
    wanted = torch.stack((states[0], torch.zeros(2, 4, 4), states[2]))
    delta.clear_ssm_states(states, torch.tensor([1, 0, 1], dtype=torch.int32))
    assert torch.equal(states, wanted)


@MANY
@given(seeds, sizes, st.integers(1, 3), st.integers(1, 3))
def test_fused_qkvzba_split_reshape_cat(seed: int, tokens: int, heads: int, each: int) -> None:
    """q and k have three channels, a value five."""
    row = 2 * 3 + 2 * each * 5
    x, gates = random(seed, tokens, heads * row), random(seed + 1, tokens, heads * 2 * each)
    qkv, z, b, a = delta.fused_qkvzba_split_reshape_cat(x, gates, heads, heads * each, 3, 5)
    for head in range(heads):
        given_ = x[:, head * row : (head + 1) * row]
        assert torch.equal(qkv[:, head * 3 : head * 3 + 3], given_[:, :3])
        assert torch.equal(qkv[:, (heads + head) * 3 : (heads + head) * 3 + 3], given_[:, 3:6])
        for one in range(each):
            value = head * each + one
            at = 6 * heads + 5 * value
            assert torch.equal(qkv[:, at : at + 5], given_[:, 6 + 5 * one : 11 + 5 * one])
            assert torch.equal(z[:, value], given_[:, 6 + 5 * (each + one) : 11 + 5 * (each + one)])
            assert torch.equal(b[:, value], gates[:, 2 * each * head + one])
            assert torch.equal(a[:, value], gates[:, 2 * each * head + each + one])


@MANY
@given(seeds, sizes, sizes)
def test_layer_norm_fwd_npu(seed: int, rows: int, width: int) -> None:
    x, z, weight = random(seed, rows, width), random(seed + 1, rows, width), random(seed + 2, width)
    got, _, _ = delta.layer_norm_fwd_npu(x, weight, None, 1e-5, z=z, is_rms_norm=True)
    close(got, functional.rms_norm(x, (width,), weight, 1e-5) * z * torch.sigmoid(z))
    with pytest.raises(NotImplementedError, match="gate"):
        delta.layer_norm_fwd_npu(x, weight, None, 1e-5, is_rms_norm=True)


# ---- sampling


@MANY
@given(seeds, st.integers(1, 8), st.floats(0.05, 0.95))
def test_top_k_top_p(seed: int, k: int, p: float) -> None:
    logits = random(seed, 2, 8)
    got = reference.top_k_top_p(logits, torch.full((2,), p), torch.full((2,), k))
    for row, kept in zip(logits, got, strict=True):
        best = row.sort(descending=True).indices[:k]
        chances = row[best].softmax(-1)
        # A token stays if those before it do not reach p.
        stays = {int(token) for i, token in enumerate(best) if i == 0 or float(chances[:i].sum()) < p}
        assert {i for i in range(8) if kept[i] > -math.inf} == stays
        assert all(kept[i] == row[i] for i in stays)


# ---- kernels


def test_slot_mapping() -> None:
    table = torch.tensor([[5, 6], [7, 8], [9, 9]], dtype=torch.int32)
    slots = torch.full((8,), 77)
    starts, positions = torch.tensor([0, 2, 5, 99]), torch.tensor([3, 4, 0, 1, 2, 0])
    kernels.slot_mapping((3,), 6, 8, starts, positions, table, 2, TOKENS, slots, PAD_ID=-1, BLOCK_SIZE=1024)
    assert slots.tolist() == [23, 24, 28, 29, 30, 77, -1, -1]


def test_slots_of_several_groups() -> None:
    """Two tables, of blocks of 4 and of 8 tokens; the first group's table has three columns, the other's one."""
    tables = torch.tensor([[5, 6, 9], [7, 8, 9]], dtype=torch.int32), torch.tensor([[3], [2]], dtype=torch.int32)
    slots = [torch.full((7,), 77, dtype=torch.int32) for _ in tables]
    addresses = [torch.tensor([one.data_ptr() for one in each]) for each in (tables, slots)]
    starts, positions = torch.tensor([0, 2, 5]), torch.tensor([3, 4, 0, 1, 2])
    given = 2, 2, 5, 7, starts, positions, *addresses, torch.tensor([3, 1]), torch.tensor([4, 8]), 4
    kernels.slot_mappings(*given, pad_id=-1, is_circular_ptr=torch.tensor([0, 0]))
    assert [one.tolist() for one in slots] == [[23, 24, 28, 29, 30, -1, -1], [27, 28, 16, 17, 18, -1, -1]]
    with pytest.raises(NotImplementedError, match="ring"):
        kernels.slot_mappings(*given, pad_id=-1, is_circular_ptr=torch.tensor([0, 1]))


def test_batch_memcpy() -> None:
    rows = random(0, 5, 7)
    wanted = torch.stack((rows[3], rows[1], torch.cat((rows[4, :2], rows[2, 2:])), rows[3], rows[4]))
    at = [torch.tensor([rows[i].data_ptr() for i in each]) for each in ((3, 4), (0, 2))]
    kernels.batch_memcpy((2,), *at, torch.tensor([7 * 4, 2 * 4]), BLOCK_SIZE=8192)
    assert torch.equal(rows, wanted)


@MANY
@given(seeds, st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3))
def test_copy_and_expand_dflash_inputs(seed: int, requests: list[tuple[int, int, int]]) -> None:
    """Each query is at the position behind the accepted tokens, and in the slot of that position.

    A request has tokens before the step, tokens in it, and those of them that were rejected.
    """
    size, drafts, mask, room = 4, 3, 500, 40
    table = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[: 10 * len(requests)]
    table = table.view(len(requests), 10).to(torch.int32)
    rejected = [min(less, count) for _, count, less in requests]
    at = [list(range(before, before + count)) for before, count, _ in requests]

    def slots(row: int, positions: list[int]) -> list[int]:
        return [int(table[row, place // size]) * size + place % size for place in positions]

    given = {
        "next_token_ids_ptr": [100 + row for row in range(len(requests))],
        "target_positions_ptr": list(chain(*at)),
        "context_slot_mapping_ptr": [place for row, each in enumerate(at) for place in slots(row, each)],
        "query_start_loc_ptr": [sum(map(len, at[:row])) for row in range(len(requests) + 1)],
        "seq_lens_ptr": [each[-1] + 1 for each in at],
        "num_rejected_tokens_ptr": rejected,
    }
    names = ("input_ids", "context_positions", "query_positions", "context_slot_mapping", "query_slot_mapping")
    outs = {f"out_{name}_ptr": torch.full((room,), -1, dtype=torch.int32) for name in (*names, "token_indices")}
    kernels.lay_out_queries(
        (1,), **{name: torch.tensor(value, dtype=torch.int32) for name, value in given.items()}, **outs,
        block_table_ptr=table, block_table_stride=10, parallel_drafting_token_id=mask, block_size=size,
        num_query_per_req=drafts + 1, num_speculative_tokens=drafts, total_input_tokens=sum(map(len, at)),
        batch_size=len(requests), HAS_NUM_REJECTED=any(rejected),
    )  # fmt: skip
    wanted = [[each[-1] + 1 - rejected[row] + ahead for ahead in range(drafts + 1)] for row, each in enumerate(at)]
    expected = {
        "input_ids": [mask if n else 100 + row for row in range(len(requests)) for n in range(drafts + 1)],
        "context_positions": list(chain(*at)),
        "query_positions": list(chain(*wanted)),
        "context_slot_mapping": given["context_slot_mapping_ptr"],
        "query_slot_mapping": [place for row, each in enumerate(wanted) for place in slots(row, each)],
        "token_indices": [row * (drafts + 1) + 1 + n for row in range(len(requests)) for n in range(drafts)],
    }
    for name, values in expected.items():
        assert outs[f"out_{name}_ptr"].tolist() == values + [-1] * (room - len(values)), name


BLOCK_END = st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3))


@pytest.mark.parametrize("release", ["0.23", "0.30"])
@MANY
@given(seeds, st.lists(BLOCK_END, min_size=1, max_size=3))
def test_postprocess_mamba_fused_kernel(release: str, seed: int, requests: list[tuple[int, int, int]]) -> None:
    """Behind each step the block of a whole number of blocks has the state behind its last token, if it was computed.

    States are numbers: the state behind n tokens is 10 n, a row of the convolution's holds the token's position. A step
    computes a token and its drafts, of which some are accepted.
    """
    size, width, count = 4, 6, 7
    temporal, conv = torch.zeros(3 * count + 1, 2), torch.full((3 * count + 1, width, 2), -1.0)
    tables = torch.arange(1, 3 * count + 1, dtype=torch.int32).view(3, count).flip(1).contiguous()
    running, computed, accepted = [], [], []
    for row, (before, drafted, kept) in enumerate(requests):
        at = before // size  # the block of the running state: that of the first token of the step
        for token in range(drafted + 1):
            temporal[tables[row, at + token]] = 10 * (before + 1 + token)
        for place in range(width):  # three rows are a state: the first is behind the step's first token
            conv[tables[row, at], place] = before - 2 + place
        running.append(at)
        computed.append(before)
        accepted.append(min(kept, drafted) + 1)
    drafted_ = [drafted for _, drafted, _ in requests]
    ints = [
        torch.tensor(x, dtype=torch.int32) for x in (accepted, running, [d + 1 for d in drafted_], computed, drafted_)
    ]
    out = ints[0].clone()
    pointers = torch.tensor([tables.data_ptr()])
    facts = [(temporal, 2, 0), (conv, 2, width)]
    bases, strides = (
        torch.tensor(x) for x in ([s.data_ptr() for s, *_ in facts], [4 * s.stride(0) for s, *_ in facts])
    )
    inner, widths = torch.tensor([i for _, i, _ in facts]), torch.tensor([w for *_, w in facts])
    four, group = torch.tensor([4, 4]), torch.tensor([0, 0])
    facts_of_states = *ints, pointers, count, bases, strides, four, inner, widths, group
    if release == "0.23":
        kernels.keep_block_ends(
            (len(requests), 2), *facts_of_states, out, len(requests), block_size=size, COPY_BLOCK_SIZE=1024
        )
    else:
        kernels.keep_block_ends_since_0_30(
            (len(requests), 2, 1), *facts_of_states, torch.zeros(2), torch.zeros(2), out, None, len(requests),
            block_size=size, COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False, TEMPORAL_TILES=1,
        )  # fmt: skip
    for row, before in enumerate(computed):
        end = (before + accepted[row]) // size * size
        if end <= before:
            assert int(out[row]) == accepted[row]
            continue
        block = int(tables[row, end // size - 1])
        assert temporal[block].tolist() == [10 * end] * 2
        assert conv[block, :3, 0].tolist() == [end - 3, end - 2, end - 1]
        assert int(out[row]) == (1 if end // size - 1 == running[row] else accepted[row])


def test_a_function_is_replaced_when_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_kernels.py").write_text("def l2norm_fwd(x):\n    raise OSError\ndef other():\n    return 5\n")
    (tmp_path / "changed.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    ours = {"l2norm_fwd": delta.l2norm_fwd}
    kernels.replace_functions({"of_kernels": ours, "changed": ours})
    module = importlib.import_module("of_kernels")
    assert module.l2norm_fwd is delta.l2norm_fwd and module.other() == 5
    with pytest.raises(ImportError, match="changed has no l2norm_fwd"):
        importlib.import_module("changed")


# ---- a sparse indexer, and attention over its choice


def paged(seed: int, counts: list[int], *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a cache of blocks of four tokens in which no block is where a sequence would expect it, and its table."""
    size, rows = 4, [max(1, -(-count // 4)) for count in counts]
    order = torch.randperm(sum(rows) + 2, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(len(counts), max(rows), dtype=torch.int32)
    for row, blocks in enumerate(rows):
        table[row, :blocks] = order[sum(rows[:row]) : sum(rows[: row + 1])]
    return random(seed + 1, sum(rows) + 2, size, 1, *shape, dtype=dtype), table


def batch(new: list[int], before: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Return how many tokens each sequence has, and where each one's queries end."""
    counts = [n + b for n, b in zip(new, before, strict=True)]
    return counts, {"actual_seq_lengths_query": torch.tensor(new).cumsum(0).int(), "layout_query": "TND"}


def each_query(new: list[int], before: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each query of a batch: its row, its sequence, and how many tokens it sees."""
    row = 0
    for sequence, (n, b) in enumerate(zip(new, before, strict=True)):
        for at in range(n):
            yield row, sequence, b + at + 1
            row += 1


few = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@MANY
@given(seeds, few, st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(1, 6), st.integers(0, 2))
def test_lightning_indexer(seed: int, new: list[int], before: list[int], most: int, padding: int) -> None:
    before = before[: len(new)]
    counts, lengths = batch(new, before)
    keys, table = paged(seed, counts, 8)
    query, weights = random(seed + 2, sum(new) + padding, 3, 8), random(seed + 3, sum(new) + padding, 3)
    best, scores = sparse.lightning_indexer(
        query,
        keys,
        weights,
        block_table=table,
        actual_seq_lengths_key=torch.tensor(counts),
        layout_key="PA_BSND",
        sparse_count=most,
        **lengths,
    )
    assert best.shape == (sum(new) + padding, 1, most) and not len(scores)
    assert (best[sum(new) :] == -1).all()
    for row, sequence, seen in each_query(new, before):
        ranked = []
        for token in range(seen):
            key = keys[table[sequence, token // 4], token % 4, 0]
            of_heads = [float(weights[row, h]) * max(0.0, float(query[row, h] @ key)) for h in range(3)]
            ranked.append((sum(of_heads), token))
        ranked.sort(key=lambda each: -each[0])
        wanted = [token for _, token in ranked[:most]]
        got = best[row, 0].tolist()
        assert got[len(wanted) :] == [-1] * (most - len(wanted))
        score = {token: value for value, token in ranked}
        assert [score[token] for token in got[: len(wanted)]] == pytest.approx(
            [score[token] for token in wanted], abs=1e-5
        )
        assert len(set(got[: len(wanted)])) == len(wanted)


@MANY
@given(seeds, few, st.integers(0, 9), st.integers(1, 6))
def test_sparse_flash_attention(seed: int, new: list[int], before: int, most: int) -> None:
    counts, lengths = batch(new, [before] * len(new))
    (latents, table), (ropes, _) = paged(seed, counts, 8), paged(seed, counts, 4)
    query, rope = random(seed + 2, sum(new), 3, 8), random(seed + 3, sum(new), 3, 4)
    chance = torch.Generator().manual_seed(seed)
    indices = torch.full((sum(new), 1, most), -1, dtype=torch.int32)
    for row, _, seen in each_query(new, [before] * len(new)):
        chosen = torch.randperm(seen, generator=chance)[:most]
        indices[row, 0, : len(chosen)] = chosen
    indices[0] = -1 if seed % 4 == 0 else indices[0]  # with DCP a rank may have none of a query's tokens
    out, largest, total = sparse.sparse_flash_attention(
        query,
        latents,
        latents,
        indices,
        0.3,
        return_softmax_lse=True,
        block_table=table,
        actual_seq_lengths_kv=torch.tensor(counts),
        query_rope=rope,
        key_rope=ropes,
        layout_kv="PA_BSND",
        **lengths,
    )
    for row, sequence, _ in each_query(new, [before] * len(new)):
        tokens = [t for t in indices[row, 0].tolist() if t >= 0]
        if not tokens:
            assert not out[row].any() and not total[0, row].any() and (largest[0, row] == -torch.inf).all()
            continue
        k, turned = (torch.stack([c[table[sequence, t // 4], t % 4, 0] for t in tokens]) for c in (latents, ropes))
        for head in range(3):
            scores = 0.3 * (k @ query[row, head] + turned @ rope[row, head])
            close(out[row, head], scores.softmax(0) @ k)
            close(largest[0, row, head], scores.max())
            close(total[0, row, head], (scores - scores.max()).exp().sum())


def test_a_rank_without_tokens_has_no_weight_where_results_are_merged() -> None:
    latents, table = paged(1, [2], 8)
    out, largest, total = sparse.sparse_flash_attention(
        random(2, 1, 3, 8),
        latents,
        latents,
        torch.full((1, 1, 4), -1),
        1.0,
        block_table=table,
        actual_seq_lengths_query=torch.tensor([1]),
        actual_seq_lengths_kv=torch.tensor([0]),
        query_rope=random(3, 1, 3, 4),
        key_rope=latents[..., :4],
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=0,
        return_softmax_lse=True,
    )
    assert not out.any() and not total.any() and (largest == -torch.inf).all()


def test_a_query_does_not_see_a_later_token_though_it_is_chosen() -> None:
    latents, table = paged(1, [2], 8)
    given = {"block_table": table, "actual_seq_lengths_query": torch.tensor([2]), "layout_query": "TND"}
    given |= {"actual_seq_lengths_kv": torch.tensor([2]), "layout_kv": "PA_BSND", "key_rope": latents[..., :4]}
    query, rope = random(2, 2, 1, 8), random(3, 2, 1, 4)
    both = torch.tensor([[[0, 1]], [[0, 1]]])
    out, _, _ = sparse.sparse_flash_attention(query, latents, latents, both, 1.0, query_rope=rope, **given)
    close(out[0, 0], latents[table[0, 0], 0, 0])


@MANY
@given(seeds, sizes, sizes)
def test_dynamic_quant(seed: int, rows: int, width: int) -> None:
    x = random(seed, rows, 2, width, dtype=torch.bfloat16)
    x[0, 0] = 0  # a row of zeros stays one
    y, scales = sparse.dynamic_quant(x)
    assert y.dtype == torch.int8 and scales.shape == (rows, 2) and scales.dtype == torch.float32
    for row in range(rows):
        largest = float(x[row, 1].abs().max())
        assert float(scales[row, 1]) == pytest.approx(largest / 127)
        assert y[row, 1].tolist() == [round(float(v) / (largest / 127)) for v in x[row, 1]]
    assert not y[0, 0].any()


@MANY
@given(seeds, sizes, sizes)
def test_dynamic_block_quant(seed: int, rows: int, tiles: int) -> None:
    x = random(seed, rows, 1, 4 * tiles)
    y, scales = sparse.dynamic_block_quant(x, col_block_size=4)
    assert scales.shape == (rows, 1, tiles)
    for tile in range(tiles):
        wanted, of_tile = sparse.dynamic_quant(x[..., 4 * tile : 4 * tile + 4].contiguous())
        assert torch.equal(y[..., 4 * tile : 4 * tile + 4], wanted)
        close(scales[..., tile], of_tile)


@MANY
@given(seeds, few)
def test_lightning_indexer_quant(seed: int, new: list[int]) -> None:
    counts, lengths = batch(new, [7] * len(new))
    keys, table = paged(seed, counts, 8)
    query, weights = random(seed + 2, sum(new), 3, 8), random(seed + 3, sum(new), 3)
    small, scales = sparse.dynamic_quant(query)
    stored, of_keys = sparse.dynamic_quant(keys)
    more = {"block_table": table, "actual_seq_lengths_key": torch.tensor(counts), "layout_key": "PA_BSND"}
    got = sparse.lightning_indexer_quant(
        small, stored, weights, scales, of_keys.squeeze(-1).unsqueeze(-1), sparse_count=3, **more, **lengths
    )
    whole = (small * scales.unsqueeze(-1)).double(), (stored * of_keys.unsqueeze(-1)).double()
    wanted, _ = sparse.lightning_indexer(*whole, weights, sparse_count=3, **more, **lengths)
    assert torch.equal(got, wanted)


@MANY
@given(seeds, few)
def test_kv_quant_sparse_flash_attention(seed: int, new: list[int]) -> None:
    """As in full, over latents that int8 and a scale for each tile of four can hold exactly."""
    counts, lengths = batch(new, [5] * len(new))
    latents, table = paged(seed, counts, 8)
    stored, scales = sparse.dynamic_block_quant(latents, col_block_size=4)
    rope = random(seed + 1, *latents.shape[:-1], 2, dtype=torch.bfloat16)
    packed = torch.cat((stored, rope.view(torch.int8), scales.view(torch.int8)), -1)
    query = random(seed + 2, sum(new), 3, 8 + 2, dtype=torch.bfloat16)
    indices = torch.arange(3).expand(sum(new), 1, 3)
    more = {"block_table": table, "actual_seq_lengths_kv": torch.tensor(counts), "layout_kv": "PA_BSND", **lengths}
    modes = {"key_quant_mode": 2, "value_quant_mode": 2, "tile_size": 4, "rope_head_dim": 2}
    got, _, _ = sparse.kv_quant_sparse_flash_attention(query, packed, packed, indices, 0.5, **modes, **more)
    whole = (stored.unflatten(-1, (2, 4)) * scales.unsqueeze(-1)).flatten(-2)
    asked = {"query_rope": query[..., 8:], "key_rope": rope}
    wanted, _, _ = sparse.sparse_flash_attention(query[..., :8], whole, whole, indices, 0.5, **asked, **more)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


@MANY
@given(seeds, sizes)
def test_scatter_nd_update(seed: int, rows: int) -> None:
    cache, new = random(seed, 20, 3), random(seed + 1, rows + 1, 3)
    before = cache.clone()
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[: rows + 1]
    slots[-1] = -1  # padding
    assert sparse.scatter_nd_update(cache, slots.view(-1, 1), new) is cache
    for slot in range(20):
        at = slots.tolist().index(slot) if slot in slots.tolist() else None
        assert torch.equal(cache[slot], before[slot] if at is None else new[at])


@MANY
@given(seeds, st.lists(st.integers(-1, 15), min_size=1, max_size=12, unique=True))
def test_store_kv_block(seed: int, slots: list[int]) -> None:
    """As one token after the other, which the metadata's runs are made of: each as long as it can be."""
    runs = [torch.full((12,), 7, dtype=torch.int32) for _ in range(3)]
    sparse.store_kv_block_metadata(torch.tensor(slots, dtype=torch.int32), *runs, block_size=4)
    keys, cache = random(seed, len(slots), 1, 3), random(seed + 1, 4, 4, 1, 3)
    wanted = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot // 4, slot % 4] = keys[token]
    sparse.store_kv_block(keys, cache, *runs, block_size=4)
    assert torch.equal(cache, wanted)


@MANY
@given(st.lists(st.integers(-1, 15), min_size=1, max_size=12, unique=True))
def test_store_kv_block_metadata(slots: list[int]) -> None:
    runs = [torch.full((12,), 7, dtype=torch.int32) for _ in range(3)]
    sparse.store_kv_block_metadata(torch.tensor(slots, dtype=torch.int32), *runs, block_size=4)
    stored = [each for each in zip(*(run.tolist() for run in runs), strict=True) if each[0]]
    assert [token + i for length, token, _ in stored for i in range(length)] == [
        t for t, s in enumerate(slots) if s >= 0
    ]
    assert [first + i for length, _, first in stored for i in range(length)] == [s for s in slots if s >= 0]
    for (length, token, first), (_, then, behind) in itertools.pairwise(stored):
        assert (token + length, first + length) != (then, behind) or behind % 4 == 0, "two runs that are one"
    assert all(first % 4 + length <= 4 for length, _, first in stored)
