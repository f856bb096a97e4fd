# SPDX-License-Identifier: Apache-2.0
"""Loads and first tokens as one: what becomes of a request once its KV is complete."""

from __future__ import annotations

import pytest

from unit.kits.loads import book_with
from unit.protocol.kit import D
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.load import Start, Wanted
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken

PUSH = "p.1"


def loaded(*, starts: bool, whole: bool, code: str = "") -> tuple[TokenBook, FirstToken, str]:
    """Report a request's KV, and then its token: which it is, and why D does not wait for it."""
    book = book_with("r")
    assert book.wanted("r", 10, 0) == 10
    bind = book.reserve("r", 10, [[1, 2, 3, 4]], D.tables, 60.0, "u")
    book.ask("r", Wanted(bind.transfer, 10, "how", None, 100, whole))
    book.ended([LoadEnd("r", Failure(code) if code else None, PUSH)])
    load = book.received(1.0, "r", starts=starts)
    assert load is not None and load.transfer == bind.transfer
    first = FirstToken(transfer=bind.transfer, push=PUSH, position=10, token=7, digest="how")
    book.token(bind.transfer, first)
    return book, first, load.source


@pytest.mark.parametrize("whole", [False, True], ids=["D can compute it", "D can begin with nothing else"])
@pytest.mark.parametrize("starts", [False, True], ids=["outside vLLM's read", "in it"])
def test_a_token_is_given_up_only_where_d_can_compute_it(starts: bool, whole: bool) -> None:
    book, first, why = loaded(starts=starts, whole=whole)
    kept = starts or whole
    assert book.take(1.0) == ([Start("r", first)] if kept else [])
    assert why == ("" if kept else "scheduler")


@pytest.mark.parametrize("starts", [False, True])
def test_a_load_that_failed_waits_for_no_token(starts: bool) -> None:
    book, _, why = loaded(starts=starts, whole=True, code="PD-XFER-004")
    assert not book.take(99.0) and not book.withholds("r")
    assert why == "load failed"
