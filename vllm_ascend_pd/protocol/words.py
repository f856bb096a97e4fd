# SPDX-License-Identifier: Apache-2.0
"""The messages of each side, with the identity that every message carries filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import (
    Ack,
    Begin,
    Cancel,
    Done,
    Failed,
    LayerAddresses,
    Message,
    Ready,
    RefusalCode,
    Refused,
)
from vllm_ascend_pd.protocol.pair import Pair

MAX_TEXT = 1000
_HEAD = ("transfer", "push", "p_incarnation", "d_incarnation", "contributor", "d_rank", "seq")


def _head(of: Message) -> dict[str, Any]:
    """Whom a message is about, for its answer."""
    return {field: getattr(of, field) for field in _HEAD}


@dataclass(frozen=True, slots=True)
class PrefillWords:
    """What one P worker says: the next of a pair."""

    incarnation: str
    contributor: Contributor
    model: str
    geometry: CacheGeometry
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

    def begin(self, pair: Pair, known_layout: str) -> Begin:
        return Begin(
            **self._next(pair),
            model=self.model,
            geometry=self.geometry,
            contributors=pair.destination.contributors,
            plan_digest=pair.destination.plan_digest,
            quiet_s=self.quiet_s,
            known_layout=known_layout,
        )

    def done(self, pair: Pair) -> Done:
        return Done(
            **self._next(pair),
            layers=pair.push.order.layers,
            tokens=pair.push.order.tokens,
            bytes=pair.coverage.nbytes,
            plan_digest=pair.destination.plan_digest,
            checksums=tuple(pair.coverage.checksums.items()),
        )

    def failed(self, pair: Pair, *, quiescent: bool) -> Failed:
        return Failed(**self._next(pair), quiescent=quiescent, cause=_text(pair.push.cause))

    def gone(self, message: Message) -> Failed:
        """The answer for a push that is not known here (any more): nothing of it is out."""
        mine = {"p_incarnation": self.incarnation, "contributor": self.contributor}
        over = Failure("PD-XFER-002", "the push is over")
        return Failed(**{**_head(message), **mine}, quiescent=True, cause=_text(over))


def ready(begin: Begin, lease_s: float, layout: str, addresses: LayerAddresses) -> Ready:
    """Addresses are told only to a P that does not know them."""
    told = None if begin.known_layout == layout else addresses
    return Ready(**_head(begin), lease_s=lease_s, layout=layout, addresses=told)


def refused(message: Message, code: RefusalCode, detail: str = "") -> Refused:
    return Refused(**_head(message), code=code.value, detail=detail[:MAX_TEXT])


def ack(message: Done | Failed) -> Ack:
    return Ack(**_head(message), kind=type(message).__name__.lower())


def cancel(begin: Begin, seq: int, failure: Failure) -> Cancel:
    """`begin` is what the contributor was granted."""
    return Cancel(**{**_head(begin), "seq": seq}, cause=_text(failure))


def _text(failure: Failure) -> str:
    return str(failure)[:MAX_TEXT]


def failure_of(message: Refused | Failed | Cancel) -> Failure:
    """What the other side says went wrong. Version 1 of the wire has texts: what `str` of a Failure makes, or anything."""
    if isinstance(message, Refused):
        code = "PD-GEO-001" if message.code == RefusalCode.MISMATCH else "PD-XFER-005"
        return Failure(code, f"{message.code}: {message.detail}")
    if isinstance(message, Cancel):
        return Failure("PD-XFER-002", message.cause)
    code, _, detail = message.cause.partition(" ")
    return Failure(code, detail) if code in CATALOGUE else Failure("PD-META-006", message.cause)
