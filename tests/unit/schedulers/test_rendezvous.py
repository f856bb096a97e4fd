# SPDX-License-Identifier: Apache-2.0
"""Both schedulers, with vLLM's own requests, meet over real sockets: P first, both at once, and refused
combinations."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from unit.kits.watching import until
from unit.schedulers.kit import CACHE, ENDPOINTS, SECRETS, engine, output, request
from unit.schedulers.rendezvous import D_ID, P_ID, TOKEN, TOY, pair
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.prefill.scheduler.core.fitting import is_prefill
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import Secrets, seal_source, unseal_source
from vllm_ascend_pd.protocol.dialects import name_of, read_meet
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Endpoint
from vllm_ascend_pd.protocol.meeting import Source, SourceId
from vllm_ascend_pd.vllm_patches import first_token
from vllm_ascend_pd.vllm_patches.patience import Patience


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (TOY, True),
        ({"do_remote_decode": True, "do_remote_prefill": True}, True),
        ({"do_remote_prefill": True, "do_remote_decode": False}, False),
        ({"do_remote_decode": "true"}, False),
        ({"do_remote_decode": 1}, False),
        (None, False),
        (["do_remote_decode"], False),
        ("do_remote_decode", False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_p_prefills_for_another_engine_only_what_says_so(params: Any, wanted: bool) -> None:
    assert is_prefill(params) is wanted


@pytest.mark.parametrize("secrets", [None, SECRETS], ids=["plain", "signed"])
def test_p_first_its_answer_brings_d_to_it(secrets: Secrets | None) -> None:
    with pair(secrets) as both:
        _, blocks_held, answer = both.prefilled()
        assert blocks_held and answer is not None and answer["do_remote_prefill"] is True and answer["pd_push"]
        bind = both.load(answer)
        until(lambda: both.news, "the offer at an idle P")
        step = both.p.build_step(output())
        (start,) = step.starts
        assert start.ended and start.reservation.transfer == bind.transfer
        ((slice_,), slices) = step.computed, step.slices
        assert (slice_.before, slice_.after, slice_.final) == (0, 10, True) and not slices
        both.steps.settled(bind.transfer)
        assert both.p.released(P_ID) and not both.p.released(P_ID)


@pytest.mark.parametrize("first", ["P", "D"])
def test_both_at_once_meet_under_the_name_of_the_router(first: str) -> None:
    with pair() as both:
        params = {**both.address(), "remote_request_id": "router-1", "remote_engine_id": "x", "tp_size": 2}
        bind = both.load(params) if first == "D" else None
        asked = request(P_ID, TOY)
        if bind is not None:
            until(lambda: both.p.book.counts()["waiting"], "the offer, before its request")
        both.p.allocated(asked)
        both.p.build_step(output([(P_ID, 0, 4, [1])]))
        if bind is None:
            bind = both.load(params)
            until(both.p.must_step, "the offer")
        step = both.p.build_step(output(cached=[(P_ID, 4, 6, [2, 3])]))
        slices = [*step.computed, *step.slices]
        assert [(slice_.before, slice_.after) for slice_ in slices] == [(0, 4), (4, 10)][first == "D" :]
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        blocks_held, answer = both.p.request_finished(asked, True)
        assert blocks_held and answer is not None and "source" not in answer
        both.steps.settled(bind.transfer)


@pytest.mark.parametrize("first", ["P", "at once"])
@pytest.mark.parametrize("kv", ["before P's last word", "after it"])
def test_p_s_last_word_brings_its_first_token(first: str, kv: str) -> None:
    with pair(SECRETS, d={"prefill_listeners": ["127.0.0.1"]}) as both:
        both.first_tokens.entered = True  # as during vLLM's update after a step
        if first == "P":
            _, _, params = both.prefilled()
            asked = None
        else:
            params, asked = {**both.address(), "remote_request_id": "router-1"}, request(P_ID, TOY)
            asked.sampling_params = SamplingParams(max_tokens=1)
            both.p.allocated(asked)
            both.p.build_step(output([(P_ID, 0, 10, [1, 2, 3])]))
        bind = both.load(params)
        until(both.p.must_step, "the binding")
        (began,) = both.p.build_step(output()).starts
        if kv == "after it":
            if asked is not None:
                both.ended(asked)
            both.steps.settled(bind.transfer)
        both.d.ended([LoadEnd(D_ID, None, began.push)])
        assert both.d.received(D_ID) and both.d.holds(D_ID)
        if kv != "after it" and asked is not None:
            both.ended(asked)
        start = both.started()
        assert start.first is not None and (start.first.token, start.first.transfer) == (TOKEN, bind.transfer)


@pytest.mark.parametrize(
    ("sampling", "why"), [({"temperature": 0.5}, "not sent"), ({"logprobs": 2}, "not sent"), ({"seed": 5}, "not sent")]
)
def test_a_p_that_was_asked_otherwise_tells_no_token(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(first_token, "reported", lambda output, request_id, count: ((TOKEN, -1.0, 1),) * (count + 1))
    with pair() as both:
        both.first_tokens.entered = True
        _, _, answer = both.prefilled(**sampling)
        bind = both.load(answer)
        both.steps.settled(bind.transfer)
        both.d.ended([LoadEnd(D_ID, None, "p.1")])
        assert both.d.received(D_ID)
        start = both.started()
        assert (start.first, start.why) == (None, why)


def test_a_request_that_dies_on_p_fails_the_load_at_once() -> None:
    with pair() as both:
        asked = request(P_ID, TOY)
        both.p.allocated(asked)
        bind = both.load({**both.address(), "remote_request_id": "router-1"})
        until(lambda: both.p.book.tracks(P_ID), "the binding")
        asked.status = RequestStatus.FINISHED_ABORTED
        blocks_held, answer = both.p.request_finished(asked, False)
        assert not blocks_held and answer is not None and "source" not in answer
        assert both.steps.cancelled(bind.transfer) == "PD-XFER-002"


def test_a_source_of_a_p_that_is_gone_fails_the_load_at_once() -> None:
    with pair() as both:
        _, _, answer = both.prefilled()
        both.p.close()
        assert both.steps.cancelled(both.load(answer).transfer) == "PD-XFER-004"


def test_what_is_held_too_long_is_freed_in_a_step_of_its_own() -> None:
    with pair(p={"hold_s": 0.5}) as both:
        _, _, answer = both.prefilled()
        until(both.p.must_step, "the end of the hold")
        assert both.p.build_step(output()).freed == (P_ID,) and both.p.released(P_ID)
        assert both.steps.cancelled(both.load(answer).transfer) == "PD-META-027"


def test_what_a_reset_freed_no_d_can_fetch() -> None:
    """As after new weights: what is held was computed with the old ones."""
    with pair() as both:
        _, _, answer = both.prefilled()
        both.p.reset()
        assert both.p.must_step() and both.p.nap_budget() is None, "the engine core must not nap before that step"
        assert both.p.build_step(output()).freed == (P_ID,) and both.p.released(P_ID)
        assert not both.p.must_step() and both.p.nap_budget() == 0
        assert both.steps.cancelled(both.load(answer).transfer) == "PD-META-027"


def test_a_timer_that_a_thread_sets_late_does_not_undo_an_earlier_end_of_a_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop thread decides first, for a target that may wait a minute, and sets its timer last."""
    with pair(p={"hold_s": 0.5, "meet_s": 60.0}) as both:
        assert both.p.reception is not None
        loop, decided, go_on = both.p.reception._loop, threading.Event(), threading.Event()
        post = loop.post

        def late(callback: Callable[..., object], *given: Any) -> None:
            if callback.__name__ == "_arm" and threading.current_thread() is loop._thread and not decided.is_set():
                decided.set()
                assert go_on.wait(30)
            post(callback, *given)

        monkeypatch.setattr(loop, "post", late)
        both.load({**both.address(), "remote_request_id": "router-2"})
        assert decided.wait(30)
        assert both.prefilled()[1]
        go_on.set()
        until(both.p.must_step, "the end of the hold", seconds=10)
        assert both.p.build_step(output()).freed == (P_ID,)


