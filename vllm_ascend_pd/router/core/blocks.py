# SPDX-License-Identifier: Apache-2.0
"""State of a response's or a message's stream that lets another D go on with it.

Pure. Such a stream is a row of events, of which those in a row that say a text piece by piece are one text, wherever
they are cut. So two D's answers are the same row, and a later D's is followed along it to the place where it goes on.
Ids that each D chooses are the first D's for the client, and events are numbered on. D puts the token ids between its
events (`pd.tokens`), and says there how the answer ends before it makes the last events of it.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from vllm_ascend_pd.protocol.continuing import EVENT, TokensSaid, read_said
from vllm_ascend_pd.router.core.accumulated import NotContinued
from vllm_ascend_pd.router.core.bodies import TRANSFER_PARAMS, UNREADABLE, Request
from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.router.core.resume import Cut, StreamState

TOKENS_EVENT = f"event: {EVENT}\n".encode()
LAST_EVENTS = (b"message_stop", b"response.completed")
_EVENT, _DATA = b"event: ", b"\ndata: "
OPENINGS = (b"message_start", b"response.created", b"response.in_progress")  # before anything is computed
_TEXTS = ("text", "thinking", "partial_json")
_WHOLE = ("response", "message")  # objects that repeat what was asked: only their id counts
_IDS = ("id", "item_id", "call_id")
_OWN = {"sequence_number", "signature", "usage"}  # each D's own, to which no other event refers

_OVERHEAD = 256  # bytes of a part, beside what it says

Key = tuple[Any, ...]


class _Text(msgspec.Struct):
    """A text that events say piece by piece."""

    key: Key
    said: bytearray


def _piece(said: dict[str, Any]) -> tuple[Key, dict[str, Any], str] | None:
    """Return which text an event says a piece of, and the object and field with the piece; None: it is no piece."""
    place, name = said, "delta"
    if isinstance(delta := said.get("delta"), dict):
        place, name = delta, next((one for one in _TEXTS if one in delta), "")
    if not isinstance(place.get(name), str):
        return None
    indices = (said.get(f"{of}index") for of in ("", "output_", "content_", "summary_"))
    return (said.get("type"), *indices, name), place, name


def _kept_of(said: dict[str, Any]) -> dict[str, Any]:
    """Return what must be alike, and the ids, of an event that is no piece of a text."""
    wholes = {name: {"id": whole.get("id")} for name in _WHOLE if isinstance(whole := said.get(name), dict)}
    return said | wholes


class EventRow:
    """The events that a client has."""

    def __init__(self) -> None:
        self.parts: list[_Text | bytes] = []  # texts, and in JSON what is kept of other events
        self.size = 0

    def take(self, said: dict[str, Any]) -> None:
        where = _piece(said)
        if where is None:
            part = msgspec.json.encode(_kept_of(said))
            self.parts.append(part)
            self.size += _OVERHEAD + len(part)
            return
        key, place, name = where
        if piece := place[name].encode():
            last = self.parts[-1] if self.parts else None
            if isinstance(last, _Text) and last.key == key:
                last.said += piece
            else:
                self.parts.append(_Text(key, bytearray(piece)))
                self.size += _OVERHEAD
            self.size += len(piece)


class FollowedRow:
    """A later D's stream along the row that the client has. `names`: of its ids, those that the client knows."""

    def __init__(self, row: EventRow, ids: array[int], names: dict[str, str]) -> None:
        self._parts, self._at, self._in_text = row.parts, 0, 0
        self._ids, self._said, self._names = ids[:], 0, names
        self.caught_up = not row.parts  # all that the client has was said; from then on the row grows

    def new(self, ids: list[int]) -> list[int]:
        """Return the tokens beyond those that the client has. Raise NotContinued if these are others."""
        had = self._ids[self._said : self._said + len(ids)]
        self._said += len(ids)
        if array("I", ids[: len(had)]) != had:
            raise NotContinued("the other D's tokens differ")
        return ids[len(had) :]

    def beyond(self, said: dict[str, Any]) -> bool:
        """Return whether an event, of which what the client has is taken away, is new. Raise NotContinued."""
        new = self._is_beyond(said)
        last = self._parts[-1]
        left = len(self._parts) - self._at
        self.caught_up = not left or (left == 1 and isinstance(last, _Text) and len(last.said) == self._in_text)
        return new

    def _is_beyond(self, said: dict[str, Any]) -> bool:
        where = _piece(said)
        key, place, name = where or (None, said, "")
        if where is not None and not place[name]:
            return False
        part = self._part(key)
        if part is None:
            return True
        if isinstance(part, bytes) and where is None:
            self._alike(msgspec.json.decode(part), _kept_of(said), "")
            self._at += 1
            return False
        if isinstance(part, bytes) or where is None:
            raise NotContinued(f"the other D's {said.get('type')} comes in another place")
        piece, had = place[name].encode(), part.said[self._in_text :]
        common = min(len(piece), len(had))
        if key != part.key or piece[:common] != had[:common]:
            raise NotContinued(f"the other D's {name} differs")
        self._in_text += common
        if common < len(piece) and self._at + 1 < len(self._parts):
            raise NotContinued(f"the other D's {name} is longer")
        place[name] = piece[common:].decode()
        return common < len(piece)

    def _part(self, key: Key | None) -> _Text | bytes | None:
        """Return the part of the row at which an event stands; None: behind all of them."""
        part = self._parts[self._at] if self._at < len(self._parts) else None
        if isinstance(part, _Text) and len(part.said) == self._in_text and part.key != key:
            self._at, self._in_text = self._at + 1, 0
            part = self._parts[self._at] if self._at < len(self._parts) else None
        return part

    def _alike(self, had: Any, said: Any, at: str) -> None:
        if at in _IDS and isinstance(had, str) and isinstance(said, str):
            self._names[said] = had
        elif isinstance(had, dict) and isinstance(said, dict) and had.keys() == said.keys():
            for name in had.keys() - _OWN:
                self._alike(had[name], said[name], name)
        elif isinstance(had, list) and isinstance(said, list) and len(had) == len(said):
            for one, other in zip(had, said, strict=True):
                self._alike(one, other, at)
        elif had != said:
            raise NotContinued(f"the other D's {at or 'event'} differs")


