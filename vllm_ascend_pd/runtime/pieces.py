# SPDX-License-Identifier: Apache-2.0
"""What lies staged: which slot holds the bytes of which push, and when a slot is free again. Guarded by the runtime's lock."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
from vllm_ascend_pd.runtime.work import Unit


@dataclass(frozen=True, slots=True)
class Piece:
    """One push's share of a slot: its writes, as offsets into the slot, and its checksum where one is wanted."""

    slot: StagingSlot
    writes: tuple[Spans, ...]
    checksum: int | None

    @property
    def nbytes(self) -> int:
        return sum(spans.nbytes for spans in self.writes)


class Pieces:
    """Pieces by (push, D rank, unit). A slot goes back when the last of its pieces is written or dropped."""

    def __init__(self, staging: Staging, quiet_s: float) -> None:
        self._staging, self._quiet_s = staging, quiet_s
        self._pieces: dict[tuple[str, int, Unit], Piece] = {}
        self._tainted: set[int] = set()  # slots of which a write failed

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, push: str, d_rank: int, unit: Unit, piece: Piece) -> bool:
        """False if these bytes are staged already: the first slot keeps them."""
        if (push, d_rank, unit) in self._pieces:
            return False
        piece.slot.users += 1
        self._pieces[push, d_rank, unit] = piece
        return True

    def get(self, push: str, d_rank: int, unit: Unit) -> Piece | None:
        return self._pieces.get((push, d_rank, unit))

    def written(self, now: float, push: str, d_rank: int, unit: Unit, ok: bool) -> None:
        """The write of a piece came home; a failed one may go on reading the slot."""
        piece = self._pieces.pop((push, d_rank, unit), None)
        if piece is None:
            return
        if not ok:
            self._tainted.add(piece.slot.number)
        self._let_go(now, piece.slot)

    def drop(self, now: float, push: str) -> None:
        """The push has closed or started over: what it had staged is not written any more."""
        for key in [key for key in self._pieces if key[0] == push]:
            self._let_go(now, self._pieces.pop(key).slot)

    def unused(self, slot: StagingSlot) -> None:
        """A slot that nobody wants after all."""
        if slot.users == 0:
            self._staging.release(slot)

    def _let_go(self, now: float, slot: StagingSlot) -> None:
        slot.users -= 1
        if slot.users > 0:
            return
        if slot.number in self._tainted:
            self._tainted.discard(slot.number)
            self._staging.quarantine(slot, now + self._quiet_s)
        else:
            self._staging.release(slot)
