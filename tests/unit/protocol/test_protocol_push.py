# SPDX-License-Identifier: Apache-2.0
"""P's guarantees: it writes only with authority, closes only when no write is out, and always reports how it ended."""

from __future__ import annotations

import pytest

from unit.protocol.kit import (
    ADDRESSES,
    DIGEST,
    ONE,
    PUSH,
    QUIET,
    TIMERS,
    TWO,
    T,
    ack,
    as_text,
    cancel,
    claim_of,
    messages,
    opened,
    order,
    ready,
    refused,
    run_until,
    sender,
)
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.actions import Closed
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Begin, Cancel, Done, Failed, Ready, Refused, Renew, memory_hash
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.protocol.states import PairState
from vllm_ascend_pd.protocol.timing import authority_until, landed_s, settled_s

AUTHORITY = authority_until(0.0, TIMERS.lease_s)
H = landed_s(TIMERS.lease_s, QUIET, TIMERS.margin_s)


def asking(ranks: tuple[int, ...] = (0,), **changes: object) -> Sender:
    s = sender(**changes)
    s.open(0.0, order(ranks))
    return s


def pushing(ranks: tuple[int, ...] = (0,), **changes: object) -> Sender:
    s = asking(ranks, **changes)
    for rank in ranks:
        s.message(0.0, f"d{rank}", ready(d_rank=rank))
    return s


def writing(at: float = 0.1) -> tuple[Sender, Claim]:
    """A sender with a unit that is out, and its claim."""
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    return s, claim_of(s, at)


def begins(s: Sender, start: float, end: float) -> list[float]:
    """Times at which a BEGIN or RENEW is sent without an answer."""
    times, at = [], start
    while (wake := s.next_wake()) is not None and wake <= end:
        at = max(at, wake)
        if messages(s.tick(at), Begin, Renew):
            times.append(round(at, 3))
    return times


# ---- asking


def test_begin_carries_what_decode_compares() -> None:
    s = sender()
    (asked,) = messages(s.open(0.0, order()))
    assert (asked.transfer, asked.push, asked.seq, asked.d_incarnation) == (T, PUSH, 1, T.incarnation)
    assert (asked.plan_digest, asked.quiet_s, asked.known_memory) == (DIGEST, QUIET, "")


@pytest.mark.parametrize("message", [ready(), refused(), cancel()], ids=lambda m: type(m).__name__)
def test_another_decode_rank_has_no_say_in_a_push(message: Ready | Refused | Cancel) -> None:
    """It may know the push's name (a log, a trace): addresses and ends are accepted only from the rank that was
    asked."""
    s = asking()
    assert s.message(0.1, "d7", message) == []
    assert s.state(PUSH, 0) is PairState.ASK and opened(s).pairs[0].addresses is None
    assert s.counters["wrong_peer"] == 1
    s.message(0.2, "d0", ready())
    assert s.state(PUSH, 0) is PairState.PUSH


def test_begin_is_repeated_with_doubling_gaps_and_a_new_seq() -> None:
    s = asking()
    assert begins(s, 0.0, 9.0) == [0.2, 0.6, 1.4, 3.0, 5.0, 7.0, 9.0]
    assert opened(s).pairs[0].seq == 8


def test_no_answer_within_the_ready_timeout_fails_the_push() -> None:
    s = asking()
    assert "closed" not in as_text(run_until(s, 0.0, TIMERS.ready_timeout_s - 0.01))
    assert as_text(run_until(s, TIMERS.ready_timeout_s - 0.01, TIMERS.ready_timeout_s)) == "failed:quiet closed:failed"


def test_a_peer_that_cannot_be_reached_fails_a_push_that_asks_and_not_one_that_writes() -> None:
    assert as_text(asking().unreachable(1.0, "d0", "refused")) == "failed:quiet closed:failed"
    assert as_text(asking().unreachable(1.0, "d7", "refused")) == ""
    assert as_text(pushing().unreachable(1.0, "d0", "refused")) == ""


def test_a_push_with_nowhere_to_go_closes_at_once() -> None:
    s = sender()
    assert as_text(s.open(0.0, order(()))) == "closed:ok"
    assert s.record_count() == 0


