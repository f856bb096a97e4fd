# SPDX-License-Identifier: Apache-2.0
"""D's book of loads with requests that have a ticket."""

from __future__ import annotations

from vllm_ascend_pd.decode.scheduler.core.book import LoadBook
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.routes import Ticket

TICKET = Ticket("http://127.0.0.1:9", "t")


def book_with(*requests: str, incarnation: str = "d") -> TokenBook:
    book = TokenBook(incarnation)
    for request_id in requests:
        arrive(book, request_id)
    return book


def arrive(book: LoadBook, request_id: str) -> None:
    """Let a request arrive whose KV the metaserver gets."""
    assert book.route(request_id, lambda: TICKET) is TICKET
