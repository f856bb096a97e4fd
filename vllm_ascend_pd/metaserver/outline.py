# SPDX-License-Identifier: Apache-2.0
"""Long JSON, gone through in slices: where a value ends, which members an object has, without making any of it.

Each function is a generator: after a slice it yields how many bytes it went through, so that whoever runs it can let others have
their turn. Only strings and brackets are understood. That is enough: all readers that accept a text agree about those, and what no
reader accepts the engine refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec
import numpy as np

SLICE = 64 << 10  # bytes between two turns: about a millisecond, whatever they are
MOST_MEMBERS = 256  # of an object: three times what the API knows
MOST_DEPTH = 900  # the standard library's reader, which engines use, takes about a thousand
_FIRST = 1 << 10  # what is looked at first of a value: most are short
_MOST_NAME = 1 << 10
_MOST_NUMBER = 1 << 10
_OVERLAP = 128

_QUOTE = ord('"')
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"true|false|null|-?[0-9][0-9.eE+-]*")
_ODD = 64
_KIND = np.full(256, _ODD, np.int8)  # of a byte outside strings: what it does to the depth, or that JSON has none such
_KIND[list(b'0123456789+-.eEtrufalsn,: \t\r\n"')] = 0
_KIND[list(b"[{")] = 1
_KIND[list(b"]}")] = -1

T = TypeVar("T")
Steps = Generator[int, None, T]
Buffer = bytes | memoryview


class NotJson(ValueError):
    """The text says why."""


def at_once(steps: Steps[T]) -> T:
    """The result, without a turn for anybody."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def members(text: Buffer) -> Steps[dict[str, memoryview]]:
    """The values of the object that `text` is; of equal names the last, as engines read it. Raises NotJson."""
    whole, found = memoryview(text), dict[str, memoryview]()
    at, count = (yield from _past_space(whole, 0)), 0
    _expect(whole, at, b"{")
    at = yield from _past_space(whole, at + 1)
    while count or not _is(whole, at, b"}"):
        if count == MOST_MEMBERS:
            raise NotJson(f"it has more than {MOST_MEMBERS} names at its outermost level")
        count += 1
        _expect(whole, at, b'"')
        end = yield from value_end(whole, at)
        name = _name(whole[at:end])
        at = yield from _past_space(whole, end)
        _expect(whole, at, b":")
        at = yield from _past_space(whole, at + 1)
        end = yield from value_end(whole, at)
        found[name] = whole[at:end]
        at = yield from _past_space(whole, end)
        if _is(whole, at, b"}"):
            break
        _expect(whole, at, b",")
        at = yield from _past_space(whole, at + 1)
    yield from _nothing_more(whole, at + 1)
    return found


def well_formed(text: Buffer) -> Steps[None]:
    """Raises NotJson unless `text` is one value, as far as strings and brackets go."""
    whole = memoryview(text)
    end = yield from value_end(whole, (yield from _past_space(whole, 0)))
    yield from _nothing_more(whole, end)


def single(text: Buffer) -> Steps[bool]:
    """Whether the list that `text` begins with has just one element."""
    whole = memoryview(text)
    end = yield from value_end(whole, (yield from _past_space(whole, 1)))
    return _is(whole, (yield from _past_space(whole, end)), b"]")


def value_end(text: memoryview, at: int) -> Steps[int]:
    """The end of the value that begins at `at`. Raises NotJson."""
    first = bytes(text[at : at + 1])
    if first == b'"':
        return (yield from _string_end(text, at + 1))
    if first in (b"[", b"{"):
        return (yield from _bracket_end(text, at))
    found = _SCALAR.match(text, at, at + _MOST_NUMBER)
    if found is None:
        raise NotJson(f"no value at byte {at}")
    return found.end()


def holds(text: Buffer, says: Callable[[bytes], object]) -> Steps[bool]:
    """Whether `says` is true of some part of it; what it looks for is shorter than the overlap of two parts."""
    for at in range(0, len(text), SLICE):
        if says(bytes(text[at : at + SLICE + _OVERLAP])):
            return True
        if at + SLICE < len(text):
            yield SLICE
    return False


def count(text: Buffer, byte: bytes) -> Steps[int]:
    found = 0
    for at in range(0, len(text), SLICE):
        found += bytes(text[at : at + SLICE]).count(byte)
        if at + SLICE < len(text):
            yield SLICE
    return found


def _string_end(text: memoryview, at: int) -> Steps[int]:
    size = _FIRST
    while at < len(text):
        piece = _piece(text, at, size)
        end = piece.find(b'"')
        if end >= 0:
            return at + end + 1
        at, size = at + len(piece), SLICE
        yield len(piece)
    raise NotJson("a string does not end")


def _bracket_end(text: memoryview, at: int) -> Steps[int]:
    size, depth, inside = _FIRST, 0, False
    while at < len(text):
        piece = _piece(text, at, size)
        codes = np.frombuffer(piece, np.uint8)
        kinds = _KIND.take(codes)
        if inside or b'"' in piece:
            within = np.logical_xor.accumulate(codes == _QUOTE) ^ inside
            kinds *= ~within
            inside = bool(within[-1])
        depths = depth + np.cumsum(np.where(kinds == _ODD, 0, kinds), dtype=np.int32)
        ends = int((depths == 0).argmax())
        last = ends if depths[ends] == 0 else len(piece) - 1
        if (kinds[: last + 1] == _ODD).any():
            raise NotJson("there is something outside its strings that JSON does not have")
        if depths[: last + 1].max() > MOST_DEPTH:
            raise NotJson("it is nested too deeply")
        if depths[last] == 0:
            return at + last + 1
        at, size, depth = at + len(piece), SLICE, int(depths[-1])
        yield len(piece)
    raise NotJson("a bracket is not closed")


def _piece(text: memoryview, at: int, size: int) -> bytes:
    """The next bytes, with escapes that could hide a quote or show one blanked. It never ends in the middle of one."""
    piece = bytes(text[at : at + size])
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0")
        if piece.endswith(b"\\") and at + len(piece) < len(text):
            return piece[:-1]
    return piece


def _past_space(text: memoryview, at: int) -> Steps[int]:
    while True:
        found = _SPACE.match(text, at, at + SLICE)
        end = found.end() if found is not None else at
        if end - at < SLICE:
            return end
        at = end
        yield SLICE


def _is(text: memoryview, at: int, wanted: bytes) -> bool:
    return bytes(text[at : at + 1]) == wanted


def _expect(text: memoryview, at: int, wanted: bytes) -> None:
    if not _is(text, at, wanted):
        raise NotJson(f"{wanted.decode()} expected at byte {at}")


def _nothing_more(text: memoryview, at: int) -> Steps[None]:
    if (yield from _past_space(text, at)) < len(text):
        raise NotJson("something comes after its end")


def _name(text: memoryview) -> str:
    if len(text) > _MOST_NAME:
        raise NotJson(f"a name is longer than {_MOST_NAME} bytes")
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise NotJson(f"a name is none: {problem}") from problem
