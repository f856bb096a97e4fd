# SPDX-License-Identifier: Apache-2.0
"""What a step's metadata carries from a scheduler to its workers, and what they tell it of loads that ended: data only, on which both
sides stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Reservation

Blocks = NDArray[np.int32]


# -- prefill


@dataclass(frozen=True, slots=True)
class PushStart:
    """A transfer that the workers hear of for the first time."""

    request_id: str
    push: str
    reservation: Reservation
    cached: int = 0  # tokens of its prompt that were in P's cache: D tells its client
    ended: bool = False  # vLLM has finished the request before


@dataclass(frozen=True, slots=True)
class PushSlice:
    """What one step adds to a push: its watermark goes from `before` to `after` tokens."""

    push: str
    before: int
    after: int
    new_blocks: tuple[Blocks, ...]  # by group; appended to what the workers know. Of a state its one, at the end
    restart: bool  # the workers forget blocks and coverage first (preemption)
    final: bool


@dataclass(frozen=True, slots=True)
class PushAbort:
    push: str
    code: str
    detail: str


Exchanged = tuple[int, int, int]  # step, layer, sub-step of an exchange that some rank missed


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One step's metadata for P's workers. `rotation` is the step's sequence number. What was computed before a push had a
    target is pushed as by a step of its own, `before`, whose layers are all there already."""

    rotation: int
    engine: CacheGeometry | None = None
    starts: tuple[PushStart, ...] = ()
    slices: tuple[PushSlice, ...] = ()
    aborts: tuple[PushAbort, ...] = ()
    preempted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()  # nothing of these pushes is exchanged any more
    catch_ups: tuple[Exchanged, ...] = ()
    computed: tuple[PushSlice, ...] = ()  # of earlier steps
    before: int = 0  # sequence number of those
    freed: tuple[str, ...] = ()  # requests whose blocks were held for nobody

    @property
    def empty(self) -> bool:
        news = self.starts or self.slices or self.aborts or self.preempted or self.ended
        return not (news or self.catch_ups or self.computed or self.freed)


# -- decode


@dataclass(frozen=True, slots=True)
class Bind:
    """A transfer whose blocks a step has allocated."""

    request_id: str
    transfer: TransferId
    first: int
    end: int
    blocks: tuple[NDArray[np.int32], ...]  # by group, from the block with the first token that is wanted of it
    deadline_s: float

    def reservation(
        self,
        model: str,
        geometry: CacheGeometry,
        endpoints: tuple[Endpoint, ...],
        prompt_length: int,
        prompt_hash: str,
    ) -> Reservation:
        """What P is told of it."""
        return Reservation(
            version=PROTOCOL_VERSION,
            transfer=self.transfer,
            model=model,
            first=self.first,
            end=self.end,
            blocks=tuple(ids.astype("<i4").tobytes() for ids in self.blocks),
            geometry=geometry,
            endpoints=endpoints,
            deadline_s=self.deadline_s,
            prompt_length=prompt_length,
            prompt_hash=prompt_hash,
        )


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """How one rank's part of a load ended; data of the worker's, for the scheduler."""

    request_id: str
    code: str  # empty: the KV is complete here
    push: str  # empty: no P began to push here
    cached: int = 0  # tokens of the prompt that P did not compute


@dataclass(frozen=True, slots=True)
class LoadCancel:
    transfer: TransferId
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step's metadata for D's workers."""

    binds: tuple[Bind, ...] = ()
    cancels: tuple[LoadCancel, ...] = ()
    settles: tuple[TransferId, ...] = ()
    overs: tuple[TransferId, ...] = ()
    wake: tuple[str, int] | None = None
    incarnation: str = ""  # of the scheduler: what its transfers are named after
    engine: CacheGeometry | None = None  # with binds: the cache of all stages

    @property
    def empty(self) -> bool:
        return not (self.binds or self.cancels or self.settles or self.overs)
