# SPDX-License-Identifier: Apache-2.0
"""The two state machines of a transfer, as data. Whatever decides about a state change stands here.

A rule names the handler that is called and the states in which it may leave the machine; the machines check the
latter after every event. An event without a rule is illegal: a local one raises LocalProtocolError, a remote one
cannot be, since every state has a rule for every message (`answer_*` rules count it, answer it, and change nothing).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=enum.Enum)


class Rule(NamedTuple, Generic[S]):
    handler: str
    into: frozenset[S]


class ReservationState(enum.Enum):
    """D: one transfer on one D rank."""

    UNBOUND = "unbound"  # its number is above the watermark: this worker has not heard of it yet
    GATED = "gated"  # bound, but the device may still be busy with the blocks' earlier life
    OPEN = "open"  # contributors may write
    VERIFYING = "verifying"  # all done; the memory is being compared with the checksums
    FENCING = "fencing"  # failed; blocks are kept until every contributor is quiet
    CLOSED_OK = "closed_ok"
    CLOSED_FAILED = "closed_failed"
    OVER = "over"  # at or below the watermark and no record: long finished


class ReservationEvent(enum.Enum):
    # messages from P
    BEGIN = "begin"
    DONE = "done"
    FAILED = "failed"
    # from our own scheduler and runtime
    BIND = "bind"
    GATE_OPEN = "gate_open"
    CANCEL = "cancel"
    SETTLE = "settle"
    VERIFIED = "verified"
    OVER = "over_said"
    # time, and proofs that a contributor is quiet
    DEADLINE = "deadline"
    LAPSE = "lapse"
    PROVEN = "proven"
    REVOKED = "revoked"


class WriterState(enum.Enum):
    """D: one contributor of one transfer."""

    AWAITED = "awaited"  # has never been granted anything
    LEASED = "leased"  # may be writing
    DONE = "done"  # has said that all is written
    QUIET = "quiet"  # nothing of it can land any more


class PairState(enum.Enum):
    """P: one push towards one D rank."""

    UNATTACHED = "unattached"  # source or reservation is still missing, or all is over: no record
    ASK = "ask"  # BEGIN sent, no authority yet
    PUSH = "push"
    DRAIN = "drain"  # no new write; those that are out come home
    CLOSED = "closed"


class PairEvent(enum.Enum):
    # messages from D
    READY = "ready"
    REFUSED = "refused"
    CANCEL = "cancel"
    ACK = "ack"
    # from our own scheduler, forward pass and pusher
    OPEN = "open"
    OFFER = "offer"
    SEAL = "seal"
    RESTART = "restart"
    CLAIM = "claim"
    RETURN = "return"  # a claim was not submitted after all
    SUBMITTED = "submitted"
    LANDED = "landed"
    LOST = "lost"  # the transport said -1: it may still land
    # what ends a push early, told to each of its pairs
    FAIL = "fail"  # abort, deadline, stall, or another pair
    UNREACHABLE = "unreachable"
    # time
    RENEW = "renew"
    READY_TIMEOUT = "ready_timeout"
    AUTHORITY_OVER = "authority_over"
    QUIET = "quiet"  # the last lost write is T ago


RESERVATION_MESSAGES = frozenset({ReservationEvent.BEGIN, ReservationEvent.DONE, ReservationEvent.FAILED})
PAIR_MESSAGES = frozenset({PairEvent.READY, PairEvent.REFUSED, PairEvent.CANCEL, PairEvent.ACK})


def _rule(handler: str, *into: S) -> Rule[S]:
    return Rule(handler, frozenset(into))


def _reservation() -> dict[ReservationState, dict[ReservationEvent, Rule[ReservationState]]]:
    s, e = ReservationState, ReservationEvent
    ended = (s.FENCING, s.CLOSED_FAILED)
    return {
        s.UNBOUND: {
            e.BEGIN: _rule("_park", s.UNBOUND),
            e.DONE: _rule("_answer_unexpected", s.UNBOUND),
            e.FAILED: _rule("_park_failure", s.UNBOUND),
            e.BIND: _rule("_bind", s.GATED, *ended),
        },
        s.GATED: {
            e.BEGIN: _rule("_park", s.GATED),
            e.DONE: _rule("_answer_unexpected", s.GATED),
            e.FAILED: _rule("_fail_before_lease", *ended),
            e.GATE_OPEN: _rule("_open", s.OPEN, *ended),
            e.CANCEL: _rule("_fence", *ended),
            e.SETTLE: _rule("_settle", s.GATED),
            e.DEADLINE: _rule("_fence", *ended),
            e.REVOKED: _rule("_ignore", s.GATED),
        },
        s.OPEN: {
            e.BEGIN: _rule("_grant", s.OPEN),
            e.DONE: _rule("_finish", s.OPEN, s.VERIFYING, s.CLOSED_OK, *ended),
            e.FAILED: _rule("_fail_by_peer", s.OPEN, *ended),
            e.CANCEL: _rule("_fence", *ended),
            e.SETTLE: _rule("_settle", s.OPEN),
            e.DEADLINE: _rule("_fence", *ended),
            e.LAPSE: _rule("_fence", *ended),
            e.REVOKED: _rule("_cut", s.OPEN, *ended),
        },
        s.VERIFYING: {
            e.BEGIN: _rule("_answer_over", s.VERIFYING),
            e.DONE: _rule("_answer_ack", s.VERIFYING),
            e.FAILED: _rule("_answer_ack", s.VERIFYING),
            e.CANCEL: _rule("_fence", s.CLOSED_FAILED),
            e.SETTLE: _rule("_ignore", s.VERIFYING),
            e.VERIFIED: _rule("_verdict", s.CLOSED_OK, s.CLOSED_FAILED),
            e.DEADLINE: _rule("_fence", s.CLOSED_FAILED),
            e.REVOKED: _rule("_ignore", s.VERIFYING),
        },
        s.FENCING: {
            e.BEGIN: _rule("_answer_cancelled", s.FENCING),
            e.DONE: _rule("_quiet_by_answer", *ended),
            e.FAILED: _rule("_quiet_by_answer", *ended),
            e.GATE_OPEN: _rule("_ignore", s.FENCING),
            e.CANCEL: _rule("_ignore", s.FENCING),
            e.SETTLE: _rule("_ignore", s.FENCING),
            e.PROVEN: _rule("_quiet_by_proof", *ended),
            e.REVOKED: _rule("_cut", s.CLOSED_FAILED),
        },
        s.CLOSED_OK: {
            e.BEGIN: _rule("_answer_over", s.CLOSED_OK),
            e.DONE: _rule("_answer_ack", s.CLOSED_OK),
            e.FAILED: _rule("_answer_ack", s.CLOSED_OK),
            e.CANCEL: _rule("_ignore", s.CLOSED_OK),
            e.SETTLE: _rule("_ignore", s.CLOSED_OK),
            e.OVER: _rule("_drop", s.OVER),
            e.REVOKED: _rule("_ignore", s.CLOSED_OK),
        },
        s.CLOSED_FAILED: {
            e.BEGIN: _rule("_answer_cancelled", s.CLOSED_FAILED),
            e.DONE: _rule("_answer_ack", s.CLOSED_FAILED),
            e.FAILED: _rule("_answer_ack", s.CLOSED_FAILED),
            e.GATE_OPEN: _rule("_ignore", s.CLOSED_FAILED),
            e.CANCEL: _rule("_ignore", s.CLOSED_FAILED),
            e.SETTLE: _rule("_ignore", s.CLOSED_FAILED),
            e.VERIFIED: _rule("_ignore", s.CLOSED_FAILED),  # cancelled while the memory was compared
            e.OVER: _rule("_drop", s.OVER),
            e.REVOKED: _rule("_ignore", s.CLOSED_FAILED),
        },
        s.OVER: {
            e.BEGIN: _rule("_answer_over", s.OVER),
            e.DONE: _rule("_answer_ack", s.OVER),
            e.FAILED: _rule("_answer_ack", s.OVER),
            e.VERIFIED: _rule("_ignore", s.OVER),  # cancelled and over while the memory was compared
        },
    }


def _pair() -> dict[PairState, dict[PairEvent, Rule[PairState]]]:
    s, e = PairState, PairEvent
    ended = (s.DRAIN, s.CLOSED)
    return {
        s.UNATTACHED: {
            e.READY: _rule("_answer_gone", s.UNATTACHED),
            e.REFUSED: _rule("_ignore", s.UNATTACHED),
            e.CANCEL: _rule("_answer_gone", s.UNATTACHED),
            e.ACK: _rule("_ignore", s.UNATTACHED),
            e.OPEN: _rule("_ask", s.ASK),
        },
        s.ASK: {
            e.READY: _rule("_authorise", s.ASK, s.PUSH, *ended),
            e.REFUSED: _rule("_fail_by_peer", *ended),
            e.CANCEL: _rule("_fail_by_peer", *ended),
            e.ACK: _rule("_answer_unexpected", s.ASK),
            e.OFFER: _rule("_take", s.ASK),
            e.SEAL: _rule("_seal", s.ASK),
            e.RESTART: _rule("_restart", s.ASK),
            e.FAIL: _rule("_drain", *ended),
            e.UNREACHABLE: _rule("_fail_by_event", *ended),
            e.RENEW: _rule("_begin", s.ASK),
            e.READY_TIMEOUT: _rule("_fail_by_event", *ended),
        },
        s.PUSH: {
            e.READY: _rule("_authorise", s.PUSH, *ended),
            e.REFUSED: _rule("_fail_by_peer", *ended),
            e.CANCEL: _rule("_fail_by_peer", *ended),
            e.ACK: _rule("_answer_unexpected", s.PUSH),
            e.OFFER: _rule("_take", s.PUSH),
            e.SEAL: _rule("_seal", s.PUSH, s.CLOSED),
            e.RESTART: _rule("_restart", s.PUSH),
            e.CLAIM: _rule("_hand_out", s.PUSH),
            e.RETURN: _rule("_take_back", s.PUSH),
            e.SUBMITTED: _rule("_look_again", s.PUSH, *ended),
            e.LANDED: _rule("_cover", s.PUSH, s.CLOSED),
            e.LOST: _rule("_fail_by_loss", *ended),
            e.FAIL: _rule("_drain", *ended),
            e.UNREACHABLE: _rule("_ignore", s.PUSH),  # authority decides how long to go on
            e.RENEW: _rule("_begin", s.PUSH),
            e.AUTHORITY_OVER: _rule("_fail_by_event", *ended),
        },
        s.DRAIN: {
            e.READY: _rule("_ignore", s.DRAIN),
            e.REFUSED: _rule("_ignore", s.DRAIN),
            e.CANCEL: _rule("_ignore", s.DRAIN),  # the final word follows, and is repeated
            e.ACK: _rule("_acknowledged", s.DRAIN),
            e.OFFER: _rule("_ignore", s.DRAIN),
            e.SEAL: _rule("_ignore", s.DRAIN),
            e.RESTART: _rule("_ignore", s.DRAIN),
            e.RETURN: _rule("_take_back", *ended),
            e.SUBMITTED: _rule("_ignore", s.DRAIN),
            e.LANDED: _rule("_cover", *ended),
            e.LOST: _rule("_lose", s.DRAIN),
            e.FAIL: _rule("_ignore", s.DRAIN),
            e.UNREACHABLE: _rule("_ignore", s.DRAIN),
            e.QUIET: _rule("_settle", *ended),
        },
        s.CLOSED: {
            e.READY: _rule("_ignore", s.CLOSED),
            e.REFUSED: _rule("_ignore", s.CLOSED),
            e.CANCEL: _rule("_repeat", s.CLOSED),
            e.ACK: _rule("_acknowledged", s.CLOSED),
            e.OFFER: _rule("_ignore", s.CLOSED),
            e.SEAL: _rule("_ignore", s.CLOSED),
            e.RESTART: _rule("_ignore", s.CLOSED),
            e.FAIL: _rule("_ignore", s.CLOSED),
            e.UNREACHABLE: _rule("_ignore", s.CLOSED),
        },
    }


RESERVATION_TABLE: Mapping[ReservationState, Mapping[ReservationEvent, Rule[ReservationState]]] = _reservation()
PAIR_TABLE: Mapping[PairState, Mapping[PairEvent, Rule[PairState]]] = _pair()
