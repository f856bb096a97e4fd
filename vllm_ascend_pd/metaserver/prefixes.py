# SPDX-License-Identifier: Apache-2.0
"""Which beginnings of prompts an engine has in its prefix cache, as far as what it was sent can tell, and what it says of its cache.

A prompt is known by marks: a digest of everything up to a place, at places that do not depend on where the prompt ends. So two
prompts that begin alike have the same first marks. Nothing is tokenised: JSON that begins with the same bytes is taken for the same beginning.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from vllm_ascend_pd.metaserver.outline import SLICE, Buffer, Steps

NEAR = 1 << 10  # bytes between two marks of the first FINE bytes
FINE = 64 << 10
FAR = 16 << 10  # and after those
MOST_BYTES = 16 << 20  # of a prompt that have marks: about four million tokens


class Mark(NamedTuple):
    """`digest` of a prompt's beginning, which is about `tokens` long."""

    digest: bytes
    tokens: int


Marks = tuple[Mark, ...]


def marks_of(told: Iterable[Buffer], prompt: Buffer, tokens: int) -> Steps[Marks]:
    """Of a prompt of about `tokens`. `told`: what makes it another one beside its own bytes, the model for one."""
    chain = hashlib.blake2b(digest_size=8)
    for part in told:
        chain.update(b"%d:" % len(part))
        chain.update(part[:SLICE])
    size, found, at, turn = len(prompt), list[Mark](), 0, SLICE
    while True:
        end = at + (NEAR if at < FINE else FAR)
        if end > min(size, MOST_BYTES):
            return tuple(found)
        chain.update(prompt[at:end])
        found.append(Mark(chain.digest(), tokens * end // size))
        at = end
        if at >= turn:
            turn += SLICE
            yield SLICE


class _Held(NamedTuple):
    """A mark that is there: the tokens that it adds, the length of what it ends, and how much the engine will have stored when all of
    its prompt is there."""

    added: int
    upto: int
    born: int


class Prompts:
    """The prompts that one engine was sent last: as many as its cache is thought to hold, or, if the engine tells (`tell`), as its cache
    does hold."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # in the order of their last use
        self.tokens = 0
        self.told = False
        self._stored = 0  # tokens that came into the cache since the engine tells
        self._there = 0  # tokens of those that are in it

    def has(self, marks: Marks) -> int:
        """How many of a prompt's first tokens are there. The marks that are there are the first ones: see `add`."""
        if not self._held or not marks or marks[0].digest not in self._held:
            return 0
        there = bisect_left(marks, True, key=lambda mark: mark.digest not in self._held)
        return marks[there - 1].tokens

    def add(self, marks: Marks) -> None:
        """It was sent this prompt. The end of it counts as older than its beginning, as engines have it: that goes first."""
        born = self._stored + (marks[-1].tokens - self.has(marks) if marks else 0)
        for place in range(len(marks) - 1, -1, -1):
            digest, upto = marks[place]
            known = self._held.get(digest)
            added = known.added if known is not None else upto - (marks[place - 1].tokens if place else 0)
            self.tokens += added if known is None else 0
            self._held[digest] = _Held(added, upto, born)
            self._held.move_to_end(digest)
        most = max(self._most, 2 * self._there) if self.told else self._most  # twice: lengths are about so
        while self.tokens > most:
            self._drop(next(iter(self._held)))

    def tell(self, came: int, there: int, *, lost: bool) -> None:
        """Take in what the engine tells: tokens that came into its cache, whoever sent them, how many of all that came are in it now, and
        whether any left."""
        self.told = True
        self._stored += came
        self._there = there
        while lost and self._held:
            # What was used last stays longest: of a prompt there is what fits beside all that came after it.
            digest = next(iter(self._held))
            held = self._held[digest]
            newer = held.upto + max(0, self._stored - held.born)
            if max(newer, self.tokens) <= self._there:
                return
            self._drop(digest)

    def forget(self) -> None:
        self._held.clear()
        self.tokens = 0

    def _drop(self, digest: bytes) -> None:
        self.tokens -= self._held.pop(digest).added
