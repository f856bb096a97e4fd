# SPDX-License-Identifier: Apache-2.0
"""D's guarantees: authority to write, the end of a transfer, and the time from which its blocks are no longer
written."""

from __future__ import annotations

import msgspec
import pytest

from unit.protocol.kit import (
    ADDRESSES,
    D_INCARNATION,
    DIGEST,
    END,
    FIRST,
    LAYERS,
    NEW_ADDRESSES,
    ONE,
    PUSH,
    QUIET,
    SET,
    TIMERS,
    TWO,
    D,
    P,
    T,
    as_text,
    begin,
    done,
    failed,
    geometry,
    messages,
    p_incarnation,
    ready,
    receiver,
    renew,
    run_until,
)
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import Region
from vllm_ascend_pd.protocol.actions import Action, Report, Verify
from vllm_ascend_pd.protocol.agreement import contributor_pairs
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.layouts import Layouts, contributors_digest, layout_hash
from vllm_ascend_pd.protocol.messages import Ack, Cancel, Ready, Refused, memory_hash
from vllm_ascend_pd.protocol.parking import MAX_PARKED
from vllm_ascend_pd.protocol.reservation import REVOKE_AGAIN_S, Receiver
from vllm_ascend_pd.protocol.states import ReservationState
from vllm_ascend_pd.protocol.timing import landed_s, lapse_s, settled_s

LAPSE = lapse_s(TIMERS.lease_s, TIMERS.margin_s)
H = landed_s(TIMERS.lease_s, QUIET, TIMERS.margin_s)
DEADLINE = TIMERS.recv_deadline_s


def opened(**changes: object) -> Receiver:
    """A receiver with T bound and its gate open."""
    r = receiver(**changes)
    r.bind(0.0, T, FIRST, END, TIMERS.recv_deadline_s)
    r.gate_open(0.0, T)
    return r


def leased(**changes: object) -> Receiver:
    """A receiver in which both contributors have authority."""
    r = opened(**changes)
    r.message(0.0, "p1", begin(ONE))
    r.message(0.0, "p2", begin(TWO))
    return r


def reports(actions: list[Action]) -> list[Report]:
    return [action for action in actions if isinstance(action, Report)]


# ---- opening


def test_what_an_earlier_incarnation_of_d_named_is_not_over_here() -> None:
    r = opened()
    assert r.state(msgspec.structs.replace(T, uuid="another")) is ReservationState.OVER, "its number has passed"
    assert r.state(msgspec.structs.replace(T, incarnation="another")) is ReservationState.UNBOUND


def test_a_begin_before_the_bind_waits_and_is_answered_when_the_gate_opens() -> None:
    r = receiver()
    assert as_text(r.message(0.0, "p1", begin())) == ""
    assert as_text(r.bind(0.1, T, FIRST, END, 300.0)) == ""
    assert r.state(T) is ReservationState.GATED
    (granted,) = messages(r.gate_open(0.2, T))
    assert isinstance(granted, Ready)
    assert (granted.seq, granted.lease_s, granted.addresses) == (1, TIMERS.lease_s, ADDRESSES)


def test_only_the_latest_parked_begin_of_a_contributor_is_answered() -> None:
    r = receiver()
    for seq in (1, 3, 2):
        r.message(0.0, "p1", begin(seq=seq))
    r.bind(0.1, T, FIRST, END, 300.0)
    assert [m.seq for m in messages(r.gate_open(0.2, T))] == [3]


def test_a_parked_begin_is_forgotten_after_the_ready_timeout() -> None:
    r = receiver()
    r.message(0.0, "p1", begin())
    assert r.next_wake() == TIMERS.ready_timeout_s
    r.tick(TIMERS.ready_timeout_s - 0.01)
    assert r.parked_count() == 1
    r.tick(TIMERS.ready_timeout_s)
    assert r.parked_count() == 0
    assert r.next_wake() is None


def test_parking_is_bounded() -> None:
    r = receiver()
    for n in range(MAX_PARKED + 10):
        r.message(0.0, "p1", begin(transfer=TransferId(D_INCARNATION, n, "u")))
    assert r.parked_count() == MAX_PARKED
    assert r.counters["parked_full"] == 10


