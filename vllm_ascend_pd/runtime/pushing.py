# SPDX-License-Identifier: Apache-2.0
"""P's worker at run time, as its engine's thread sees it: plan a step, announce its layers, report closed pushes.

That thread waits only in `preempt`, for a bounded time. The machine (machine.py) decides; the pusher's thread (pusher.py,
writing.py) writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, StepPlanner, push_range
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.decisions import Exchanged, PrefillStep, PushStart
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.regroup.parts import RegroupParts
from vllm_ascend_pd.runtime.machine import PushMachine, PushSite
from vllm_ascend_pd.runtime.orders import OrderBook
from vllm_ascend_pd.runtime.pieces import Pieces
from vllm_ascend_pd.runtime.pusher import Computed, Pusher, Sealed
from vllm_ascend_pd.runtime.regrouping import Regrouper
from vllm_ascend_pd.runtime.verify import Summer
from vllm_ascend_pd.runtime.work import PushWork, Unit
from vllm_ascend_pd.runtime.writing import Writing
from vllm_ascend_pd.transport.base import Transport

CLOSE_GRACE_S = 5.0


@dataclass(slots=True)
class _Step:
    """The step that the engine is computing."""

    number: int
    unmarked: set[int]
    direct: bool
    final: tuple[str, ...]


class PushRuntime:
    """Owns the machine, the pusher, the regrouper and the transfer engine of one P worker."""

    def __init__(
        self,
        config: PushConfig,
        site: PushSite,
        caches: Caches,
        device: Device,
        transport: Transport,
        secrets: Secrets | None,
        regroup: RegroupParts | None = None,
    ) -> None:
        self._config, self._site, self._caches, self._device, self._transport = config, site, caches, device, transport
        self._layers = {name: index for index, name in enumerate(caches.geometry.layers)}
        self._by_address = {bases[0]: index for index, bases in enumerate(caches.bases)}
        self._members: dict[str, PushWork] = {}  # until the scheduler says that they ended: who takes part in exchanges
        self._planner: StepPlanner | None = None
        self._orders: OrderBook | None = None
        self._step: _Step | None = None
        self._parts = regroup
        self._regrouper: Regrouper | None = None
        self._first_layer = 0  # of this stage, counted through the whole engine
        transport.register([*caches.storages, *([regroup.staging.region] if regroup is not None else [])])
        self._machine = PushMachine(site, config.timers, config.quiet_s, secrets)
        summer = Summer(caches, device, site.contributor.rank) if config.wire.verify == "full" else None
        pieces = Pieces(regroup.staging, config.quiet_s) if regroup is not None else None
        self._writing = Writing(self._machine, caches, config.wire.fuse_layers, summer, pieces)
        self._pusher = Pusher(f"pd-writer-{site.contributor}", self._writing, transport, device)
        self._machine.attend(on_closed=self._writing.forget, on_news=self._pusher.nudge)

    @property
    def tally(self) -> Tally:
        return self._machine.tally

    # -- the engine's thread

    def begin_step(self, step: PrefillStep) -> None:
        """Take in a step's metadata and plan what its layers will push."""
        self.end_step()  # of the step before, if nobody said that it was over
        if step.empty:
            return
        if not self._machine.started and step.engine is not None:
            self._open_engine(step.engine)
        for abort in step.aborts:
            self._machine.abort(abort.push, abort.code, abort.detail)
        for start in step.starts:
            self._start(start)
        if step.slices:
            self._plan(step)
        for push in step.ended:
            self._members.pop(push, None)
        if self._regrouper is not None:
            self._regrouper.end(step.ended)
            if step.catch_ups:
                # Layers are told apart by their place in the whole engine: each stage makes its own exchanges again.
                again = [Unit(number, layer - self._first_layer, part) for number, layer, part in step.catch_ups]
                self._regrouper.catch_up(again, self._device.record())

    def layer_computed(self, name: str, tensor_address: int | None) -> None:
        """A layer's hook fired. Costs one event and one queue entry; layers are known by name, else by address."""
        step = self._step
        if step is None:
            return
        index = self._layers.get(name)
        if index is None and tensor_address is not None:
            index = self._by_address.get(tensor_address)
        if index is not None and index in step.unmarked:
            self._mark(step, index)
            if not step.unmarked:  # nothing is pushed after this layer: D need not wait for the rest of the forward
                self.end_step()

    def end_step(self) -> None:
        """Sweep up layers whose hook did not fire, and seal."""
        step, self._step = self._step, None
        if step is None:
            return
        for index in sorted(step.unmarked):
            self._mark(step, index)
        for push in step.final:
            if push in self._members:
                self._members[push].sealed = time.monotonic()
        exchanged = tuple(push for push in step.final if push in self._members and self._members[push].exchanges)
        self._pusher.put(Sealed(step.number, tuple(push for push in step.final if push not in exchanged)))
        if self._regrouper is not None:
            self._regrouper.forward(Sealed(step.number, exchanged, behind_exchanges=True))

    def missed_exchanges(self) -> list[Exchanged]:
        """Exchanges that this worker wants to be made again."""
        if self._regrouper is None:
            return []
        self.tally.level("staging_quarantined", self._regrouper.staging.quarantined)
        return [(unit.step, unit.layer + self._first_layer, unit.part) for unit in self._regrouper.wanted()]

    def stats(self) -> dict[str, int | float]:
        """Of the exchanges: counts since the start, and what is held at this moment. Empty without a regrouper."""
        if self._regrouper is None:
            return {}
        return {**self._regrouper.stats(), **self._writing.levels()}

    def check(self) -> None:
        """Raises PdError when this worker can never push again and has nothing left to end."""
        self._machine.check()

    def take_failures(self) -> list[tuple[str, str]]:
        """Transfers whose push failed here, with the code, since the last call."""
        return self._machine.take_failures()

    def preempt(self, pushes: Iterable[str]) -> None:
        """Before blocks are overwritten: wait a bounded time for writes that read them, then start over or fail."""
        deadline = time.monotonic() + self._config.timers.preempt_drain_s
        for push in pushes:
            if push in self._machine.works:
                self._drain(push, deadline)

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        """Requests whose pushes are closed, each once; `ended` are requests that vLLM has finished."""
        return self._machine.take_finished(ended)

    def close(self) -> None:
        """Idempotent. Tells peers what is cut off, stops the threads, closes the transfer engine."""
        self._machine.abort_all("PD-XFER-004", "the prefill engine shuts down")
        if self._regrouper is not None:
            self._regrouper.close(CLOSE_GRACE_S)
        ended = self._pusher.stop(CLOSE_GRACE_S)
        self._transport.close()
        self._machine.close(CLOSE_GRACE_S, quiet=ended)

    # -- starting and planning, on the engine's thread

    def _open_engine(self, engine: CacheGeometry) -> None:
        rank, room = self._site.contributor.rank, self._parts.room if self._parts is not None else None
        self._first_layer = sum(len(names) for names in engine.stages[: self._site.contributor.stage])
        self._orders = OrderBook(engine, self._caches.geometry, rank, self._config.regroup, room)
        self._planner = StepPlanner(engine, self._site.contributor.rank)
        if self._parts is not None:
            self._regrouper = self._writing.regrouper = Regrouper(
                engine,
                self._site.contributor.rank,
                len(self._layers),
                self._parts.exchange,
                self._parts.staging,
                self._device,
                self._pusher.put,
                self._writing.wants,
            )
        self._machine.start(engine)

    def _start(self, start: PushStart) -> None:
        if self._orders is None:
            raise LocalProtocolError("a push was scheduled before the engine's geometry was known")
        work, order, differences = self._orders.take(start)
        self._members[start.push] = work
        self._machine.open(work, order)
        if differences:
            self._machine.abort(start.push, "PD-GEO-001", str(differences[0]))

    def _plan(self, step: PrefillStep) -> None:
        """Plan the step once for all its pushes; the plans wait for the layers."""
        direct: list[tuple[PushWork, Job]] = []
        exchanged: list[tuple[PushWork, Job]] = []
        instances: dict[tuple[Endpoint, ...], int] = {}
        for piece in step.slices:
            work = self._members.get(piece.push)
            if work is None or not work.fits:
                continue
            if piece.restart and piece.push in self._machine.works:
                self._drain(piece.push, time.monotonic() + self._config.timers.preempt_drain_s)
            with self._machine.lock:
                work.extend(step.rotation, piece)
            r = work.reservation
            lo, hi = push_range(r.first, r.end, piece.before, piece.after, r.geometry.block_size)
            facts = {"before": piece.before, "after": piece.after, "tokens": hi - lo}
            trace.emit("step", transfer=str(r.transfer), step=step.rotation, **facts)
            if hi <= lo:
                continue
            job = work.job(lo, hi, instances.setdefault(r.endpoints, len(instances)))
            # Whatever we know of the push: ranks share the tokens of all jobs, so all must plan the same jobs.
            if work.exchanges:
                exchanged.append((work, job))
            elif self._machine.dead is None:  # else nothing would use the plan
                direct.append((work, job))
        self._plan_direct(step.rotation, direct)
        if exchanged and self._regrouper is not None:
            self._regrouper.plan(step.rotation, [work for work, _ in exchanged], [job for _, job in exchanged])
            with self._machine.lock:
                for work, _ in exchanged:
                    work.exchanged.add(step.rotation)
        unmarked = set(range(len(self._layers))) if direct or exchanged else set()
        final = tuple(piece.push for piece in step.slices if piece.final)
        self._step = _Step(step.rotation, unmarked, bool(direct), final)

    def _plan_direct(self, rotation: int, jobs: list[tuple[PushWork, Job]]) -> None:
        if jobs and self._planner is not None:
            plans = self._planner.plan([job for _, job in jobs], rotation)
            with self._machine.lock:
                for (work, _), plan in zip(jobs, plans, strict=True):
                    if work.push in self._machine.works:
                        work.plans[rotation] = plan

    def _mark(self, step: _Step, index: int) -> None:
        step.unmarked.discard(index)
        if trace.enabled():
            trace.emit("layer_computed", step=step.number, layer=index, of=len(self._layers))
        event = self._device.record()
        if step.direct:
            self._pusher.put(Computed(step.number, index, event))
        if self._regrouper is not None:
            self._regrouper.computed(step.number, index, event)

    def _drain(self, push: str, deadline: float) -> None:
        """Wait for the push's writes to come home, then start over; fail it if they do not come."""
        with self._machine.deciding() as deciding:
            sender = deciding.sender
            self._writing.hold(push)
            while sender.outstanding(push) and (left := deadline - time.monotonic()) > 0:
                self._machine.returned.wait(left)
            writes_out = bool(sender.outstanding(push))
            work = self._machine.works.get(push)
            if work is not None:
                work.forget()
            self._writing.start_over(push, writes_out=writes_out)
            now = time.monotonic()
            if writes_out:
                detail = "writes did not return before preemption"
                deciding.actions += sender.abort(now, push, "PD-XFER-001", detail)
            else:
                deciding.actions += sender.restart(now, push)
