# SPDX-License-Identifier: Apache-2.0
"""Estimate of the prompts in an engine's prefix cache, from what it was sent and from its own KV events.

A prompt is identified by marks: digests of everything up to a place, at places that do not depend on the prompt's end.
So two prompts that begin alike have the same first marks. Nothing is tokenised: JSON that begins with the same bytes
counts as the same beginning.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from vllm_ascend_pd.router.core.pieces import PIECE, Buffer

NEAR = 1 << 10  # bytes between two marks in the first FINE bytes
FINE = 64 << 10
FAR = 16 << 10  # and beyond those
LEAST = 32  # tokens as which a mark counts at least: a client may fill a prompt with what is no token
MAX_BYTES = 16 << 20  # of a prompt that are covered by marks: about four million tokens


class Mark(NamedTuple):
    """Digest of a prompt's beginning of about `tokens` tokens."""

    digest: bytes
    tokens: int


Marks = tuple[Mark, ...]


def marks_of(context: Iterable[Buffer], prompt: Buffer, tokens: int) -> Marks:
    """Return the marks of a prompt of about `tokens` tokens.

    `context`: what distinguishes it beside its own bytes, for example the model.
    """
    chain = hashlib.blake2b(digest_size=8)
    for part in context:
        chain.update(b"%d:" % len(part))
        chain.update(part[:PIECE])
    size, marks, at = len(prompt), list[Mark](), 0
    while True:
        end = at + (NEAR if at < FINE else FAR)
        if end > min(size, MAX_BYTES):
            return tuple(marks)
        chain.update(prompt[at:end])
        marks.append(Mark(chain.digest(), tokens * end // size))
        at = end


class _Held(NamedTuple):
    """A mark that the engine is thought to have.

    `added`: its tokens beyond the mark before, at least LEAST; `upto`: tokens of the prompt up to it; `born`: all
    tokens that the engine will have stored once the whole prompt is there.
    """

    added: int
    upto: int
    born: int


class Prompts:
    """The prompts that were sent to one engine last: as many as its cache is thought to hold.

    If the engine publishes KV events (`update`), as many as its cache does hold.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.entries: OrderedDict[bytes, _Held] = OrderedDict()  # least recently used first
        self.tokens = 0
        self.reported = False
        self._stored = 0  # tokens that came into the cache since the first KV event
        self._there = 0  # those of them that are still in it

    def has(self, marks: Marks) -> int:
        """Return how many of a prompt's first tokens are there. Its marks that are there are the first: see `add`."""
        if not self.entries or not marks or marks[0].digest not in self.entries:
            return 0
        there = bisect_left(marks, True, key=lambda mark: mark.digest not in self.entries)
        return marks[there - 1].tokens

    def upto(self, digest: bytes) -> int:
        """Return how many tokens there are up to this mark; 0 if it is not there."""
        entry = self.entries.get(digest)
        return entry.upto if entry is not None else 0

    def add(self, marks: Marks) -> None:
        """Note that the prompt was sent. Its end counts as older than its beginning and goes first, as in engines."""
        born = self._stored + (marks[-1].tokens - self.has(marks) if marks else 0)
        for place in range(len(marks) - 1, -1, -1):
            digest, upto = marks[place]
            known = self.entries.get(digest)
            more = upto - (marks[place - 1].tokens if place else 0)
            added = known.added if known is not None else max(LEAST, more)
            self.tokens += added if known is None else 0
            self.entries[digest] = _Held(added, upto, born)
            self.entries.move_to_end(digest)
        # Twice what the engine reports, because lengths are estimates.
        max_tokens = max(self._max_tokens, 2 * self._there) if self.reported else self._max_tokens
        while self.tokens > max_tokens:
            self._drop(next(iter(self.entries)))

    def update(self, came: int, there: int, *, lost: bool) -> None:
        """Take in the engine's KV events.

        `came`: tokens that came into its cache, from any sender; `there`: tokens in it now; `lost`: whether any left.
        """
        self.reported = True
        self._stored += came
        self._there = there
        while lost and self.entries:
            # The cache drops the least recently used: a mark is there if it fits beside all that came after it.
            digest = next(iter(self.entries))
            entry = self.entries[digest]
            newer = entry.upto + max(0, self._stored - entry.born)
            if max(newer, self.tokens) <= self._there:
                return
            self._drop(digest)

    def forget(self) -> None:
        self.entries.clear()
        self.tokens = 0

    def _drop(self, digest: bytes) -> None:
        self.tokens -= self.entries.pop(digest).added
