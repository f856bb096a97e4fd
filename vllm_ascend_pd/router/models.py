# SPDX-License-Identifier: Apache-2.0
"""The models that engines list, and the list of all of them that clients get."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vllm_ascend_pd.router.core.bodies import UNREADABLE
from vllm_ascend_pd.router.core.decisions import Condition
from vllm_ascend_pd.router.fleet import Instance

ROUTE = "/v1/models"
_UP = (Condition.READY, Condition.SUSPECT)


class _Card(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


def cards_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the entries of an engine's model list by name; none if the list is not understood."""
    try:
        cards = msgspec.json.decode(body, type=_List).data
        return {msgspec.json.decode(card, type=_Card).id: msgspec.Raw(bytes(card)) for card in cards}
    except UNREADABLE:
        return {}


def listed(decodes: Iterable[Instance]) -> bytes:
    """Return one list of all models of the D's that are up, each with the entry of the first D that lists it."""
    cards: dict[str, msgspec.Raw] = {}
    for decode in decodes:
        if decode.condition() in _UP:
            cards = {**(decode.cards or {}), **cards}
    return msgspec.json.encode({"object": "list", "data": list(cards.values())})
