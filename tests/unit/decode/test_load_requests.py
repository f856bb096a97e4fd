# SPDX-License-Identifier: Apache-2.0
"""Loads and first tokens as one: what becomes of a request once its KV is complete."""

from __future__ import annotations

import pytest

from unit.protocol.kit import D
from vllm_ascend_pd.decode.scheduler.core.book import LoadBook
from vllm_ascend_pd.decode.scheduler.core.first_tokens import FirstTokenBook, Start, Wanted
from vllm_ascend_pd.decode.scheduler.core.requests import LoadRequests
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.protocol.first import First

PUSH = "p.1"


def loaded(*, starts: bool, whole: bool, code: str = "") -> tuple[LoadRequests, First, str]:
    """Report a request's KV, and then its token: which it is, and why D does not wait for it."""
    requests = LoadRequests(LoadBook("decode-1"), FirstTokenBook(0.2, 15.0))
    assert requests.book.wanted("r", 10, 0) == 10
    bind = requests.book.reserve("r", 10, [[1, 2, 3, 4]], D.tables, 60.0, "u")
    wanted = Wanted(bind.transfer, 10, "how", None, 100, whole)
    assert not requests.ask("r", lambda: wanted, recomputes_last=False)
    requests.book.ended([LoadEnd("r", code, PUSH)])
    received = requests.received(1.0, "r", starts=starts)
    assert received is not None and received.transfer == bind.transfer
    first = First(transfer=bind.transfer, push=PUSH, position=10, token=7, digest="how")
    requests.token(bind.transfer, first)
    return requests, first, received.why_no_first_token


@pytest.mark.parametrize("whole", [False, True], ids=["D can compute it", "D can begin with nothing else"])
@pytest.mark.parametrize("starts", [False, True], ids=["outside vLLM's read", "in it"])
def test_a_token_is_given_up_only_where_d_can_compute_it(starts: bool, whole: bool) -> None:
    requests, first, why = loaded(starts=starts, whole=whole)
    kept = starts or whole
    assert requests.first_token_book.take(1.0) == ([Start("r", first, whole=whole)] if kept else [])
    assert why == ("" if kept else "scheduler")


@pytest.mark.parametrize("starts", [False, True])
def test_a_load_that_failed_waits_for_no_token(starts: bool) -> None:
    requests, _, why = loaded(starts=starts, whole=True, code="PD-XFER-004")
    assert not requests.first_token_book.take(99.0) and not requests.first_token_book.open_count()
    assert why == "load failed"
