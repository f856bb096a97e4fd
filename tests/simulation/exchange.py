# SPDX-License-Identifier: Apache-2.0
"""The exchanges of prefill ranks on a simulated device: launched work runs later, in order, when all ranks are there.

The production Regrouper launches an exchange from a layer's hook, as on an NPU; this is the device that it uses. A
rank's stream continues although its process is stopped; a collective waits for the last of its ranks. Bytes really
move, by the tables of the production plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulation.memory import Planes, RankMemory
from simulation.world import Violation, World
from vllm_ascend_pd.geometry.images import Rows
from vllm_ascend_pd.geometry.regroup import RegroupPlan
from vllm_ascend_pd.regroup.core.staging import StagingSlot
from vllm_ascend_pd.regroup.exchange import ExchangeOutcome, absent, own_tag, tag_after

STAGING = 1 << 40  # addresses of staging slots: far from every cache
Bytes = NDArray[np.uint8]
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]  # the source and the destination of each byte


class Flat:
    """Registered memory with the interface that `Staging` needs: a length, an address, slices."""

    def __init__(self, content: Bytes, address: int = STAGING) -> None:
        self.bytes = content
        self._address = address

    def numel(self) -> int:
        return len(self.bytes)

    def data_ptr(self) -> int:
        return self._address

    def __getitem__(self, part: slice) -> Flat:
        return Flat(self.bytes[part], self._address + (part.start or 0))


class StreamEvent:
    """A point on a rank's side stream."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = reached

    def done(self) -> bool:
        return self.reached


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Moves that fill one slot; `tags` are the last tags of its sources, by slot number."""

    own_moves: Moves
    received: Moves
    sources: tuple[int, ...]
    tags: dict[int, dict[int, int]]

    def absent(self, slot: StagingSlot, number: int) -> list[int]:
        last_tags = self.tags.get(slot.number, {})
        return absent({source: last_tags.get(source, 0) for source in self.sources}, number)


@dataclass(frozen=True, slots=True)
class ExchangeMoves:
    """A plan as byte moves, made once for all layers of one shape."""

    plan: RegroupPlan
    send: Moves
    slots: tuple[SlotMoves, ...]


@dataclass(slots=True, eq=False)
class Launched:
    """One exchange on one rank's stream."""

    tables: ExchangeMoves
    layer: int
    slots: Sequence[StagingSlot | None]
    number: int
    tag: int
    after: StreamEvent
    event: StreamEvent = field(default_factory=StreamEvent)
    sent: Bytes | None = None
    moving: bool = False


