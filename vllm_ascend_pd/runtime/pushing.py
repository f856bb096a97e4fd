# SPDX-License-Identifier: Apache-2.0
"""P's worker at run time: the Sender machine behind one lock, the side channel on the loop thread, the pusher thread.

The engine's thread plans a step, announces computed layers and reports closed pushes; it waits only in `preempt`, for a
bounded time. Every decision is made under the lock; sockets and the transfer engine are touched after it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, StepPlanner, push_range
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.decisions import Exchanged, PrefillStep, PushStart
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Endpoint, LayerAddresses, Message
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.regroup.parts import RegroupParts
from vllm_ascend_pd.regroup.staging import StagingSlot
from vllm_ascend_pd.runtime.batches import Batch, Triples, aimed, grouped, joined, spans_of, unit_of
from vllm_ascend_pd.runtime.loop import LoopThread
from vllm_ascend_pd.runtime.orders import OrderBook
from vllm_ascend_pd.runtime.pieces import Piece, Pieces
from vllm_ascend_pd.runtime.pusher import IN_FLIGHT, Computed, Pusher, Sealed
from vllm_ascend_pd.runtime.regrouping import Regrouper, Staged
from vllm_ascend_pd.runtime.verify import Summer
from vllm_ascend_pd.runtime.work import PushWork, Unit
from vllm_ascend_pd.transport.base import Transport

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
MOST_WORDS = 200  # of another library's error that D is told


@dataclass(frozen=True, slots=True)
class PushSite:
    """Who this worker is."""

    incarnation: str
    contributor: Contributor
    model: str


@dataclass(slots=True)
class _Step:
    """The step that the engine is computing."""

    number: int
    unmarked: set[int]
    direct: bool
    final: tuple[str, ...]


@dataclass(slots=True)
class _Deciding:
    sender: Sender
    actions: list[act.Action]


class PushRuntime:
    """Owns the loop thread, the dialer, the pusher and the transfer engine of one P worker."""

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
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._works: dict[str, PushWork] = {}
        self._members: dict[str, PushWork] = {}  # until the scheduler says that they ended: who takes part in exchanges
        self._push_of: dict[str, str] = {}  # request id → push
        self._held: set[str] = set()  # pushes being drained: nothing of them is submitted
        self._unsealed: set[str] = set()  # pushes whose last layer was announced, but that missed an exchange
        self._closed: set[str] = set()  # pushes closed, not reported yet
        self._ended: set[str] = set()  # requests that vLLM has finished, not reported yet
        self._sender: Sender | None = None
        self._planner: StepPlanner | None = None
        self._orders: OrderBook | None = None
        self._summer = Summer(caches, device, site.contributor.rank) if config.wire.verify == "full" else None
        self._step: _Step | None = None
        self._dead: Exception | None = None
        self.tally = Tally()
        self._leads = site.contributor == Contributor(0, 0)  # who tells the times of a push
        self._failures: list[tuple[str, str]] = []  # transfer and code, not told to the scheduler yet
        self._timer: asyncio.TimerHandle | None = None
        self._armed = float("inf")
        self._parts = regroup
        self._regrouper: Regrouper | None = None
        self._first_layer = 0  # of this stage, counted through the whole engine
        self._pieces = Pieces(regroup.staging, config.quiet_s) if regroup is not None else None
        transport.register([*caches.storages, *([regroup.staging.region] if regroup is not None else [])])
        self._loop = LoopThread(f"pd-push-{site.contributor}")
        self._dialer = Dialer(
            incarnation=site.incarnation,
            name=str(site.contributor),
            secrets=secrets,
            on_message=self._on_message,
            on_unreachable=self._on_unreachable,
        )
        self._pusher = Pusher(f"pd-writer-{site.contributor}", self, transport, device)

    # -- the engine's thread

    def begin_step(self, step: PrefillStep) -> None:
        """Take in a step's metadata and plan what its layers will push."""
        self.end_step()  # of the step before, if nobody said that it was over
        if step.empty:
            return
        if self._sender is None and step.engine is not None:
            self._open_engine(step.engine)
        for abort in step.aborts:
            self._abort(abort.push, abort.code, abort.detail)
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
        if self._regrouper is None or self._pieces is None:
            return {}
        with self._lock:
            held = {"pieces": len(self._pieces), "unsealed": len(self._unsealed)}
        return {**self._regrouper.stats(), **held}

    def take_failures(self) -> list[tuple[str, str]]:
        """Transfers whose push failed here, with the code, since the last call."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def preempt(self, pushes: Iterable[str]) -> None:
        """Before blocks are overwritten: wait a bounded time for writes that read them, then start over or fail."""
        deadline = time.monotonic() + self._config.timers.preempt_drain_s
        for push in pushes:
            if push in self._works:
                self._drain(push, deadline)

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        """Requests whose pushes are closed, each once; `ended` are requests that vLLM has finished."""
        with self._lock:
            self._ended.update(request for request in ended if request in self._push_of)
            ready = {request for request in self._ended if self._push_of[request] in self._closed}
            self._ended -= ready
            for request in ready:
                self._closed.discard(self._push_of.pop(request))
        return ready

    def close(self) -> None:
        """Idempotent. Tells peers what is cut off, stops the threads, closes the transfer engine."""
        for push in list(self._works):
            self._abort(push, "PD-XFER-004", "the prefill engine shuts down")
        if self._regrouper is not None:
            self._regrouper.close(CLOSE_GRACE_S)
        ended = self._pusher.stop(CLOSE_GRACE_S)
        self._transport.close()
        if self._loop.alive:
            try:
                # With the engine closed nothing of ours lands any more: D need not revoke to be sure of it.
                self._loop.call(self._dialer.close(quiet=ended), timeout=CLOSE_GRACE_S)
            except TimeoutError:
                log.error("the side channel did not close within %.0f s", CLOSE_GRACE_S)
        self._loop.stop(CLOSE_GRACE_S)

    # -- starting and planning, on the engine's thread

    def _open_engine(self, engine: CacheGeometry) -> None:
        rank, room = self._site.contributor.rank, self._parts.room if self._parts is not None else None
        self._first_layer = sum(len(names) for names in engine.stages[: self._site.contributor.stage])
        self._orders = OrderBook(engine, self._caches.geometry, rank, self._config.regroup, room)
        self._planner = StepPlanner(engine, self._site.contributor.rank)
        if self._parts is not None:
            self._regrouper = Regrouper(
                engine,
                self._site.contributor.rank,
                len(self._layers),
                self._parts.exchange,
                self._parts.staging,
                self._device,
                self._pusher.put,
                self._wants,
            )
        self._sender = Sender(
            incarnation=self._site.incarnation,
            contributor=self._site.contributor,
            model=self._site.model,
            geometry=engine,
            timers=self._config.timers,
            quiet_s=self._config.quiet_s,
        )

    def _start(self, start: PushStart) -> None:
        work, order, differences = self._need_orders().take(start)
        work.opened = time.monotonic()
        with self._deciding() as deciding:
            self._works[start.push] = self._members[start.push] = work
            self._push_of[start.request_id] = start.push
            deciding.actions += deciding.sender.open(time.monotonic(), order)
        if differences:
            self._abort(start.push, "PD-GEO-001", str(differences[0]))
        if self._dead is not None:
            self._abort(start.push, "PD-XFER-003", f"the pusher died: {self._dead}")

    def _plan(self, step: PrefillStep) -> None:
        """Plan the step once for all its pushes; the plans wait for the layers."""
        direct: list[tuple[PushWork, Job]] = []
        exchanged: list[tuple[PushWork, Job]] = []
        instances: dict[tuple[Endpoint, ...], int] = {}
        for piece in step.slices:
            work = self._members.get(piece.push)
            if work is None or not work.fits:
                continue
            if piece.restart and piece.push in self._works:
                self._drain(piece.push, time.monotonic() + self._config.timers.preempt_drain_s)
            with self._lock:
                work.extend(step.rotation, piece)
            r = work.reservation
            lo, hi = push_range(r.first, r.end, piece.before, piece.after, r.geometry.block_size)
            facts = {"before": piece.before, "after": piece.after, "tokens": hi - lo}
            trace.emit("step", transfer=str(r.transfer), step=step.rotation, **facts)
            if hi <= lo:
                continue
            job = work.job(lo, hi, instances.setdefault(r.endpoints, len(instances)))
            # Whatever we know of the push: ranks share the tokens of all jobs, so all must plan the same jobs.
            (exchanged if work.exchanges else direct).append((work, job))
        self._plan_direct(step.rotation, direct)
        if exchanged and self._regrouper is not None:
            self._regrouper.plan(step.rotation, [work for work, _ in exchanged], [job for _, job in exchanged])
            with self._lock:
                for work, _ in exchanged:
                    work.exchanged.add(step.rotation)
        unmarked = set(range(len(self._layers))) if direct or exchanged else set()
        final = tuple(piece.push for piece in step.slices if piece.final)
        self._step = _Step(step.rotation, unmarked, bool(direct), final)

    def _plan_direct(self, rotation: int, jobs: list[tuple[PushWork, Job]]) -> None:
        if jobs and self._planner is not None:
            plans = self._planner.plan([job for _, job in jobs], rotation)
            with self._lock:
                for (work, _), plan in zip(jobs, plans, strict=True):
                    if work.push in self._works:
                        work.plans[rotation] = plan

    def _need_orders(self) -> OrderBook:
        if self._orders is None:
            raise LocalProtocolError("a push was scheduled before the engine's geometry was known")
        return self._orders

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
        with self._deciding() as deciding:
            sender = deciding.sender
            self._held.add(push)
            while sender.outstanding(push) and (left := deadline - time.monotonic()) > 0:
                self._returned.wait(left)
            self._held.discard(push)
            self._unsealed.discard(push)
            work = self._works.get(push)
            now = time.monotonic()
            if work is not None:
                work.forget()
            if self._regrouper is not None:
                self._regrouper.forget(push)
            if self._pieces is not None and not sender.outstanding(push):
                self._pieces.drop(now, push)
            if sender.outstanding(push):
                detail = "writes did not return before preemption"
                deciding.actions += sender.abort(now, push, "PD-XFER-001", detail)
            else:
                deciding.actions += sender.restart(now, push)

    def _abort(self, push: str, code: str, detail: str) -> None:
        if push in self._works:
            with self._deciding() as deciding:
                deciding.actions += deciding.sender.abort(time.monotonic(), push, code, detail)

    # -- the pusher's thread (see pusher.Work)

    def computed(self, item: Computed) -> None:
        """Offer a computed layer of a step to the machine, for every push and destination of the step."""
        unit = Unit(item.step, item.layer)
        with self._deciding() as deciding:
            now = time.monotonic()
            for work in list(self._works.values()):
                plan = work.plans.get(item.step)
                for rank in plan.by_rank if plan is not None else ():
                    nbytes = plan.nbytes(rank) if plan is not None else 0
                    deciding.actions += deciding.sender.offer(now, work.push, rank, unit, nbytes)

    def staged(self, item: Staged) -> None:
        """Offer what an exchange has brought; bytes of pushes that ended or started over meanwhile are dropped."""
        pieces, regrouper = self._pieces, self._regrouper
        if pieces is None or regrouper is None:
            return
        if self._leads:
            self.tally.time("regroup_time_seconds", item.waited)
        strangers = [item.strangers(index) if item.error is None else [] for index in range(len(item.slots))]
        with self._deciding() as deciding:
            if item.error is not None:
                self._fail_exchanged(deciding, item.part.works, str(item.error)[:MOST_WORDS])
            for index, (slot, ranks) in enumerate(zip(item.slots, strangers, strict=True)):
                if slot is None:
                    continue
                if ranks:
                    why = f"prefill ranks {', '.join(map(str, ranks))} did not give their part"
                    self._fail_exchanged(deciding, item.part.pushes(index), why)
                elif item.error is None:
                    self._offer_staged(deciding, item, index, slot)
                pieces.unused(slot)
                regrouper.arrived(item.unit, index)
            self._seal_late(deciding, time.monotonic())
        if trace.enabled():
            trace.emit("staged", **item.facts())

    def _offer_staged(self, deciding: _Deciding, item: Staged, index: int, slot: StagingSlot) -> None:
        if self._pieces is None:
            return
        planned, unit = item.part.rows.plan.slots[index], item.unit
        sums = self._summer.staged(planned, item.part.jobs, slot) if self._summer is not None else {}
        for member, writes in planned.writes.items():
            work, rank = item.part.works[member], planned.d_rank
            piece = Piece(slot, writes, sums.get(member))
            if not piece.nbytes or work.push not in self._works or unit.step not in work.exchanged:
                continue
            if self._pieces.add(work.push, rank, unit, piece):
                now = time.monotonic()
                deciding.actions += deciding.sender.offer(now, work.push, rank, unit, piece.nbytes)

    def _fail_exchanged(self, deciding: _Deciding, works: Iterable[PushWork], why: str) -> None:
        for work in works:
            if work.push in self._works:
                deciding.actions += deciding.sender.abort(time.monotonic(), work.push, "PD-XFER-006", why)

    def sealed(self, item: Sealed) -> None:
        with self._deciding() as deciding:
            for push in item.pushes:
                work = self._works.get(push)
                if work is not None and work.final_step == item.step:  # else it was preempted and starts over
                    self._unsealed.add(push)
            self._seal_late(deciding, time.monotonic())

    def _seal_late(self, deciding: _Deciding, now: float) -> None:
        """Seal what is complete; a push that missed an exchange waits until that was made again."""
        for push in list(self._unsealed):
            if push not in self._works:
                self._unsealed.discard(push)
            elif self._regrouper is None or not self._regrouper.owes(push):
                self._unsealed.discard(push)
                deciding.actions += deciding.sender.seal(now, push)

    def _wants(self, push: str, step: int) -> bool:
        """Asked by the regrouper, from its thread: whether bytes of this push are still of use here."""
        with self._lock:
            work = self._works.get(push)
            return work is not None and step in work.exchanged

    def next_batches(self, busy: dict[Hashable, int]) -> list[Batch]:
        """Claim what may be written now, grouped by destination and layer; destinations with enough in flight wait."""
        if self._sender is None:
            return []
        batches: list[Batch] = []
        with self._deciding() as deciding:
            sender, now = deciding.sender, time.monotonic()
            claims = []
            for claim in sender.claim(now, lambda peer: busy.get(peer, 0) < IN_FLIGHT):
                if claim.push in self._held:
                    deciding.actions += sender.returned(now, claim)
                else:
                    claims.append(claim)
            for peer, group in grouped(claims, self._works, self._config.wire.fuse_layers):
                batch = self._batch(deciding, peer, group)
                if batch is not None:
                    batches.append(batch)
        return batches

    def submitted(self, batch: Batch) -> None:
        with self._deciding() as deciding:
            now = time.monotonic()
            for claim in batch.claims:
                deciding.actions += deciding.sender.submitted(now, claim)
        if trace.enabled():
            trace.emit("layer_submitted", **batch.facts())

    def finished(self, batch: Batch, ok: bool) -> None:
        now = time.monotonic()
        if trace.enabled():
            trace.emit("layer_pushed", ok=ok, took=now - batch.submitted_at, **batch.facts())
        if ok:
            self.tally.add("bytes_transferred", sum(batch.size))
            self.tally.add("num_descriptors", len(batch.size))
        with self._deciding() as deciding:
            for claim in batch.claims:
                if self._pieces is not None:
                    self._pieces.written(now, claim.push, claim.d_rank, unit_of(claim), ok)
                deciding.actions += deciding.sender.wrote(now, claim, ok)
            self._returned.notify_all()

    def died(self, error: Exception) -> None:
        """The pusher's thread ended by an error: fail every push, and every later one."""
        self._dead = error
        for push in list(self._works):
            self._abort(push, "PD-XFER-003", f"the pusher died: {error}")

    def _batch(self, deciding: _Deciding, peer: Endpoint, claims: list[Claim]) -> Batch | None:
        """The spans of these claims as one batch. A claim that cannot be written fails its push."""
        sender, now = deciding.sender, time.monotonic()
        parts, taken, session = [], [], ""
        for claim in claims:
            work = self._works[claim.push]
            theirs = sender.addresses(claim.push, claim.d_rank)
            try:
                if theirs is None:
                    raise PdError("PD-CTRL-002", why="READY brought no addresses")
                parts.append(self._spans(work, claim, theirs))
            except PdError as error:
                deciding.actions += sender.returned(now, claim)
                deciding.actions += sender.abort(now, claim.push, error.code, error.sentence)
                continue
            self._add_checksum(sender, claim, work)
            session = theirs.session
            taken.append(claim)
        if not taken:
            return None
        spans = joined(parts)
        transfers = sorted({str(self._works[claim.push].reservation.transfer) for claim in taken})
        return Batch(peer, session, taken, transfers, spans.src.tolist(), spans.dst.tolist(), spans.size.tolist())

    def _spans(self, work: PushWork, claim: Claim, theirs: LayerAddresses) -> Triples:
        unit = unit_of(claim)
        if unit.part == 0 or self._pieces is None:
            return spans_of(work, claim, self._caches.bases, theirs)
        piece = self._pieces.get(claim.push, claim.d_rank, unit)
        if piece is None:
            raise PdError("PD-XFER-002", why="what was staged is gone")
        return aimed(piece.writes, [piece.slot.address] * len(piece.writes), work, unit, theirs)

    def _add_checksum(self, sender: Sender, claim: Claim, work: PushWork) -> None:
        if self._summer is None:
            return
        unit = unit_of(claim)
        piece = self._pieces.get(claim.push, claim.d_rank, unit) if self._pieces is not None and unit.part else None
        if piece is None:
            self._summer.add(sender, claim, work)
        elif piece.checksum is not None:
            sender.checksum(claim.push, claim.d_rank, self._caches.geometry.layers[unit.layer], piece.checksum)

    # -- the loop thread

    def _on_message(self, endpoint: Endpoint, message: Message) -> None:
        with self._deciding() as deciding:
            deciding.actions += deciding.sender.message(time.monotonic(), endpoint, message)
        self._pusher.nudge()

    def _on_unreachable(self, endpoint: Endpoint, detail: str) -> None:
        with self._deciding() as deciding:
            deciding.actions += deciding.sender.unreachable(time.monotonic(), endpoint, detail)

    def _tick(self) -> None:
        self._timer, self._armed = None, float("inf")
        with self._deciding() as deciding:
            deciding.actions += deciding.sender.tick(time.monotonic())
        self._pusher.nudge()

    def _arm(self, wake: float) -> None:
        """Only ever earlier: two threads that decide one after the other may post in the other order."""
        loop = self._loop.loop
        at = loop.time() + max(0.0, wake - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._tick)

    # -- deciding under the lock, acting after it

    @contextmanager
    def _deciding(self) -> Iterator[_Deciding]:
        """Hold the lock while the machine decides; perform the actions it asks for once the lock is free."""
        with self._lock:
            sender = self._sender
            if sender is None:
                raise LocalProtocolError("the machine is asked before its first step")
            deciding = _Deciding(sender, [])
            yield deciding
            for action in deciding.actions:
                if isinstance(action, act.Closed):
                    self._close_push(action)
            wake = sender.next_wake()
            rearm = wake is not None and wake < self._armed - 0.001
            if rearm and wake is not None:
                self._armed = wake
        for action in deciding.actions:
            if isinstance(action, act.Send):
                self._loop.post(self._dialer.send, action.peer, action.message)
            elif isinstance(action, act.Note):
                trace.emit(action.stage, **action.facts)
                if self._leads and action.stage == "ready" and isinstance(waited := action.facts.get("waited"), float):
                    self.tally.time("ready_wait_seconds", waited)
        if rearm and wake is not None:
            self._loop.post(self._arm, wake)

    def _close_push(self, action: act.Closed) -> None:
        work = self._works.pop(action.push, None)
        if work is None:
            return
        self._closed.add(action.push)
        self._unsealed.discard(action.push)
        if self._pieces is not None:
            self._pieces.drop(time.monotonic(), action.push)
        if self._regrouper is not None:
            self._regrouper.forget(action.push)
        transfer = str(work.reservation.transfer)
        trace.emit("push_closed", transfer=transfer, ok=action.ok, code=action.code, detail=action.detail)
        now = time.monotonic()
        if action.ok and self._leads:
            self.tally.time("xfer_time_seconds", now - work.opened)
            self.tally.time("exposed_time_seconds", max(0.0, now - work.sealed) if work.sealed else 0.0)
        if not action.ok:
            self._failures.append((transfer, action.code))
            log.warning("push of transfer %s failed: %s %s", transfer, action.code, action.detail)
