# SPDX-License-Identifier: Apache-2.0
"""The two state machines of a transfer, as they run: each event's next state and effect in each state.

A cell's state is set first, then its effect runs. An effect may cause a further event: `fence` may find that no
contributor has to be waited for, `cover` that all has landed, and a push that fails on one pair fails on all. An event
without a cell is illegal and raises LocalProtocolError. The table of a third machine, of one writer, is in
`transfer.py`.
"""

from __future__ import annotations

from vllm_ascend_pd.protocol.push_rules import PairMachine
from vllm_ascend_pd.protocol.reservation_rules import ReservationMachine
from vllm_ascend_pd.protocol.states import Cell, PairEvent, PairState, ReservationEvent, ReservationState, Table, idle


def _reservation() -> Table[ReservationState, ReservationEvent]:
    s, e, do = ReservationState, ReservationEvent, ReservationMachine
    return {
        s.UNBOUND: {
            e.BEGIN: Cell(s.UNBOUND, do.park),
            e.RENEW: Cell(s.UNBOUND, do.ignore, "early_renew"),
            e.DONE: Cell(s.UNBOUND, do.acknowledge, "unexpected_done"),
            e.FAILED: Cell(s.UNBOUND, do.park_failure),
            e.BIND: Cell(s.GATED, do.bind),
        },
        s.GATED: {
            e.BEGIN: Cell(s.GATED, do.park),
            e.RENEW: Cell(s.GATED, do.ignore, "early_renew"),
            e.DONE: Cell(s.GATED, do.acknowledge, "unexpected_done"),
            e.FAILED: Cell(s.FENCING, do.fail),
            e.GATE_OPEN: Cell(s.OPEN, do.open),
            e.CANCEL: Cell(s.FENCING, do.fence),
            e.SETTLE: Cell(s.GATED, do.settle),
            e.DEADLINE: Cell(s.FENCING, do.fence),
            e.REVOKED: Cell(s.GATED, do.ignore),
        },
        s.OPEN: {
            e.BEGIN: Cell(s.OPEN, do.grant),
            e.RENEW: Cell(s.OPEN, do.grant),
            e.FIRST_BEGIN: Cell(s.OPEN, do.grant_first),
            e.BEGIN_AGAIN: Cell(s.OPEN, do.grant_again),
            e.LATE_BEGIN: Cell(s.OPEN, do.ignore, "late_begin"),
            e.BEGIN_OF_GONE: Cell(s.OPEN, do.ignore, "begin_of_the_gone"),
            e.BEGIN_OF_ANOTHER: Cell(s.OPEN, do.refuse),
            e.BEGIN_UNFIT: Cell(s.OPEN, do.refuse),
            e.BEGIN_UNKNOWN_LAYOUT: Cell(s.OPEN, do.ask_which, "begin_unknown_layout"),
            e.BEGIN_IN_REVOCATION: Cell(s.OPEN, do.park),
            e.DONE: Cell(s.OPEN, do.finish),
            e.LAST_DONE: Cell(s.CLOSED_OK, do.finish_last),
            e.LAST_DONE_TO_VERIFY: Cell(s.VERIFYING, do.finish_and_verify),
            e.WRONG_PLAN_DONE: Cell(s.FENCING, do.fail_other_plan),
            e.LATE_DONE: Cell(s.OPEN, do.acknowledge, "late_done"),
            e.EARLY_DONE: Cell(s.OPEN, do.acknowledge, "unexpected_done"),
            e.FAILED: Cell(s.FENCING, do.fail_quietly),
            e.FAILED_IN_FLIGHT: Cell(s.FENCING, do.fail),
            e.LATE_FAILED: Cell(s.OPEN, do.acknowledge),
            e.EARLY_FAILED: Cell(s.FENCING, do.fail),
            e.NOT_A_CONTRIBUTOR: Cell(s.OPEN, do.acknowledge, "not_a_contributor"),
            e.OTHER_PROCESS: Cell(s.OPEN, do.acknowledge, "other_incarnation"),
            e.CANCEL: Cell(s.FENCING, do.fence),
            e.SETTLE: Cell(s.OPEN, do.settle),
            e.DEADLINE: Cell(s.FENCING, do.fence),
            e.LAPSE: Cell(s.FENCING, do.fence),
            e.REVOKED: Cell(s.OPEN, do.ignore),
            e.CUT: Cell(s.FENCING, do.fail_cut),
        },
        s.VERIFYING: {
            e.BEGIN: Cell(s.VERIFYING, do.refuse_over),
            e.RENEW: Cell(s.VERIFYING, do.refuse_over),
            e.DONE: Cell(s.VERIFYING, do.acknowledge),
            e.FAILED: Cell(s.VERIFYING, do.acknowledge),
            e.CANCEL: Cell(s.FENCING, do.fence),
            e.VERIFIED: Cell(s.CLOSED_OK, do.report),
            e.CORRUPT: Cell(s.CLOSED_FAILED, do.report_corrupt),
            e.DEADLINE: Cell(s.FENCING, do.fence),
            **idle(s.VERIFYING, do.ignore, e.SETTLE, e.REVOKED),
        },
        s.FENCING: {
            e.BEGIN: Cell(s.FENCING, do.refuse_cancelled),
            e.RENEW: Cell(s.FENCING, do.refuse_cancelled),
            e.DONE: Cell(s.FENCING, do.receive_done),
            e.LATE_DONE: Cell(s.FENCING, do.acknowledge),
            e.FAILED: Cell(s.FENCING, do.receive_quiet),
            e.FAILED_IN_FLIGHT: Cell(s.FENCING, do.acknowledge),
            e.NOT_A_CONTRIBUTOR: Cell(s.FENCING, do.acknowledge, "not_a_contributor"),
            e.OTHER_PROCESS: Cell(s.FENCING, do.acknowledge, "other_incarnation"),
            e.PROVEN: Cell(s.FENCING, do.prove),
            e.REVOKED: Cell(s.FENCING, do.revoke),
            e.ALL_QUIET: Cell(s.CLOSED_FAILED, do.report),
            **idle(s.FENCING, do.ignore, e.GATE_OPEN, e.CANCEL, e.SETTLE),
        },
        s.CLOSED_OK: {
            e.BEGIN: Cell(s.CLOSED_OK, do.refuse_over),
            e.RENEW: Cell(s.CLOSED_OK, do.refuse_over),
            e.DONE: Cell(s.CLOSED_OK, do.acknowledge),
            e.FAILED: Cell(s.CLOSED_OK, do.acknowledge),
            e.OVER: Cell(s.OVER, do.drop),
            **idle(s.CLOSED_OK, do.ignore, e.CANCEL, e.SETTLE, e.REVOKED),
        },
        s.CLOSED_FAILED: {
            e.BEGIN: Cell(s.CLOSED_FAILED, do.refuse_cancelled),
            e.RENEW: Cell(s.CLOSED_FAILED, do.refuse_cancelled),
            e.DONE: Cell(s.CLOSED_FAILED, do.acknowledge),
            e.FAILED: Cell(s.CLOSED_FAILED, do.acknowledge),
            e.OVER: Cell(s.OVER, do.drop),
            **idle(s.CLOSED_FAILED, do.ignore, e.GATE_OPEN, e.CANCEL, e.SETTLE, e.REVOKED),
            **idle(s.CLOSED_FAILED, do.ignore, e.VERIFIED, e.CORRUPT),  # cancelled while the memory was compared
        },
        s.OVER: {
            e.BEGIN: Cell(s.OVER, do.refuse_over),
            e.RENEW: Cell(s.OVER, do.refuse_over),
            e.DONE: Cell(s.OVER, do.acknowledge),
            e.FAILED: Cell(s.OVER, do.acknowledge),
            **idle(s.OVER, do.ignore, e.VERIFIED, e.CORRUPT),  # cancelled and over while the memory was compared
        },
    }


