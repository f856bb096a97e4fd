# SPDX-License-Identifier: Apache-2.0
"""One rank's part in an exchange: gather what others own, all-to-all, assemble what this rank owns.

Every rank calls the collective for every layer and sub-step in which any byte crosses between ranks. It does so
whatever it knows about destinations, and even if its own gather failed: otherwise the others would wait for it.

Each rank puts a tag before what it sends to another: its own number, and that of the exchange, which all ranks count
alike. An owner finds the tags of its sources behind its slot. So it notices a source whose gather failed, or that took
part in another exchange, and bytes of another rank than expected. That works even for a source that is done with the
transfer and therefore cannot fail it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vllm_ascend_pd.geometry.coalesce import Ints
from vllm_ascend_pd.geometry.images import BUFFER_ROW, CACHE_ROW, Rows
from vllm_ascend_pd.geometry.regroup import RegroupPlan, Slot
from vllm_ascend_pd.regroup.core.staging import StagingSlot
from vllm_ascend_pd.regroup.ops import Assemble, Gather

log = logging.getLogger(__name__)

TAG_BYTES = 64
TAGS = 1 << 14  # exchanges' numbers are below; 0 marks a part that failed, the others repeat
_BLOCK, _OFFSET, _SOURCE = CACHE_ROW.index("block"), CACHE_ROW.index("offset"), BUFFER_ROW.index("source")


def tags_of(ranks: int) -> int:
    """Return the bytes of all tags in a buffer, or behind a slot."""
    return ranks * TAG_BYTES


def tag_after(collectives: int) -> int:
    """Return the tag of the next exchange after this many collectives."""
    return collectives % (TAGS - 1) + 1


def own_tag(rank: int, number: int) -> int:
    return rank * TAGS + number


def absent(tags: Mapping[int, int], number: int) -> list[int]:
    """Return the sources whose tag is not theirs in exchange `number`."""
    return [source for source, tag in tags.items() if tag != own_tag(source, number)]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Copies that fill one slot. The tags of `sources` are copied to `tags`, behind the slot's bytes."""

    gather: Gather | None
    received: Assemble | None
    sources: tuple[int, ...]
    tags: int

    def absent(self, slot: StagingSlot, number: int) -> list[int]:
        """Return the sources whose bytes in this slot are not of exchange `number`. Reads device memory."""
        if not self.sources:
            return []
        tags = slot.memory[self.tags : self.tags + tags_of(len(self.sources))].cpu().view(torch.int64)
        numbers = tags.view(len(self.sources), -1)[:, 0].tolist()
        return absent(dict(zip(self.sources, numbers, strict=True)), number)


@dataclass(frozen=True, slots=True)
class ExchangeRows:
    """A plan prepared for this rank's buffers, once for all layers."""

    plan: RegroupPlan
    send: Gather | None
    slots: tuple[SlotRows, ...]
    send_splits: list[int]
    receive_splits: list[int]
    sent_tags: list[int]  # offsets of the tags in the send buffer
    blocks: torch.Tensor | None  # this rank's blocks of which images are made first


@dataclass(frozen=True, slots=True)
class ExchangeOutcome:
    """Result of one exchange on this rank."""

    number: int  # the tag that its bytes carry
    error: Exception | None  # of this rank's own part
    waited: float  # seconds inside the collective


