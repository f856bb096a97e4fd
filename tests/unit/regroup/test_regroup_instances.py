# SPDX-License-Identifier: Apache-2.0
"""One exchange for reservations of several layouts at the same endpoints: each push gets the layers that its D has.

A D that starts again on its fixed ports, with a draft model or without, leaves reservations of both kinds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from unit.geometry.kit import geometry
from unit.protocol import kit as rig
from unit.regroup.common import config
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.worker.core.exchanges import Run, Staged
from vllm_ascend_pd.prefill.worker.core.push import Push, Unit
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.core.register import PushSite
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.regroup.core.staging import Staging

LAYERS, BLOCK, TOKENS, SLOT = 3, 4, 16, 4096
PLAIN = geometry("token", heads=2, tp=1, block=BLOCK, layers=LAYERS - 1)


def drafting(tp: int) -> CacheGeometry:
    """A cache of which the last layer is a draft model's, and like the others."""
    made = geometry("token", heads=2, tp=tp, block=BLOCK, layers=LAYERS)
    return msgspec.structs.replace(made, drafter="a draft model", drafts=made.layers[-1:])


def step_of(*ds: CacheGeometry) -> PrefillStep:
    """One step that computes a prompt for each of these reservations, all with the same endpoints."""
    book = PushBook(model=rig.MODEL, geometry=drafting(2))
    for n, d in enumerate(ds):
        reservation = rig.reservation(d, TOKENS, transfer=TransferId("d", n, f"u{n}"))
        assert book.take(0.0, NewRequest(f"r{n}", (TOKENS, reservation.prompt_hash), f"p.{n}", reservation)) is None
        table = list(range(1 + n * TOKENS, 1 + n * TOKENS + TOKENS // BLOCK))
        book.scheduled(f"r{n}", 0, TOKENS, table, replaces=True)
    return book.take_step()


def core_of(rank: int) -> Pushes:
    staging = Staging(torch.zeros(SLOT * 32, dtype=torch.uint8), SLOT, 16, waits=False)
    room = Room(SLOT, 2 * SLOT, 2 * SLOT)
    return Pushes(config(), PushSite("p", Contributor(0, rank), rig.MODEL), drafting(2), ((),) * LAYERS, staging, room)


def exchange_all(core: Pushes, step: PrefillStep) -> list[np.ndarray]:
    """Make all exchanges of a step in all layers. Return what each of them moves between the ranks."""
    plan, event = core.plans.begin(0.0, step), cast("Any", SimpleNamespace(done=lambda: True))
    for exchange in plan.exchanges:
        for layer in exchange.layers:
            run = Run(Unit(step.number, layer, exchange.number), exchange)
            slots = tuple(core.making.slot(run, index) for index in range(len(exchange.shares)))
            core.making.made(run)
            brought = Staged(event, run, slots, waited=0.0)
            core.offers.staged(0.0, brought, [[] for _ in slots], [{} for _ in slots])
    return [exchange.plan.matrix for exchange in plan.exchanges]


def offered(push: Push) -> set[int]:
    """Layers that were offered to D."""
    return {unit.layer for pair in push.pairs.values() for unit in pair.coverage.pending if isinstance(unit, Unit)}


@pytest.mark.parametrize("drafts", ["at the ends", "in the middle"])
def test_reservations_of_a_restarted_d_get_the_layers_that_each_of_them_has(drafts: str) -> None:
    """Three equal prompts for two ranks: each rank owns one of them and half of the middle one."""
    one, other = (drafting(1), PLAIN) if drafts == "at the ends" else (PLAIN, drafting(1))
    ds, cores, moved = (one, other, one), [core_of(rank) for rank in range(2)], []
    for core in cores:
        moved.append(exchange_all(core, step_of(*ds)))
        theirs = [
            (offered(push), set(range(len(d.layers)))) for push, d in zip(list(core.records.values()), ds, strict=True)
        ]
        assert sum(layers == wanted for layers, wanted in theirs) == 2, theirs
        assert [layers for layers, wanted in theirs if layers != wanted] == [set()]
        assert not any(push.owed for push in core.records.values())
    ((one_plan,), (same_plan,)) = moved
    assert one_plan.sum() and (one_plan == same_plan).all(), "ranks that plan apart would wait for each other"
