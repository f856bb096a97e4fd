# SPDX-License-Identifier: Apache-2.0
"""Decisions of P's scheduler: the requests that push, the tokens of them that a step computes, the blocks it holds.

Pure: the adapter in ../role.py translates vLLM's objects. Each step's metadata is incremental: new blocks and a
token range, never the whole list again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.geometry.match import mismatches, range_fault
from vllm_ascend_pd.metadata import Blocks, MissedExchange, PrefillStep, PushAbort, PushSlice, PushStart
from vllm_ascend_pd.protocol.first import First, Sample, Seed
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.versions import OURS, WHOLE

FORCED_STEPS = 8  # empty steps forced after a catch-up: what is missed still is ordered without waiting for requests


@dataclass(slots=True)
class _Tracked:
    request_id: str
    push: str
    reservation: Reservation
    groups: tuple[Group, ...] = ()  # of this engine, where it is known
    watermark: int = 0
    started: bool = False
    restart: bool = False
    sealed: bool = False
    aborted: bool = False

    def unreported(self, index: int, ids: Sequence[int]) -> Blocks:
        """Return a group's blocks as the workers receive them.

        In a group of states this is only the block of D's last token, once a step ends exactly there. If a step
        computes more, no block has the state that D wants: none is sent, and the push fails.
        """
        if self.groups and self.groups[index].stateful:
            end = self.reservation.end
            at = (end - 1) // self.groups[index].block_size
            ids = ids[at : at + 1] if self.watermark == end else ()
        return np.asarray(ids, dtype=np.int32)


@dataclass(slots=True)
class _PendingPushes:
    starts: list[PushStart] = field(default_factory=list)
    slices: list[PushSlice] = field(default_factory=list)
    aborts: list[PushAbort] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    catch_ups: set[MissedExchange] = field(default_factory=set)
    computed: list[PushSlice] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


class PushBook:
    """P's pushes by request. A transfer is pushed once, even if it is asked for again."""

    def __init__(self, *, model: str, remembered: int = 65536) -> None:
        self.model = model
        self._tracked: dict[str, _Tracked] = {}
        self._refused: dict[str, PdError] = {}  # by request id, until it ends
        self._holding: dict[str, str] = {}  # request id → push, blocks held until the workers report; "": no push
        self._seen: dict[TransferId, None] = {}  # oldest first, bounded
        self._remembered = remembered
        self._pending = _PendingPushes()
        self._number = 0
        self._looks = 0

    def admit(
        self,
        request_id: str,
        reservation: Reservation,
        prompt_length: int,
        prompt_hash: str,
        push: str,
        geometry: CacheGeometry | None = None,
    ) -> PdError | None:
        """Take a reservation for a request, once. A refusal is returned, not raised: the request itself may go on.

        `geometry` is this cache: what cannot be pushed from it is refused at once, not only by D's deadline.
        """
        refusal = self.refusal_of(reservation, prompt_length, prompt_hash, geometry)
        if refusal is not None:
            return self.refuse(request_id, refusal)
        self._see(reservation)
        groups = geometry.tables if geometry is not None else ()
        self._tracked[request_id] = _Tracked(request_id, push, reservation, groups)
        return None

    def attach(
        self,
        request_id: str,
        reservation: Reservation,
        push: str,
        computed: int,
        blocks: Sequence[Sequence[int]],
        geometry: CacheGeometry | None = None,
    ) -> None:
        """Add a reservation that fits to a request of which `computed` tokens are in `blocks` (by group).

        The next step pushes those. If the request has ended already, the caller calls `finished` next.
        """
        self._see(reservation)
        groups = geometry.tables if geometry is not None else ()
        tracked = self._tracked[request_id] = _Tracked(request_id, push, reservation, groups)
        if not computed:
            return
        tracked.started, tracked.watermark = True, computed
        tracked.sealed = computed >= reservation.end
        after, tables = min(computed, reservation.end), tuple(np.asarray(ids, dtype=np.int32) for ids in blocks)
        self._pending.starts.append(PushStart(request_id, push, reservation))
        self._pending.computed.append(PushSlice(push, 0, after, tables, restart=False, final=tracked.sealed))

    def free(self, request_id: str) -> None:
        """Free the blocks of an ended request that were held and not pushed: the workers report it like any other."""
        self._holding[request_id] = ""
        self._pending.freed.append(request_id)

    def _see(self, reservation: Reservation) -> None:
        self._seen[reservation.transfer] = None
        while len(self._seen) > self._remembered:
            del self._seen[next(iter(self._seen))]

    def refuse(self, request_id: str, why: PdError) -> PdError:
        """Record that a request is prefilled but not pushed, and return why."""
        self._refused[request_id] = why
        return why

    def refusal_of(
        self, reservation: Reservation, prompt_length: int, prompt_hash: str, geometry: CacheGeometry | None
    ) -> PdError | None:
        """Return why this prompt cannot be pushed for this reservation; None if it can."""
        refusal = OURS.refusal(reservation.version, reservation.needs)
        if refusal is not None:
            return refusal
        if reservation.transfer in self._seen:
            return PdError("PD-META-005", why=f"transfer {reservation.transfer} was pushed already")
        if reservation.model != self.model:
            return PdError("PD-GEO-001", field="model", prefill=self.model, decode=reservation.model)
        if reservation.prompt_length != prompt_length:
            return PdError(
                "PD-META-005", why=f"{prompt_length} prompt tokens here, {reservation.prompt_length} reserved"
            )
        if reservation.prompt_hash != prompt_hash:
            return PdError("PD-META-005", why="the prompts differ (tokens, LoRA, multimodal input or cache salt)")
        why = _malformed(reservation)
        if why:
            return PdError("PD-META-005", why=why)
        differences = mismatches(geometry, reservation.geometry) if geometry is not None else ()
        return differences[0].error() if differences else None

    def knows(self, request_id: str) -> bool:
        """Return whether the request's reservation was taken or refused: vLLM announces it again when it resumes."""
        return request_id in self._tracked or request_id in self._refused

    def tracks(self, request_id: str) -> bool:
        return request_id in self._tracked

    def whole(self, request_id: str) -> bool:
        """Return whether its D can begin only with the first token of this engine."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and WHOLE in tracked.reservation.needs

    def asks(self, request_id: str) -> Seed | None:
        """Return how the first token must be chosen for D to start with it; None if D asks for none."""
        tracked = self._tracked.get(request_id)
        return tracked.reservation.seed if tracked is not None else None

    def first(self, request_id: str, sample: Sample | None) -> First | None:
        """Return a request's sampled token for D, if all of the request is or will be pushed, and D accepts the choice.

        To be called before `finished`.
        """
        tracked = self._tracked.get(request_id)
        if sample is None or tracked is None or not tracked.sealed or tracked.aborted:
            return None
        seed, (token, digest, logprobs) = tracked.reservation.seed, sample
        if (
            seed is None
            or seed.digest != digest
            or len(logprobs) != (0 if seed.logprobs is None else seed.logprobs + 1)
        ):
            return None
        return First(
            transfer=tracked.reservation.transfer,
            push=tracked.push,
            position=tracked.reservation.prompt_length,
            token=token,
            digest=digest,
            logprobs=tuple(logprobs),
        )

    def refusal(self, request_id: str) -> PdError | None:
        """Return why a request is not pushed. To be called before `finished`."""
        return self._refused.get(request_id)

    def scheduled(
        self, request_id: str, computed: int, count: int, *blocks: Sequence[int], replaces: bool, ready: int = 0
    ) -> PushSlice | None:
        """Record that a step computes tokens [computed, computed + count) of a request.

        `blocks` of each group are new, or all if `replaces`. In a group of states they are always all, because entries
        move. The request's first `ready` tokens are in the cache already: all their layers are pushed at once.
        """
        tracked = self._tracked.get(request_id)
        if tracked is not None and replaces and not tracked.restart:
            self.preempted(request_id)  # no step has listed it, and resets.py has not reported it
        if tracked is None or tracked.sealed or tracked.aborted:
            return None
        if not tracked.started:
            self._pending.starts.append(PushStart(request_id, tracked.push, tracked.reservation, computed))
            blocks = self._push_ready(tracked, min(ready, computed), blocks)
        before = 0 if tracked.restart else tracked.watermark
        tracked.watermark = computed + count
        tracked.sealed = tracked.watermark >= tracked.reservation.end
        push_slice = PushSlice(
            push=tracked.push,
            before=before,
            after=min(tracked.watermark, tracked.reservation.end),
            new_blocks=tuple(tracked.unreported(index, ids) for index, ids in enumerate(blocks)),
            restart=tracked.restart,
            final=tracked.sealed,
        )
        tracked.started, tracked.restart = True, False
        self._pending.slices.append(push_slice)
        return push_slice

    def _push_ready(
        self, tracked: _Tracked, ready: int, blocks: tuple[Sequence[int], ...]
    ) -> tuple[Sequence[int], ...]:
        """Push what earlier steps have computed, if D wants any of it. Return the blocks that are not sent with it."""
        if not tracked.reservation.first < ready < tracked.reservation.end:
            return blocks
        tracked.watermark = ready
        tables = tuple(tracked.unreported(index, ids) for index, ids in enumerate(blocks))
        self._pending.computed.append(PushSlice(tracked.push, 0, ready, tables, restart=False, final=False))
        stateful = [group.stateful for group in tracked.groups] or [False]
        return tuple(ids if moves else () for moves, ids in zip(stateful, blocks, strict=True))

    def preempted(self, request_id: str) -> None:
        """Have the writes that read a preempted request's blocks drained before the blocks are overwritten.

        The push starts over when the request resumes, but fails if its last chunk is out already: some ranks may have
        finished with it for good. What a rank owns differs by step, so the others would push something else than what
        they still owe.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.started or tracked.aborted:
            return
        if self._withdraw_start(tracked):
            tracked.started, tracked.sealed, tracked.watermark = False, False, 0
            return
        self._pending.preempted.append(tracked.push)
        if tracked.sealed:
            self._abort(tracked, "the request was preempted after its last chunk")
        tracked.restart, tracked.sealed, tracked.watermark = True, False, 0

    def finished(self, request_id: str, *, holds_blocks: bool, why: str) -> bool:
        """Handle the end of a request. Return whether its blocks must be held until the workers report it."""
        self._refused.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or not tracked.started:
            return False  # no worker has received it: D learns of it from the end of the HTTP call, or a message
        if not tracked.sealed or not holds_blocks:
            if self._withdraw_start(tracked):
                return False
            self._abort(tracked, why)
        if holds_blocks:
            self._holding[request_id] = tracked.push
            starts = self._pending.starts  # not sent yet: vLLM may report the request as finished before they are
            self._pending.starts = [replace(s, ended=True) if s.push == tracked.push else s for s in starts]
        else:
            self._pending.ended.append(tracked.push)
        return holds_blocks

    def released(self, request_id: str) -> bool:
        """Record that all workers have reported the request. Return whether its blocks were held."""
        push = self._holding.pop(request_id, None)
        if push:
            self._pending.ended.append(push)
        return push is not None

    def missed(self, exchanges: Iterable[MissedExchange]) -> None:
        """Order exchanges again that workers could not stage and have room for now, on every rank in the next step."""
        self._pending.catch_ups.update(exchanges)

    def must_step(self) -> bool:
        """Return whether the workers wait for a step's metadata, or will soon have more to ask for."""
        pending = self._pending
        return bool(pending.catch_ups or pending.computed or pending.freed) or self._looks > 0

    def open_count(self) -> int:
        return len(self._tracked) + len(self._holding)

    def take_step(self, geometry: CacheGeometry | None) -> PrefillStep:
        """Return this step's metadata; the next call starts anew."""
        pending, self._pending = self._pending, _PendingPushes()
        self._number += 1 + bool(pending.computed)
        self._looks = FORCED_STEPS if pending.catch_ups else max(0, self._looks - 1)
        return PrefillStep(
            number=self._number,
            geometry=geometry if pending.starts else None,
            starts=tuple(pending.starts),
            slices=tuple(pending.slices),
            aborts=tuple(pending.aborts),
            preempted=tuple(pending.preempted),
            ended=tuple(pending.ended),
            catch_ups=tuple(sorted(pending.catch_ups)),
            computed=tuple(pending.computed),
            before=self._number - 1 if pending.computed else 0,
            freed=tuple(pending.freed),
        )

    def _withdraw_start(self, tracked: _Tracked) -> bool:
        """Take back the start of a push that no step has sent. Return whether there was one."""
        pending, push = self._pending, tracked.push
        kept = [start for start in pending.starts if start.push != push]
        if len(kept) == len(pending.starts):
            return False
        pending.starts = kept
        pending.computed = [push_slice for push_slice in pending.computed if push_slice.push != push]
        return True

    def _abort(self, tracked: _Tracked, why: str) -> None:
        if not tracked.aborted:
            tracked.aborted = True
            self._pending.aborts.append(PushAbort(tracked.push, "PD-XFER-002", why))


def _malformed(reservation: Reservation) -> str:
    """Return why no decode engine reserves like this; empty if one does. The workers' arithmetic relies on it."""
    d = reservation.geometry
    if reservation.end > reservation.prompt_length:
        return f"tokens [{reservation.first}, {reservation.end}) of {reservation.prompt_length}"
    if len(reservation.endpoints) != d.workers:
        return f"{len(reservation.endpoints)} endpoints for {d.workers} workers"
    if d.recomputes_last and reservation.end >= reservation.prompt_length and WHOLE not in reservation.needs:
        return f"{reservation.end} tokens of {reservation.prompt_length}, of a cache of which the last is not pushed"
    if WHOLE in reservation.needs and reservation.end < reservation.prompt_length:
        return f"{reservation.end} tokens of {reservation.prompt_length}, which is said to be all of them"
    sizes = [len(ids) for ids in reservation.blocks]
    if any(size % 4 for size in sizes):
        return f"{', '.join(map(str, sizes))} bytes of block ids"
    return range_fault(d, reservation.first, reservation.end, *(size // 4 for size in sizes))