class GroupExchange:
    """Buffers and process group of one rank. Not thread-safe: only one thread or stream may run it."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        caches: Sequence[Sequence[torch.Tensor]],
        buffer_bytes: int,
        device: str,
        make_images: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """`rank` is this rank's TP rank by the engine, which the group's own order must agree with.

        `make_images`: `caches` are images, which it makes of a layer's blocks before they are gathered.
        """
        self._group, self._caches, self._make_images = group, caches, make_images
        size = buffer_bytes + tags_of(group.size())
        self._send = torch.empty(size, dtype=torch.uint8, device=device)
        self._receive = torch.empty(size, dtype=torch.uint8, device=device)
        numbers = (
            torch.arange(own_tag(rank, 0), own_tag(rank, TAGS), dtype=torch.int64).view(-1, 1).repeat(1, TAG_BYTES // 8)
        )
        self._tags = numbers.view(torch.uint8).to(device)
        self._tag = torch.empty((1, 1, 1, TAG_BYTES), dtype=torch.uint8, device=device)
        self.buffer_bytes = buffer_bytes
        self.collectives = 0

    def prepare(self, plan: RegroupPlan, slot: torch.Tensor, layer: int) -> ExchangeRows:
        """Prepare a plan for this rank's buffers.

        `slot` is the memory of any slot, and `layer` is any layer of the plan: all slots are alike, and all layers.
        """
        cache = (*self._caches[layer], self._tag)
        sends, receives = _Tagged(plan.send_splits), _Tagged(plan.receive_splits)
        rows = sends.shifted(plan.send, _OFFSET)
        tags = [(len(cache) - 1, 0, 0, 0, 1, 1, at, TAG_BYTES, TAG_BYTES) for at in sends.tags]
        rows = np.concatenate([rows, np.array(tags, dtype=np.int64).reshape(-1, len(CACHE_ROW))])
        return ExchangeRows(
            plan=plan,
            send=Gather(rows, cache, self._send) if len(rows) else None,
            slots=tuple(self._slot(planned, receives, slot, layer) for planned in plan.slots),
            send_splits=sends.splits,
            receive_splits=receives.splits,
            sent_tags=sends.tags,
            blocks=None if self._make_images is None else self._blocks(plan),
        )

    def _blocks(self, plan: RegroupPlan) -> torch.Tensor:
        gathered = np.concatenate([plan.send[:, _BLOCK], *(slot.own_rows[:, _BLOCK] for slot in plan.slots)])
        return torch.from_numpy(np.unique(gathered)).to(self._send.device)

    def _slot(self, planned: Slot, receives: _Tagged, slot: torch.Tensor, layer: int) -> SlotRows:
        gather = Gather(planned.own_rows, self._caches[layer], slot) if len(planned.own_rows) else None
        tags = -(-planned.nbytes // TAG_BYTES) * TAG_BYTES
        if not len(planned.received):
            return SlotRows(gather, None, (), tags)
        sources = receives.ranks_of(planned.received, _SOURCE)
        moved = [
            (TAG_BYTES, 1, 1, receives.tag_of[source], TAG_BYTES, TAG_BYTES, at, TAG_BYTES, TAG_BYTES)
            for source, at in zip(sources, range(tags, tags + tags_of(len(sources)), TAG_BYTES), strict=True)
        ]
        rows = np.concatenate([receives.shifted(planned.received, _SOURCE), np.array(moved, dtype=np.int64)])
        return SlotRows(gather, Assemble(rows, self._receive, slot), sources, tags)

    def run(self, rows: ExchangeRows, layer: int, slots: Sequence[StagingSlot | None]) -> ExchangeOutcome:
        """Exchange one layer of one sub-step. Bytes of a slot that is None are dropped.

        An error in this rank's own part is returned after the collective; an error of the collective is raised.
        """
        error: Exception | None = None
        number = tag_after(self.collectives)
        caches = self._caches[layer]
        try:
            if self._make_images is not None and rows.blocks is not None:
                self._make_images(layer, rows.blocks)
            self._gather(rows, caches, number)
        except Exception as failed:  # any error: the other ranks wait in the collective
            log.exception("this rank's part of an exchange failed")
            error = failed
            self._invalidate_sent(rows)
        began = time.monotonic()
        self._all_to_all(rows)
        waited = time.monotonic() - began
        try:
            for slot, one in zip(slots, rows.slots, strict=True):
                if slot is None:
                    continue
                if one.gather is not None:
                    one.gather(caches, slot.memory)
                if one.received is not None:
                    one.received(self._receive, slot.memory)
        except Exception as failed:
            log.exception("this rank's part of an exchange failed")
            error = error or failed
        return ExchangeOutcome(number, error, waited)

    def _gather(self, rows: ExchangeRows, caches: Sequence[torch.Tensor], number: int) -> None:
        if rows.send is not None:
            self._tag.view(-1).copy_(self._tags[number])
            rows.send((*caches, self._tag), self._send)

    def _invalidate_sent(self, rows: ExchangeRows) -> None:
        """Mark the contents of the send buffer as invalid for the ranks that receive them."""
        for at in rows.sent_tags:
            self._send[at : at + TAG_BYTES].copy_(self._tags[0])

    def break_off(self) -> None:
        """Leave the group for good after `run` has raised, so that no rank waits for this one.

        No rank can exchange in this group any more.
        """
        hang_up(self._group, self._send.device)

    def _all_to_all(self, rows: ExchangeRows) -> None:
        plan = rows.plan
        if not plan.exchanges:
            return
        send, receive, equal = rows.send_splits, rows.receive_splits, plan.equal_splits
        self.collectives += 1
        dist.all_to_all_single(
            self._receive[: sum(receive)],
            self._send[: sum(send)],
            output_split_sizes=None if equal else receive,
            input_split_sizes=None if equal else send,
            group=self._group,
        )


class _Tagged:
    """Splits of one buffer with a tag before each that is not empty, and rows shifted to fit."""

    def __init__(self, splits: Sequence[int]) -> None:
        self.splits = [size + TAG_BYTES if size else 0 for size in splits]
        self._ends = np.cumsum(np.array(splits, dtype=np.int64))
        self._shift = np.cumsum([TAG_BYTES if size else 0 for size in splits], dtype=np.int64)
        begin = np.cumsum(np.array(self.splits, dtype=np.int64)) - self.splits
        self.tag_of = {rank: int(begin[rank]) for rank, size in enumerate(splits) if size}
        self.tags = list(self.tag_of.values())

    def ranks_of(self, rows: Rows, column: int) -> tuple[int, ...]:
        return tuple(int(rank) for rank in np.unique(self._ranks(rows, column)))

    def shifted(self, rows: Rows, column: int) -> Rows:
        rows = rows.copy()
        if len(rows):
            rows[:, column] += self._shift[self._ranks(rows, column)]
        return rows

    def _ranks(self, rows: Rows, column: int) -> Ints:
        ranks: Ints = np.searchsorted(self._ends, rows[:, column], side="right")
        return ranks


def new_group(tp_size: int, count: int, rank: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Make process groups for all `count` TP groups of the world, and return `rank`'s.

    Every rank of the world must call this, because each must make all groups, in the same order.
    """
    mine: dist.ProcessGroup | None = None
    for first in range(0, count * tp_size, tp_size):
        ranks = list(range(first, first + tp_size))
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
        if rank in ranks:
            mine = group
    if mine is None:
        raise ValueError(f"rank {rank} is in none of {count} groups of {tp_size}")
    return mine


def hang_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Close this rank's connections in a group, so that collectives in which others wait fail at once."""
    backend: Any = group._get_backend(device)
    close = _hang_up_gloo if backend.name() == "gloo" else _hang_up_hccl
    close(backend, group.rank())


def _hang_up_hccl(backend: Any, rank: int) -> None:
    """Abort HCCL's communicator. Only the call is tested; its effect on other ranks has not been tried on an NPU."""
    backend.abort_hccl_comm(f"rank {rank} left a regroup exchange")


def _hang_up_gloo(backend: Any, rank: int) -> None:
    """Let a receive run out of time: gloo then closes every connection of the receive's context.

    gloo has no abort of its own; `ProcessGroup.abort` does nothing there.
    """
    peer = 1 if rank == 0 else 0
    for tag in range(os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1):  # one context for each interface
        with suppress(RuntimeError):  # the timeout
            backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(timedelta(milliseconds=1))