def test_opening_twice_is_our_own_error() -> None:
    s = asking()
    with pytest.raises(LocalProtocolError):
        s.open(1.0, order())
    with pytest.raises(LocalProtocolError):
        sender().open(0.0, order((0, 0)))


# ---- authority


def test_nothing_is_handed_out_before_ready() -> None:
    s = asking()
    s.offer(0.0, opened(s), 0, "unit", 10)
    assert s.claim(0.1) == []
    s.message(0.2, "d0", ready())
    assert [c.unit for c in s.claim(0.3)] == ["unit"]
    assert s.claim(0.4) == [], "handed out once"


def test_authority_counts_from_when_begin_was_sent() -> None:
    s = asking()
    s.message(10.0, "d0", ready())
    assert opened(s).pairs[0].authority == pytest.approx(AUTHORITY)
    s.offer(10.0, opened(s), 0, "unit", 10)
    assert s.claim(AUTHORITY) == []
    assert len(s.claim(AUTHORITY - 0.001)) == 1


def test_an_answer_whose_authority_is_over_grants_nothing() -> None:
    s = asking()
    assert s.message(AUTHORITY, "d0", ready()) == []
    assert s.state(PUSH, 0) is PairState.ASK
    assert s.counters["ready_late"] == 1


def test_an_answer_to_a_question_that_was_not_asked_grants_nothing() -> None:
    s = asking()
    s.message(0.1, "d0", ready(seq=77))
    assert s.state(PUSH, 0) is PairState.ASK
    assert s.counters["ready_unasked"] == 1


def test_the_lease_is_renewed_after_a_third() -> None:
    s = pushing()
    assert begins(s, 0.0, TIMERS.lease_s / 3 + 0.3) == [5.0, 5.2]
    s.message(5.3, "d0", ready(seq=2))
    assert opened(s).pairs[0].authority == pytest.approx(5.0 + AUTHORITY)
    assert begins(s, 5.3, 10.1) == [10.0]


def test_a_late_answer_never_shortens_authority() -> None:
    s = pushing()
    s.tick(5.0)
    s.message(5.1, "d0", ready(seq=2))
    s.message(5.2, "d0", ready(seq=1))
    assert opened(s).pairs[0].authority == pytest.approx(5.0 + AUTHORITY)


def test_when_authority_is_over_the_push_fails_and_no_write_starts() -> None:
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    assert as_text(run_until(s, 0.0, AUTHORITY - 0.01)).split()[-1] == "renew"
    s.offer(AUTHORITY - 0.01, opened(s), 0, "another", 10)
    assert as_text(s.tick(AUTHORITY + 0.001)) == "failed:quiet closed:failed"
    assert s.claim(AUTHORITY + 0.002) == []


def test_a_submission_that_outlived_its_authority_fails_the_push() -> None:
    s, claim = writing(at=1.0)
    assert as_text(s.submitted(AUTHORITY - 0.001, claim)) == ""
    assert as_text(s.submitted(AUTHORITY, claim)) == "failed:loud"


def test_a_peer_that_is_held_back_keeps_its_units() -> None:
    s = pushing((0, 1))
    for rank in (0, 1):
        s.offer(0.0, opened(s), rank, "unit", 10)
    assert [c.d_rank for c in s.claim(0.1, lambda peer: peer == "d1")] == [1]
    assert [c.d_rank for c in s.claim(0.2)] == [0]


def test_a_returned_claim_is_handed_out_again() -> None:
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    s.returned(0.2, claim_of(s, 0.1))
    assert not opened(s).pairs[0].coverage.out
    assert claim_of(s, 0.3).unit == "unit"


# ---- addresses


def test_addresses_come_with_ready_and_are_known_to_the_next_push() -> None:
    s = pushing()
    assert opened(s).pairs[0].addresses == ADDRESSES
    (asked,) = messages(s.open(1.0, order(name="push-2", transfer=TransferId(T.incarnation, 8, "u"))), Begin)
    assert asked.known_memory == memory_hash(ADDRESSES)
    s.message(1.1, "d0", ready(push="push-2", transfer=TransferId(T.incarnation, 8, "u"), addresses=None))
    assert opened(s, "push-2").pairs[0].addresses == ADDRESSES