def test_what_is_parked_is_bounded_in_bytes_too() -> None:
    """A message may have 4 MiB: a peer's BEGINs must not fill the memory."""
    r = receiver()
    layers = tuple(f"{index:04}" + "x" * 1000 for index in range(2000))
    huge = geometry(2, stages=(layers,))
    for n in range(200):
        r.message(0.0, "p", begin(transfer=TransferId(D_INCARNATION, n, "u"), geometry=huge))
    assert r.parked_count() < 40 and r.counters["parked_full"] > 150
    r.tick(1000.0)
    assert r.parked_count() == 0
    for n in range(20):  # there is room again
        r.message(1000.0, "p", begin(transfer=TransferId(D_INCARNATION, n, "u"), geometry=huge))
    assert r.parked_count() == 20


def test_a_parked_begin_is_refused_when_the_transfer_is_cancelled_behind_its_gate() -> None:
    r = receiver()
    r.message(0.0, "p1", begin(ONE))
    r.bind(0.1, T, FIRST, END, 300.0)
    r.message(0.2, "p2", begin(TWO))
    assert (
        as_text(r.cancel(0.3, T, Failure("PD-XFER-002", "left"))) == "refused:cancelled refused:cancelled report:failed"
    )
    assert r.parked_count() == 0


def test_a_transfer_that_the_scheduler_skipped_is_refused_when_a_later_one_is_bound() -> None:
    r = receiver()
    r.message(0.0, "p1", begin(transfer=TransferId(D_INCARNATION, 5, "skipped")))
    (answer,) = messages(r.bind(0.1, T, FIRST, END, 300.0))
    assert isinstance(answer, Refused)
    assert answer.failure == Failure("PD-XFER-005", "over: ")
    assert r.parked_count() == 0


def test_a_failure_before_the_bind_ends_the_transfer_at_its_bind() -> None:
    r = receiver()
    assert as_text(r.message(0.0, "p1", failed())) == "ack:failed"
    assert as_text(r.bind(0.1, T, FIRST, END, 300.0)) == "ack:failed ack:failed report:failed"


def test_binding_at_or_below_the_watermark_is_our_own_error() -> None:
    r = opened()
    with pytest.raises(LocalProtocolError):
        r.bind(0.1, TransferId(D_INCARNATION, T.n, "again"), FIRST, END, 300.0)
    with pytest.raises(LocalProtocolError):
        r.bind(0.1, TransferId("decode-2", T.n + 1, "u"), FIRST, END, 300.0)


def test_without_an_incarnation_the_first_bind_tells_it() -> None:
    r = receiver(incarnation="")
    r.message(0.0, "p1", begin())
    r.message(0.0, "p1", begin(transfer=TransferId("decode-0", 99, "old"), d_incarnation="decode-0"))
    assert as_text(r.bind(0.1, T, FIRST, END, 300.0)) == "refused:over"
    assert as_text(r.gate_open(0.1, T)) == "ready"
    assert as_text(r.message(0.2, "p1", begin(d_incarnation="decode-0"))) == "refused:stale"


def test_addresses_are_sent_once() -> None:
    r = opened()
    (first,) = messages(r.message(0.0, "p1", begin()))
    (second,) = messages(r.message(0.1, "p1", begin(seq=2, known_memory=first.memory)))
    assert first.addresses == ADDRESSES
    assert first.memory == memory_hash(ADDRESSES)
    assert second.addresses is None


# ---- layouts


def test_a_layout_that_is_not_known_is_asked_for_and_then_known_by_its_name() -> None:
    r = opened()
    assert as_text(r.message(0.1, "p1", begin(layout_bytes=b""))) == "which"
    assert r.counters["begin_unknown_layout"] == 1 and r.state(T) is ReservationState.OPEN
    assert as_text(r.message(0.2, "p1", begin(seq=2))) == "ready"
    assert as_text(r.message(0.3, "p2", begin(TWO, layout_bytes=b""))) == "ready", (
        "the other worker of this P need not tell it"
    )
    second = T.__class__(D_INCARNATION, 8, "u")
    r.bind(0.4, second, FIRST, END, 300.0)
    r.gate_open(0.4, second)
    assert as_text(r.message(0.5, "p1", begin(layout_bytes=b"", transfer=second, push="push-2"))) == "ready"