@pytest.mark.parametrize("how", ["cached", "aborted", "aborted in the queue"])
def test_p_holds_nothing_for_a_d_that_loads_nothing(how: str) -> None:
    with pair() as both:
        _, _, answer = both.prefilled()
        asked = request(D_ID, answer)
        if how != "aborted in the queue":
            assert both.d.wanted(asked, 9 if how == "cached" else 4) == (0 if how == "cached" else 6)
        if how == "cached":
            both.d.allocated(asked, [[40, 41, 42]], 0)
        else:
            both.d.request_finished(asked, False)
        until(both.p.must_step, "D's word that it comes for nothing")
        assert both.p.build_step(output()).freed == (P_ID,) and both.p.released(P_ID)


def test_no_more_is_held_than_is_allowed_and_the_answer_says_so() -> None:
    with pair(p={"hold_sources": 1}) as both:
        assert both.prefilled()[1]
        _, blocks_held, answer = both.prefilled(name="cmpl-router-2-0-aaaaaaaa")
        assert not blocks_held and answer is not None
        assert answer["pd_push"]["code"] == "PD-META-028" and "source" not in answer


def test_without_hold_sources_p_listens_nowhere_and_says_what_it_always_said() -> None:
    scheduler = PrefillScheduler(engine())
    scheduler.attach_workers({(0, 0): WorkerFacts(None, CACHE)})
    asked = request(params=TOY)
    scheduler.allocated(asked)
    assert scheduler.reception is None
    assert scheduler.request_finished(asked, True)[1]["pd_push"]["code"] == "PD-META-005"  # type: ignore[index]


