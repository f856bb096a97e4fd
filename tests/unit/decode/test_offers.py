# SPDX-License-Identifier: Apache-2.0
"""D's offers: repeated until answered, repeated while P computes, and one outcome whatever happens to P."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.core.offers import Answered, Offers, SendMessage
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Offer, Waits

P, OTHER = Endpoint("p", 1), Endpoint("p", 2)
TRANSFER = TransferId("d", 1, "u")
OFFER = Offer(TRANSFER, b"", meets="name")


def opened() -> Offers:
    offers = Offers(Timers())
    offers.offer(0.0, P, OFFER)
    assert offers.take_effects() == [SendMessage(P, OFFER)]
    return offers


def kinds(offers: Offers) -> list[Any]:
    return [effect.outcome.kind if isinstance(effect, Answered) else effect for effect in offers.take_effects()]


def test_an_offer_is_repeated_until_it_is_answered_and_then_asked_again_by_the_lease() -> None:
    offers = opened()
    assert offers.next_wake() == 0.2
    offers.tick(0.2)
    assert kinds(offers) == [SendMessage(P, OFFER)]
    offers.message(0.3, P, Waits(TRANSFER))
    assert offers.next_wake() == pytest.approx(5.3) and kinds(offers) == []
    offers.message(5.3, P, Bound(TRANSFER, "push", ended=False))
    assert kinds(offers) == ["accepted"]
    offers.tick(10.3)
    assert kinds(offers) == [SendMessage(P, OFFER)]
    offers.message(10.4, P, Bound(TRANSFER, "push", ended=True))
    assert kinds(offers) == ["prefilled"] and offers.open_count() == 0 and offers.next_wake() is None


def test_a_source_that_is_complete_is_accepted_and_prefilled_at_once() -> None:
    offers = opened()
    offers.message(0.1, P, Bound(TRANSFER, "push", ended=True))
    assert kinds(offers) == ["accepted", "prefilled"]


@pytest.mark.parametrize("bound", [False, True])
def test_a_p_that_says_nothing_for_a_lease_is_gone(bound: bool) -> None:
    offers = opened()
    if bound:
        offers.message(1.0, P, Bound(TRANSFER, "p.1", ended=False))
        offers.take_effects()
    offers.tick(14.9)
    assert all(isinstance(effect, SendMessage) for effect in offers.take_effects())
    offers.tick(16.0)
    (outcome,) = [effect.outcome for effect in offers.take_effects() if isinstance(effect, Answered)]
    assert (outcome.kind, outcome.failure.code, outcome.prefill) == ("failed", "PD-XFER-004", "p" if bound else "")


def test_an_address_that_refuses_is_the_end_of_what_was_offered_there() -> None:
    offers = opened()
    offers.unreachable(1.0, OTHER, "connection refused")
    assert kinds(offers) == []
    offers.unreachable(1.0, P, "connection refused")
    (answer,) = offers.take_effects()
    assert isinstance(answer, Answered) and "connection refused" in answer.outcome.failure.detail


@pytest.mark.parametrize(("code", "reported"), [("PD-META-027", "PD-META-027"), ("PD-WHAT-999", "PD-META-006")])
def test_gone_is_final_and_its_code_is_one_that_we_know(code: str, reported: str) -> None:
    offers = opened()
    offers.message(1.0, P, Gone(TRANSFER, Failure(code, "why")))
    (answer,) = offers.take_effects()
    assert isinstance(answer, Answered)
    assert answer.outcome == Outcome("failed", Failure(reported, "why"), seconds=1.0)
    offers.message(1.0, P, Bound(TRANSFER, "push", ended=True))
    assert kinds(offers) == []


def test_only_the_p_that_was_asked_is_heard() -> None:
    offers = opened()
    for message in (Bound(TRANSFER, "push", ended=True), Gone(TRANSFER, Failure("PD-META-027"))):
        offers.message(1.0, OTHER, message)
    offers.message(1.0, P, OFFER)
    assert kinds(offers) == [] and offers.open_count() == 1


def test_what_is_not_wanted_any_more_is_withdrawn_once() -> None:
    offers = opened()
    offers.forget(TRANSFER)
    offers.forget(TRANSFER)
    (said,) = offers.take_effects()
    assert isinstance(said, SendMessage) and isinstance(said.message, Gone)