def test_what_was_reported_before_the_gate_opened_is_known_behind_it() -> None:
    r = receiver()
    r.message(0.0, "p1", begin(ONE))
    r.message(0.0, "p2", begin(TWO, layout_bytes=b""))
    r.bind(0.1, T, FIRST, END, 300.0)
    assert as_text(r.gate_open(0.2, T)) == "ready ready"


def test_layouts_are_remembered_in_a_bounded_number() -> None:
    r = opened()
    for n in range(Layouts.max_kept + 1):
        r.message(0.1, "p1", begin(model=f"another/{n}"))
    assert as_text(r.message(0.2, "p1", begin(model="another/0", layout_bytes=b""))) == "which"
    assert as_text(r.message(0.2, "p1", begin(model="another/1", layout_bytes=b""))) == "refused:mismatch"


def test_a_layout_that_cannot_be_read_is_refused_with_the_reason() -> None:
    r = opened()
    for layout, says in ((b"?", "PD-CTRL-002"), (msgspec.msgpack.encode({"model": "m"}), "PD-CTRL-002")):
        unread = begin(layout=layout_hash(layout), layout_bytes=layout)
        (answer,) = messages(r.message(0.1, "p1", unread), Refused)
        assert answer.failure.code == "PD-GEO-001" and "not valid: layout: " in answer.failure.detail, says