class RankStream:
    """The device of one rank, and its part in the group's collectives: replaces Device and Exchange."""

    exchanges_inline = True

    def __init__(self, group: RankGroup, rank: int, memory: RankMemory, moved: Callable[[], None]) -> None:
        self.collectives = 0
        self.fails: Callable[[], bool] = lambda: False  # whether this rank's next part fails
        self.queue: deque[Launched] = deque()
        self._group, self._rank, self._memory, self._moved = group, rank, memory, moved
        self._tags: dict[int, dict[int, int]] = {}
        self._after: StreamEvent | None = None  # during a launch: the event of the compute stream that it follows
        self._last = StreamEvent(reached=True)
        group.streams.append(self)

    # -- Device

    def record(self) -> StreamEvent:
        return self._last if self._after is not None else StreamEvent(reached=True)

    @contextmanager
    def side_stream(self, after: Any) -> Iterator[None]:
        self._after = after
        try:
            yield
        finally:
            self._after = None

    def planning(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- Exchange

    def prepare(self, plan: RegroupPlan, slot: Any, layer: int) -> ExchangeMoves:
        del slot
        planes = self._memory.planes[layer]
        borders = np.cumsum(plan.receive_splits)
        slots = []
        for planned in plan.slots:
            starts = planned.received[:, 3]
            sources = tuple(int(rank) for rank in np.unique(np.searchsorted(borders, starts, side="right")))
            received = buffer_moves(planned.received)
            slots.append(SlotMoves(cache_moves(planes, planned.own_rows), received, sources, self._tags))
        return ExchangeMoves(plan, cache_moves(planes, plan.send), tuple(slots))

    def run(self, tables: ExchangeMoves, layer: int, slots: Sequence[StagingSlot | None]) -> ExchangeOutcome:
        """Enqueue the exchange without running it."""
        number = tag_after(self.collectives)
        self.collectives += tables.plan.exchanges
        failed = self.fails()
        after = self._after or StreamEvent(reached=True)
        launched = Launched(tables, layer, slots, number, 0 if failed else number, after)
        self._last = launched.event
        self.queue.append(launched)
        self.soon()
        return ExchangeOutcome(number, RuntimeError("this part went wrong") if failed else None, 0.0)

    # -- the stream

    def soon(self) -> None:
        """Look soon for something that was waited for."""
        self._group.soon()

    def gather(self, launched: Launched) -> None:
        source, target = launched.tables.send
        launched.sent = np.zeros(sum(launched.tables.plan.send_splits), dtype=np.uint8)
        if launched.tag:  # otherwise the buffer's old contents are sent
            launched.sent[target] = self._memory.layer(launched.layer)[source]

    def assemble(self, launched: Launched, received: Bytes, tags: dict[int, int]) -> None:
        cache = self._memory.layer(launched.layer)
        for slot, moves in zip(launched.slots, launched.tables.slots, strict=True):
            if slot is None:
                continue
            memory: Any = slot.memory
            memory.bytes[moves.own_moves[1]] = cache[moves.own_moves[0]]
            memory.bytes[moves.received[1]] = received[moves.received[0]]
            self._tags[slot.number] = {source: tags[source] for source in moves.sources}

    def finish(self) -> None:
        launched = self.queue.popleft()
        launched.event.reached = True
        self._moved()


class RankGroup:
    """The ranks of one stage: their streams meet in each collective."""

    def __init__(self, world: World, name: str) -> None:
        self.streams: list[RankStream] = []
        self._world, self._name = world, name
        self._looking = False

    def soon(self) -> None:
        """Look in a separate event: a violation must not end in the caller's error handler."""
        if not self._looking:
            self._looking = True
            self._world.after(0.0, self._look)

    def _look(self) -> None:
        self._looking = False
        self.advance()

    def advance(self) -> None:
        """Start all that can start.

        A rank reads its cache when its stream gets there, not when the last rank arrives.
        """
        for stream in self.streams:
            if stream.queue and stream.queue[0].sent is None and stream.queue[0].after.reached:
                stream.gather(stream.queue[0])
        for stream in self.streams:
            head = stream.queue[0] if stream.queue else None
            if head is not None and head.sent is not None and not head.tables.plan.exchanges and not head.moving:
                head.moving = True
                self._world.after(self._world.rng.uniform(0.0, 0.001), self._packed, stream)
        heads = [stream.queue[0] for stream in self.streams if stream.queue]
        if len(heads) == len(self.streams) and all(
            h.sent is not None and h.tables.plan.exchanges and not h.moving for h in heads
        ):
            self._check(heads)
            for head in heads:
                head.moving = True
            self._world.after(self._world.rng.expovariate(1 / 0.002), self._exchanged)

    def _packed(self, stream: RankStream) -> None:
        head = stream.queue[0]
        stream.assemble(head, np.empty(0, dtype=np.uint8), {})
        stream.finish()
        self.advance()

    def _exchanged(self) -> None:
        heads = [stream.queue[0] for stream in self.streams]
        self._world.stats["exchanges"] += 1
        tags = {rank: own_tag(rank, head.tag) for rank, head in enumerate(heads)}
        borders = [np.concatenate(([0], np.cumsum(head.tables.plan.send_splits))) for head in heads]
        for rank, stream in enumerate(self.streams):
            parts = [
                head.sent[border[rank] : border[rank + 1]]
                for head, border in zip(heads, borders, strict=True)
                if head.sent is not None
            ]
            stream.assemble(heads[rank], np.concatenate(parts), tags)
        for stream in self.streams:
            stream.finish()
        self.advance()

    def _check(self, heads: list[Launched]) -> None:
        first = heads[0]
        for head in heads[1:]:
            alike = head.layer == first.layer and np.array_equal(head.tables.plan.matrix, first.tables.plan.matrix)
            if not alike or head.number != first.number:
                raise Violation(f"promise 3: the ranks of {self._name} are in different exchanges")


def cache_moves(planes: Planes, rows: Rows) -> Moves:
    """Return the bytes moved by a table of cache rows, within one layer."""
    if not len(rows):
        return _NOWHERE
    at = np.array(planes.offsets)
    strides = np.array([(r.block_stride, r.head_stride, r.token_stride, r.cell_bytes) for r in planes.regions])
    of, block, head, token, heads, tokens, offset, head_stride, token_stride = rows.T
    row, h, t = _cells(heads, tokens)
    by_block, by_head, by_token, cell = strides[of].T
    source = at[of][row] + (block * by_block)[row]
    source += (head[row] + h) * by_head[row] + (token[row] + t) * by_token[row]
    target = offset[row] + h * head_stride[row] + t * token_stride[row]
    return _bytes(source, target, cell[row])


def buffer_moves(rows: Rows) -> Moves:
    """Return the bytes moved by a table of buffer rows."""
    if not len(rows):
        return _NOWHERE
    cell, heads, tokens, src, src_head, src_token, dst, dst_head, dst_token = rows.T
    row, h, t = _cells(heads, tokens)
    source = src[row] + h * src_head[row] + t * src_token[row]
    target = dst[row] + h * dst_head[row] + t * dst_token[row]
    return _bytes(source, target, cell[row])


_NOWHERE: Moves = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def _cells(heads: Rows, tokens: Rows) -> tuple[Rows, Rows, Rows]:
    """Return row, head and token of every cell."""
    count = heads * tokens
    row = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    h, t = np.divmod(nth, tokens[row])
    return row, h, t


def _bytes(source: Rows, target: Rows, length: Rows) -> Moves:
    nth = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(source, length) + nth, np.repeat(target, length) + nth
