# SPDX-License-Identifier: Apache-2.0
"""Every state times every event has a defined outcome, and the machines follow it.

The outcomes are written out here by hand: the state in the end, and what is sent or asked. None: illegal, changes
nothing. The package's table is what runs: each of its cells is reached by input from outside.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from unit.protocol.kit import (
    ADDRESSES,
    END,
    FIRST,
    NEW_ADDRESSES,
    ONE,
    PUSH,
    TWO,
    OpenReceiver,
    OpenSender,
    T,
    ack,
    as_text,
    begin,
    cancel,
    claim_of,
    done,
    failed,
    layout_request,
    opened,
    order,
    p_incarnation,
    ready,
    receiver,
    refused,
    renew,
    sender,
    taken,
)
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.actions import Action
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.guards import TO_DECODE, TO_PREFILL
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import Memory, Message, memory_hash
from vllm_ascend_pd.protocol.pair import PairRecord
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.states import (
    Cell,
    PairEvent,
    PairState,
    ReservationEvent,
    ReservationState,
    WriterEvent,
    WriterState,
    look_up,
)
from vllm_ascend_pd.protocol.tables import PAIR_TABLE, RESERVATION_TABLE
from vllm_ascend_pd.protocol.transfer import WRITER_TABLE, WriterRecord

S, E = ReservationState, ReservationEvent
Outcome = tuple[ReservationState, str] | None
FAILURE = Failure("PD-XFER-001", "test")


def watched(table: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The table, and a list of the cells that are used, in order."""
    entered: list[tuple[Any, Any]] = []

    def noted(state: Any, event: Any, cell: Cell[Any]) -> Cell[Any]:
        def effect(*args: Any) -> None:
            entered.append((state, event))
            cell.effect(*args)

        return replace(cell, effect=effect)

    return {s: {e: noted(s, e, cell) for e, cell in cells.items()} for s, cells in table.items()}, entered


def led(table: Any, entered: list[tuple[Any, Any]]) -> Any:
    """Target of the last cell that was used: nothing but the table changes a state."""
    state, event = entered[-1]
    return table[state][event].into


