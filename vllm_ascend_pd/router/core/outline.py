# SPDX-License-Identifier: Apache-2.0
"""Long JSON, scanned in slices: where a value ends and which members an object has, without decoding any of it.

Each scan is a generator: after a slice it yields how many bytes it scanned, so that its caller can let other work run.
Only strings and brackets are understood. That is enough: all readers that accept a text agree about those, and the
engine refuses a text that no reader accepts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec
import numpy as np

SLICE = 64 << 10  # bytes between two yields: about a millisecond, whatever they contain
MAX_MEMBERS = 256  # of an object: three times as many as the API has
MAX_DEPTH = 900  # the standard library's reader, which engines use, takes about a thousand
_FIRST = 1 << 10  # bytes of the first slice of a value: most values are short
_MAX_NAME = 1 << 10
_MAX_NUMBER = 1 << 10
_OVERLAP = 128

_QUOTE = ord('"')
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"true|false|null|-?[0-9][0-9.eE+-]*")
_ODD = 64
_KIND = np.full(256, _ODD, np.int8)  # by byte, outside strings: how it changes the depth, or that JSON has no such byte
_KIND[list(b'0123456789+-.eEtrufalsn,: \t\r\n"')] = 0
_KIND[list(b"[{")] = 1
_KIND[list(b"]}")] = -1

T = TypeVar("T")
Scan = Generator[int, None, T]
Buffer = bytes | memoryview


class NotJson(ValueError):
    """A text that is not JSON; the message says why."""


def at_once(steps: Scan[T]) -> T:
    """Run all steps without pauses and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def members(text: Buffer) -> Scan[dict[str, memoryview]]:
    """Return the raw values of an object by name; of equal names the last, as engines read it. Raise NotJson."""
    whole, found = memoryview(text), dict[str, memoryview]()
    at, count = (yield from past_space(whole, 0)), 0
    _expect(whole, at, b"{")
    at = yield from past_space(whole, at + 1)
    while count or not _is(whole, at, b"}"):
        if count == MAX_MEMBERS:
            raise NotJson(f"it has more than {MAX_MEMBERS} names at its outermost level")
        count += 1
        _expect(whole, at, b'"')
        end = yield from value_end(whole, at)
        name = _name(whole[at:end])
        at = yield from past_space(whole, end)
        _expect(whole, at, b":")
        at = yield from past_space(whole, at + 1)
        end = yield from value_end(whole, at)
        found[name] = whole[at:end]
        at = yield from past_space(whole, end)
        if _is(whole, at, b"}"):
            break
        _expect(whole, at, b",")
        at = yield from past_space(whole, at + 1)
    yield from _nothing_more(whole, at + 1)
    return found


def well_formed(text: Buffer) -> Scan[None]:
    """Raise NotJson unless `text` is one value, by its strings and brackets only."""
    whole = memoryview(text)
    end = yield from value_end(whole, (yield from past_space(whole, 0)))
    yield from _nothing_more(whole, end)


def single(text: Buffer) -> Scan[bool]:
    """Return whether the list that `text` begins with has exactly one element."""
    whole = memoryview(text)
    end = yield from value_end(whole, (yield from past_space(whole, 1)))
    return _is(whole, (yield from past_space(whole, end)), b"]")


def value_end(text: memoryview, at: int) -> Scan[int]:
    """Return the end of the value that begins at `at`. Raise NotJson."""
    first = bytes(text[at : at + 1])
    if first == b'"':
        return (yield from _string_end(text, at + 1))
    if first in (b"[", b"{"):
        return (yield from _bracket_end(text, at))
    found = _SCALAR.match(text, at, at + _MAX_NUMBER)
    if found is None:
        raise NotJson(f"no value at byte {at}")
    return found.end()


def holds(text: Buffer, says: Callable[[bytes], object]) -> Scan[bool]:
    """Return whether `says` is true of some part. It must look for less than the `_OVERLAP` bytes that parts share."""
    for at in range(0, len(text), SLICE):
        if says(bytes(text[at : at + SLICE + _OVERLAP])):
            return True
        if at + SLICE < len(text):
            yield SLICE
    return False


def count(text: Buffer, byte: bytes) -> Scan[int]:
    found = 0
    for at in range(0, len(text), SLICE):
        found += bytes(text[at : at + SLICE]).count(byte)
        if at + SLICE < len(text):
            yield SLICE
    return found


def past_space(text: Buffer, at: int, space: re.Pattern[bytes] = _SPACE) -> Scan[int]:
    """Return where something else than white space begins, at `at` or later. `space`: pattern of any length of it."""
    while True:
        found = space.match(text, at, at + SLICE)
        end = found.end() if found is not None else at
        if end - at < SLICE:
            return end
        at = end
        yield SLICE


def _string_end(text: memoryview, at: int) -> Scan[int]:
    size = _FIRST
    while at < len(text):
        piece = _piece(text, at, size)
        end = piece.find(b'"')
        if end >= 0:
            return at + end + 1
        at, size = at + len(piece), SLICE
        yield len(piece)
    raise NotJson("a string does not end")


def _bracket_end(text: memoryview, at: int) -> Scan[int]:
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
        if depths[: last + 1].max() > MAX_DEPTH:
            raise NotJson("it is nested too deeply")
        if depths[last] == 0:
            return at + last + 1
        at, size, depth = at + len(piece), SLICE, int(depths[-1])
        yield len(piece)
    raise NotJson("a bracket is not closed")


def _piece(text: memoryview, at: int, size: int) -> bytes:
    """Return the next bytes with escaped quotes and backslashes blanked; they never end inside such an escape."""
    piece = bytes(text[at : at + size])
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0")
        if piece.endswith(b"\\") and at + len(piece) < len(text):
            return piece[:-1]
    return piece


def _is(text: memoryview, at: int, wanted: bytes) -> bool:
    return bytes(text[at : at + 1]) == wanted


def _expect(text: memoryview, at: int, wanted: bytes) -> None:
    if not _is(text, at, wanted):
        raise NotJson(f"{wanted.decode()} expected at byte {at}")


def _nothing_more(text: memoryview, at: int) -> Scan[None]:
    if (yield from past_space(text, at)) < len(text):
        raise NotJson("something comes after its end")


def _name(text: memoryview) -> str:
    if len(text) > _MAX_NAME:
        raise NotJson(f"a name is longer than {_MAX_NAME} bytes")
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise NotJson(f"a name is none: {problem}") from problem
