# SPDX-License-Identifier: Apache-2.0
"""D's int8 of heads, made of P's cache: for one layer at a time, of the blocks that an exchange is about to gather.

A P of vllm-ascend keeps the model's dtype, and its D int8 in fractals of 32 channels. Both have the scales of one
checkpoint, by channel. The exchange gathers from these images instead of from the cache; so slots, rounds, checksums
and unequal sizes are those of any exchange. The images have room for all blocks of a layer, so block ids stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches, CacheShape, describe
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import FRACTAL_CHANNELS, Ranks

log = logging.getLogger(__name__)


def describe_for_decode(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], shape: CacheShape, device: Device, rank: int
) -> tuple[Caches, Quantiser | None]:
    """Return the layout of a P's caches as a D has them, and what makes images of them if they are not like that."""
    if not shape.int8_scales:
        return describe(tensors, shape, device), None
    made = Quantiser(tensors, shape, rank)
    return describe(made.images, shape, device, images=True), made


class Quantiser:
    """Images of one rank's K and V. Not thread-safe: it belongs to the thread or stream that exchanges."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], shape: CacheShape, rank: int
    ) -> None:
        """`tensors` are the registered caches, all of whose layers D has in int8."""
        names = [name for name in tensors if name in shape.int8_scales]  # others read the cache of one of these
        self._caches = [_key_and_value(name, tensors[name]) for name in names]
        self._scales = [_of_rank(name, shape, rank) for name in names]
        blank = self._caches[0][0].new_empty(self._caches[0][0].shape, dtype=torch.int8)
        self._both = blank, torch.empty_like(blank)
        self.images = dict.fromkeys(names, self._both)  # in the place of `tensors`
        log.info("decode's int8 is made of one layer at a time: %.1f MiB", 2 * blank.nbytes / 2**20)

    def __call__(self, layer: int, blocks: torch.Tensor) -> None:
        """Make the images of these blocks of a layer. Of cells that are not computed yet they are arbitrary."""
        for cache, image, (inverse, offset) in zip(self._caches[layer], self._both, self._scales[layer], strict=True):
            # As decode itself makes int8 of a token's key or value, in the model's dtype.
            cells = torch.clamp(torch.round(cache[blocks] * inverse + offset), -128, 127).to(torch.int8)
            by_token = cells.view(*cells.shape[:3], -1, FRACTAL_CHANNELS)  # block, token, head, fractal, 32
            by_fractal = by_token.permute(0, 2, 3, 1, 4)
            image[blocks] = by_fractal.reshape(cells.shape)


def _key_and_value(name: str, tensors: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first = tensors[0]
    if len(tensors) != 2 or first.dim() != 4 or first.shape != tensors[1].shape or not first.is_floating_point():
        shapes = [tuple(one.shape) for one in tensors]
        why = f"shapes {shapes}, {first.dtype}, of which no int8 is made for decode"
        raise ConfigError("PD-GEO-003", layer=name, why=why)
    return tensors[0], tensors[1]


def _of_rank(name: str, shape: CacheShape, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, of K and of V, the reciprocal scale and the offset of this rank's heads: by channel, or one for all."""
    layer = shape.of(name)
    heads = Ranks(layer.total_heads, shape.tp_size).head_range(rank)

    def part(scale: torch.Tensor) -> torch.Tensor:
        whole = scale.detach()
        if whole.numel() == 1:
            return whole
        if whole.numel() != layer.total_heads * layer.head_size:
            why = f"{whole.numel()} scales for {layer.total_heads} heads of {layer.head_size} channels"
            raise ConfigError("PD-GEO-003", layer=name, why=why)
        return whole.view(-1, layer.head_size)[heads.start : heads.stop]

    k_scale, k_offset, v_scale, v_offset = map(part, shape.int8_scales[name])
    return [(1.0 / k_scale, k_offset), (1.0 / v_scale, v_offset)]
