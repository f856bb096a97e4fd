# SPDX-License-Identifier: Apache-2.0
"""D's question for the answer so far of a request that goes on here, and the router's answer.

A request's transfer parameters only say that it goes on. D asks the metaserver that its ticket names, which is one that
D allows, so no client can hand tokens to D. The question changes nothing, and may be repeated.

vLLM returns no token ids of a response or a message. A router that wants to let another D go on with one asks for them
in the same parameters, and D's server puts them between the events of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

CONTINUE = "continue"  # in a request's transfer parameters, beside the ticket
REPORT = "report_tokens"  # there too: the token ids are wanted in the stream
EVENT = "pd.tokens"  # the type of such an event
ROUTE = "/v1/metaserver/answer"  # beside the route of the reservations
UNKNOWN, OTHER_PROMPT = 404, 409  # the router's status: it knows no such ticket; the prompt is another one there
MAX_TOKENS = 1 << 17
MAX_QUESTION_BYTES = 4096
MAX_ANSWER_BYTES = 16 * MAX_TOKENS  # of each ten digits, a comma, perhaps a space

_Word = Annotated[str, msgspec.Meta(max_length=256)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class AnswerWanted(msgspec.Struct, frozen=True):
    """D's question. The same body may become another prompt on another D; then the answer so far is none of its own."""

    ticket: _Word
    prompt: _Word  # hash of the ids of D's prompt and of nothing else (`prompt_hash` in auth.py)


class AnswerSoFar(msgspec.Struct, frozen=True):
    """The router's answer: the ids that the request has put out, in order. None: it begins anew."""

    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]


class TokensSaid(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens of the events that follow, up to the next of these. The first one has the prompt's too."""

    ids: list[TokenId]
    prompt: list[TokenId] | None = None
    finish_reason: str | None = None  # vLLM's, of the last tokens; so a break is known before what is made of it
    stop_reason: int | str | None = None
    stored: bool = False  # D keeps this answer for requests that follow on it, and no other D has it


_WANTED = msgspec.json.Decoder(AnswerWanted)
_SO_FAR = msgspec.json.Decoder(AnswerSoFar)
_SAID = msgspec.json.Decoder(TokensSaid)


def goes_on(params: Mapping[str, Any]) -> bool:
    """Return whether a request's transfer parameters, which may be any JSON, say that it goes on here."""
    return params.get(CONTINUE) is True


def read_wanted(body: bytes) -> AnswerWanted:
    """Return the question that D posted. Raise msgspec's errors."""
    return _WANTED.decode(body)


def read_so_far(body: bytes) -> AnswerSoFar:
    """Return the router's answer. Raise msgspec's errors."""
    return _SO_FAR.decode(body)


def read_said(event: bytes) -> TokensSaid:
    """Return the tokens in an event of D's. Raise msgspec's errors."""
    return _SAID.decode(event)
