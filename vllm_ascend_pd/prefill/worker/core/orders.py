# SPDX-License-Identifier: Apache-2.0
"""Orders of pushes, made from a reservation before anything is computed: the D workers to write to, and the mode.

All of it depends on the two geometries and the configuration only, so every rank of P comes to the same result.
"""

from __future__ import annotations

import logging

from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.geometry.decide import decide
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.match import Mismatch, mismatches
from vllm_ascend_pd.geometry.pairing import destinations, exchanged, pairings
from vllm_ascend_pd.geometry.plan import plan_digest
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.geometry.substeps import room_for_a_block
from vllm_ascend_pd.metadata import PushStart
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.protocol.agreement import contributor_pairs
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.push import Destination, PushOrder

log = logging.getLogger(__name__)

DIRECT = "direct"
MAX_MODES = 256  # remembered, one for each D geometry; bounded, because a peer can make geometries up


class OrderBook:
    """Orders of one worker. `room` is the capacity of slots and buffers, None without them."""

    def __init__(
        self, of_engine: CacheGeometry, own: CacheGeometry, me: Contributor, config: RegroupConfig, room: Room | None
    ) -> None:
        self._all = of_engine
        self._own, self._me, self._config, self._room = own, me, config, room
        self._modes: dict[CacheGeometry, str] = {}

    def take(self, now: float, start: PushStart) -> tuple[Push, PushOrder, tuple[Mismatch, ...]]:
        """Return the record and the order of a push, and mismatches of the geometries.

        With mismatches the order has no destinations.
        """
        reservation = start.reservation
        d = reservation.geometry
        found = mismatches(self._all, d)
        mode = DIRECT if found else self._mode(d)
        workers = () if found else self._destinations(d)
        some = () if found else pairings(self._all, d)
        apart = exchanged(self._all, d) if mode != DIRECT else ()
        push = Push.of(now, start, self._own, some, apart)
        order = PushOrder(
            push=start.push,
            transfer=reservation.transfer,
            deadline_s=reservation.deadline_s,
            destinations=tuple(self._destination(reservation, worker, mode) for worker in workers),
            cached=start.cached,
        )
        return push, order, found

    def _destinations(self, d: CacheGeometry) -> tuple[int, ...]:
        return destinations(self._all, d, self._me.stage, self._me.rank)

    def _destination(self, reservation: Reservation, worker: int, mode: str) -> Destination:
        d = reservation.geometry
        stage, _ = d.stage_and_rank(worker)
        first = d.first_layer(stage)
        return Destination(
            d_rank=worker,
            peer=reservation.endpoints[worker],
            contributors=contributor_pairs(self._all, d, worker),
            plan_digest=plan_digest(self._all, d, reservation.first, reservation.end, mode),
            regions=tuple(len(kind.regions) for kind in d.by_layer[first : first + len(d.stages[stage])]),
            groups=len(d.tables),
        )

    def _mode(self, d: CacheGeometry) -> str:
        mode = self._modes.get(d)
        if mode is None:
            if len(self._modes) >= MAX_MODES:
                self._modes.clear()
            mode = self._modes[d] = self._decide(d)
        return mode

    def _decide(self, d: CacheGeometry) -> str:
        if self._room is None:
            return DIRECT
        decision = decide(self._all, d, self._config.regroup, self._config.regroup_min_span)
        if not decision.regroup:
            return DIRECT
        needs = [room_for_a_block(pair.p, pair.d) for pair in exchanged(self._all, d)]
        if any(need.slot > self._room.slot or max(need.send, need.receive) > self._room.send for need in needs):
            log.warning("one block of this decode engine does not fit a staging slot: it is pushed directly")
            return DIRECT
        log.info("pushes to TP %d are regrouped: %s", d.tp_size, decision.why)
        return decision.mode
