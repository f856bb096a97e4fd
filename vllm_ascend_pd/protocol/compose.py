# SPDX-License-Identifier: Apache-2.0
"""Construction of the messages of P and D workers, and the failure in a received one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.protocol.failure import MAX_TEXT, Failure
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.layouts import contributors_digest, layout_hash
from vllm_ascend_pd.protocol.messages import (
    Ack,
    Begin,
    Cancel,
    Done,
    Failed,
    LayoutRequest,
    Memory,
    Message,
    Ready,
    RefusalCode,
    Refused,
    Renew,
    message_name,
)
from vllm_ascend_pd.protocol.pair import PairRecord

_HEAD = ("transfer", "push", "p_incarnation", "d_incarnation", "contributor", "d_rank", "seq")


def _head(of: Message) -> dict[str, Any]:
    """Return the fields of a message that identify transfer, push and ranks, for a message about the same push."""
    return {field: getattr(of, field) for field in _HEAD}


@dataclass(slots=True)
class PrefillMessages:
    """Messages of one P worker. Each has the next `seq` of its pair."""

    incarnation: str
    contributor: Contributor
    quiet_s: float
    layout: bytes = b""  # of this engine, once it is known
    layout_name: str = ""

    def describe(self, layout: bytes) -> None:
        self.layout, self.layout_name = layout, layout_hash(layout)

    def _next(self, pair: PairRecord) -> dict[str, Any]:
        push = pair.push
        return {
            "transfer": push.transfer,
            "push": push.name,
            "p_incarnation": self.incarnation,
            "d_incarnation": push.transfer.incarnation,
            "contributor": self.contributor,
            "d_rank": pair.destination.d_rank,
            "seq": pair.seq + 1,
        }

    def begin(self, pair: PairRecord, known_memory: str) -> Begin:
        """Return a BEGIN, with P's layout if D may not know it.

        If P knows D's memory, D has received P's layout before.
        """
        return Begin(
            **self._next(pair),
            layout=self.layout_name,
            layout_bytes=self.layout if pair.asked_which or not known_memory else b"",
            contributors=contributors_digest(pair.destination.contributors),
            plan_digest=pair.destination.plan_digest,
            quiet_s=self.quiet_s,
            known_memory=known_memory,
        )

    def renew(self, pair: PairRecord) -> Renew:
        return Renew(**self._next(pair))

    def done(self, pair: PairRecord) -> Done:
        return Done(
            **self._next(pair),
            bytes=(pair.coverage.nbytes,),
            plan_digest=pair.destination.plan_digest,
            checksums=tuple((*place, value) for place, value in pair.coverage.checksums.items()),
            cached=pair.push.cached,
        )

    def failed(self, pair: PairRecord, *, quiescent: bool) -> Failed:
        return Failed(**self._next(pair), quiescent=quiescent, failure=_bounded(pair.push.cause))

    def push_over(self, message: Message) -> Failed:
        """Return a FAILED for a push that is unknown or over here: no write of it is in progress."""
        mine = {"p_incarnation": self.incarnation, "contributor": self.contributor}
        failure = Failure("PD-XFER-002", "the push is over")
        return Failed(**{**_head(message), **mine}, quiescent=True, failure=failure)


def ready(asked: Begin | Renew, lease_s: float, memory: str, addresses: Memory) -> Ready:
    """Return a READY. It has the addresses only for a BEGIN of a P that does not know them; a P that renews does."""
    now = addresses if isinstance(asked, Begin) and asked.known_memory != memory else None
    return Ready(**_head(asked), lease_s=lease_s, memory=memory, addresses=now)


def layout_request(begin: Begin) -> LayoutRequest:
    return LayoutRequest(**_head(begin))


def refused(message: Message, code: RefusalCode, detail: str = "") -> Refused:
    catalogued = "PD-GEO-001" if code is RefusalCode.MISMATCH else "PD-XFER-005"
    return Refused(**_head(message), failure=_bounded(Failure(catalogued, f"{code.value}: {detail}")))


def not_meant(message: Message) -> bool:
    """Return whether a message says that what it answers was meant for another process of D."""
    return isinstance(message, Refused) and message.failure.detail.startswith(f"{RefusalCode.STALE.value}:")


def ack(message: Done | Failed) -> Ack:
    return Ack(**_head(message), kind=message_name(message))


def cancel(begin: Begin, seq: int, failure: Failure) -> Cancel:
    """Return a CANCEL. `begin` is the contributor's BEGIN that was granted."""
    return Cancel(**{**_head(begin), "seq": seq}, failure=_bounded(failure))


def _bounded(failure: Failure) -> Failure:
    return Failure(failure.code, failure.detail[:MAX_TEXT])


def failure_of(message: Refused | Failed | Cancel) -> Failure:
    """Return the failure in a message as this side records it.

    For a CANCEL the code is PD-XFER-002: this side was cancelled, it did not fail. A code that is not in the catalogue
    is replaced by PD-META-006.
    """
    failure = message.failure
    if isinstance(message, Cancel):
        return Failure("PD-XFER-002", str(failure))
    return failure if failure.code in CATALOGUE else Failure("PD-META-006", str(failure))