# ---- ending well


def test_done_leaves_when_everything_is_covered_and_sealed() -> None:
    s = pushing()
    for unit in ("a", "b"):
        s.offer(0.1, opened(s), 0, unit, 10)
    s.checksum(opened(s), 0, 4, (2**64 - 1, 5))
    s.checksum(opened(s), 0, 4, (3, 6))
    a, b = s.claim(0.2)
    assert as_text(s.wrote(0.3, a, True)) == ""
    assert as_text(s.seal(0.4, opened(s))) == ""
    actions = s.wrote(0.5, b, True)
    assert as_text(actions) == "done closed:ok"
    (word,) = messages(actions, Done)
    assert (word.bytes, word.plan_digest) == ((20,), DIGEST)
    assert word.checksums == ((4, 0, 2), (4, 1, 11))


def test_a_contributor_that_owns_nothing_says_begin_and_done() -> None:
    s = asking()
    assert as_text(s.seal(0.0, opened(s))) == ""
    assert as_text(s.message(0.1, "d0", ready())) == "done closed:ok"


def test_done_is_repeated_until_it_is_acknowledged_and_closes_before() -> None:
    s = pushing()
    (word,) = messages(s.seal(0.0, opened(s)), Done)
    assert s.open_count() == 0
    assert s.record_count() == 1
    repeated = messages(run_until(s, 0.0, 3.3, 0.1), Done)
    assert len(repeated) == 4
    assert {m.seq for m in repeated} == {word.seq}
    s.message(3.4, "d0", ack("failed", word.seq))
    s.message(3.4, "d0", ack("done", word.seq + 1))
    assert s.record_count() == 1, "another word was acknowledged"
    s.message(3.5, "d0", ack("done", word.seq))
    assert s.record_count() == 0
    assert s.next_wake() is None


def test_a_message_that_is_not_acknowledged_is_given_up_after_h() -> None:
    s = pushing()
    s.seal(0.0, opened(s))
    run_until(s, 0.0, H - 1)
    assert s.record_count() == 1
    run_until(s, H - 1, H + 3)
    assert s.record_count() == 0
    assert s.next_wake() is None


def test_a_push_to_two_ranks_closes_when_both_pairs_have() -> None:
    s = pushing((0, 1))
    for rank in (0, 1):
        s.offer(0.0, opened(s), rank, "unit", 10)
    a, b = s.claim(0.1)
    s.seal(0.2, opened(s))
    assert as_text(s.wrote(0.3, a, True)) == "done"
    assert as_text(s.wrote(0.4, b, True)) == "done closed:ok"


# ---- ending badly


def test_a_lost_write_is_quiet_only_after_the_quiet_time() -> None:
    s, claim = writing()
    assert as_text(s.wrote(1.0, claim, False)) == "failed:loud"
    quiet_at = 1.0 + settled_s(QUIET)
    assert "closed" not in as_text(run_until(s, 1.0, quiet_at - 0.01))
    actions = run_until(s, quiet_at - 0.01, quiet_at + 0.01)
    assert as_text(actions) == "failed:quiet closed:failed"
    (closed,) = [a for a in actions if isinstance(a, Closed)]
    assert closed.failure.code == "PD-XFER-003"


def test_a_stopped_prefill_does_not_count_the_time_it_was_stopped() -> None:
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    s.wrote(1.0, claim_of(s, 0.1), False)
    run_until(s, 1.0, 2.0)
    assert "closed" not in as_text(s.tick(500.0)), "what it had sent may leave only when it goes on"
    assert "closed" not in as_text(run_until(s, 500.0, 500.0 + QUIET - 3))
    assert "closed" in as_text(run_until(s, 500.0 + QUIET - 3, 500.0 + QUIET))


