# SPDX-License-Identifier: Apache-2.0
"""An engine whose steps take what two lines say, on a virtual clock."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm_ascend_pd.cli.load.lines import StepLines


class VirtualTime:
    """A clock that jumps to the next event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, act: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), act, args))

    def after(self, delay: float, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay, act, *args)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Let events happen, as long as there are some and it is to go on."""
        while self._events and goes_on():
            self.now, _, act, args = heapq.heappop(self._events)
            act(*args)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Limits of an engine."""

    step_tokens: int  # of a step
    at_once: int  # requests
    cache_tokens: int  # of its KV cache
    chunk: int  # tokens with one identity


@dataclass(eq=False, slots=True)
class Prefilling:
    """A prompt that is being computed."""

    left: int
    done: Callable[[], None]


class SimulatedEngine:
    """One engine: prompts in the order in which they came, and with each step a token of each answer."""

    def __init__(self, name: str, time: VirtualTime, lines: StepLines, sizes: EngineSizes) -> None:
        self.name, self._time, self._lines, self._sizes = name, time, lines, sizes
        self.alive = True
        self._forget()

    def _forget(self) -> None:
        self._life = object()
        self._inside: dict[object, int] = {}  # requests with the tokens that they hold
        self._tokens_held = 0
        self._outside: OrderedDict[object, tuple[int, Callable[[], None]]] = OrderedDict()
        self._prompts: dict[object, Prefilling] = {}
        self._answers: dict[object, Callable[[], None]] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # beginnings of prompts, least recently used first
        self._steps = False
        self._behind: list[Callable[[], None]] = []  # the step that it computes

    def between_steps(self, act: Callable[[], None]) -> None:
        """Act when no step is under way: only then does an engine see what has come."""
        if self._steps:
            self._behind.append(act)
        else:
            act()

    def enter(self, request: object, tokens: int, then: Callable[[], None]) -> None:
        """Let a request in as soon as there is room for its tokens; it has the room until it leaves."""
        self._outside[request] = tokens, then
        self._admit()

    def _admit(self) -> None:
        while self._outside:
            request, (tokens, then) = next(iter(self._outside.items()))
            full = self._tokens_held + tokens > self._sizes.cache_tokens or len(self._inside) >= self._sizes.at_once
            if self._inside and full:
                return
            del self._outside[request]
            self._inside[request] = tokens
            self._tokens_held += tokens
            then()

    def leave(self, request: object) -> None:
        """End whatever it does for a request."""
        self._outside.pop(request, None)
        self._prompts.pop(request, None)
        self._answers.pop(request, None)
        self._tokens_held -= self._inside.pop(request, 0)
        self._admit()

    def prefill(self, request: object, tokens: int, chain: Sequence[int], done: Callable[[], None]) -> None:
        """Compute a prompt, without what is in the cache of the beginnings in `chain`."""
        there = 0
        for beginning in chain:
            if beginning not in self._cached:
                break
            there += self._sizes.chunk

        def computed() -> None:
            for beginning in reversed(chain):
                self._cached[beginning] = None
                self._cached.move_to_end(beginning)
            while len(self._cached) * self._sizes.chunk > self._sizes.cache_tokens:
                self._cached.popitem(last=False)
            done()

        self._prompts[request] = Prefilling(max(1, tokens - there), computed)
        self._wake()

    def decode(self, request: object, token: Callable[[], None]) -> None:
        """Call `token` with each step, until the request leaves."""
        self._answers[request] = token
        self._wake()

    # -- steps

    def _wake(self) -> None:
        if not self._steps and self.alive and (self._prompts or self._answers):
            self._steps = True
            room, parts = self._sizes.step_tokens - len(self._answers), list[tuple[object, int]]()
            for request, work in self._prompts.items():
                if room <= 0:
                    break
                parts.append((request, min(room, work.left)))
                room -= parts[-1][1]
            seconds = self._lines.seconds(sum(part for _, part in parts), len(self._answers))
            self._time.after(seconds, self._end, self._life, tuple(self._answers), parts)

    def _end(self, life: object, answers: Sequence[object], parts: Sequence[tuple[object, int]]) -> None:
        if life is not self._life:
            return
        for request in answers:
            if (token := self._answers.get(request)) is not None:
                token()
        for request, part in parts:
            if (work := self._prompts.get(request)) is not None:
                work.left -= part
                if not work.left:
                    del self._prompts[request]
                    work.done()
        self._steps = False
        behind, self._behind = self._behind, []
        for act in behind:
            act()
        self._wake()

    # -- life and death

    def kill(self) -> list[object]:
        """End it. Return the requests that it had, inside or waiting for room."""
        had = [*self._inside, *self._outside]
        self.alive = False
        self._forget()
        return had

    def restart(self) -> None:
        self.alive = True
