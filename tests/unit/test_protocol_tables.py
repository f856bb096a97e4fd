# SPDX-License-Identifier: Apache-2.0
"""Every state times every event has a decided outcome, and the machines do what is decided.

The outcomes are written out here by hand: state after, and what is sent or asked. None: illegal, changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from protocol_rig import (
    END,
    FIRST,
    NEW_ADDRESSES,
    ONE,
    PUSH,
    TWO,
    T,
    ack,
    begin,
    cancel,
    claim_of,
    done,
    failed,
    order,
    ready,
    receiver,
    refused,
    sender,
    told,
)

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.actions import Action
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.tables import (
    PAIR_MESSAGES,
    PAIR_TABLE,
    RESERVATION_MESSAGES,
    RESERVATION_TABLE,
    PairEvent,
    PairState,
    ReservationEvent,
    ReservationState,
    Rule,
)

S, E = ReservationState, ReservationEvent
Outcome = tuple[ReservationState, str] | None

# The canonical OPEN and FENCING: ONE is leased, TWO has not been heard of. VERIFYING and CLOSED_OK: both are done.
RESERVATION: dict[ReservationState, dict[ReservationEvent, Outcome]] = {
    S.UNBOUND: {
        E.BEGIN: (S.UNBOUND, ""),
        E.DONE: (S.UNBOUND, "ack:done"),
        E.FAILED: (S.UNBOUND, "ack:failed"),
        E.BIND: (S.GATED, ""),
    },
    S.GATED: {
        E.BEGIN: (S.GATED, ""),
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
        E.DONE: (S.OPEN, "ack:done"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed report:failed"),
        E.CANCEL: (S.FENCING, "cancel"),
        E.SETTLE: (S.OPEN, ""),
        E.DEADLINE: (S.FENCING, "cancel"),
        E.LAPSE: (S.FENCING, "cancel"),
        E.REVOKED: (S.CLOSED_FAILED, "cancel report:failed"),
    },
    S.VERIFYING: {
        E.BEGIN: (S.VERIFYING, "refused:over"),
        E.DONE: (S.VERIFYING, "ack:done"),
        E.FAILED: (S.VERIFYING, "ack:failed"),
        E.CANCEL: (S.CLOSED_FAILED, "report:failed"),
        E.SETTLE: (S.VERIFYING, ""),
        E.VERIFIED: (S.CLOSED_OK, "report:ok"),
        E.DEADLINE: (S.CLOSED_FAILED, "report:failed"),
        E.REVOKED: (S.VERIFYING, ""),
    },
    S.FENCING: {
        E.BEGIN: (S.FENCING, "refused:cancelled"),
        E.DONE: (S.CLOSED_FAILED, "ack:done report:failed"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed report:failed"),
        E.GATE_OPEN: (S.FENCING, ""),
        E.CANCEL: (S.FENCING, ""),
        E.SETTLE: (S.FENCING, ""),
        E.PROVEN: (S.FENCING, ""),  # asked before anything is proven
        E.REVOKED: (S.CLOSED_FAILED, "report:failed"),
    },
    S.CLOSED_OK: {
        E.BEGIN: (S.CLOSED_OK, "refused:over"),
        E.DONE: (S.CLOSED_OK, "ack:done"),
        E.FAILED: (S.CLOSED_OK, "ack:failed"),
        E.CANCEL: (S.CLOSED_OK, ""),
        E.SETTLE: (S.CLOSED_OK, ""),
        E.OVER: (S.OVER, ""),
        E.REVOKED: (S.CLOSED_OK, ""),
    },
    S.CLOSED_FAILED: {
        E.BEGIN: (S.CLOSED_FAILED, "refused:cancelled"),
        E.DONE: (S.CLOSED_FAILED, "ack:done"),
        E.FAILED: (S.CLOSED_FAILED, "ack:failed"),
        E.GATE_OPEN: (S.CLOSED_FAILED, ""),
        E.CANCEL: (S.CLOSED_FAILED, ""),
        E.SETTLE: (S.CLOSED_FAILED, ""),
        E.VERIFIED: (S.CLOSED_FAILED, ""),
        E.OVER: (S.OVER, ""),
        E.REVOKED: (S.CLOSED_FAILED, ""),
    },
    S.OVER: {
        E.BEGIN: (S.OVER, "refused:over"),
        E.DONE: (S.OVER, "ack:done"),
        E.FAILED: (S.OVER, "ack:failed"),
        E.VERIFIED: (S.OVER, ""),
    },
}


def decode_in(state: ReservationState) -> Receiver:
    """A Receiver that holds T in `state`, at time 0 or a little later."""
    r = receiver(verify=state is S.VERIFYING)
    if state is S.UNBOUND:
        return r
    r.bind(0.0, T, FIRST, END, 300.0)
    if state is S.GATED:
        return r
    r.gate_open(0.0, T)
    r.message(0.0, "p1", begin(ONE))
    if state in (S.VERIFYING, S.CLOSED_OK, S.OVER):
        r.message(0.0, "p2", begin(TWO))
        r.message(0.0, "p1", done(ONE))
        r.message(0.0, "p2", done(TWO))
    if state in (S.FENCING, S.CLOSED_FAILED):
        r.cancel(0.0, T, "PD-XFER-002", "test")
    if state is S.CLOSED_FAILED:
        r.message(0.0, "p1", failed(ONE))
    if state is S.OVER:
        r.over(0.0, T)
    return r


def fire(r: Receiver, event: ReservationEvent) -> list[Action]:
    """The event through the interface, or straight into the machine where the interface has its own condition."""
    if event is E.REVOKED:
        record = r._lookup(T)
        r._fence_of.revoking = False
        r._addresses = NEW_ADDRESSES
        r._fire(event, 0.1, record)
        return r._taken(record)
    if event in (E.DEADLINE, E.LAPSE, E.PROVEN) or (event is E.BIND and r.state(T) is not S.UNBOUND):
        record = r._lookup(T)
        r._fire(event, 0.1, record)
        return r._taken(record)
    calls: dict[ReservationEvent, Callable[[], list[Action]]] = {
        E.BEGIN: lambda: r.message(0.1, "p1", begin(ONE, seq=2)),
        E.DONE: lambda: r.message(0.1, "p1", done(ONE)),
        E.FAILED: lambda: r.message(0.1, "p1", failed(ONE)),
        E.BIND: lambda: r.bind(0.1, T, FIRST, END, 300.0),
        E.GATE_OPEN: lambda: r.gate_open(0.1, T),
        E.CANCEL: lambda: r.cancel(0.1, T, "PD-XFER-002", "test"),
        E.SETTLE: lambda: r.settle(0.1, T),
        E.VERIFIED: lambda: r.verified(0.1, T, None),
        E.OVER: lambda: r.over(0.1, T),
    }
    return calls[event]()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)), ids=lambda x: x.value)
def test_decode_does_what_is_decided(state: ReservationState, event: ReservationEvent) -> None:
    expected = RESERVATION[state].get(event)
    assert (event in RESERVATION_TABLE[state]) == (expected is not None), "the table and the decisions differ"
    r = decode_in(state)
    assert r.state(T) is state
    if expected is None:
        with pytest.raises(LocalProtocolError):
            fire(r, event)
        assert r.state(T) is state
    else:
        actions = fire(r, event)
        assert (r.state(T), told(actions)) == expected


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_no_message_is_illegal_for_decode(state: ReservationState) -> None:
    assert set(RESERVATION_TABLE[state]) >= RESERVATION_MESSAGES


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
    answer = told(r.message(0.1, "p1", message))  # type: ignore[arg-type]
    assert answer in ("refused:stale", "ack:done", "ack:failed")
    assert r.state(T) is state


# ---- P

PS, PE = PairState, PairEvent
PairOutcome = tuple[PairState, str] | None

# ASK: asked, one unit offered. PUSH: one unit out. DRAIN: the same after an abort. CLOSED: after an abort, all home.
PAIR: dict[PairState, dict[PairEvent, PairOutcome]] = {
    PS.UNATTACHED: {
        PE.READY: (PS.UNATTACHED, "failed:quiet"),
        PE.REFUSED: (PS.UNATTACHED, ""),
        PE.CANCEL: (PS.UNATTACHED, "failed:quiet"),
        PE.ACK: (PS.UNATTACHED, ""),
        PE.OPEN: (PS.ASK, "begin"),
    },
    PS.ASK: {
        PE.READY: (PS.PUSH, ""),
        PE.REFUSED: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.CANCEL: (PS.CLOSED, "failed:quiet closed:failed"),
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
        PE.REFUSED: (PS.DRAIN, "failed:loud"),
        PE.CANCEL: (PS.DRAIN, "failed:loud"),
        PE.ACK: (PS.PUSH, ""),
        PE.OFFER: (PS.PUSH, ""),
        PE.SEAL: (PS.PUSH, ""),
        PE.RESTART: None,  # a unit is out: see below
        PE.CLAIM: (PS.PUSH, ""),
        PE.RETURN: (PS.PUSH, ""),
        PE.SUBMITTED: (PS.PUSH, ""),
        PE.LANDED: (PS.PUSH, ""),
        PE.LOST: (PS.DRAIN, "failed:loud"),
        PE.FAIL: (PS.DRAIN, "failed:loud"),
        PE.UNREACHABLE: (PS.PUSH, ""),
        PE.RENEW: (PS.PUSH, "begin"),
        PE.AUTHORITY_OVER: (PS.DRAIN, "failed:loud"),
    },
    PS.DRAIN: {
        PE.READY: (PS.DRAIN, ""),
        PE.REFUSED: (PS.DRAIN, ""),
        PE.CANCEL: (PS.DRAIN, ""),
        PE.ACK: (PS.DRAIN, ""),
        PE.OFFER: (PS.DRAIN, ""),
        PE.SEAL: (PS.DRAIN, ""),
        PE.RESTART: (PS.DRAIN, ""),
        PE.RETURN: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.SUBMITTED: (PS.DRAIN, ""),
        PE.LANDED: (PS.CLOSED, "failed:quiet closed:failed"),
        PE.LOST: (PS.DRAIN, ""),
        PE.FAIL: (PS.DRAIN, ""),
        PE.UNREACHABLE: (PS.DRAIN, ""),
        PE.QUIET: (PS.DRAIN, ""),  # asked while a write is out
    },
    PS.CLOSED: {
        PE.READY: (PS.CLOSED, ""),
        PE.REFUSED: (PS.CLOSED, ""),
        PE.CANCEL: (PS.CLOSED, "failed:quiet"),
        PE.ACK: (PS.CLOSED, ""),
        PE.OFFER: (PS.CLOSED, ""),
        PE.SEAL: (PS.CLOSED, ""),
        PE.RESTART: (PS.CLOSED, ""),
        PE.FAIL: (PS.CLOSED, ""),
        PE.UNREACHABLE: (PS.CLOSED, ""),
    },
}


def prefill_in(state: PairState) -> tuple[Sender, Claim]:
    """A Sender whose only pair is in `state`, and the claim that is or was out."""
    s = sender()
    claim = Claim(PUSH, 0, "unit", 0)
    if state is PS.UNATTACHED:
        return s, claim
    s.open(0.0, order())
    s.offer(0.0, PUSH, 0, "unit", 10)
    if state is PS.ASK:
        return s, claim
    s.message(0.0, "d0", ready())
    claim = claim_of(s, 0.0)
    if state in (PS.DRAIN, PS.CLOSED):
        s.abort(0.0, PUSH, "PD-XFER-002", "test")
    if state is PS.CLOSED:
        s.wrote(0.0, claim, True)
    return s, claim


def fire_pair(s: Sender, claim: Claim, event: PairEvent) -> list[Action]:
    pair = s._pair(PUSH, 0)
    internal = (PE.RENEW, PE.READY_TIMEOUT, PE.AUTHORITY_OVER, PE.QUIET, PE.FAIL, PE.RESTART, PE.SEAL, PE.CLAIM)
    if event in internal or (event is PE.OPEN and pair is not None):
        if pair is None:
            raise LocalProtocolError("no such pair")
        if event is PE.RESTART and pair.coverage.out:
            return s.restart(0.1, PUSH)
        s._fire(event, 0.1, pair)
        return s._taken()
    calls: dict[PairEvent, Callable[[], list[Action]]] = {
        PE.READY: lambda: s.message(0.1, "d0", ready()),
        PE.REFUSED: lambda: s.message(0.1, "d0", refused()),
        PE.CANCEL: lambda: s.message(0.1, "d0", cancel()),
        PE.ACK: lambda: s.message(0.1, "d0", ack("done", 1)),
        PE.OPEN: lambda: s.open(0.1, order()),
        PE.OFFER: lambda: s.offer(0.1, PUSH, 0, "another", 10),
        PE.RETURN: lambda: s.returned(0.1, claim),
        PE.SUBMITTED: lambda: s.submitted(0.1, claim),
        PE.LANDED: lambda: s.wrote(0.1, claim, True),
        PE.LOST: lambda: s.wrote(0.1, claim, False),
        PE.UNREACHABLE: lambda: _unreachable(s),
    }
    return calls[event]()


def _unreachable(s: Sender) -> list[Action]:
    if s._pair(PUSH, 0) is None:
        raise LocalProtocolError("nothing is open towards this peer")  # the interface then has nobody to tell
    return s.unreachable(0.1, "d0", "refused")


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PS, PE)), ids=lambda x: x.value)
def test_prefill_does_what_is_decided(state: PairState, event: PairEvent) -> None:
    expected = PAIR[state].get(event)
    s, claim = prefill_in(state)
    assert s.state(PUSH, 0) is state
    if expected is None:
        with pytest.raises(LocalProtocolError):
            fire_pair(s, claim, event)
        assert s.state(PUSH, 0) is state
        if (state, event) != (PS.PUSH, PE.RESTART):
            assert event not in PAIR_TABLE[state], "the table and the decisions differ"
    else:
        actions = fire_pair(s, claim, event)
        assert (s.state(PUSH, 0), told(actions)) == expected
        assert event in PAIR_TABLE[state]


@pytest.mark.parametrize("state", PS, ids=lambda s: s.value)
def test_no_message_is_illegal_for_prefill(state: PairState) -> None:
    assert set(PAIR_TABLE[state]) >= PAIR_MESSAGES


@pytest.mark.parametrize("state", PS, ids=lambda s: s.value)
@pytest.mark.parametrize("message", [ready(), refused(), cancel(), ack("done", 1)], ids=lambda m: type(m).__name__)
def test_a_message_for_an_earlier_process_is_counted_and_not_answered(state: PairState, message: object) -> None:
    s, _ = prefill_in(state)
    stale = type(message)(**{f: getattr(message, f) for f in message.__struct_fields__} | {"p_incarnation": "older"})  # type: ignore[attr-defined]
    assert told(s.message(0.1, "d0", stale)) == ""
    assert s.state(PUSH, 0) is state
    assert sum(s.counters.values()) == 1


@pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state in S for event in RESERVATION_TABLE[state]], ids=lambda x: x.value
)
def test_a_rule_of_decode_that_leads_elsewhere_is_noticed(state: ReservationState, event: ReservationEvent) -> None:
    """The machine checks itself after every event."""
    rule = RESERVATION_TABLE[state][event]
    r = decode_in(state)
    r.table = {state: {event: Rule(rule.handler, frozenset())}}
    with pytest.raises(LocalProtocolError):
        fire(r, event)