def test_a_p_without_the_secret_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    """Neither its answer nor its offer is accepted."""
    with pair(SECRETS) as both:
        _, _, answer = both.prefilled()
        foreign = DecodeScheduler(engine(Secrets(b"x" * 32)), Patience(lambda: 0))
        foreign.attach_workers({(0, 0): WorkerFacts(ENDPOINTS[0], CACHE)})
        try:
            assert foreign.wanted(request(D_ID, answer), 4) == 0
            assert "PD-SEC-003" in caplog.text
        finally:
            foreign.close()
        assert both.p.book.counts()["held"] == 1


# -- what D reads of kv_transfer_params

PROMPT = (10, "h")
LISTENS = Endpoint("10.0.0.1", 5600)


def sealed(secrets: Secrets | None = None, **changes: Any) -> str:
    facts = {"version": PROTOCOL_VERSION, "source": SourceId("p", 1, "u"), "listens": LISTENS, "hold_s": 1.0}
    prompt = {"prompt_length": PROMPT[0], "prompt_hash": PROMPT[1]}
    return base64.b64encode(seal_source(Source(**{**facts, **prompt, **changes}), secrets)).decode()


def read(params: dict[str, Any], listeners: Any = (), secrets: Secrets | None = None, request_id: str = D_ID) -> Any:
    meeting = read_meet(params, request_id, PROMPT, listeners, secrets)
    return getattr(meeting, "code", meeting)


def test_a_signed_source_may_be_dialled_and_an_unsigned_one_only_where_it_is_allowed() -> None:
    assert read({"source": sealed(SECRETS)}, secrets=SECRETS).listener == LISTENS
    assert read({"source": sealed()}) == "PD-META-030"
    assert read({"source": sealed()}, ["10.0.0.1:5601", "10.0.0.2"]) == "PD-META-030"
    for allowed in ("10.0.0.1", "10.0.0.1:5600"):
        assert read({"source": sealed()}, [allowed]).source == SourceId("p", 1, "u")