def test_a_push_fails_as_one_on_all_its_pairs() -> None:
    s = pushing((0, 1))
    for rank in (0, 1):
        s.offer(0.0, opened(s), rank, "unit", 10)
    a, b = s.claim(0.1)
    assert as_text(s.wrote(1.0, a, False)) == "failed:loud failed:loud"
    assert as_text(s.wrote(2.0, b, True)) == "failed:quiet"
    assert as_text(run_until(s, 2.0, 1.0 + settled_s(QUIET) + 0.1)).endswith("failed:quiet closed:failed")


@pytest.mark.parametrize(
    "message", [cancel(), refused(failure=Failure("PD-GEO-001", "mismatch: dtype: prefill a, decode b"))]
)
def test_decode_can_stop_a_push(message: object) -> None:
    s, claim = writing()
    s.offer(0.2, opened(s), 0, "later", 10)
    assert as_text(s.message(0.3, "d0", message)) == "failed:loud"  # type: ignore[arg-type]
    assert s.claim(0.4) == []
    actions = s.wrote(0.5, claim, True)
    assert as_text(actions) == "failed:quiet closed:failed"
    (closed,) = [a for a in actions if isinstance(a, Closed)]
    if not isinstance(message, type(cancel())):
        assert (closed.failure.code, "dtype" in closed.failure.detail) == ("PD-GEO-001", True)


def test_cancel_of_a_push_that_is_covered_is_answered_with_done() -> None:
    s, claim = writing()
    s.seal(0.2, opened(s))
    s.message(0.3, "d0", cancel())
    assert as_text(s.wrote(0.4, claim, True)) == "done closed:ok"


def test_done_is_not_said_for_what_was_offered_after_the_failure() -> None:
    """Found by the simulator: a writer stopped in a submission went on, failed, and then its step went on."""
    s, claim = writing()
    s.submitted(AUTHORITY + 4.0, claim)
    s.offer(AUTHORITY + 4.1, opened(s), 0, "the last layer", 10)
    s.seal(AUTHORITY + 4.2, opened(s))
    assert as_text(s.wrote(AUTHORITY + 4.3, claim, True)) == "failed:quiet closed:failed"


def test_done_is_not_said_when_the_blocks_may_have_gone() -> None:
    """Found by the simulator: preempted in its last step while a write was out."""
    s, claim = writing()
    s.seal(0.2, opened(s))
    s.abort(0.3, opened(s), Failure("PD-XFER-001", "writes did not return before preemption"))
    assert as_text(s.wrote(0.4, claim, True)) == "failed:quiet closed:failed"


def test_done_is_not_said_when_a_failing_push_is_preempted() -> None:
    s, claim = writing()
    s.seal(0.2, opened(s))
    s.message(0.3, "d0", cancel())
    s.restart(0.4, opened(s))
    assert as_text(s.wrote(0.5, claim, True)) == "failed:quiet closed:failed"


def test_cancel_of_a_closed_push_repeats_its_last_word() -> None:
    s = pushing()
    s.seal(0.0, opened(s))
    assert as_text(s.message(0.1, "d0", cancel())) == "done"


def test_cancel_of_an_unknown_push_is_answered_quiet() -> None:
    (answer,) = messages(sender().message(0.0, "d0", cancel()), Failed)
    assert (answer.quiescent, answer.push, answer.p_incarnation) == (True, PUSH, "prefill-P0.0")


def test_ready_after_cancel_is_ignored() -> None:
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    claim_of(s, 0.1)
    s.message(0.2, "d0", cancel())
    s.tick(0.3)
    s.message(0.3, "d0", ready())
    s.offer(0.4, opened(s), 0, "later", 10)
    assert s.claim(0.5) == []


def test_the_local_deadline_fails_the_push() -> None:
    s = sender()
    s.open(0.0, order(deadline_s=12.0))
    s.message(0.0, "d0", ready())
    assert "closed" not in as_text(run_until(s, 0.0, 11.99))
    assert "closed:failed" in as_text(run_until(s, 11.99, 12.0))


def test_a_push_without_progress_stalls() -> None:
    s = pushing(timers=type(TIMERS)(stall_timeout_s=7.0))
    s.offer(1.0, opened(s), 0, "unit", 10)
    claim = claim_of(s, 2.0)
    assert "failed" not in as_text(run_until(s, 2.0, 7.99))
    assert "failed:loud" in as_text(run_until(s, 7.99, 8.0))
    assert as_text(s.wrote(8.1, claim, True)) == "failed:quiet closed:failed"


