# SPDX-License-Identifier: Apache-2.0
"""The states and events of the machines, and what a cell of their tables is.

A message or a timer may mean different things to one state. `guards.py` says which, before the table is asked: every
event below has exactly one outcome in a state.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.messages import Message

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)
M = TypeVar("M", bound=Message, covariant=True)


class Named(enum.Enum):
    """A member is itself only: tables are asked all the time, and need no hash of its name."""

    __hash__ = object.__hash__


class ReservationState(Named):
    """D: one transfer on one D rank."""

    UNBOUND = "unbound"  # its number is above the watermark: this worker has not heard of it yet
    GATED = "gated"  # bound, but the device may still be busy with the blocks' earlier life
    OPEN = "open"  # contributors may write
    VERIFYING = "verifying"  # all done; the memory is being compared with the checksums
    FENCING = "fencing"  # failed; blocks are kept until every contributor is quiet
    CLOSED_OK = "closed_ok"
    CLOSED_FAILED = "closed_failed"
    OVER = "over"  # at or below the watermark and no record: long finished


class ReservationEvent(Named):
    # a BEGIN. Only an open transfer tells them apart; elsewhere each is the first
    BEGIN = "begin"  # asks for a lease that it may have
    FIRST_BEGIN = "first_begin"  # the same, and it is the one that binds the push, its plan and its set
    BEGIN_AGAIN = "begin_again"  # the same question once more
    LATE_BEGIN = "late_begin"  # an older question, or of one that is done
    BEGIN_OF_GONE = "begin_of_gone"  # its process has ended
    BEGIN_OF_ANOTHER = "begin_of_another"  # another push, or another process, than the one that was granted
    BEGIN_UNFIT = "begin_unfit"  # version, model, cache, plan or set differ
    BEGIN_UNTOLD = "begin_untold"  # it names a layout that is not known here
    BEGIN_IN_REVOCATION = "begin_in_revocation"  # the addresses are about to change
    RENEW = "renew"  # asks for what was granted to go on; where it may not, it is one of the above
    # a DONE
    DONE = "done"  # of a writer
    LAST_DONE = "last_done"  # every other contributor is done already
    LAST_DONE_TO_VERIFY = "last_done_to_verify"  # the same, and the memory is to be compared with the sums
    WRONG_PLAN_DONE = "wrong_plan_done"  # of a writer that worked after another plan
    LATE_DONE = "late_done"  # of one that is not writing any more
    EARLY_DONE = "early_done"  # of one that was never granted anything
    # a FAILED
    FAILED = "failed"  # and nothing of it can land any more
    LOUD_FAILED = "loud_failed"  # what it wrote may still land
    LATE_FAILED = "late_failed"  # of one that is done
    EARLY_FAILED = "early_failed"  # of one that was never granted anything
    # a DONE or FAILED whose author has no say
    WORD_OF_STRANGER = "word_of_stranger"  # no contributor of this push
    WORD_OF_ANOTHER = "word_of_another"  # another process than the one that was granted
    # from our own scheduler and runtime
    BIND = "bind"
    GATE_OPEN = "gate_open"
    CANCEL = "cancel"
    SETTLE = "settle"
    VERIFIED = "verified"
    CORRUPT = "corrupt"  # the memory is not what the sums say
    OVER = "over_said"
    # time, and proofs that a contributor is quiet
    DEADLINE = "deadline"
    LAPSE = "lapse"
    PROVEN = "proven"  # time may have proven somebody quiet
    REVOKED = "revoked"
    CUT = "revoked_while_written"  # somebody could write when access was revoked
    ALL_QUIET = "all_quiet"  # nobody is leased any more


class WriterState(Named):
    """D: one contributor of one transfer."""

    AWAITED = "awaited"  # has never been granted anything
    LEASED = "leased"  # may be writing
    ANSWERED = "answered"  # says that nothing of it can land any more; older bytes may wait in our own buffers
    DONE = "done"  # has said that all is written
    QUIET = "quiet"  # nothing of it can land any more


class WriterEvent(Named):
    GRANTED = "granted"  # a READY leaves
    DONE = "done"
    ANSWER = "answer"  # FAILED(quiescent)
    PROVEN = "proven"  # its process is gone and its time is over, or its answer has rested
    REVOKED = "revoked"


class PairState(Named):
    """P: one push towards one D rank."""

    UNATTACHED = "unattached"  # source or reservation is still missing, or all is over: no record
    ASK = "ask"  # BEGIN sent, no authority yet
    PUSH = "push"
    DRAIN = "drain"  # no new write; those that are out come home
    CLOSED = "closed"


class PairEvent(Named):
    # a READY. Only a pair that asks or writes tells them apart; elsewhere each is the first
    READY = "ready"
    READY_UNASKED = "ready_unasked"  # to no BEGIN that we know of
    READY_LATE = "ready_late"  # its authority is over, or shorter than ours
    READY_BARE = "ready_bare"  # its addresses are neither told nor known
    READY_MOVED = "ready_moved"  # D has revoked the memory that we wrote to
    READY_UNFIT = "ready_unfit"  # its addresses are not of the cache that was planned for
    # other messages from D
    REFUSED = "refused"
    WHICH = "which"  # the layout is not known there
    WHICH_AGAIN = "which_again"  # it was told since
    CANCEL = "cancel"
    ACK = "ack"  # of our last word, where there is one
    ACK_OF_ANOTHER = "ack_of_another"  # of an earlier word
    # from our own scheduler, forward pass and writer
    OPEN = "open"
    OFFER = "offer"
    SEAL = "seal"
    RESTART = "restart"
    CLAIM = "claim"
    RETURN = "return"  # a claim was not submitted after all
    SUBMITTED = "submitted"
    SUBMITTED_LATE = "submitted_late"  # the submission returned when authority was over
    LANDED = "landed"
    LOST = "lost"  # the transport said -1: it may still land
    # what ends a push early
    FAIL = "fail"  # told to each pair of a push that fails, for whatever reason
    UNREACHABLE = "unreachable"
    # time
    RENEW = "renew"
    READY_TIMEOUT = "ready_timeout"
    AUTHORITY_OVER = "authority_over"
    # nothing is out any more, and what was lost is T ago
    QUIET = "quiet"  # something is owed
    COMPLETE = "complete"  # sealed, and all has landed


@dataclass(frozen=True, slots=True)
class Heard(Generic[M]):
    """What a message brings to a machine. `peer` is what the channel calls its sender."""

    peer: Hashable
    message: M


@dataclass(frozen=True, slots=True)
class Cell(Generic[S]):
    """What an event does in a state: the state that follows is set, then the effect happens, in that state."""

    into: S
    effect: Callable[..., None]  # of the machine, the time, the record, and what came with the event
    counted: str = ""


Table = Mapping[S, Mapping[E, Cell[S]]]


def enter(table: Table[S, E], state: S, event: E, counters: Counter[str], of: object) -> Cell[S]:
    """The cell, counted. Illegal events have none and change nothing; every state has one for every message."""
    cell = table[state].get(event)
    if cell is None:
        raise LocalProtocolError(f"{event.value} in state {state.value} of {of}")
    if cell.counted:
        counters[cell.counted] += 1
    return cell
