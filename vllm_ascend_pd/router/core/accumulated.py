# SPDX-License-Identifier: Apache-2.0
"""The part of an answer that a client has, and the part of another engine's stream that lies beyond it.

Pure. A stream's deltas are objects whose strings and lists grow; where they are cut means nothing. A part of an answer
is named by its path in a delta. In a list of objects with an `index` the index is a step of the path; their `id` and
`type` are names, which come once and which each engine chooses for itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

Path: TypeAlias = tuple[str | int, ...]
IDS = "token_ids"
_NAMES = ("id", "type")


class NotContinued(ValueError):
    """A stream that no other engine can go on with; the text says why."""


class Row(msgspec.Struct):
    """A token's log-probabilities, of which the token alone is kept and the rest is not even decoded."""

    token: str | float | None = None  # a number: of a completion's likeliest tokens, one whose text is "token"


def _is_name(path: Path) -> bool:
    return len(path) > 1 and path[-1] in _NAMES and isinstance(path[-2], int)


def _indexed(value: list[Any]) -> bool:
    if not value or not isinstance(value[0], dict) or "index" not in value[0]:
        return False
    return all(isinstance(one, dict) and isinstance(one.get("index"), int) for one in value)


def _compared(path: Path, piece: str | list[Any]) -> Any:
    """Return what must be the same on two engines: strings, token ids, and of rows the token and how many there are.

    Log-probabilities are each engine's own.
    """
    if isinstance(piece, str):
        return piece.encode()
    return array("I", piece) if path == (IDS,) else [_word(one) for one in piece]


def _word(row: object) -> str | None:
    word = row.token if isinstance(row, Row) else row.get("token") if isinstance(row, dict) else row
    return word if isinstance(word, str) else None


class Accumulated:
    """The parts of an answer that have come, in whatever pieces. `size`: about the bytes of all but the ids."""

    def __init__(self) -> None:
        self.ids = array("I")
        self.parts: dict[Path, Any] = {(IDS,): self.ids}
        self.size = 0

    def take(self, said: Mapping[str, Any], at: Path = ()) -> None:
        """Take in a delta. What is neither string nor list does not grow, and is no part of an answer."""
        for name, value in said.items():
            if isinstance(value, str):
                path = (*at, name)
                had = self.parts.get(path)
                if had is None:
                    had = self.parts[path] = bytearray()
                elif name in _NAMES and _is_name(path):
                    continue
                coded = value.encode()
                had += coded
                self.size += len(coded)
            elif isinstance(value, dict):
                self.take(value, (*at, name))
            elif isinstance(value, list) and _indexed(value):
                for one in value:
                    self.take(one, (*at, name, one["index"]))
            elif isinstance(value, list):
                path = (*at, name)
                self.parts.setdefault(path, []).extend(_compared(path, value))
                self.size += 64 * len(value)

    def names(self) -> Accumulated:
        """Return the names alone, by which a client knows what is still to come."""
        kept = Accumulated()
        kept.parts |= {path: part for path, part in self.parts.items() if _is_name(path)}
        return kept

    def renamed(self, said: dict[str, Any], at: Path = ()) -> dict[str, Any]:
        """Return a delta of another engine with the names that the client knows."""
        return {name: self._renamed(value, (*at, name)) for name, value in said.items()}

    def _renamed(self, value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return self.renamed(value, path)
        if isinstance(value, list) and _indexed(value):
            return [self.renamed(one, (*path, one["index"])) for one in value]
        return self.parts[path].decode() if isinstance(value, str) and _is_name(path) and path in self.parts else value


class RepeatedAnswer:
    """Another engine's stream from its beginning, as long as it has not said all that the client has."""

    def __init__(self, had: Accumulated) -> None:
        self._had = had.parts
        self._at = dict.fromkeys(had.parts, 0)

    @property
    def caught_up(self) -> bool:
        return all(at >= len(self._had[path]) for path, at in self._at.items())

    def beyond(self, said: Mapping[str, Any], at: Path = ()) -> dict[str, Any]:
        """Return a delta without what the client has. Raise NotContinued if it is not what the client has."""
        rest = {name: self._beyond(value, (*at, name)) for name, value in said.items()}
        return {name: value for name, value in rest.items() if value}

    def _beyond(self, value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return self.beyond(value, path)
        if isinstance(value, list) and _indexed(value):
            parts = ({"index": one["index"], **self.beyond(one, (*path, one["index"]))} for one in value)
            return [part for part in parts if len(part) > 1]
        return self._rest(value, path) if isinstance(value, str | list) else None

    def _rest(self, piece: Any, path: Path) -> Any:
        had, at = self._had.get(path), self._at.get(path, 0)
        if had is None:
            return piece
        if _is_name(path):
            self._at[path] = len(had)
            return None
        new, left = _compared(path, piece), max(0, len(had) - at)
        if had[at : at + len(new)] != new[:left]:
            raise NotContinued(f"the other D's {path[-1]} differs")
        self._at[path] = at + len(new)
        return new[left:].decode() if isinstance(new, bytes) else piece[left:]