# ---- agreement


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 99}, ["Protocol version 99 of the peer is not 2"]),
        ({"needs": ("sections",)}, ["needs 'sections', which this release does not know"]),
        ({"model": "other/7"}, ["model: prefill other/7, decode model/1"]),
        ({"geometry": geometry(2, dtype="fp16")}, ["dtype: prefill fp16, decode bf16"]),
        ({"geometry": geometry(2, packing="kv")}, ["packing: prefill kv, decode k|v"]),
        ({"geometry": geometry(2, kv_heads=8)}, ["kv_heads: prefill 8, decode 4"]),
        ({"geometry": geometry(2, stages=(("layer.0", "layer.x"),))}, ["layers: ", "layer.x", "layer.1"]),
        ({"geometry": geometry(2, regions=(Region("kv", 4096, 1024, 0, 1024),))}, ["token axis of kv"]),
        (
            {"geometry": geometry(2, regions=(Region("kv", 4096, 1024, 64, 32),))},
            ["cell bytes of kv: prefill 32, decode 64"],
        ),
        ({"geometry": geometry(2, dtype="fp16", packing="kv")}, ["dtype: ", "packing: "]),
        ({"quiet_s": 121.0}, ["quiet time: prefill 121, decode at most 120"]),
        ({"contributors": SET[:1]}, [f"contributors: prefill {contributors_digest(SET[:1])}, decode P0.0 P0.1"]),
        ({"plan_digest": "0" * 64}, ["plan: prefill 0000", DIGEST]),
        ({"contributor": Contributor(3, 3)}, ["contributor: P3.3 is not in the set"]),
        ({"d_rank": 5}, ["d_rank: prefill 5, decode 0"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_difference_is_refused_field_by_field_with_both_values(changes: dict[str, object], named: list[str]) -> None:
    r = opened()
    (answer,) = messages(r.message(0.1, "p1", begin(**changes)))
    assert isinstance(answer, Refused)
    assert answer.failure.code == "PD-GEO-001"
    assert all(words in answer.failure.detail for words in named), answer.failure.detail
    assert r.state(T) is ReservationState.OPEN
    assert as_text(r.message(0.2, "p1", begin())) == "ready", "a refusal binds nothing"


def test_opaque_blocks_must_be_of_equal_size() -> None:
    def opaque(tp: int, size: int) -> object:
        return geometry(tp, block_size=size, regions=(Region("kv", 4096, 1024, 0, 1024),))

    r = receiver(geometry=opaque(1, 16))
    r.bind(0.0, T, FIRST, 32, 300.0)
    r.gate_open(0.0, T)
    (answer,) = messages(r.message(0.1, "p1", begin(geometry=opaque(2, 32))))
    assert "block_size: prefill 32, decode 16" in answer.failure.detail


def test_contributors_are_pairs_over_the_stages_that_share_a_layer() -> None:
    p = geometry(2, stages=(("layer.0",), ("layer.1",)))
    assert contributor_pairs(p, D, 0) == tuple(Contributor(s, r) for s in (0, 1) for r in (0, 1))
    partly = geometry(1, stages=(("layer.1",),))
    assert contributor_pairs(p, partly, 0) == (Contributor(1, 0), Contributor(1, 1))
    nothing = geometry(1, stages=(("elsewhere",),))
    assert contributor_pairs(p, nothing, 0) == (Contributor(0, 0),), "the leader tells a rank that receives nothing"


def test_the_first_push_binds_and_another_is_refused() -> None:
    r = opened()
    r.message(0.0, "p1", begin(ONE))
    (answer,) = messages(r.message(0.1, "p9", begin(TWO, push="push-2")))
    assert answer.failure.code == "PD-XFER-005" and answer.failure.detail.startswith("bound: ")
    assert "push-2" in answer.failure.detail and PUSH in answer.failure.detail
    assert as_text(r.message(0.2, "p2", begin(TWO))) == "ready"


def test_a_process_that_took_the_place_of_a_leased_one_is_refused() -> None:
    r = leased()
    assert as_text(r.message(0.1, "p1", begin(ONE, seq=5, p_incarnation="newer"))) == "refused:bound"


def test_a_renewal_with_another_set_or_digest_is_refused() -> None:
    r = leased()
    assert as_text(r.message(0.1, "p1", begin(ONE, seq=2, plan_digest="0" * 64))) == "refused:mismatch"
    assert as_text(r.message(0.1, "p1", begin(ONE, seq=3, contributors=SET[:1]))) == "refused:mismatch"


# ---- leases


def test_the_same_seq_repeats_the_answer_and_extends_nothing() -> None:
    r = opened()
    r.message(0.0, "p1", begin(seq=1))
    run_until(r, 0.0, 10.0)
    assert as_text(r.message(10.0, "p1", begin(seq=1))) == "ready"
    actions = run_until(r, 10.0, LAPSE + 0.01)
    assert as_text(actions).startswith("cancel")


def test_a_new_seq_extends() -> None:
    r = opened()
    r.message(0.0, "p1", begin(seq=1))
    run_until(r, 0.0, 10.0)
    r.message(10.0, "p1", begin(seq=2))
    assert as_text(run_until(r, 10.0, 10.0 + LAPSE - 0.01)) == ""
    assert as_text(run_until(r, 10.0 + LAPSE - 0.01, 10.0 + LAPSE + 0.01)) == "cancel"


def test_a_begin_after_done_does_not_lease_again() -> None:
    r = leased()
    r.message(0.1, "p1", done(ONE))
    assert as_text(r.message(0.2, "p1", begin(ONE, seq=2))) == ""
    assert as_text(r.message(0.3, "p2", done(TWO))) == "ack:done report:ok"


def test_a_lapsed_lease_fails_the_transfer_and_names_the_contributor() -> None:
    r = opened()
    r.message(0.0, "p1", begin(ONE))
    r.message(0.0, "p2", begin(TWO))
    run_until(r, 0.0, LAPSE - 0.1)
    r.message(LAPSE - 0.1, "p2", begin(TWO, seq=2))
    actions = run_until(r, LAPSE - 0.1, LAPSE + 0.1)
    cancels = messages(actions, Cancel)
    assert {m.contributor for m in cancels} == {ONE, TWO}
    assert "P0.0" in cancels[0].failure.detail
    assert "P0.1" not in cancels[0].failure.detail


# ---- ending well


def test_it_ends_well_when_every_contributor_is_done() -> None:
    r = leased()
    assert as_text(r.message(0.1, "p1", done(ONE))) == "ack:done"
    assert as_text(r.message(0.2, "p2", done(TWO))) == "ack:done report:ok"
    assert r.open_count() == 0
    assert r.record_count() == 1
    r.load_over(0.3, T)
    assert r.record_count() == 0
    assert r.next_wake() is None


def test_done_before_any_authority_is_acknowledged_and_does_not_count() -> None:
    r = opened()
    r.message(0.0, "p1", begin(ONE))
    assert as_text(r.message(0.1, "p2", done(TWO))) == "ack:done"
    assert r.counters["unexpected_done"] == 1
    assert as_text(r.message(0.2, "p1", done(ONE))) == "ack:done"
    assert r.state(T) is ReservationState.OPEN


@pytest.mark.parametrize(
    "changes",
    [{"push": "push-0"}, {"p_incarnation": "older"}, {"contributor": Contributor(0, 7)}],
    ids=["push", "incarnation", "contributor"],
)
def test_done_of_another_writer_does_not_count(changes: dict[str, object]) -> None:
    r = leased()
    r.message(0.1, "p2", done(TWO))
    assert as_text(r.message(0.2, "p1", done(**{"contributor": ONE, **changes}))) == "ack:done"
    assert r.state(T) is ReservationState.OPEN


def test_done_under_another_plan_fails_the_transfer() -> None:
    r = leased()
    actions = r.message(0.1, "p1", done(ONE, plan_digest="0" * 64))
    assert as_text(actions) == "ack:done cancel"
    assert messages(actions, Cancel)[0].contributor == TWO


def test_an_acknowledgement_names_kind_and_seq() -> None:
    r = receiver()
    (answer,) = messages(r.message(0.0, "p1", done(seq=33)), Ack)
    assert (answer.kind, answer.seq, answer.push) == ("done", 33, PUSH)


def test_checksums_of_all_contributors_are_summed_before_it_ends_well() -> None:
    r = leased(verify=True)
    top = 2**64 - 1
    r.message(0.1, "p1", done(ONE, checksums=((0, 0, top), (1, 0, 2**63))))
    actions = r.message(0.2, "p2", done(TWO, checksums=((0, 0, 3), (1, 0, 6))))
    (asked,) = [action for action in actions if isinstance(action, Verify)]
    assert dict(asked.sums) == {(0, 0): 2, (1, 0): 2**63 + 6}
    assert not reports(actions)
    assert as_text(r.verified(0.3, T, None)) == "report:ok"


def test_a_wrong_checksum_fails_the_transfer() -> None:
    r = leased(verify=True)
    r.message(0.1, "p1", done(ONE))
    r.message(0.2, "p2", done(TWO))
    (report,) = reports(r.verified(0.3, T, LAYERS[1]))
    assert (report.ok, report.failure) == (False, Failure("PD-WIRE-004", LAYERS[1]))


# ---- ending badly


def test_one_failed_contributor_fails_the_transfer_and_the_others_are_fenced() -> None:
    r = leased()
    actions = r.message(0.1, "p1", failed(ONE))
    assert as_text(actions) == "ack:failed cancel"
    assert messages(actions, Cancel)[0].contributor == TWO
    (report,) = reports(r.message(0.2, "p2", done(TWO)))
    assert (report.ok, report.failure.code) == (False, "PD-XFER-003")


def test_a_loud_failure_is_not_a_quiet_one() -> None:
    r = leased()
    assert as_text(r.message(0.1, "p1", failed(ONE, quiescent=False))) == "ack:failed cancel cancel"
    assert as_text(r.message(0.2, "p2", failed(TWO))) == "ack:failed"
    assert as_text(r.message(0.3, "p1", failed(ONE, quiescent=False))) == "ack:failed"
    assert r.state(T) is ReservationState.FENCING
    assert as_text(r.message(0.4, "p1", failed(ONE))) == "ack:failed report:failed"


def test_a_failure_of_a_contributor_that_was_never_granted_anything_ends_it() -> None:
    r = opened()
    assert as_text(r.message(0.1, "p1", failed(ONE))) == "ack:failed report:failed"


def test_the_deadline_counts_from_the_bind() -> None:
    r = receiver()
    r.bind(5.0, T, FIRST, END, 10.0)
    assert r.next_wake() == 15.0
    assert as_text(r.tick(14.99)) == ""
    (report,) = reports(r.tick(15.0))
    assert report.failure == Failure("PD-XFER-001", "gated")


def test_settle_shortens_the_deadline_to_a_lease_and_never_lengthens_it() -> None:
    r = opened()
    r.settle(10.0, T)
    assert as_text(r.tick(10.0 + TIMERS.lease_s - 0.01)) == ""
    assert as_text(r.tick(10.0 + TIMERS.lease_s)) == "report:failed"
    short = receiver()
    short.bind(0.0, T, FIRST, END, 5.0)
    short.settle(1.0, T)
    assert as_text(short.tick(5.0)) == "report:failed"


def test_a_push_that_goes_on_after_prefill_has_ended_keeps_its_deadline() -> None:
    """With many destinations its writes may take longer than a lease; it renews while it works."""
    r = opened()
    r.settle(0.0, T)
    r.message(0.1, "p1", begin(ONE))
    r.message(0.2, "p2", begin(TWO))
    seq, at = 1, 0.2
    while at < DEADLINE - TIMERS.lease_s:
        seq, at = seq + 1, at + TIMERS.lease_s / 3
        assert as_text(r.message(at, "p1", renew(ONE, seq))) == "ready"
        assert as_text(r.message(at, "p2", renew(TWO, seq))) == "ready"
    assert as_text(r.tick(DEADLINE - 0.01)) == ""
    assert as_text(r.tick(DEADLINE)) == "cancel cancel"


def test_a_rank_that_does_not_begin_after_prefill_has_ended_is_given_up() -> None:
    r = opened()
    r.message(0.0, "p1", begin(ONE))
    r.settle(1.0, T)
    r.message(TIMERS.lease_s / 2, "p1", renew(ONE, 2))
    assert as_text(r.tick(1.0 + TIMERS.lease_s - 0.01)) == ""
    assert as_text(r.tick(1.0 + TIMERS.lease_s)) == "cancel"


def test_cancel_is_repeated_with_doubling_gaps_until_it_is_answered() -> None:
    r = opened()
    r.message(0.0, "p1", begin(ONE))
    r.cancel(0.0, T, Failure("PD-XFER-002", "left"))
    sent = []
    at = 0.0
    while at < 8.0:
        at = r.next_wake() or 99.0
        if messages(r.tick(at), Cancel):
            sent.append(round(at, 3))
    assert sent[:6] == [0.2, 0.6, 1.4, 3.0, 5.0, 7.0]
    r.message(8.0, "p1", failed(ONE))
    assert as_text(run_until(r, 8.0, 12.0)) == ""


def test_cancel_goes_where_the_contributor_was_last_heard() -> None:
    r = opened()
    r.message(0.0, "old connection", begin(ONE))
    r.message(0.1, "new connection", begin(ONE, seq=2))
    (sent,) = [a for a in r.cancel(0.2, T, Failure("PD-XFER-002", "left")) if hasattr(a, "peer")]
    assert sent.peer == "new connection"


# ---- the fence


def fencing() -> Receiver:
    r = opened()
    r.message(0.0, "p1", begin(ONE))
    r.cancel(0.0, T, Failure("PD-XFER-002", "left"))
    return r


def test_an_answer_of_another_incarnation_proves_nothing() -> None:
    r = fencing()
    assert as_text(r.message(0.1, "p1", failed(ONE, p_incarnation="newer"))) == "ack:failed"
    assert as_text(r.message(0.1, "p1", done(ONE, push="push-0"))) == "ack:done"
    assert r.state(T) is ReservationState.FENCING


def test_time_alone_frees_nothing_it_only_starts_a_revocation() -> None:
    r = fencing()
    actions = run_until(r, 0.0, H + 100)
    assert as_text([a for a in actions if not messages([a], Cancel)]) == "revoke"
    assert r.state(T) is ReservationState.FENCING


def test_a_process_that_is_gone_is_quiet_once_h_is_over() -> None:
    r = fencing()
    r.peer_gone(1.0, p_incarnation(ONE))
    assert not reports(run_until(r, 1.0, H - 0.01))
    (report,) = reports(run_until(r, H - 0.01, H + 0.01))
    assert report.ok is False


def test_a_process_that_ended_late_gets_the_time_for_what_it_wrote_at_the_end() -> None:
    """Found by the simulator: a writer was stopped, continued, wrote, and was killed just before H was over."""
    r = fencing()
    run_until(r, 0.0, H - 1.0)
    r.peer_gone(H - 1.0, p_incarnation(ONE))
    quiet_at = H - 1.0 + settled_s(QUIET)
    actions = run_until(r, H - 1.0, quiet_at - 0.01)
    assert not reports(actions)
    assert "revoke" not in as_text(actions), "its end is known: nothing has to be cut off"
    assert reports(run_until(r, quiet_at - 0.01, quiet_at + 0.01))


def test_a_connection_that_comes_back_proves_nothing() -> None:
    r = fencing()
    r.peer_gone(1.0, p_incarnation(ONE))
    r.peer_back(2.0, p_incarnation(ONE))
    actions = run_until(r, 2.0, H + 1)
    assert not reports(actions)
    assert "revoke" in as_text(actions)


def test_what_a_process_asked_for_before_it_ended_is_not_granted() -> None:
    r = receiver()
    r.message(0.0, "p1", begin(ONE))
    r.message(0.0, "p2", begin(TWO))
    r.bind(0.0, T, FIRST, END, 300.0)
    r.peer_gone(0.1, p_incarnation(ONE))
    assert [m.contributor for m in messages(r.gate_open(0.2, T))] == [TWO]
    assert as_text(r.message(0.3, "p1", begin(ONE, seq=2))) == "", "it was on its way when the process ended"
    r.peer_back(0.4, p_incarnation(ONE))
    assert as_text(r.message(0.5, "p1", begin(ONE, seq=3))) == "ready"


def test_the_larger_quiet_time_of_both_sides_counts() -> None:
    r = opened()
    r.message(0.0, "p1", begin(ONE, quiet_s=100.0))
    r.cancel(0.0, T, Failure("PD-XFER-002", "left"))
    r.peer_gone(0.0, p_incarnation(ONE))
    longer = landed_s(TIMERS.lease_s, 100.0, TIMERS.margin_s)
    assert not reports(run_until(r, 0.0, longer - 0.01))
    assert reports(run_until(r, longer - 0.01, longer + 0.01))


def test_a_stopped_decode_does_not_count_the_time_it_was_stopped() -> None:
    r = fencing()
    r.peer_gone(0.0, p_incarnation(ONE))
    run_until(r, 0.0, 10.0)
    assert not reports(r.tick(10.0 + H)), "one long gap counts as one second"
    assert not reports(run_until(r, 10.0 + H, 10.0 + H + (H - 11.0) - 0.01))
    assert reports(run_until(r, H + H - 1.01, H + H))


def test_an_answer_right_after_a_stop_is_believed_only_when_what_waited_has_been_read() -> None:
    """Found by the simulator: P gave up and finished its writes while D was stopped; D's own buffers still held the
    bytes."""
    r = fencing()
    run_until(r, 0.0, 1.0)
    assert as_text(r.message(50.0, "p1", failed(ONE))) == "ack:failed"
    assert r.state(T) is ReservationState.FENCING
    assert as_text(run_until(r, 50.0, 50.0 + TIMERS.margin_s - 0.01)) == "", "it has answered: CANCEL is not repeated"
    assert reports(run_until(r, 50.0 + TIMERS.margin_s - 0.01, 50.0 + TIMERS.margin_s + 0.01))


def test_stops_after_an_answer_do_not_put_off_that_it_is_believed() -> None:
    """Found on a machine that stopped for a second repeatedly: the margin began again each time, without end."""
    r = fencing()
    run_until(r, 0.0, 1.0)
    assert as_text(r.message(50.0, "p1", failed(ONE))) == "ack:failed"
    now, ran = 50.0, 0.0
    while ran + 1.5 < TIMERS.margin_s:
        assert not reports(run_until(r, now, now + 1.5)), "only what it ran counts"
        ran, now = ran + 1.5, now + 1.5 + 30.0
        assert not reports(r.tick(now))
    left = TIMERS.margin_s - ran
    assert not reports(run_until(r, now, now + left - 0.01))
    assert reports(run_until(r, now + left - 0.01, now + left + 0.01))


def test_done_right_after_a_stop_is_believed_at_once() -> None:
    """Every write was acknowledged by our own transport: nothing is left in buffers."""
    r = fencing()
    run_until(r, 0.0, 1.0)
    assert as_text(r.message(50.0, "p1", done(ONE))) == "ack:done report:failed"


def test_decode_asks_to_be_woken_often_enough_to_know_that_it_runs() -> None:
    r = leased()
    assert (r.next_wake() or 99) <= 0.8
    r.tick(0.8)
    assert (r.next_wake() or 99) <= 1.6


# ---- revocation


def test_revocation_frees_what_is_fenced_and_fails_what_it_cuts() -> None:
    r = fencing()
    other = TransferId(D_INCARNATION, 8, "uuid-8")
    untouched = TransferId(D_INCARNATION, 9, "uuid-9")
    at = H - 1
    run_until(r, 0.0, at)
    for transfer in (other, untouched):
        r.bind(at, transfer, FIRST, END, 300.0)
        r.gate_open(at, transfer)
    r.message(at, "p2", begin(TWO, transfer=other, push="push-2"))
    assert "revoke" in as_text(run_until(r, at, H + 0.5))
    actions = r.revoked(H + 1.0, NEW_ADDRESSES)
    assert {(report.transfer, report.ok) for report in reports(actions)} == {(T, False), (other, False)}
    assert [m.contributor for m in messages(actions, Cancel)] == [TWO], "CANCEL goes to the cut one, once"
    assert r.state(untouched) is ReservationState.OPEN


def test_a_begin_during_a_revocation_gets_the_new_addresses() -> None:
    r = fencing()
    assert "revoke" in as_text(run_until(r, 0.0, H + 0.5))
    other = TransferId(D_INCARNATION, 8, "uuid-8")
    r.bind(H + 0.5, other, FIRST, END, 300.0)
    r.gate_open(H + 0.5, other)
    asked = begin(TWO, transfer=other, push="push-2", known_memory=memory_hash(ADDRESSES))
    assert as_text(r.message(H + 0.6, "p2", asked)) == ""
    (granted,) = messages(r.revoked(H + 1.0, NEW_ADDRESSES), Ready)
    assert granted.addresses == NEW_ADDRESSES
    assert granted.memory == memory_hash(NEW_ADDRESSES)


def test_only_one_revocation_at_a_time() -> None:
    r = leased()
    r.cancel(0.0, T, Failure("PD-XFER-002", "left"))
    assert as_text(run_until(r, 0.0, H + 50)).count("revoke") == 1


def test_a_revocation_that_failed_is_asked_for_until_it_succeeds_and_proves_nothing_before() -> None:
    r = fencing()
    at = H + 0.5
    assert "revoke" in as_text(run_until(r, 0.0, at))
    for _ in range(20):
        assert r.not_revoked(at) == []
        assert as_text(r.message(at, "p2", begin(TWO, push="push-2"))) == "refused:cancelled"
        due = at + REVOKE_AGAIN_S
        assert (r.next_wake() or 1e9) <= due
        assert as_text(r.tick(due - 0.1)).count("revoke") == 0
        assert as_text(r.tick(due)).count("revoke") == 1
        assert as_text(r.tick(due)).count("revoke") == 0, "once until it has failed again"
        assert r.state(T) is ReservationState.FENCING
        at = due
    assert [report.ok for report in reports(r.revoked(at, NEW_ADDRESSES))] == [False]
    assert r.next_wake() is None


def test_revoked_without_having_been_asked_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError):
        leased().revoked(0.1, NEW_ADDRESSES)


# ---- messages that P never sends to D


def test_messages_of_the_wrong_direction_are_counted() -> None:
    r = leased()
    assert r.message(0.1, "p1", ready()) == []
    assert r.counters["unexpected_ready"] == 1


def test_geometry_of_the_rig_fits() -> None:
    assert contributor_pairs(P, D, 0) == SET
    assert len(SET) == 2
