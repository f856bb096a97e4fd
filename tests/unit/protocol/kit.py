# SPDX-License-Identifier: Apache-2.0
"""Builders for the protocol tests: one D rank with two contributors, one P rank with two destinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import plan_digest
from vllm_ascend_pd.protocol.actions import Action, Closed, Note, Report, Revoke, Send, Verify
from vllm_ascend_pd.protocol.agreement import contributor_pairs
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Contributor, Endpoint, TransferId
from vllm_ascend_pd.protocol.layouts import EngineLayout, contributors_digest, layout_hash, written
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
    Refused,
    Renew,
    Reservation,
    memory_hash,
    message_name,
)
from vllm_ascend_pd.protocol.push import Claim, Destination, PushRecord, Sender
from vllm_ascend_pd.protocol.push_rules import PairMachine
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.reservation_rules import ReservationMachine

MODEL = "model/1"
TIMERS = Timers()
QUIET = 40.0
D_INCARNATION = "decode-1"
LAYERS = ("layer.0", "layer.1")


def geometry(tp: int, **changes: Any) -> CacheGeometry:
    values: dict[str, Any] = {
        "block_size": 16,
        "kv_heads": 4,
        "tp_size": tp,
        "dtype": "bf16",
        "packing": "k|v",
        "regions": (Region("kv", 4096, 1024, 64, 64),),
        "stages": (LAYERS,),
    }
    return CacheGeometry(**{**values, **changes})


P, D = geometry(2), geometry(1)
FIRST, END = 0, 40
DIGEST = plan_digest(P, D, FIRST, END, "direct")
SET = contributor_pairs(P, D, 0)
ONE, TWO = SET
T = TransferId(D_INCARNATION, 7, "uuid-7")
PUSH = "push-1"
ADDRESSES = Memory("session-1", (10,), ((0,), (100,)))
NEW_ADDRESSES = Memory("session-2", (10,), ((0,), (100,)))


def p_incarnation(contributor: Contributor) -> str:
    return f"prefill-{contributor}"


class OpenReceiver(Receiver):
    """Receiver that shows its machine, and with it its records and its fence."""

    rules: ReservationMachine

    def machine(self, *parts: Any) -> ReservationMachine:  # type: ignore[override]
        self.rules = ReservationMachine(*parts)
        return self.rules


class OpenSender(Sender):
    """Sender that shows its machine."""

    rules: PairMachine

    def machine(self, *parts: Any) -> PairMachine:  # type: ignore[override]
        self.rules = PairMachine(*parts)
        return self.rules


def taken(rules: ReservationMachine | PairMachine) -> list[Action]:
    """Take the actions of a machine, as the interface does after each call."""
    actions, rules.actions = rules.actions, []
    return actions


def receiver(**changes: Any) -> OpenReceiver:
    values: dict[str, Any] = {
        "incarnation": D_INCARNATION,
        "rank": 0,
        "model": MODEL,
        "geometry": D,
        "addresses": ADDRESSES,
        "timers": TIMERS,
        "quiet_s": QUIET,
        "verify": False,
    }
    return OpenReceiver(**{**values, **changes})


def _head(contributor: Contributor, seq: int, changes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "transfer": T,
        "push": PUSH,
        "p_incarnation": p_incarnation(contributor),
        "d_incarnation": D_INCARNATION,
        "contributor": contributor,
        "d_rank": 0,
        "seq": seq,
    }
    return {**values, **changes}


def begin(
    contributor: Contributor = ONE,
    seq: int = 1,
    *,
    model: str = MODEL,
    geometry: CacheGeometry = P,
    contributors: Sequence[Contributor] = SET,
    **changes: Any,
) -> Begin:
    """A BEGIN with the layout in full."""
    layout = written(EngineLayout(model, geometry))
    fields: dict[str, Any] = {
        "layout": layout_hash(layout),
        "layout_bytes": layout,
        "contributors": contributors_digest(tuple(contributors)),
        "plan_digest": DIGEST,
        "quiet_s": QUIET,
    }
    return Begin(**_head(contributor, seq, {**fields, **changes}))


def renew(contributor: Contributor = ONE, seq: int = 2, **changes: Any) -> Renew:
    return Renew(**_head(contributor, seq, changes))


def done(contributor: Contributor = ONE, seq: int = 9, **changes: Any) -> Done:
    fields: dict[str, Any] = {"bytes": (100,), "plan_digest": DIGEST}
    return Done(**_head(contributor, seq, {**fields, **changes}))


def failed(contributor: Contributor = ONE, seq: int = 9, quiescent: bool = True, **changes: Any) -> Failed:
    fields: dict[str, Any] = {"quiescent": quiescent, "failure": Failure("PD-XFER-003", "a write failed")}
    return Failed(**_head(contributor, seq, {**fields, **changes}))


def ready(seq: int = 1, contributor: Contributor = ONE, **changes: Any) -> Ready:
    fields: dict[str, Any] = {"lease_s": TIMERS.lease_s, "memory": memory_hash(ADDRESSES), "addresses": ADDRESSES}
    return Ready(**_head(contributor, seq, {**fields, **changes}))


def refused(seq: int = 1, contributor: Contributor = ONE, **changes: Any) -> Refused:
    return Refused(**_head(contributor, seq, {"failure": Failure("PD-XFER-005", "over: "), **changes}))


def layout_request(seq: int = 1, contributor: Contributor = ONE, **changes: Any) -> LayoutRequest:
    return LayoutRequest(**_head(contributor, seq, changes))


def cancel(seq: int = 1, contributor: Contributor = ONE, **changes: Any) -> Cancel:
    return Cancel(**_head(contributor, seq, {"failure": Failure("PD-XFER-001", "deadline"), **changes}))


def ack(kind: str, seq: int, contributor: Contributor = ONE, **changes: Any) -> Ack:
    return Ack(**_head(contributor, seq, {"kind": kind, **changes}))


def sender(contributor: Contributor = ONE, **changes: Any) -> OpenSender:
    values: dict[str, Any] = {
        "incarnation": p_incarnation(contributor),
        "contributor": contributor,
        "timers": TIMERS,
        "quiet_s": QUIET,
    }
    made = OpenSender(**{**values, **changes})
    made.describe(MODEL, P)
    return made


def order(ranks: Iterable[int] = (0,), **changes: Any) -> PushRecord:
    to = tuple(Destination(rank, f"d{rank}", SET, DIGEST, ADDRESSES.counts) for rank in ranks)
    values: dict[str, Any] = {
        "name": PUSH,
        "transfer": T,
        "deadline_s": 300.0,
        "destinations": to,
    }
    return PushRecord(**{**values, **changes})


def reservation(cache: CacheGeometry, end: int, first: int = 0, **changes: Any) -> Reservation:
    """A reservation of tokens [first, end), with as many endpoints as the cache has ranks."""
    size = cache.block_size
    values: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "transfer": T,
        "model": MODEL,
        "first": first,
        "end": end,
        "blocks": (np.arange(1, 1 - (-end // size) - first // size, dtype="<i4").tobytes(),),
        "geometry": cache,
        "endpoints": tuple(Endpoint("127.0.0.1", 4711 + rank) for rank in range(cache.tp_size)),
        "deadline_s": 60.0,
        "prompt_length": end,
        "prompt_hash": "h",
    }
    return Reservation(**{**values, **changes})


def opened(sender: Sender, push: str = PUSH) -> PushRecord:
    """The record of a push that was opened and is not forgotten."""
    record = sender.find(push)
    assert record is not None
    return record


def claim_of(sender: Sender, now: float) -> Claim:
    (claim,) = sender.claim(now)
    return claim


def run_until(machine: Receiver | Sender, start: float, end: float, step: float = 0.5) -> list[Action]:
    """Tick as a running process does."""
    actions: list[Action] = []
    at = start
    while at < end:
        at = min(at + step, end)
        actions += machine.tick(at)
    return actions


def as_text(actions: Iterable[Action]) -> str:
    """Return the actions as text, without the trace's notes."""
    return " ".join(word for action in actions if (word := _word(action)))


def messages(actions: Iterable[Action], *kinds: type[Any]) -> list[Any]:
    sent: list[Message] = [action.message for action in actions if isinstance(action, Send)]
    return [message for message in sent if not kinds or isinstance(message, kinds)]


def _word(action: Action) -> str:
    if isinstance(action, Note):
        return ""
    if isinstance(action, Report):
        return "report:ok" if action.ok else "report:failed"
    if isinstance(action, Closed):
        return "closed:ok" if action.ok else "closed:failed"
    if isinstance(action, Verify):
        return "verify"
    if isinstance(action, Revoke):
        return "revoke"
    message = action.message
    name = message_name(message)
    match message:
        case Refused():
            return f"{name}:{message.failure.detail.partition(':')[0]}"
        case Ack():
            return f"{name}:{message.kind}"
        case Failed():
            return f"{name}:{'quiet' if message.quiescent else 'loud'}"
    return name
