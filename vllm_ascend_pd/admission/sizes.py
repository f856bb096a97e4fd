# SPDX-License-Identifier: Apache-2.0
"""Parallel sizes of an engine, as vLLM's configuration has them: its ranks, their ports, the division of tokens."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class TokenDivision(NamedTuple):
    """Division of an engine's tokens among ranks."""

    dcp: int
    pcp: int
    interleave: int

    @property
    def world(self) -> int:
        return self.dcp * self.pcp


def token_division(parallel: Any) -> TokenDivision:
    dcp = int(getattr(parallel, "decode_context_parallel_size", 1))
    pcp = int(getattr(parallel, "prefill_context_parallel_size", 1))
    return TokenDivision(dcp, pcp, int(parallel.cp_kv_cache_interleave_size) if dcp * pcp > 1 else 1)


def listening_offsets(parallel: Any) -> range:
    """Return where this rank's workers listen, as offsets from side_channel_port.

    Each data-parallel rank has its own, so that ranks on one host do not collide.
    """
    size = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size) * token_division(parallel).pcp
    first = dp_rank(parallel) * size
    return range(first, first + size)


def dp_rank(parallel: Any) -> int:
    """Return the data-parallel index: in a dense model vLLM gives each rank a size of 1 and the rank 0."""
    return int(parallel.data_parallel_index)


def ranks_here(parallel: Any) -> int:
    """Return how many data-parallel ranks one address on this host stands for.

    It is 1 for a dense model, whose ranks do not know of each other.
    """
    return int(parallel.data_parallel_size_local) if parallel.data_parallel_size > 1 else 1


def is_dense_rank(engine_id: str | None) -> bool:
    return re.search(r"_dp\d+$", str(engine_id)) is not None
