# SPDX-License-Identifier: Apache-2.0
"""Metadata of a step, from a scheduler to its workers, and their reports of loads that ended. Data only, for both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Reservation

Blocks = NDArray[np.int32]


# -- prefill


@dataclass(frozen=True, slots=True)
class PushStart:
    """A push that is new to the workers."""

    request_id: str
    push: str
    reservation: Reservation
    cached: int = 0  # tokens of its prompt that were in P's cache: D reports them to the client
    ended: bool = False  # vLLM has finished the request already


@dataclass(frozen=True, slots=True)
class PushSlice:
    """Tokens that one step adds to a push: its watermark goes from `before` to `after`."""

    push: str
    before: int
    after: int
    new_blocks: tuple[Blocks, ...]  # by group; appended to the workers' tables. For states only one block, at the end
    restart: bool  # the workers forget blocks and coverage first (preemption)
    final: bool


@dataclass(frozen=True, slots=True)
class PushAbort:
    push: str
    failure: Failure


MissedExchange = tuple[int, int, int]  # its step, layer and sub-step


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One step's metadata for P's workers. `number` is the step's sequence number.

    What earlier steps have computed of a push that starts now is pushed as if by a step of its own, with the number
    `before`. All its layers are there already.
    """

    number: int
    geometry: CacheGeometry | None = None
    starts: tuple[PushStart, ...] = ()
    slices: tuple[PushSlice, ...] = ()
    aborts: tuple[PushAbort, ...] = ()
    preempted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()  # nothing of these pushes is exchanged any more
    catch_ups: tuple[MissedExchange, ...] = ()
    computed: tuple[PushSlice, ...] = ()  # of earlier steps
    before: int = 0  # sequence number of those
    freed: tuple[str, ...] = ()  # requests whose blocks were held and never pushed

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
    kernel_blocks: tuple[int, ...]  # by group: how many of `blocks` are one of vLLM's

    def taken(self) -> list[int]:
        """Return vLLM's blocks of all groups."""
        each = zip(self.blocks, self.kernel_blocks, strict=True)
        return [block for ids, count in each for block in np.unique(ids // count).tolist()]

    def reservation(
        self,
        model: str,
        geometry: CacheGeometry,
        endpoints: tuple[Endpoint, ...],
        prompt_length: int,
        prompt_hash: str,
    ) -> Reservation:
        """Return the reservation to send to P."""
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
    """End of one rank's part of a load, from the worker for the scheduler."""

    request_id: str
    failure: Failure | None  # None: the KV is complete here
    push: str  # empty: no P began to push here
    cached: int = 0  # tokens of the prompt that P did not compute
    blocks: tuple[int, ...] = ()  # what it loaded into, named only if it failed: the worker reports them to older vLLMs

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def why(self) -> Failure:
        return self.failure or Failure("")


@dataclass(frozen=True, slots=True)
class LoadCancel:
    transfer: TransferId
    failure: Failure


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step's metadata for D's workers."""

    binds: tuple[Bind, ...] = ()
    cancels: tuple[LoadCancel, ...] = ()
    settles: tuple[TransferId, ...] = ()
    overs: tuple[TransferId, ...] = ()
    wake: tuple[str, int] | None = None
    incarnation: str = ""  # of the scheduler; its transfers are named after it
    geometry: CacheGeometry | None = None  # with binds: the cache of all stages

    @property
    def empty(self) -> bool:
        return not (self.binds or self.cancels or self.settles or self.overs)
