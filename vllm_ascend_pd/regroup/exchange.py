# SPDX-License-Identifier: Apache-2.0
"""One rank's part in an exchange: gather what others own, all-to-all, assemble what this rank owns.

The collective is called by every rank for every layer and sub-step in which any byte crosses, whatever this rank knows
about destinations, and even if its own gather failed: a rank that stayed away would hold up the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from vllm_ascend_pd.geometry.regroup import RegroupPlan
from vllm_ascend_pd.regroup import ops
from vllm_ascend_pd.regroup.staging import StagingSlot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeRows:
    """A plan's tables as the ops want them, converted once for all layers."""

    plan: RegroupPlan
    send: torch.Tensor
    own: tuple[torch.Tensor, ...]  # by slot
    received: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, plan: RegroupPlan) -> ExchangeRows:
        return cls(
            plan,
            torch.from_numpy(plan.send),
            tuple(torch.from_numpy(slot.own) for slot in plan.slots),
            tuple(torch.from_numpy(slot.received) for slot in plan.slots),
        )


class Exchange:
    """The buffers and the process group of one rank. Not thread-safe: one thread or one stream runs it."""

    def __init__(
        self, group: dist.ProcessGroup, caches: Sequence[Sequence[torch.Tensor]], buffer_bytes: int, device: str
    ) -> None:
        self._group, self._caches = group, caches
        self._send = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        self._receive = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        self.buffer_bytes = buffer_bytes
        self.collectives = 0

    def run(self, rows: ExchangeRows, layer: int, slots: Sequence[StagingSlot | None]) -> Exception | None:
        """One layer of one sub-step. Slots that are None drop what would have gone there.

        An error in this rank's own part is returned after the collective; an error of the collective is raised.
        """
        error: Exception | None = None
        caches = self._caches[layer]
        try:
            if len(rows.send):
                ops.gather(caches, rows.send, self._send)
        except (RuntimeError, ValueError) as failed:
            error = failed
        self._all_to_all(rows.plan)
        try:
            for slot, own, received in zip(slots, rows.own, rows.received, strict=True):
                if slot is None:
                    continue
                if len(own):
                    ops.gather(caches, own, slot.memory)
                if len(received):
                    ops.assemble(self._receive, received, slot.memory)
        except (RuntimeError, ValueError) as failed:
            error = error or failed
        if error is not None:
            log.error("this rank's part of an exchange failed: %s", error)
        return error

    def _all_to_all(self, plan: RegroupPlan) -> None:
        if not plan.exchanges:
            return
        send, receive = plan.send_splits, plan.receive_splits
        equal = plan.equal_splits
        self.collectives += 1
        dist.all_to_all_single(
            self._receive[: sum(receive)],
            self._send[: sum(send)],
            output_split_sizes=None if equal else receive,
            input_split_sizes=None if equal else send,
            group=self._group,
        )


def new_group(tp_size: int, pp_size: int, rank: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A process group of its own for the TP group of `rank`'s stage. Every rank of the engine must call this."""
    mine: dist.ProcessGroup | None = None
    for stage in range(pp_size):
        ranks = [stage * tp_size + member for member in range(tp_size)]
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
        if rank in ranks:
            mine = group
    if mine is None:
        raise ValueError(f"rank {rank} is in no stage of {pp_size} x {tp_size}")
    return mine
