# SPDX-License-Identifier: Apache-2.0
"""Records of pushes, made from a reservation before anything is computed: the D workers to write to, and the mode.

All of it depends on the two geometries and the configuration only, so every rank of P comes to the same result.
"""

from __future__ import annotations

import logging

from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.decide import decide
from vllm_ascend_pd.geometry.layout import FRACTAL_PACKING, CacheGeometry
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
from vllm_ascend_pd.protocol.push import Destination

log = logging.getLogger(__name__)

DIRECT = "direct"
MAX_MODES = 256  # remembered, one for each D geometry; bounded, because a peer can make geometries up


class OrderBook:
    """Orders of one worker. `room` is the capacity of slots and buffers, None without them."""

    def __init__(
        self, geometry: CacheGeometry, cache: CacheGeometry, me: Contributor, config: RegroupConfig, room: Room | None
    ) -> None:
        self._geometry = geometry  # of the whole engine
        self._cache, self._me, self._config, self._room = cache, me, config, room
        self._modes: dict[CacheGeometry, str] = {}

    def take(self, start: PushStart) -> tuple[Push, tuple[Mismatch, ...]]:
        """Return the record of a push, and mismatches of the geometries. With mismatches it has no destinations."""
        d = start.reservation.geometry
        if differences := mismatches(self._geometry, d):
            return Push.of(start, self._cache, (), (), ()), differences
        mode = self._mode(d)
        apart = exchanged(self._geometry, d) if mode != DIRECT else ()
        if self._cache.packing == FRACTAL_PACKING and len(apart) < len(pairings(self._geometry, d)):
            raise LocalProtocolError("decode's int8 is not in this engine's cache: it cannot be pushed directly")
        to = tuple(self._destination(start.reservation, worker, mode) for worker in self._destinations(d))
        return Push.of(start, self._cache, pairings(self._geometry, d), apart, to), ()

    def _destinations(self, d: CacheGeometry) -> tuple[int, ...]:
        return destinations(self._geometry, d, self._me.stage, self._me.rank)

    def _destination(self, reservation: Reservation, worker: int, mode: str) -> Destination:
        d = reservation.geometry
        stage, _ = d.stage_and_rank(worker)
        first = d.first_layer(stage)
        return Destination(
            d_rank=worker,
            peer=reservation.endpoints[worker],
            contributors=contributor_pairs(self._geometry, d, worker),
            plan_digest=plan_digest(self._geometry, d, reservation.first, reservation.end, mode),
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
        decision = decide(self._geometry, d, self._config.regroup, self._config.regroup_min_span)
        if not decision.regroup:
            return DIRECT
        needs = [room_for_a_block(pair.p, pair.d) for pair in exchanged(self._geometry, d)]
        if any(need.slot > self._room.slot or max(need.send, need.receive) > self._room.send for need in needs):
            log.warning("one block of this decode engine does not fit a staging slot: it is pushed directly")
            return DIRECT
        log.info("pushes to TP %d are regrouped: %s", d.tp_size, decision.why)
        return decision.mode
