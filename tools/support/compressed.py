# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's caches as vllm-ascend makes them, without an engine: specs by layer and group, and registered tensors.

Sizes are the checkpoints': latents of 512 channels, index keys of 128, a window of 128 tokens. Block sizes, padded
pages and groups are those that vllm-ascend 0.23.0.post1 makes of `--block-size`. 0.30 makes the same (`newer`), but
counts a block of entries in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from tools.support import ascend_specs

LATENT, KEY, WINDOW = 512, 128, 128
# By --block-size: entries of a block of a compressor for 4 tokens and for 128; bytes of a page of index keys, of
# others.
SIZES = {32: (2, 8, 4160, 32768), 64: (4, 16, 8320, 65536), 128: (8, 32, 16640, 131072)}
Specs = dict[str, Any]  # by layer


def latent(size: int, ratio: int, newer: bool = False) -> Any:
    return _entries(size, LATENT, ratio, newer)


def keys(size: int, newer: bool = False) -> Any:
    return _entries(size, KEY, 4, newer, dtype=torch.int8, scale_dim=1)


def _entries(size: int, width: int, ratio: int, newer: bool, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    if not newer:
        return ascend_specs.latent(size, (width,), dtype, compress_ratio=ratio, **more)
    return ascend_specs.NewerMLASpec(
        block_size=size * ratio, num_kv_heads=1, head_size=width, dtype=dtype, tokens_per_state=ratio, **more
    )


def window(size: int, head: int, tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    return ascend_specs.AscendSlidingWindowMLASpec(
        block_size=size, num_kv_heads=1, head_size=head, dtype=dtype, sliding_window=tokens
    )


def layer(number: int, name: str) -> str:
    return f"model.layers.{number}.self_attn.{name}"


def groups(ratios: Sequence[int], size: int = 128, drafted: int = 0, newer: bool = False) -> tuple[Specs, ...]:
    """Return the groups of a model whose layers have these ratios (0: a window alone), and so many layers of MTP.

    Windows are in as many groups as it takes for none to have more layers than the first group has of a page size.
    """
    fours, longs = ([n for n, ratio in enumerate(ratios) if ratio == each] for each in (4, 128))
    of_four, of_long, *_ = SIZES[size]
    windows = [layer(n, "swa_cache") for n in range(len(ratios))]
    windows += [f"mtp.{len(ratios) + n}.self_attn.swa_cache" for n in range(drafted)]
    apart = -(-len(windows) // len(fours))
    return (
        {
            layer(n, name): spec
            for n in fours
            for name, spec in (("attn", latent(size, 4, newer)), ("indexer.k_cache", keys(size, newer)))
        },
        {layer(n, "attn"): latent(size, 128, newer) for n in longs},
        *(dict.fromkeys(windows[n::apart], window(size, LATENT, WINDOW, torch.bfloat16)) for n in range(apart)),
        {
            layer(n, name): window(of_four, head, 8)
            for n in fours
            for name, head in (("compressor.state_cache", 4 * LATENT), ("indexer.compressor.state_cache", 4 * KEY))
        },
        {layer(n, "compressor.state_cache"): window(of_long, 2 * LATENT, 128) for n in longs},
    )


def made(groups: Sequence[Specs], blocks: int) -> Any:
    """Return vLLM's configuration of such a cache."""
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                list(specs),
                UniformTypeKVCacheSpecs(block_size=next(iter(specs.values())).block_size, kv_cache_specs=specs),
            )
            for specs in groups
        ],
    )


def tensors(groups: Sequence[Specs], size: int, blocks: int) -> dict[str, list[torch.Tensor]]:
    """Return the tensors as they are registered: layers of one place in their groups share memory."""
    *_, of_keys, of_latents = SIZES[size]
    raw: dict[tuple[int, int], torch.Tensor] = {}
    views: dict[str, list[torch.Tensor]] = {}
    for specs in groups:
        layers_of = {of_keys: 0, of_latents: 0}
        for name, spec in specs.items():
            page = of_keys if ".indexer." in name else of_latents
            memory = raw.setdefault((layers_of[page], page), torch.zeros(blocks * page, dtype=torch.int8))
            layers_of[page] += 1
            parts = [(spec.dtype, spec.head_size)] + [(torch.float16, 1)] * getattr(spec, "scale_dim", 0)
            at, entries = 0, spec.block_size // max(1, getattr(spec, "tokens_per_state", 1))
            for dtype, dim in parts:
                item = dtype.itemsize
                view = memory.view(dtype).as_strided((blocks, entries, 1, dim), (page // item, dim, dim, 1), at // item)
                views.setdefault(name, []).append(view)
                at += entries * dim * item
    return views