class BlockStream(StreamState):
    """State of one stream of typed events."""

    reports = True

    def __init__(self, request: Request, max_length: int) -> None:
        super().__init__(request, max_length)
        self._row = EventRow()
        self._names: dict[str, str] = {}
        self._followed: FollowedRow | None = None
        self._reported = False  # by the D that answers
        self._created: Any = None

    @property
    def size(self) -> int:
        return super().size + self._row.size

    def give_up(self, why: str) -> None:
        super().give_up(why)
        self._row = EventRow()

    def go_on(self) -> bool:
        came, self._reported = super().go_on(), False
        self._followed = FollowedRow(self._row, self.ids, self._names)
        return came

    def take_whole(self, answer: Buffer) -> bool:
        return False  # vLLM returns no token ids of it

    def _taken(self, event: bytes) -> bytes:
        name, marker, data = event.partition(_DATA)
        if not marker or not name.startswith(_EVENT):
            return event + b"\n\n"  # a comment
        name = name[len(_EVENT) :]
        try:
            if name == EVENT.encode():
                self._tokens(read_said(data))
                return b""
            said = msgspec.json.decode(data, type=dict[str, Any])
        except UNREADABLE:
            return self._not_understood(event)
        if name == b"error":
            self.cut = Cut.FAILED
            return b""
        if name in LAST_EVENTS:
            event = self._last(event, name, said)
        return self._block(event, name, said)

    def _tokens(self, said: TokensSaid) -> None:
        if said.finish_reason is not None:
            self.cut = self._cut_by(said.finish_reason, said.stop_reason)
            if said.finish_reason == "error":
                self.cut = Cut.FAILED
        if self.cut is not None:
            return
        self._reported = True
        prompt = array("I", said.prompt or ())
        if prompt and self._prompt and prompt != self._prompt:
            raise NotContinued("the prompt is another one there")
        ids = said.ids if self._followed is None else self._followed.new(said.ids)
        if self._unfit:
            return
        if prompt:
            self._prompt = prompt
        self._seen.ids.extend(ids)
        self._answer += len(ids)
        if said.stored:
            self.give_up("its D keeps it for requests that follow on it")
        elif self.length > self._max_length:
            self.give_up(f"it has more than {self._max_length} tokens")

    def _last(self, event: bytes, name: bytes, said: dict[str, Any]) -> bytes:
        """Take from the last event what the client does not get."""
        whole = said.get("response")
        if isinstance(whole, dict) and whole.get(TRANSFER_PARAMS) is not None:
            whole[TRANSFER_PARAMS] = None
            event = _EVENT + name + _DATA + msgspec.json.encode(said)
        return event

    def _block(self, event: bytes, name: bytes, said: dict[str, Any]) -> bytes:
        if not (self._first or self._reported or name in OPENINGS):
            raise NotContinued("the other D returns no token ids")
        followed = self._followed
        if followed is not None and not followed.caught_up and not followed.beyond(said):
            return b""
        if self._first:
            if isinstance(opening := said.get("response"), dict) and self._created is None:
                self._created = opening.get("created_at")
        else:
            said = self._as_first(said)
            event = _EVENT + name + _DATA + msgspec.json.encode(said)
        if "sequence_number" in said:
            self.number = said["sequence_number"] + 1
        if not self._unfit:
            self._row.take(said)
        self.done = name in LAST_EVENTS
        return event + b"\n\n"

    def _as_first(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return a later D's event as if the first D had written it."""
        said = self._named(said, "")
        if "sequence_number" in said:
            said["sequence_number"] = self.number
        if isinstance(whole := said.get("response"), dict):
            self._take_metrics(whole)
            if "created_at" in whole:
                whole["created_at"] = self._created
        return said

    def _named(self, value: Any, at: str) -> Any:
        if isinstance(value, dict):
            return {name: self._named(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self._named(one, at) for one in value]
        return self._names.get(value, value) if at in _IDS and isinstance(value, str) else value
