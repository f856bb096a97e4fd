# SPDX-License-Identifier: Apache-2.0
"""`verify: full` on D: every block is summed again where it arrived (geometry/digest.py).

It is for tests and for finding a bad link: everything is read once more on both sides, on the threads that move it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import CacheBytes, Caches
from vllm_ascend_pd.geometry.digest import cache_digest
from vllm_ascend_pd.metadata import Bind


class MemoryVerifier:
    """Comparison of D's memory with the contributors' checksums."""

    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        self._memory, self._geometry, self._rank = CacheBytes(caches, device), caches.geometry, rank

    def first_difference(self, bind: Bind, sums: Mapping[tuple[int, int], int], pushed: Collection[str]) -> str | None:
        """Return the first layer and component whose bytes are not what was sent; None if all are.

        `pushed`: the layers that P has.
        """
        for index, name in enumerate(self._geometry.layers):
            if name not in pushed:
                continue
            kind = self._geometry.by_layer[index]
            begin, end = kind.wanted_entries(bind.first, bind.end)
            digest = cache_digest(
                lambda region, layer=index: self._memory.region(layer, region),  # type: ignore[misc]
                kind,
                self._rank,
                kind.head_range(self._rank),
                range(begin, end),
                bind.blocks[kind.group_index],
                begin // kind.covers,
            )
            for number, value in enumerate(digest):
                # If tokens are divided among ranks, a rank may have none, and receives nothing.
                if sums.get((index, number), 0) != value:
                    component = (
                        kind.region_label(number) if sums else "prefill sent no checksums: set verify to full there too"
                    )
                    return f"{name} ({component})"
        return None