# The canonical OPEN and FENCING: ONE is leased, TWO has not sent anything. VERIFYING and CLOSED_OK: both are done.
RESERVATION: dict[ReservationState, dict[ReservationEvent, Outcome]] = {
    S.UNBOUND: {
        E.BEGIN: (S.UNBOUND, ""),
        E.RENEW: (S.UNBOUND, ""),
        E.DONE: (S.UNBOUND, "ack:done"),
        E.FAILED: (S.UNBOUND, "ack:failed"),
        E.BIND: (S.GATED, ""),
    },
    S.GATED: {
        E.BEGIN: (S.GATED, ""),
        E.RENEW: (S.GATED, ""),
        E.DONE: (S.GATED, "ack:done"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed report:failed"),
        E.GATE_OPEN: (S.OPEN, ""),
        E.CANCEL: (S.CLOSED_FAILED, "report:failed"),
        E.SETTLE: (S.GATED, ""),
        E.DEADLINE: (S.CLOSED_FAILED, "report:failed"),
        E.REVOKED: (S.GATED, ""),
    },
    S.OPEN: {
        E.BEGIN: (S.OPEN, "ready"),
        E.RENEW: (S.OPEN, "ready"),
        E.FIRST_BEGIN: (S.OPEN, "ready"),
        E.BEGIN_AGAIN: (S.OPEN, "ready"),
        E.LATE_BEGIN: (S.OPEN, ""),
        E.BEGIN_OF_GONE: (S.OPEN, ""),
        E.BEGIN_OF_ANOTHER: (S.OPEN, "refused:bound"),
        E.BEGIN_UNFIT: (S.OPEN, "refused:mismatch"),
        E.BEGIN_UNKNOWN_LAYOUT: (S.OPEN, "which"),
        E.BEGIN_IN_REVOCATION: (S.OPEN, ""),
        E.DONE: (S.OPEN, "ack:done"),
        E.LAST_DONE: (S.CLOSED_OK, "ack:done report:ok"),
        E.LAST_DONE_TO_VERIFY: (S.VERIFYING, "ack:done verify"),
        E.WRONG_PLAN_DONE: (S.CLOSED_FAILED, "ack:done report:failed"),
        E.LATE_DONE: (S.OPEN, "ack:done"),
        E.EARLY_DONE: (S.OPEN, "ack:done"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed report:failed"),
        E.FAILED_IN_FLIGHT: (S.FENCING, "ack:failed cancel"),
        E.LATE_FAILED: (S.OPEN, "ack:failed"),
        E.EARLY_FAILED: (S.FENCING, "ack:failed cancel"),
        E.NOT_A_CONTRIBUTOR: (S.OPEN, "ack:done"),
        E.OTHER_PROCESS: (S.OPEN, "ack:done"),
        E.CANCEL: (S.FENCING, "cancel"),
        E.SETTLE: (S.OPEN, ""),
        E.DEADLINE: (S.FENCING, "cancel"),
        E.LAPSE: (S.FENCING, "cancel"),
        E.REVOKED: (S.OPEN, ""),  # before any grant
        E.CUT: (S.CLOSED_FAILED, "cancel report:failed"),
    },
    S.VERIFYING: {
        E.BEGIN: (S.VERIFYING, "refused:over"),
        E.RENEW: (S.VERIFYING, "refused:over"),
        E.DONE: (S.VERIFYING, "ack:done"),
        E.FAILED: (S.VERIFYING, "ack:failed"),
        E.CANCEL: (S.CLOSED_FAILED, "report:failed"),
        E.SETTLE: (S.VERIFYING, ""),
        E.VERIFIED: (S.CLOSED_OK, "report:ok"),
        E.CORRUPT: (S.CLOSED_FAILED, "report:failed"),
        E.DEADLINE: (S.CLOSED_FAILED, "report:failed"),
        E.REVOKED: (S.VERIFYING, ""),
    },
    S.FENCING: {
        E.BEGIN: (S.FENCING, "refused:cancelled"),
        E.RENEW: (S.FENCING, "refused:cancelled"),
        E.DONE: (S.CLOSED_FAILED, "ack:done report:failed"),
        E.LATE_DONE: (S.FENCING, "ack:done"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed report:failed"),
        E.FAILED_IN_FLIGHT: (S.FENCING, "ack:failed"),
        E.NOT_A_CONTRIBUTOR: (S.FENCING, "ack:done"),
        E.OTHER_PROCESS: (S.FENCING, "ack:done"),
        E.ALL_QUIET: (S.CLOSED_FAILED, "ack:done report:failed"),
        E.GATE_OPEN: (S.FENCING, ""),
        E.CANCEL: (S.FENCING, ""),
        E.SETTLE: (S.FENCING, ""),
        E.PROVEN: (S.FENCING, ""),  # asked before anything is proven
        E.REVOKED: (S.CLOSED_FAILED, "report:failed"),
    },
    S.CLOSED_OK: {
        E.BEGIN: (S.CLOSED_OK, "refused:over"),
        E.RENEW: (S.CLOSED_OK, "refused:over"),
        E.DONE: (S.CLOSED_OK, "ack:done"),
        E.FAILED: (S.CLOSED_OK, "ack:failed"),
        E.CANCEL: (S.CLOSED_OK, ""),
        E.SETTLE: (S.CLOSED_OK, ""),
        E.OVER: (S.OVER, ""),
        E.REVOKED: (S.CLOSED_OK, ""),
    },
    S.CLOSED_FAILED: {
        E.BEGIN: (S.CLOSED_FAILED, "refused:cancelled"),
        E.RENEW: (S.CLOSED_FAILED, "refused:cancelled"),
        E.DONE: (S.CLOSED_FAILED, "ack:done"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed"),
        E.GATE_OPEN: (S.CLOSED_FAILED, ""),
        E.CANCEL: (S.CLOSED_FAILED, ""),
        E.SETTLE: (S.CLOSED_FAILED, ""),
        E.VERIFIED: (S.CLOSED_FAILED, ""),
        E.CORRUPT: (S.CLOSED_FAILED, ""),
        E.OVER: (S.OVER, ""),
        E.REVOKED: (S.CLOSED_FAILED, ""),
    },
    S.OVER: {
        E.BEGIN: (S.OVER, "refused:over"),
        E.RENEW: (S.OVER, "refused:over"),
        E.DONE: (S.OVER, "ack:done"),
        E.FAILED: (S.OVER, "ack:failed"),
        E.VERIFIED: (S.OVER, ""),
        E.CORRUPT: (S.OVER, ""),
    },
}


UNASKED = (E.FIRST_BEGIN, E.REVOKED)  # in an OPEN without a BEGIN


def decode_in(state: ReservationState, event: ReservationEvent | None = None) -> OpenReceiver:
    """A Receiver that holds T in `state`, at time 0 or a little later, as `event` needs it."""
    r = receiver(verify=state is S.VERIFYING or event is E.LAST_DONE_TO_VERIFY)
    if state is S.UNBOUND:
        return r
    r.bind(0.0, T, FIRST, END, 300.0)
    if state is S.GATED:
        r.rules.guards.fence.revoking = event is E.REVOKED
        return r
    r.gate_open(0.0, T)
    if state is S.OPEN and event in UNASKED:
        r.rules.guards.fence.revoking = event is E.REVOKED
        return r
    r.message(0.0, "p1", begin(ONE))
    if state in (S.VERIFYING, S.CLOSED_OK, S.OVER):
        r.message(0.0, "p2", begin(TWO))
        r.message(0.0, "p1", done(ONE))
        r.message(0.0, "p2", done(TWO))
    if state is S.OPEN and event in (E.LAST_DONE, E.LAST_DONE_TO_VERIFY):
        r.message(0.0, "p2", begin(TWO))
        r.message(0.0, "p2", done(TWO))
    if state is S.OPEN and event in (E.LATE_DONE, E.LATE_FAILED):
        r.message(0.0, "p1", done(ONE))
    if state in (S.FENCING, S.CLOSED_FAILED):
        r.cancel(0.0, T, Failure("PD-XFER-002", "test"))
    if state is S.CLOSED_FAILED:
        r.message(0.0, "p1", failed(ONE))
    if state is S.OVER:
        r.load_over(0.0, T)
    if state is S.OPEN and event is E.BEGIN_OF_GONE:
        r.peer_gone(0.0, p_incarnation(ONE))
    r.rules.guards.fence.revoking = event in (E.REVOKED, E.CUT, E.BEGIN_IN_REVOCATION)
    return r


def straight(r: OpenReceiver, event: ReservationEvent) -> list[Action]:
    """Call the machine directly, where the interface checks a condition first, or would block the event."""
    r.rules.fire(event, 0.1, r.rules.lookup(T), FAILURE)
    return taken(r.rules)


def calls_of(r: OpenReceiver, state: ReservationState) -> dict[ReservationEvent, Callable[[], list[Action]]]:
    """Return the call that delivers each event."""
    late = TWO if state is S.FENCING else ONE  # in FENCING, TWO was never granted anything
    return {
        E.BEGIN: lambda: r.message(0.1, "p1", begin(ONE, seq=2)),
        E.RENEW: lambda: r.message(0.1, "p1", renew(ONE)),
        E.FIRST_BEGIN: lambda: r.message(0.1, "p1", begin(ONE)),
        E.BEGIN_AGAIN: lambda: r.message(0.1, "p1", begin(ONE)),
        E.LATE_BEGIN: lambda: r.message(0.1, "p1", begin(ONE, seq=0)),
        E.BEGIN_OF_GONE: lambda: r.message(0.1, "p1", begin(ONE, seq=2)),
        E.BEGIN_OF_ANOTHER: lambda: r.message(0.1, "p2", begin(TWO, push="push-2")),
        E.BEGIN_UNFIT: lambda: r.message(0.1, "p2", begin(TWO, model="another")),
        E.BEGIN_UNKNOWN_LAYOUT: lambda: r.message(0.1, "p2", begin(TWO, model="another", layout_bytes=b"")),
        E.BEGIN_IN_REVOCATION: lambda: r.message(0.1, "p2", begin(TWO)),
        E.DONE: lambda: r.message(0.1, "p1", done(ONE)),
        E.LAST_DONE: lambda: r.message(0.1, "p1", done(ONE)),
        E.LAST_DONE_TO_VERIFY: lambda: r.message(0.1, "p1", done(ONE)),
        E.ALL_QUIET: lambda: r.message(0.1, "p1", done(ONE)),
        E.WRONG_PLAN_DONE: lambda: r.message(0.1, "p1", done(ONE, plan_digest="another")),
        E.LATE_DONE: lambda: r.message(0.1, "p1", done(late)),
        E.EARLY_DONE: lambda: r.message(0.1, "p2", done(TWO)),
        E.FAILED: lambda: r.message(0.1, "p1", failed(ONE)),
        E.FAILED_IN_FLIGHT: lambda: r.message(0.1, "p1", failed(ONE, quiescent=False)),
        E.LATE_FAILED: lambda: r.message(0.1, "p1", failed(ONE)),
        E.EARLY_FAILED: lambda: r.message(0.1, "p2", failed(TWO)),
        E.NOT_A_CONTRIBUTOR: lambda: r.message(0.1, "p1", done(Contributor(5, 5))),
        E.OTHER_PROCESS: lambda: r.message(0.1, "p1", done(ONE, p_incarnation="another")),
        E.BIND: lambda: r.bind(0.1, T, FIRST, END, 300.0),
        E.GATE_OPEN: lambda: r.gate_open(0.1, T),
        E.CANCEL: lambda: r.cancel(0.1, T, Failure("PD-XFER-002", "test")),
        E.SETTLE: lambda: r.settle(0.1, T),
        E.VERIFIED: lambda: r.verified(0.1, T, None),
        E.CORRUPT: lambda: r.verified(0.1, T, "layer.0"),
        E.OVER: lambda: r.load_over(0.1, T),
        E.REVOKED: lambda: r.revoked(0.1, NEW_ADDRESSES),
        E.CUT: lambda: r.revoked(0.1, NEW_ADDRESSES),
    }


def fire(r: OpenReceiver, state: ReservationState, event: ReservationEvent) -> list[Action]:
    return calls_of(r, state).get(event, lambda: straight(r, event))()


def test_each_message_has_an_event_that_comes_in_as_a_message() -> None:
    """An event whose message the interface drops would be tested, but never occur."""
    assert {*TO_DECODE, *TO_PREFILL} == set(get_args(Message))
    assert set(TO_DECODE.values()) <= calls_of(decode_in(S.OPEN, None), S.OPEN).keys()


def test_each_event_has_a_cell() -> None:
    """A check that raises on an unknown event would let a peer end the engine."""
    assert {event for cells in RESERVATION_TABLE.values() for event in cells} == set(E)
    assert {event for cells in PAIR_TABLE.values() for event in cells} == set(PairEvent)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)), ids=lambda x: x.value)
def test_decode_does_what_is_decided(
    state: ReservationState, event: ReservationEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = RESERVATION[state].get(event)
    assert (event in RESERVATION_TABLE[state]) == (expected is not None), "the table and the decisions differ"
    table, entered = watched(RESERVATION_TABLE)
    monkeypatch.setattr(Receiver, "table", table)
    r = decode_in(state, event if expected is not None else None)
    assert r.state(T) is state
    entered.clear()
    if expected is None:
        with pytest.raises(LocalProtocolError):
            straight(r, event)
        assert r.state(T) is state and entered == []
    else:
        actions = fire(r, state, event)
        assert (r.state(T), as_text(actions)) == expected
        assert (state, event) in entered and led(RESERVATION_TABLE, entered) is expected[0]


@pytest.mark.parametrize("event", [E.BIND, E.GATE_OPEN, E.SETTLE, E.VERIFIED, E.OVER], ids=lambda e: e.value)
@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_decode_refuses_an_event_that_cannot_be(state: ReservationState, event: ReservationEvent) -> None:
    if event in RESERVATION_TABLE[state]:
        return
    r = decode_in(state)
    with pytest.raises(LocalProtocolError):
        fire(r, state, event)
    assert r.state(T) is state


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_no_message_is_illegal_for_decode(state: ReservationState) -> None:
    assert set(RESERVATION_TABLE[state]) >= set(TO_DECODE.values())


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
@pytest.mark.parametrize(
    "message",
    [
        begin(transfer=TransferId("decode-0", 7, "old"), d_incarnation="decode-0"),
        done(d_incarnation="decode-0"),
        failed(transfer=TransferId("decode-0", 7, "old"), d_incarnation="decode-0"),
    ],
    ids=["begin", "done", "failed"],
)
def test_another_incarnation_of_decode_is_answered_and_changes_nothing(
    state: ReservationState, message: object
) -> None:
    r = decode_in(state)
    answer = as_text(r.message(0.1, "p1", message))  # type: ignore[arg-type]
    assert answer in ("refused:stale", "ack:done", "ack:failed")
    assert r.state(T) is state


# ---- P

PS, PE = PairState, PairEvent
PairOutcome = tuple[PairState, str] | None

# ASK: asked, one unit offered. PUSH: one unit out. DRAIN: the same after an abort. CLOSED: after an abort, none out.
PAIR: dict[PairState, dict[PairEvent, PairOutcome]] = {
    PS.UNATTACHED: {
        PE.READY: (PS.UNATTACHED, "failed:quiet"),
        PE.WHICH: (PS.UNATTACHED, ""),
        PE.REFUSED: (PS.UNATTACHED, ""),
        PE.CANCEL: (PS.UNATTACHED, "failed:quiet"),
        PE.ACK: (PS.UNATTACHED, ""),
        PE.OPEN: (PS.ASK, "begin"),
    },
    PS.ASK: {
        PE.READY: (PS.PUSH, ""),
        PE.WHICH: (PS.ASK, "begin"),
        PE.WHICH_AGAIN: (PS.ASK, ""),
        PE.REFUSED: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.CANCEL: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.READY_UNASKED: (PS.ASK, ""),
        PE.READY_LATE: (PS.ASK, ""),
        PE.READY_NO_ADDRESSES: (PS.ASK, ""),
        PE.READY_UNFIT: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.ACK: (PS.ASK, ""),
        PE.OFFER: (PS.ASK, ""),
        PE.SEAL: (PS.ASK, ""),
        PE.RESTART: (PS.ASK, ""),
        PE.FAIL: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.UNREACHABLE: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.RENEW: (PS.ASK, "begin"),
        PE.READY_TIMEOUT: (PS.CLOSED, "failed:quiet closed:failed"),
    },
    PS.PUSH: {
        PE.READY: (PS.PUSH, ""),
        PE.WHICH: (PS.PUSH, ""),
        PE.REFUSED: (PS.DRAIN, "failed:loud"),
        PE.CANCEL: (PS.DRAIN, "failed:loud"),
        PE.READY_UNASKED: (PS.PUSH, ""),
        PE.READY_LATE: (PS.PUSH, ""),
        PE.READY_NO_ADDRESSES: (PS.PUSH, ""),
        PE.READY_MOVED: (PS.DRAIN, "failed:loud"),
        PE.READY_UNFIT: (PS.DRAIN, "failed:loud"),
        PE.ACK: (PS.PUSH, ""),
        PE.OFFER: (PS.PUSH, ""),
        PE.SEAL: (PS.PUSH, ""),
        PE.RESTART: (PS.PUSH, ""),  # not while a unit is out: see below
        PE.CLAIM: (PS.PUSH, ""),
        PE.RETURN: (PS.PUSH, ""),
        PE.SUBMITTED: (PS.PUSH, ""),
        PE.SUBMITTED_LATE: (PS.DRAIN, "failed:loud"),
        PE.LANDED: (PS.PUSH, ""),
        PE.LOST: (PS.DRAIN, "failed:loud"),
        PE.FAIL: (PS.DRAIN, "failed:loud"),
        PE.UNREACHABLE: (PS.PUSH, ""),
        PE.RENEW: (PS.PUSH, "renew"),
        PE.AUTHORITY_OVER: (PS.DRAIN, "failed:loud"),
        PE.COMPLETE: (PS.CLOSED, "done closed:ok"),
    },
    PS.DRAIN: {
        PE.READY: (PS.DRAIN, ""),
        PE.WHICH: (PS.DRAIN, ""),
        PE.REFUSED: (PS.DRAIN, ""),
        PE.CANCEL: (PS.DRAIN, ""),
        PE.ACK: (PS.DRAIN, ""),
        PE.ACK_OF_ANOTHER: (PS.DRAIN, ""),
        PE.OFFER: (PS.DRAIN, ""),
        PE.SEAL: (PS.DRAIN, ""),
        PE.RESTART: (PS.DRAIN, ""),
        PE.RETURN: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.SUBMITTED: (PS.DRAIN, ""),
        PE.LANDED: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.LOST: (PS.DRAIN, ""),
        PE.FAIL: (PS.DRAIN, ""),
        PE.UNREACHABLE: (PS.DRAIN, ""),
        PE.QUIET: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.COMPLETE: (PS.CLOSED, "done closed:ok"),
    },
    PS.CLOSED: {
        PE.READY: (PS.CLOSED, ""),
        PE.WHICH: (PS.CLOSED, ""),
        PE.REFUSED: (PS.CLOSED, ""),
        PE.CANCEL: (PS.CLOSED, "failed:quiet"),
        PE.ACK: (PS.UNATTACHED, ""),  # closed, acknowledged: forgotten
        PE.ACK_OF_ANOTHER: (PS.CLOSED, ""),
        PE.OFFER: (PS.CLOSED, ""),
        PE.SEAL: (PS.CLOSED, ""),
        PE.RESTART: (PS.CLOSED, ""),
        PE.FAIL: (PS.CLOSED, ""),
        PE.UNREACHABLE: (PS.CLOSED, ""),
    },
}


LESS = Memory("session-1", (10,), ((0,),))  # fewer layers than planned


def prefill_in(state: PairState, event: PairEvent | None = None) -> tuple[OpenSender, Claim]:
    """A Sender whose only pair is in `state`, as `event` needs it, and the claim that is or was out."""
    s = sender()
    claim = Claim(PUSH, 0, "unit", 0)
    if state is PS.UNATTACHED:
        return s, claim
    s.open(0.0, order())
    s.offer(0.0, opened(s), 0, "unit", 10)
    if state is PS.ASK:
        if event is PE.WHICH_AGAIN:
            s.message(0.0, "d0", layout_request())
        return s, claim
    s.message(0.0, "d0", ready())
    claim = claim_of(s, 0.0)
    if state is PS.PUSH and event in (PE.READY, PE.READY_NO_ADDRESSES, PE.READY_MOVED, PE.READY_UNFIT):
        straight_pair(s, PE.RENEW)  # RENEW that a READY may answer
    if state is PS.PUSH and event is PE.RESTART:
        s.returned(0.0, claim)
    if event is PE.COMPLETE:
        s.seal(0.0, opened(s))
    if state is PS.DRAIN and event is PE.COMPLETE:
        s.message(0.0, "d0", cancel())
    elif state in (PS.DRAIN, PS.CLOSED):
        s.abort(0.0, opened(s), Failure("PD-XFER-002", "test"))
    if state is PS.CLOSED:
        s.wrote(0.0, claim, True)
    return s, claim


def pair_of(s: Sender) -> PairRecord | None:
    push = s.find(PUSH)
    return push.pairs[0] if push is not None else None


def straight_pair(s: OpenSender, event: PairEvent) -> list[Action]:
    pair = pair_of(s)
    if pair is None:
        look_up(s.table, PS.UNATTACHED, event, Counter(), PUSH)
        raise AssertionError("only messages and `open` come without a pair")
    s.rules.fire(event, 0.1, pair, FAILURE)
    return taken(s.rules)


def fire_pair(s: OpenSender, claim: Claim, event: PairEvent) -> list[Action]:
    pair, push = pair_of(s), s.find(PUSH) or order()
    asked = pair.seq if pair is not None and pair.final is None else 1
    said = pair.final if pair is not None else None
    moved, less = memory_hash(NEW_ADDRESSES), memory_hash(ADDRESSES)
    calls: dict[PairEvent, Callable[[], list[Action]]] = {
        PE.READY: lambda: s.message(0.2, "d0", ready(asked)),
        PE.READY_UNASKED: lambda: s.message(0.2, "d0", ready(77)),
        PE.READY_LATE: lambda: s.message(14.97, "d0", ready(1)),
        PE.READY_NO_ADDRESSES: lambda: s.message(0.2, "d0", ready(asked, memory="unknown", addresses=None)),
        PE.READY_MOVED: lambda: s.message(0.2, "d0", ready(asked, memory=moved, addresses=NEW_ADDRESSES)),
        PE.READY_UNFIT: lambda: s.message(0.2, "d0", ready(asked, memory=less, addresses=LESS)),
        PE.REFUSED: lambda: s.message(0.1, "d0", refused()),
        PE.WHICH: lambda: s.message(0.1, "d0", layout_request()),
        PE.WHICH_AGAIN: lambda: s.message(0.1, "d0", layout_request()),
        PE.CANCEL: lambda: s.message(0.1, "d0", cancel()),
        PE.ACK: lambda: s.message(0.1, "d0", ack("failed", said.seq) if said is not None else ack("done", 1)),
        PE.ACK_OF_ANOTHER: lambda: s.message(0.1, "d0", ack("done", 1)),
        PE.OPEN: lambda: s.open(0.1, order()),
        PE.OFFER: lambda: s.offer(0.1, push, 0, "another", 10),
        PE.SEAL: lambda: s.seal(0.1, push),
        PE.RESTART: lambda: s.restart(0.1, push),
        PE.RETURN: lambda: s.returned(0.1, claim),
        PE.SUBMITTED: lambda: s.submitted(0.1, claim),
        PE.SUBMITTED_LATE: lambda: s.submitted(14.97, claim),
        PE.LANDED: lambda: s.wrote(0.1, claim, True),
        PE.LOST: lambda: s.wrote(0.1, claim, False),
        PE.COMPLETE: lambda: s.wrote(0.1, claim, True),
        PE.QUIET: lambda: s.wrote(0.1, claim, True),
        PE.UNREACHABLE: lambda: s.unreachable(0.1, "d0", "refused"),
    }
    if pair is not None and pair.state in (PS.DRAIN, PS.CLOSED) and event in (PE.SEAL, PE.RESTART):
        return straight_pair(s, event)  # a failed or closed push gets another call from the interface
    return calls.get(event, lambda: straight_pair(s, event))()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PS, PE)), ids=lambda x: x.value)
