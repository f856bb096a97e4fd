# SPDX-License-Identifier: Apache-2.0
"""Routes of a request's KV, and our own metaserver's ticket. Those of other routers are in protocol/dialects.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from vllm_ascend_pd.errors import PdError

MAX_TICKET = 256
MAX_URL = 256  # of one that is refused, in the log


class KvRoute(Protocol):
    """Bringer of a request's KV."""

    @property
    def metaserver(self) -> str:
        """The metaserver to report to; empty: there is none."""

    @property
    def ticket(self) -> str:
        """The request's name there."""

    @property
    def p_waits(self) -> bool:
        """True if a P waits for D: with blocks that it holds, or to answer D's offer."""

    @property
    def carries_first(self) -> bool:
        """True if P's first token can come the same way."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The metaserver's part of a request: the address to call, and the request's name there."""

    p_waits: ClassVar[bool] = False
    carries_first: ClassVar[bool] = True

    metaserver: str
    ticket: str
    send_tokens: bool = False
    first_token: bool = False  # each P that it may ask sends its first token


def read_ticket(params: Mapping[str, Any] | None, allowed: frozenset[str]) -> Ticket | PdError | str | None:
    """Return a ticket, or why there is none (the request is then prefilled locally), or None if none was meant.

    A client can reach an engine without a router: `params` may be any JSON.
    """
    if (
        not isinstance(params, Mapping)
        or params.get("do_remote_prefill") is not True
        or params.get("do_virtual") is True
    ):
        return None  # virtual: a warm-up that names no prefill engine; it is prefilled locally
    url, ticket = params.get("metaserver"), params.get("ticket")
    if not isinstance(url, str):
        return "it names no metaserver"
    if url.rstrip("/") not in allowed:
        return PdError("PD-META-001", url=url[:MAX_URL])
    if not isinstance(ticket, str) or not 0 < len(ticket) <= MAX_TICKET or not ticket.isascii():
        return "it carries no ticket"
    return Ticket(url.rstrip("/"), ticket, params.get("send_tokens") is True, params.get("first_token") is True)
