# SPDX-License-Identifier: Apache-2.0
"""Actions that the state machines ask of the runtime, which carries them out in the order given."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the side channel, which may lose it. `peer` is the name that the channel or the order uses."""

    peer: Hashable
    message: Message


@dataclass(frozen=True, slots=True)
class Report:
    """D: report that this rank has finished with the transfer and nothing can land any more. Once per transfer."""

    transfer: TransferId
    failure: Failure | None = None
    push: str = ""  # the push that was granted authority, if any was
    cached: int = 0  # tokens of the prompt that P did not compute

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Verify:
    """D: compare the memory with the sum of all contributors' checksums, then call `verified`. All of them are done."""

    transfer: TransferId
    sums: Mapping[tuple[int, int], int]  # by layer (its place in this worker's stage) and component
    pushed: frozenset[str]  # names of the layers that P pushes; a draft model may be on D alone


@dataclass(frozen=True, slots=True)
class Revoke:
    """D: end all remote access (`Target.revoke`), register again, then call `revoked` with the new addresses.

    If anything of it fails, call `not_revoked`.
    """


@dataclass(frozen=True, slots=True)
class Closed:
    """P: report that every pair of this push has closed, so its blocks may be freed. Once per push."""

    push: str
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Note:
    """Entry for the trace: a stage was reached."""

    stage: str
    facts: Mapping[str, object] = field(default_factory=dict)


Action: TypeAlias = Send | Report | Verify | Revoke | Closed | Note