@pytest.mark.parametrize("garbage", [7, True, [], {}, "", "not base64!", "\ud800", "AAAA", "A" * 10_000], ids=repr)
def test_a_source_that_is_none_is_refused_with_a_code(garbage: Any) -> None:
    assert read({"source": garbage}) in ("PD-META-029", "PD-CTRL-002")


def test_a_source_of_another_prompt_version_or_secret_is_refused() -> None:
    assert read({"source": sealed(SECRETS, prompt_hash="another")}, secrets=SECRETS) == "PD-META-005"
    assert read({"source": sealed(SECRETS, version=9)}, secrets=SECRETS) == "PD-CTRL-003"
    assert read({"source": sealed(SECRETS, needs=("magic",))}, secrets=SECRETS) == "PD-CTRL-004"
    assert read({"source": sealed()}, secrets=SECRETS) == "PD-SEC-003"
    assert read({"source": sealed(SECRETS)}) == "PD-SEC-003"


def test_a_source_is_no_reservation_and_no_reservation_a_source() -> None:
    from vllm_ascend_pd.errors import RemoteProtocolError
    from vllm_ascend_pd.protocol.auth import unseal

    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        unseal(base64.b64decode(sealed(SECRETS)), SECRETS)
    assert unseal_source(base64.b64decode(sealed(SECRETS)), SECRETS).listens == LISTENS


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"remote_host": "10.0.0.9", "remote_port": 5600, "remote_request_id": "x"}, "PD-META-030"),
        ({"remote_host": "10.0.0.1", "remote_port": "5600", "remote_request_id": "x"}, "PD-META-029"),
        ({"remote_host": "10.0.0.1", "remote_port": True, "remote_request_id": "x"}, "PD-META-029"),
        ({"remote_host": "10.0.0.1", "remote_port": 1 << 20, "remote_request_id": "x"}, "PD-META-029"),
        ({"remote_host": ["10.0.0.1"], "remote_port": 5600, "remote_request_id": "x"}, "PD-META-029"),
        ({"remote_host": "10.0.0.1", "remote_port": 5600}, "PD-META-029"),
        ({"remote_host": "10.0.0.1", "remote_port": 5600, "remote_request_id": "x" * 300}, "PD-META-029"),
        ({"remote_host": "10.0.0.1", "remote_port": 5600, "remote_request_id": "ü"}, "PD-META-029"),
        (
            {"remote_host": "10.0.0.1", "remote_port": 5600, "remote_request_id": "x", "remote_block_ids": [[1]]},
            "PD-META-029",
        ),
        ({"remote_host": None, "remote_port": None}, None),
        ({}, None),
    ],
)
def test_an_address_that_is_none_or_not_allowed_is_refused_with_a_code(params: dict[str, Any], code: Any) -> None:
    assert read(params, ["10.0.0.1"]) == code


def test_names_are_those_of_the_router_with_the_place_of_the_prompt() -> None:
    params = {"remote_host": "10.0.0.1", "remote_port": 5600, "remote_request_id": "a-b"}
    assert read(params, ["10.0.0.1"], request_id="cmpl-a-b-1-cccccccc").name == "a-b-1"
    assert name_of("cmpl-a-b-1-dddddddd") == "a-b-1"
    assert (
        read(params, ["10.0.0.1"], request_id="chatcmpl-a-b-cccccccc").name == "a-b" == name_of("chatcmpl-a-b-dddddddd")
    )
    assert name_of("something else") == name_of("") == ""


def test_a_forged_request_is_prefilled_locally_and_calls_no_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with pair() as both:
        asked = request(D_ID, {"do_remote_prefill": True, "source": sealed()})
        assert both.d.wanted(asked, 4) == both.d.wanted(asked, 4) == 0
        assert caplog.text.count("PD-META-030") == 1, "said once, however long it waits"
        assert both.d.finished(D_ID) is None
