# SPDX-License-Identifier: Apache-2.0
"""Messages in any order: no exception, no second report, no unbounded growth."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

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
    SET,
    TWO,
    T,
    ack,
    begin,
    cancel,
    done,
    failed,
    geometry,
    order,
    p_incarnation,
    ready,
    receiver,
    refused,
    renew,
    sender,
)
from vllm_ascend_pd.protocol.actions import Closed, Report, Revoke
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.parking import MAX_PARKED
from vllm_ascend_pd.protocol.states import PairState, ReservationState

transfers = st.sampled_from(
    [
        T,
        TransferId(D_INCARNATION, 7, "other"),
        TransferId(D_INCARNATION, 3, "u"),
        TransferId(D_INCARNATION, 9, "u"),
        TransferId("decode-0", 7, "u"),
    ]
)
contributors = st.sampled_from([ONE, TWO, Contributor(5, 5)])
heads = {
    "transfer": transfers,
    "push": st.sampled_from([PUSH, "push-2", ""]),
    "p_incarnation": st.sampled_from([p_incarnation(ONE), p_incarnation(TWO), "other"]),
    "d_incarnation": st.sampled_from([D_INCARNATION, "decode-0"]),
    "contributor": contributors,
    "d_rank": st.sampled_from([0, 0, 0, 1]),
    "seq": st.integers(0, 6),
}


def made(build: Any, **fields: Any) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={**heads, **fields}).map(lambda changes: build(**changes))


failures = st.builds(
    Failure, st.sampled_from(["PD-XFER-003", "", "nonsense", "PD-XFER-999"]), st.sampled_from(["", "x"])
)
to_decode = st.one_of(
    made(
        begin,
        geometry=st.sampled_from(
            [geometry(2), geometry(4), geometry(2, dtype="x"), geometry(1024), geometry(2, stages=())]
        ),
        contributors=st.sampled_from([SET, SET[:1], ()]),
        plan_digest=st.sampled_from([DIGEST, "x"]),
        quiet_s=st.sampled_from([40.0, 0.0, 500.0]),
    ),
    made(renew),
    made(done, plan_digest=st.sampled_from([DIGEST, "x"]), checksums=st.sampled_from([(), ((LAYERS[0], 2**64 - 1),)])),
    made(failed, quiescent=st.booleans(), failure=failures),
    made(ready),
    made(cancel),
)
to_prefill = st.one_of(
    made(ready, lease_s=st.sampled_from([0.0, 15.0, 1e4]), addresses=st.sampled_from([None, ADDRESSES, NEW_ADDRESSES])),
    made(refused, failure=failures),
    made(cancel),
    st.builds(
        lambda kind, seq, rank: ack(kind, seq, d_rank=rank),
        st.sampled_from(["done", "failed", "x"]),
        heads["seq"],
        heads["d_rank"],
    ),
    made(begin),
    made(done),
)
pauses = st.sampled_from([0.0, 0.01, 0.3, 0.9, 7.0, 25.0, 70.0, 400.0])
local = st.sampled_from(["bind", "gate", "cancel", "settle", "over", "gone", "back", "revoked", "not_revoked", "tick"])


@settings(max_examples=300)
@given(st.lists(st.tuples(pauses, st.one_of(to_decode, local)), max_size=60))
def test_decode_survives_any_storm_and_reports_once(storm: list[tuple[float, Any]]) -> None:
    r, now, reports, revoking, bound = receiver(), 0.0, 0, False, False
    for pause, event in storm:
        now += pause
        state = r.state(T)
        if not isinstance(event, str):
            actions = r.message(now, "peer", event)
        elif event == "bind" and not bound:
            actions, bound = r.bind(now, T, FIRST, END, 30.0), True
        elif event == "gate" and state is ReservationState.GATED:
            actions = r.gate_open(now, T)
        elif event in ("cancel", "settle") and bound and state is not ReservationState.OVER:
            actions = r.cancel(now, T, Failure("PD-XFER-002", "")) if event == "cancel" else r.settle(now, T)
        elif event == "over" and state in (ReservationState.CLOSED_OK, ReservationState.CLOSED_FAILED):
            actions = r.load_over(now, T)
        elif event in ("gone", "back"):
            actions = (r.peer_gone if event == "gone" else r.peer_back)(now, p_incarnation(ONE))
        elif event == "revoked" and revoking:
            actions, revoking = r.revoked(now, NEW_ADDRESSES), False
        elif event == "not_revoked" and revoking:
            actions = r.not_revoked(now)
        else:
            actions = r.tick(now)
        reports += sum(isinstance(action, Report) for action in actions)
        revoking = revoking or any(isinstance(action, Revoke) for action in actions)
        assert reports <= 1
        assert r.parked_count() <= MAX_PARKED
        wake = r.next_wake()
        assert wake is None or wake >= 0


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(pauses, st.one_of(to_prefill, st.sampled_from(["offer", "claim", "land", "lose", "seal", "tick"]))),
        max_size=60,
    )
)
def test_prefill_survives_any_storm_and_closes_once(storm: list[tuple[float, Any]]) -> None:
    s, now, closed, sealed, units, out = sender(), 0.0, 0, False, 0, []
    push = order((0, 1))
    s.open(now, push)
    for pause, event in storm:
        now += pause
        if not isinstance(event, str):
            actions = s.message(now, f"d{event.d_rank}", event)
        elif event == "offer" and not sealed:
            units += 1
            actions = s.offer(now, push, units % 2, units, 10)
        elif event == "claim":
            actions = []
            for claim in s.claim(now):
                assert s.state(claim.push, claim.d_rank) is PairState.PUSH
                assert now < (push.pairs[claim.d_rank].authority or 0.0)
                out.append(claim)
        elif event in ("land", "lose") and out:
            actions = s.wrote(now, out.pop(0), event == "land")
        elif event == "seal" and not sealed:
            actions, sealed = s.seal(now, push), True
        else:
            actions = s.tick(now)
        closed += sum(isinstance(action, Closed) for action in actions)
        assert closed <= 1
        assert not (closed and out), "closed while a write is out"
    for claim in out:
        s.wrote(now, claim, True)
    for _ in range(2000):
        wake = s.next_wake()
        if wake is None:
            break
        now = max(now, wake)
        s.tick(now)
    assert s.record_count() == 0, "it must end by itself"