def _pair() -> Table[PairState, PairEvent]:
    s, e, do = PairState, PairEvent, PairMachine
    return {
        s.UNATTACHED: {
            e.READY: Cell(s.UNATTACHED, do.answer_gone, "unknown_ready"),
            e.REFUSED: Cell(s.UNATTACHED, do.ignore, "ignored_refused"),
            e.WHICH: Cell(s.UNATTACHED, do.ignore, "ignored_which"),
            e.CANCEL: Cell(s.UNATTACHED, do.answer_gone, "unknown_cancel"),
            e.ACK: Cell(s.UNATTACHED, do.ignore, "ignored_ack"),
            e.OPEN: Cell(s.ASK, do.ask),
        },
        s.ASK: {
            e.READY: Cell(s.PUSH, do.start),
            e.READY_UNASKED: Cell(s.ASK, do.ignore, "ready_unasked"),
            e.READY_LATE: Cell(s.ASK, do.ignore, "ready_late"),
            e.READY_NO_ADDRESSES: Cell(s.ASK, do.ignore, "ready_without_addresses"),
            e.READY_UNFIT: Cell(s.ASK, do.fail_unfit),
            e.REFUSED: Cell(s.ASK, do.fail_refused),
            e.WHICH: Cell(s.ASK, do.ask_with_layout),
            e.WHICH_AGAIN: Cell(s.ASK, do.ignore, "ignored_which"),
            e.CANCEL: Cell(s.ASK, do.fail_refused),
            e.ACK: Cell(s.ASK, do.ignore, "unexpected_ack"),
            e.OFFER: Cell(s.ASK, do.take),
            e.SEAL: Cell(s.ASK, do.ignore),
            e.RESTART: Cell(s.ASK, do.restart),
            e.FAIL: Cell(s.DRAIN, do.drain),
            e.UNREACHABLE: Cell(s.ASK, do.fail_for),
            e.RENEW: Cell(s.ASK, do.ask_again),
            e.READY_TIMEOUT: Cell(s.ASK, do.fail_for),
        },
        s.PUSH: {
            e.READY: Cell(s.PUSH, do.extend),
            e.READY_UNASKED: Cell(s.PUSH, do.ignore, "ready_unasked"),
            e.READY_LATE: Cell(s.PUSH, do.ignore, "ready_late"),
            e.READY_NO_ADDRESSES: Cell(s.PUSH, do.ignore, "ready_without_addresses"),
            e.READY_MOVED: Cell(s.PUSH, do.fail_moved),
            e.READY_UNFIT: Cell(s.PUSH, do.fail_unfit),
            e.REFUSED: Cell(s.PUSH, do.fail_refused),
            e.WHICH: Cell(s.PUSH, do.ignore, "ignored_which"),
            e.CANCEL: Cell(s.PUSH, do.fail_refused),
            e.ACK: Cell(s.PUSH, do.ignore, "unexpected_ack"),
            e.OFFER: Cell(s.PUSH, do.take_to_write),
            e.SEAL: Cell(s.PUSH, do.close_if_finished),
            e.RESTART: Cell(s.PUSH, do.restart),
            e.CLAIM: Cell(s.PUSH, do.hand_out),
            e.RETURN: Cell(s.PUSH, do.return_claim),
            e.SUBMITTED: Cell(s.PUSH, do.ignore),
            e.SUBMITTED_LATE: Cell(s.PUSH, do.fail_late),
            e.LANDED: Cell(s.PUSH, do.cover),
            e.LOST: Cell(s.PUSH, do.fail_lost),
            e.FAIL: Cell(s.DRAIN, do.drain),
            e.UNREACHABLE: Cell(s.PUSH, do.ignore),  # authority decides how long to go on
            e.RENEW: Cell(s.PUSH, do.renew),
            e.AUTHORITY_OVER: Cell(s.PUSH, do.fail_for),
            e.COMPLETE: Cell(s.CLOSED, do.close_done),
        },
        s.DRAIN: {
            e.READY: Cell(s.DRAIN, do.ignore, "ignored_ready"),
            e.REFUSED: Cell(s.DRAIN, do.ignore, "ignored_refused"),
            e.WHICH: Cell(s.DRAIN, do.ignore, "ignored_which"),
            e.CANCEL: Cell(s.DRAIN, do.ignore, "ignored_cancel"),  # DONE or FAILED follows, and is repeated
            e.ACK: Cell(s.DRAIN, do.stop_resending),
            e.RETURN: Cell(s.DRAIN, do.return_claim_draining),
            e.LANDED: Cell(s.DRAIN, do.cover),
            e.LOST: Cell(s.DRAIN, do.lose),
            e.QUIET: Cell(s.CLOSED, do.close_failed),
            e.COMPLETE: Cell(s.CLOSED, do.close_done),
            **idle(s.DRAIN, do.ignore, e.ACK_OF_ANOTHER, e.OFFER, e.SEAL, e.RESTART, e.SUBMITTED),
            **idle(s.DRAIN, do.ignore, e.FAIL, e.UNREACHABLE),
        },
        s.CLOSED: {
            e.READY: Cell(s.CLOSED, do.ignore, "ignored_ready"),
            e.REFUSED: Cell(s.CLOSED, do.ignore, "ignored_refused"),
            e.WHICH: Cell(s.CLOSED, do.ignore, "ignored_which"),
            e.CANCEL: Cell(s.CLOSED, do.repeat),
            e.ACK: Cell(s.CLOSED, do.stop_resending),
            **idle(s.CLOSED, do.ignore, e.ACK_OF_ANOTHER, e.OFFER, e.SEAL, e.RESTART, e.FAIL, e.UNREACHABLE),
        },
    }


RESERVATION_TABLE: Table[ReservationState, ReservationEvent] = _reservation()
PAIR_TABLE: Table[PairState, PairEvent] = _pair()
