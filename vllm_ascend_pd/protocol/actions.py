# SPDX-License-Identifier: Apache-2.0
"""What the machines ask of the runtime. They decide; it acts, in the order given."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a message to the side channel; it may be lost. `peer` is what the channel or the order called it."""

    peer: Hashable
    message: Message


@dataclass(frozen=True, slots=True)
class Report:
    """D: this rank has finished with the transfer and nothing can land any more. Once per transfer."""

    transfer: TransferId
    failure: Failure | None = None
    push: str = ""  # the one that was granted authority, if any was
    cached: int = 0  # tokens of the prompt that P did not compute

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Verify:
    """D: every contributor is done; compare the memory with the sum of their checksums, then call `verified`."""

    transfer: TransferId
    sums: Mapping[tuple[int, int], int]  # by layer, counted in this worker's stage, and component
    pushed: frozenset[str]  # which layers P has to push; a draft model may be on D alone


@dataclass(frozen=True, slots=True)
class Revoke:
    """D: cut every writer off (Transport.revoke), register again, then call `revoked` with the new addresses."""


@dataclass(frozen=True, slots=True)
class Closed:
    """P: every pair of this push has closed; its blocks may go. Once per push."""

    push: str
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Note:
    """For the trace: a stage was reached."""

    stage: str
    facts: Mapping[str, object] = field(default_factory=dict)


Action: TypeAlias = Send | Report | Verify | Revoke | Closed | Note