def test_every_write_that_comes_home_is_progress() -> None:
    s = pushing(timers=type(TIMERS)(stall_timeout_s=7.0))
    s.offer(1.0, opened(s), 0, "unit", 10)
    claim = claim_of(s, 2.0)
    s.wrote(6.0, claim, True)
    assert "closed" not in as_text(run_until(s, 6.0, 12.99))
    assert "closed:failed" in as_text(run_until(s, 12.99, 13.0))


# ---- preemption


def test_after_a_restart_everything_is_owed_again() -> None:
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    s.checksum(opened(s), 0, 0, (5,))
    s.wrote(0.2, claim_of(s, 0.1), True)
    s.offer(0.3, opened(s), 0, "pending", 10)
    assert as_text(s.restart(0.4, opened(s))) == ""
    assert s.claim(0.5) == []
    s.offer(0.6, opened(s), 0, "unit", 10)
    claim = claim_of(s, 0.7)
    assert claim.epoch == 1
    s.seal(0.8, opened(s))
    (word,) = messages(s.wrote(0.9, claim, True), Done)
    assert (word.bytes, word.checksums) == ((10,), ())


def test_a_claim_of_an_earlier_epoch_is_our_own_error() -> None:
    s, claim = writing()
    s.wrote(0.2, claim, True)
    s.restart(0.3, opened(s))
    s.offer(0.4, opened(s), 0, "unit", 10)
    claim_of(s, 0.5)
    with pytest.raises(LocalProtocolError):
        s.wrote(0.6, claim, True)


def test_a_sealed_push_does_not_start_over() -> None:
    """Found by the simulator: another rank had said DONE, and the new step divided the work anew."""
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    s.seal(0.1, opened(s))
    assert as_text(s.restart(0.2, opened(s))) == "failed:quiet closed:failed"


# ---- faults of the runtime, and what only looks like one


def test_a_unit_is_offered_once_and_not_after_the_seal() -> None:
    s = pushing()
    s.offer(0.0, opened(s), 0, "unit", 10)
    with pytest.raises(LocalProtocolError):
        s.offer(0.1, opened(s), 0, "unit", 10)
    s.seal(0.2, opened(s))
    with pytest.raises(LocalProtocolError):
        s.offer(0.3, opened(s), 0, "another", 10)
    with pytest.raises(LocalProtocolError):
        s.seal(0.4, opened(s))


def test_what_was_never_opened_is_our_own_error_and_what_is_over_is_not() -> None:
    s, push = sender(), order(())
    for call in (
        lambda: s.offer(0.0, push, 0, "unit", 10),
        lambda: s.seal(0.0, push),
        lambda: s.abort(0.0, push, Failure("PD-XFER-002", "")),
        lambda: s.restart(0.0, push),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    s.open(0.0, push)
    assert s.record_count() == 0
    assert s.seal(1.0, push) == s.abort(1.0, push, Failure("", "")) == s.restart(1.0, push) == []
    s = pushing()
    push = opened(s)
    s.abort(0.1, push, Failure("PD-XFER-002", "left"))
    s.message(0.2, "d0", ack("failed", push.pairs[0].seq))
    assert s.record_count() == 0
    assert s.offer(0.3, push, 0, "unit", 10) == s.seal(0.3, push) == s.abort(0.3, push, Failure("", "")) == []
    assert s.record_count() == 0


def test_a_message_about_another_transfer_of_the_push_is_counted() -> None:
    s = pushing()
    assert s.message(0.1, "d0", cancel(transfer=TransferId(T.incarnation, 99, "u"))) == []
    assert s.counters["wrong_transfer"] == 1
    assert s.message(0.1, "d0", cancel(contributor=TWO)) == []


def test_prefill_knows_when_it_last_heard_of_a_peer() -> None:
    s = asking()
    assert s.last_message_at("d0") is None
    s.message(3.0, "d0", ready(contributor=ONE))
    assert s.last_message_at("d0") == 3.0
