# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's cache, for `vllm-ascend-pd plan`: as vllm-ascend allocates it (docs/kinds.md has the picture).

No cache of it depends on TP: every rank has all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm_ascend_pd.cli.flag_values import refuse
from vllm_ascend_pd.cli.model import Model
from vllm_ascend_pd.geometry.layout import COMPRESSED, WINDOW, CacheGeometry, Group, LayerKind, Region

BLOCKS = (32, 64, 128)  # values of --block-size; of a compressor's entries a block has a 16th or a quarter
_WINDOWS = 2  # index of the group of all layers' windows
# Bytes of a number: of a latent, of a compressor's entries, of index keys, of their scales.
_LATENT, _FLOAT32, _KEY, _SCALE = 2, 4, 1, 2


def geometry(model: Model, flag: str, tp: int, pp: int, size: int, item: int, drafts: int) -> CacheGeometry:
    """Return an engine's geometry. `item`: bytes of a latent's number. Raise ConfigError for a size that it has not."""
    if pp > 1:
        refuse(f"{flag}-pp", pp, "the model compresses its latents", "Give 1: an engine does not start with more.")
    if size not in BLOCKS:
        refuse("--block-size", size, "the windows' blocks follow from it", f"Give one of {BLOCKS}.")
    if item != _LATENT:
        refuse("--dtype", f"{item} bytes a number", "vllm-ascend has its latents in bf16", "Leave it out.")
    groups = (
        *(Group(size, COMPRESSED, ratio) for ratio in (4, 128)),
        *(Group(*sizes) for sizes in ((size, WINDOW, model.window), (size // 16, WINDOW, 8), (size // 4, WINDOW, 128))),
    )
    (first, _), *others = kinds = list(_kinds(model, groups, item, drafts))
    return CacheGeometry(
        block_size=groups[first.group_index].block_size,
        kv_heads=1,
        tp_size=tp,
        dtype=first.dtype,
        packing="plain",
        regions=first.regions,
        stages=(tuple(name for _, names in kinds for name in names),),
        drafter="a draft model" if drafts else "",
        drafts=tuple(f"layers.{model.layers + index}.swa_cache" for index in range(drafts)),
        others=tuple(kind for kind, _ in others),
        kind_of=tuple(index for index, (_, names) in enumerate(kinds) for _ in names),
        groups=groups,
        group_index=first.group_index,
    )


def pool(d: CacheGeometry, tokens: int) -> tuple[int, int]:
    """Return the bytes of a block of the pool that all groups share, and the blocks that a prompt takes of it.

    A block has a page of latents and one of index keys for each place in a group. vllm-ascend divides windows among
    groups of the length with the fewest empty places, and gives layers of a draft model places of their own.
    """
    counts, pages, layers = Counter(d.kind_indices), 0, [0] * len(d.groups)
    for index, kind in enumerate(d.kinds):
        layers[kind.group_index] = counts[index]  # all kinds of a group have as many
        pages += sum(region.block_stride for region in kind.regions) if kind.group_index == 0 else 0
    length = min(range(layers[0], max(layers) + 1), key=lambda n: (sum(-count % n for count in layers), -n))
    blocks, group_places = 0, 0
    for index, (group, count) in enumerate(zip(d.groups, layers, strict=True)):
        whole, size = -(-(tokens // group.per_entry) // group.block_size), group.block_size
        parts = -(-count // length) if group.partial else 1
        blocks += parts * min(whole, -(-(group.n - 1) // size) + 1) if group.partial else whole
        target_layers = count - len(d.drafts) if index == _WINDOWS else count
        group_places = max(group_places, -(-target_layers // parts))
    return (group_places + len(d.drafts)) * pages, blocks


def _kinds(
    model: Model, groups: tuple[Group, ...], item: int, drafts: int
) -> Iterator[tuple[LayerKind, tuple[str, ...]]]:
    """Yield each kind of layers, and its layers."""
    dim, key = model.dim, model.index
    all_layers = range(model.layers + drafts)  # a draft layer has a window alone
    fours, longs = ([index for index, ratio in enumerate(model.ratios) if ratio == each] for each in (4, 128))
    for group, name, layers, cells in (
        (0, "attn", fours, (("latent of 4 tokens", dim * item),)),
        (0, "indexer.k_cache", fours, (("index key", key * _KEY), ("its scale", _SCALE))),
        (1, "attn", longs, (("latent of 128 tokens", dim * item),)),
        (_WINDOWS, "swa_cache", all_layers, (("window", dim * item),)),
        (3, "compressor.state_cache", fours, (("compressor of 4", 4 * dim * _FLOAT32),)),
        (3, "indexer.compressor.state_cache", fours, (("indexer's compressor", 4 * key * _FLOAT32),)),
        (4, "compressor.state_cache", longs, (("compressor of 128", 2 * dim * _FLOAT32),)),
    ):
        if layers:
            entries = groups[group].block_size
            regions = tuple(Region(word, entries * size, 0, size, size) for word, size in cells)
            names = tuple(f"layers.{index}.{name}" for index in layers)
            yield LayerKind(1, "-", "plain", regions, group), names
