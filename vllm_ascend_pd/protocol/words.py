# SPDX-License-Identifier: Apache-2.0
"""The messages of each side, with the identity that every message carries filled in."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class PrefillWords:
    """What one P worker says: the next of a pair."""

    incarnation: str
    contributor: Contributor
    model: str
    geometry: CacheGeometry
    quiet_s: float

    def begin(self, pair: Pair, known_layout: str) -> Begin:
        order, to = pair.push.order, pair.destination
        return Begin(
            transfer=order.transfer,
            push=order.push,
            p_incarnation=self.incarnation,
            d_incarnation=order.transfer.incarnation,
            contributor=self.contributor,
            d_rank=to.d_rank,
            seq=pair.seq + 1,
            model=self.model,
            geometry=self.geometry,
            contributors=to.contributors,
            plan_digest=to.plan_digest,
            quiet_s=self.quiet_s,
            known_layout=known_layout,
        )

    def done(self, pair: Pair) -> Done:
        order, to = pair.push.order, pair.destination
        return Done(
            transfer=order.transfer,
            push=order.push,
            p_incarnation=self.incarnation,
            d_incarnation=order.transfer.incarnation,
            contributor=self.contributor,
            d_rank=to.d_rank,
            seq=pair.seq + 1,
            layers=order.layers,
            tokens=order.tokens,
            bytes=pair.coverage.nbytes,
            plan_digest=to.plan_digest,
            checksums=tuple(pair.coverage.checksums.items()),
        )

    def failed(self, pair: Pair, *, quiescent: bool) -> Failed:
        order = pair.push.order
        return Failed(
            transfer=order.transfer,
            push=order.push,
            p_incarnation=self.incarnation,
            d_incarnation=order.transfer.incarnation,
            contributor=self.contributor,
            d_rank=pair.destination.d_rank,
            seq=pair.seq + 1,
            quiescent=quiescent,
            cause=str(pair.push.cause)[:MAX_TEXT],
        )

    def gone(self, message: Message) -> Failed:
        """The answer for a push that is not known here (any more): nothing of it is out."""
        return Failed(
            transfer=message.transfer,
            push=message.push,
            p_incarnation=self.incarnation,
            d_incarnation=message.d_incarnation,
            contributor=self.contributor,
            d_rank=message.d_rank,
            seq=message.seq,
            quiescent=True,
            cause=str(Failure("PD-XFER-002", "the push is over")),
        )


def ready(begin: Begin, lease_s: float, layout: str, addresses: LayerAddresses) -> Ready:
    """Addresses are told only to a P that does not know them."""
    return Ready(
        transfer=begin.transfer,
        push=begin.push,
        p_incarnation=begin.p_incarnation,
        d_incarnation=begin.d_incarnation,
        contributor=begin.contributor,
        d_rank=begin.d_rank,
        seq=begin.seq,
        lease_s=lease_s,
        layout=layout,
        addresses=None if begin.known_layout == layout else addresses,
    )


def refused(message: Message, code: RefusalCode, detail: str = "") -> Refused:
    return Refused(
        transfer=message.transfer,
        push=message.push,
        p_incarnation=message.p_incarnation,
        d_incarnation=message.d_incarnation,
        contributor=message.contributor,
        d_rank=message.d_rank,
        seq=message.seq,
        code=code.value,
        detail=detail[:MAX_TEXT],
    )


def ack(message: Done | Failed) -> Ack:
    return Ack(
        transfer=message.transfer,
        push=message.push,
        p_incarnation=message.p_incarnation,
        d_incarnation=message.d_incarnation,
        contributor=message.contributor,
        d_rank=message.d_rank,
        seq=message.seq,
        kind=type(message).__name__.lower(),
    )


def cancel(begin: Begin, seq: int, failure: Failure) -> Cancel:
    """`begin` is what the contributor was granted."""
    return Cancel(
        transfer=begin.transfer,
        push=begin.push,
        p_incarnation=begin.p_incarnation,
        d_incarnation=begin.d_incarnation,
        contributor=begin.contributor,
        d_rank=begin.d_rank,
        seq=seq,
        cause=str(failure)[:MAX_TEXT],
    )


def failure_of(message: Refused | Failed | Cancel) -> Failure:
    """What the other side says went wrong. Version 1 of the wire has texts: what `str` of a Failure makes, or anything."""
    if isinstance(message, Refused):
        code = "PD-GEO-001" if message.code == RefusalCode.MISMATCH else "PD-XFER-005"
        return Failure(code, f"{message.code}: {message.detail}")
    if isinstance(message, Cancel):
        return Failure("PD-XFER-002", message.cause)
    code, _, detail = message.cause.partition(" ")
    return Failure(code, detail) if code in CATALOGUE else Failure("PD-META-006", message.cause)
