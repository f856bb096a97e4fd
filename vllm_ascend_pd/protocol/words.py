# SPDX-License-Identifier: Apache-2.0
"""The messages of each side, with the identity that every message carries filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.protocol.failure import MAX_TEXT, Failure
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.layouts import contributors_digest
from vllm_ascend_pd.protocol.messages import (
    Ack,
    Begin,
    Cancel,
    Done,
    Failed,
    Memory,
    Message,
    Ready,
    RefusalCode,
    Refused,
    Renew,
    Which,
)
from vllm_ascend_pd.protocol.pair import Pair

_HEAD = ("transfer", "push", "p_incarnation", "d_incarnation", "contributor", "d_rank", "seq")


def _head(of: Message) -> dict[str, Any]:
    """Return the fields of a message that identify transfer, push and ranks, for its answer."""
    return {field: getattr(of, field) for field in _HEAD}


@dataclass(frozen=True, slots=True)
class PrefillWords:
    """Messages of one P worker. Each has the next `seq` of its pair."""

    incarnation: str
    contributor: Contributor
    layout: bytes  # of this engine
    layout_name: str
    quiet_s: float

    def _next(self, pair: Pair) -> dict[str, Any]:
        order = pair.push.order
        return {
            "transfer": order.transfer,
            "push": order.push,
            "p_incarnation": self.incarnation,
            "d_incarnation": order.transfer.incarnation,
            "contributor": self.contributor,
            "d_rank": pair.destination.d_rank,
            "seq": pair.seq + 1,
        }

    def begin(self, pair: Pair, known_memory: str) -> Begin:
        """Return a BEGIN, with our layout if D may not know it.

        A D that has sent us its memory has received our layout before.
        """
        return Begin(
            **self._next(pair),
            layout=self.layout_name,
            told=self.layout if pair.asked_which or not known_memory else b"",
            contributors=contributors_digest(pair.destination.contributors),
            plan_digest=pair.destination.plan_digest,
            quiet_s=self.quiet_s,
            known_memory=known_memory,
        )

    def renew(self, pair: Pair) -> Renew:
        return Renew(**self._next(pair))

    def done(self, pair: Pair) -> Done:
        return Done(
            **self._next(pair),
            bytes=(pair.coverage.nbytes,),
            plan_digest=pair.destination.plan_digest,
            checksums=tuple((*place, value) for place, value in pair.coverage.checksums.items()),
            cached=pair.push.order.cached,
        )

    def failed(self, pair: Pair, *, quiescent: bool) -> Failed:
        return Failed(**self._next(pair), quiescent=quiescent, failure=_bounded(pair.push.cause))

    def gone(self, message: Message) -> Failed:
        """Return the answer for a push that is not known here, or not any more: no write of it is out."""
        mine = {"p_incarnation": self.incarnation, "contributor": self.contributor}
        over = Failure("PD-XFER-002", "the push is over")
        return Failed(**{**_head(message), **mine}, quiescent=True, failure=over)


def ready(asked: Begin | Renew, lease_s: float, memory: str, addresses: Memory) -> Ready:
    """Return a READY, with the addresses only for a P that does not know them. A P that renews does."""
    now = addresses if isinstance(asked, Begin) and asked.known_memory != memory else None
    return Ready(**_head(asked), lease_s=lease_s, memory=memory, addresses=now)


def which(begin: Begin) -> Which:
    return Which(**_head(begin))


def refused(message: Message, code: RefusalCode, detail: str = "") -> Refused:
    said = "PD-GEO-001" if code is RefusalCode.MISMATCH else "PD-XFER-005"
    return Refused(**_head(message), failure=_bounded(Failure(said, f"{code.value}: {detail}")))


def ack(message: Done | Failed) -> Ack:
    return Ack(**_head(message), kind=type(message).__name__.lower())


def cancel(begin: Begin, seq: int, failure: Failure) -> Cancel:
    """Return a CANCEL. `begin` is the one that the contributor was granted."""
    return Cancel(**{**_head(begin), "seq": seq}, failure=_bounded(failure))


def _bounded(failure: Failure) -> Failure:
    return Failure(failure.code, failure.detail[:MAX_TEXT])


def failure_of(message: Refused | Failed | Cancel) -> Failure:
    """Return the failure in a message as this side records it.

    A side that was cancelled has not failed itself, so its code is another one. A code that is not in the catalogue is
    replaced.
    """
    failure = message.failure
    if isinstance(message, Cancel):
        return Failure("PD-XFER-002", str(failure))
    return failure if failure.code in CATALOGUE else Failure("PD-META-006", str(failure))