def test_prefill_does_what_is_decided(state: PairState, event: PairEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PAIR[state].get(event)
    assert (event in PAIR_TABLE[state]) == (expected is not None), "the table and the decisions differ"
    table, entered = watched(PAIR_TABLE)
    monkeypatch.setattr(Sender, "table", table)
    s, claim = prefill_in(state, event if expected is not None else None)
    assert s.state(PUSH, 0) is state
    entered.clear()
    if expected is None:
        with pytest.raises(LocalProtocolError):
            straight_pair(s, event)
        assert s.state(PUSH, 0) is state and entered == []
    else:
        actions = fire_pair(s, claim, event)
        assert (s.state(PUSH, 0), as_text(actions)) == expected
        assert (state, event) in entered
        assert led(PAIR_TABLE, entered) is (PS.CLOSED if (state, event) == (PS.CLOSED, PE.ACK) else expected[0])


@pytest.mark.parametrize("event", [PE.OPEN, PE.OFFER, PE.RETURN, PE.SUBMITTED, PE.LANDED, PE.LOST])
@pytest.mark.parametrize("state", PS, ids=lambda s: s.value)
def test_prefill_refuses_an_event_that_cannot_be(state: PairState, event: PairEvent) -> None:
    if event in PAIR_TABLE[state]:
        return
    s, claim = prefill_in(state)
    with pytest.raises(LocalProtocolError):
        fire_pair(s, claim, event)
    assert s.state(PUSH, 0) is state


def test_nothing_starts_over_or_ends_while_a_unit_is_out() -> None:
    s, _ = prefill_in(PS.PUSH)
    with pytest.raises(LocalProtocolError):
        s.restart(0.1, opened(s))
    assert s.state(PUSH, 0) is PS.PUSH
    s, _ = prefill_in(PS.DRAIN)
    s.rules.close_if_finished(0.1, pair_of(s), None)
    assert s.state(PUSH, 0) is PS.DRAIN


@pytest.mark.parametrize("state", PS, ids=lambda s: s.value)
def test_no_message_is_illegal_for_prefill(state: PairState) -> None:
    assert set(PAIR_TABLE[state]) >= set(TO_PREFILL.values())


@pytest.mark.parametrize("state", PS, ids=lambda s: s.value)
@pytest.mark.parametrize("message", [ready(), refused(), cancel(), ack("done", 1)], ids=lambda m: type(m).__name__)
def test_a_message_for_an_earlier_process_is_counted_and_not_answered(state: PairState, message: object) -> None:
    s, _ = prefill_in(state)
    stale = type(message)(**{f: getattr(message, f) for f in message.__struct_fields__} | {"p_incarnation": "older"})  # type: ignore[attr-defined]
    assert as_text(s.message(0.1, "d0", stale)) == ""
    assert s.state(PUSH, 0) is state
    assert sum(s.counters.values()) == 1


# ---- one writer of a transfer

WS, WE = WriterState, WriterEvent
WRITER: dict[WriterState, dict[WriterEvent, WriterState]] = {
    WS.AWAITED: {WE.GRANTED: WS.LEASED, WE.ANSWER: WS.AWAITED},
    WS.LEASED: {
        WE.GRANTED: WS.LEASED,
        WE.DONE: WS.DONE,
        WE.ANSWER: WS.ANSWERED,
        WE.PROVEN: WS.QUIET,
        WE.REVOKED: WS.QUIET,
    },
    WS.ANSWERED: {WE.DONE: WS.DONE, WE.ANSWER: WS.ANSWERED, WE.PROVEN: WS.QUIET, WE.REVOKED: WS.QUIET},
    WS.DONE: {WE.ANSWER: WS.DONE},
    WS.QUIET: {WE.ANSWER: WS.QUIET},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(WS, WE)), ids=lambda x: x.value)
def test_a_writer_goes_where_is_decided(state: WriterState, event: WriterEvent) -> None:
    expected, writer = WRITER[state].get(event), WriterRecord(ONE, state)
    assert WRITER_TABLE[state].get(event) is expected
    if expected is None:
        with pytest.raises(LocalProtocolError):
            writer.on(event)
    else:
        writer.on(event)
    assert writer.state is (expected or state)


def test_only_a_writer_that_may_still_write_is_waited_for() -> None:
    assert {state for state in WS if WriterRecord(ONE, state).waited_for} == {WS.LEASED, WS.ANSWERED}
