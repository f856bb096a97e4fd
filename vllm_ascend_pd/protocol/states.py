# SPDX-License-Identifier: Apache-2.0
"""States and events of the state machines, and the cells of their tables.

A message or a timer may mean different things in one state. `guards.py` decides which event it is before the table is
consulted, so every event below has exactly one outcome in a state.
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


class IdentityEnum(enum.Enum):
    """Enum whose members hash by identity: tables are consulted all the time, and need no hash of a name."""

    __hash__ = object.__hash__


class ReservationState(IdentityEnum):
    """D: one transfer on one D rank."""

    UNBOUND = "unbound"  # its number is above the watermark: this worker has not bound it yet
    GATED = "gated"  # bound, but the device may still be busy with the blocks' earlier life
    OPEN = "open"  # contributors may write
    VERIFYING = "verifying"  # all done; the memory is being compared with the checksums
    FENCING = "fencing"  # failed; blocks are kept until every contributor is quiet
    CLOSED_OK = "closed_ok"
    CLOSED_FAILED = "closed_failed"
    OVER = "over"  # at or below the watermark and no record: long finished


class ReservationEvent(IdentityEnum):
    # a BEGIN. guards.py distinguishes these in the state OPEN; in any other state each BEGIN is BEGIN
    BEGIN = "begin"  # in OPEN: it gets the lease that it asks for
    FIRST_BEGIN = "first_begin"  # it gets the lease, and binds the push, its plan and its contributors
    BEGIN_AGAIN = "begin_again"  # the seq that was granted last, once more
    LATE_BEGIN = "late_begin"  # an older seq, or a writer that may not write any more
    BEGIN_OF_GONE = "begin_of_gone"  # its process has ended
    BEGIN_OF_ANOTHER = "begin_of_another"  # another push, or another process, than the one that was granted
    BEGIN_UNFIT = "begin_unfit"  # version, model, cache, plan or contributors differ
    BEGIN_UNKNOWN_LAYOUT = "begin_unknown_layout"  # it names a layout that is not known here
    BEGIN_IN_REVOCATION = "begin_in_revocation"  # the addresses are about to change
    RENEW = "renew"  # it gets the lease again; a RENEW that does not is one of the BEGIN events above
    # a DONE
    DONE = "done"  # of a writer that has to be waited for
    LAST_DONE = "last_done"  # every other contributor is done already
    LAST_DONE_TO_VERIFY = (
        "last_done_to_verify"  # every other contributor is done already, and the memory is to be compared with the sums
    )
    WRONG_PLAN_DONE = "wrong_plan_done"  # of a writer that followed another plan
    LATE_DONE = "late_done"  # of one that is not writing any more
    EARLY_DONE = "early_done"  # of one that was never granted anything
    # a FAILED
    FAILED = "failed"  # and nothing of it can land any more
    FAILED_IN_FLIGHT = "failed_in_flight"  # what it wrote may still land
    LATE_FAILED = "late_failed"  # of one that is done
    EARLY_FAILED = "early_failed"  # of one that was never granted anything
    # a DONE or FAILED of an unauthorised sender
    NOT_A_CONTRIBUTOR = "not_a_contributor"  # not of a contributor, or of another push
    OTHER_PROCESS = "other_process"  # another process than the one that was granted
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
    PROVEN = "proven"  # time to check whether a contributor is quiet by now
    REVOKED = "revoked"
    CUT = "revoked_while_written"  # a contributor could write when access was revoked
    ALL_QUIET = "all_quiet"  # no contributor has to be waited for any more


class WriterState(IdentityEnum):
    """D: one contributor of one transfer."""

    AWAITED = "awaited"  # has never been granted anything
    LEASED = "leased"  # may be writing
    ANSWERED = "answered"  # says that nothing of it can land any more; earlier bytes may still wait in local buffers
    DONE = "done"  # has said that all is written
    QUIET = "quiet"  # nothing of it can land any more


class WriterEvent(IdentityEnum):
    GRANTED = "granted"  # a READY is sent
    DONE = "done"
    ANSWER = "answer"  # FAILED(quiescent)
    PROVEN = "proven"  # its process is gone and its time is over, or its answer was waited on long enough
    REVOKED = "revoked"


class PairState(IdentityEnum):
    """P: one push towards one D rank."""

    UNATTACHED = "unattached"  # source or reservation is still missing, or all is over: no record
    ASK = "ask"  # BEGIN sent, no authority yet
    PUSH = "push"
    DRAIN = "drain"  # no new write; those that are out are waited for
    CLOSED = "closed"


class PairEvent(IdentityEnum):
    # a READY. guards.py distinguishes these in the states ASK and PUSH; in any other state each READY is READY
    READY = "ready"
    READY_UNASKED = "ready_unasked"  # answers no BEGIN or RENEW on record
    READY_LATE = "ready_late"  # its authority is over, or ends no later than the present one
    READY_NO_ADDRESSES = "ready_no_addresses"  # its addresses are neither in it nor known
    READY_MOVED = "ready_moved"  # D has revoked the memory that we wrote to
    READY_UNFIT = "ready_unfit"  # its addresses are not of the cache that was planned for
    # other messages from D
    REFUSED = "refused"
    WHICH = "which"  # D does not know the layout
    WHICH_AGAIN = "which_again"  # the layout was sent since
    CANCEL = "cancel"
    ACK = "ack"  # of the DONE or FAILED sent last, if there is one
    ACK_OF_ANOTHER = "ack_of_another"  # of an earlier one
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
    LOST = "lost"  # the transport reports a failure: it may still land
    # what ends a push early
    FAIL = "fail"  # of each pair of a push that fails, for whatever reason
    UNREACHABLE = "unreachable"
    # time
    RENEW = "renew"
    READY_TIMEOUT = "ready_timeout"
    AUTHORITY_OVER = "authority_over"
    # no write is in flight any more, and T has passed since the last lost one
    QUIET = "quiet"  # not all has landed, or the push is not sealed
    COMPLETE = "complete"  # sealed, and all has landed


@dataclass(frozen=True, slots=True)
class Incoming(Generic[M]):
    """A message and its sender. `peer` is the channel's name for the sender."""

    peer: Hashable
    message: M


@dataclass(frozen=True, slots=True)
class Cell(Generic[S]):
    """Outcome of an event in a state: the next state is set first, then the effect runs in it."""

    into: S
    effect: Callable[..., None]  # takes the machine, the time, the record, and the event's cause
    counted: str = ""


Table = Mapping[S, Mapping[E, Cell[S]]]


def idle(state: S, ignore: Callable[..., None], *events: E) -> dict[E, Cell[S]]:
    """Return cells of events that change nothing."""
    return {event: Cell(state, ignore) for event in events}


def look_up(table: Table[S, E], state: S, event: E, counters: Counter[str], of: object) -> Cell[S]:
    """Return the cell of an event in a state, and count it.

    Raise LocalProtocolError if there is none. That is an error of this package: each message has a cell in each state.
    """
    cell = table[state].get(event)
    if cell is None:
        raise LocalProtocolError(f"{event.value} in state {state.value} of {of}")
    if cell.counted:
        counters[cell.counted] += 1
    return cell
