# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: the contents of a page, and its division into parts that ranks hold differently.

A layer keeps two states: the last inputs of its convolution (rows), and the recurrence itself, a matrix per head. One
part of the convolution's inputs has the heads of the recurrence. The other part has heads of its own; there may be so
few of these that every rank has all. Parts with the same heads are a *section*. Each section is planned like a layer
whose blocks have one entry; its heads are divided as those of attention are. Where the rows of a convolution lie one
behind the other, each row is a region of its own. An engine with a draft model has a row more for each drafted token.
A prompt leaves these empty, so they are not pushed, and P and D may draft different numbers of tokens.

    Mamba-2             convolution: x | B | C per row      sections  heads: x, recurrence   groups: B, C
    Gated DeltaNet      convolution: q | k | v per row      sections  keys: q, k             values: v, recurrence
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from vllm_ascend_pd.errors import ConfigError

MAMBA2, DELTA_NET = "mamba2", "gated delta net"
PACKING = "state"


class StateRegion(msgspec.Struct, frozen=True):
    """A region of a section: `cell_bytes` of each head, from `offset` on in the state with index `state`."""

    name: str
    state: int
    offset: int
    cell_bytes: int
    dtype: str


class StateSection(msgspec.Struct, frozen=True):
    """Parts of a layer's states that have the same heads."""

    name: str
    heads: int  # in the whole model; if there are fewer than ranks, each rank has one
    regions: tuple[StateRegion, ...]


class Recurrent(msgspec.Struct, frozen=True):
    """One layer's states on one rank, from the engine's configuration."""

    recurrence: str  # MAMBA2 or DELTA_NET
    shapes: tuple[tuple[int, ...], ...]  # of the convolution's state, and of the recurrence's: [heads, …]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of an element
    dim_first: bool  # the convolution's state is [dim, rows], else [rows, dim]
    groups: int = 0  # groups of B and C in the whole model; 0 if unknown
    drafted: int = 0  # rows of the convolution that only drafted tokens use: the last ones, empty behind a prompt

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each state."""
        return tuple(math.prod(shape) * size for shape, size in zip(self.shapes, self.sizes, strict=True))

    def sections(self, layer: str, tp: int) -> tuple[StateSection, ...]:
        """Return the layer's sections. Raise PD-GEO-003 for shapes that do not add up."""
        if len(self.shapes) != 2 or len(self.shapes[0]) != 2 or len(self.shapes[1]) != 3:
            raise ConfigError("PD-GEO-003", layer=layer, why=f"states of shapes {self.shapes}")
        conv, (heads, *matrix) = self.shapes[0], self.shapes[1]
        if self.drafted and (self.dim_first or self.drafted >= conv[0]):
            why = f"a convolution's state of shape {conv} with {self.drafted} rows for drafted tokens"
            raise ConfigError("PD-GEO-003", layer=layer, why=why)
        dim = conv[0] if self.dim_first else conv[1]
        # The recurrence is [heads, head, state] of Mamba-2, and [heads, value, key] of Gated DeltaNet.
        head, state = matrix
        beside, odd = divmod((dim - heads * head) // 2, state)
        if dim - heads * head != 2 * beside * state or odd or beside < 1:
            why = f"a convolution over {dim} values does not fit {heads} heads of {head} and states of {state}"
            raise ConfigError("PD-GEO-003", layer=layer, why=why)
        size = self.sizes[1]
        matrices = StateRegion("recurrence", 1, 0, head * state * size, self.dtypes[1])
        if self.recurrence == DELTA_NET:
            q, k, v = self._rows((("q", beside, state), ("k", beside, state), ("v", heads, head)), dim)
            return StateSection("keys", beside * tp, q + k), StateSection("values", heads * tp, (*v, matrices))
        x, b, c = self._rows((("x", heads, head), ("B", beside, state), ("C", beside, state)), dim)
        return StateSection("heads", heads * tp, (*x, matrices)), StateSection(
            "groups", self._groups(layer, beside, tp), b + c
        )

    def _groups(self, layer: str, local: int, tp: int) -> int:
        """Return the model's number of groups. One group per rank may be the same one on all ranks, or one of `tp`."""
        if local > 1 or tp == 1:
            return local * tp
        if self.groups not in (1, tp):
            why = f"one group of B and C on each of {tp} ranks, and {self.groups or 'an unknown number'} in the model"
            raise ConfigError("PD-GEO-003", layer=layer, why=why)
        return self.groups

    def _rows(self, parts: Sequence[tuple[str, int, int]], dim: int) -> list[tuple[StateRegion, ...]]:
        """Return the regions of the convolution's state by part; a part has a name, heads, and values of a head."""
        size, dtype, begin = self.sizes[0], self.dtypes[0], 0
        regions: list[tuple[StateRegion, ...]] = []
        rows = self.shapes[0][1] if self.dim_first else self.shapes[0][0] - self.drafted
        for name, heads, values in parts:
            cell = values * size
            if self.dim_first:
                regions.append((StateRegion(f"conv.{name}", 0, begin * rows * size, cell * rows, dtype),))
            else:
                at = [(row * dim + begin) * size for row in range(rows)]
                regions.append(
                    tuple(StateRegion(f"conv.{name}.{i}", 0, offset, cell, dtype) for i, offset in enumerate(at))
                )
            begin += heads * values
        return regions
