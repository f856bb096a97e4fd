# SPDX-License-Identifier: Apache-2.0
"""Relation of the clocks of trace files. One host has one monotonic clock; hosts are related by their messages.

The wall clock in each file's first line gives an estimate. If P and D are on different hosts, each BEGIN that a READY
answered is a measurement as in NTP: P's time of BEGIN, D's time of READY, P's time of READY. The one with the shortest
round trip counts; its error is at most half of that round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

SAME_CLOCK_S = 0.05  # two clocks count as one if their offsets to the wall clock differ by no more than this
REBOOT_S = 5.0  # a reboot moves the offset by more than this; a smaller jump is a clock that was set


_Key = tuple[Any, Any, Any, Any]


class _StageEvent(Protocol):
    @property
    def t(self) -> float: ...

    @property
    def stage(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...


_E = TypeVar("_E", bound=_StageEvent)


@dataclass(slots=True)
class Clock:
    """One host's clock. `shift` is added to its times; `error_s` is None where only the wall clocks relate it."""

    sources: list[str]
    ahead: float  # wall clock minus monotonic clock
    shift: float = 0.0
    error_s: float | None = None

    def words(self) -> str:
        how = "by the wall clock" if self.error_s is None else f"± {self.error_s * 1e3:.2f} ms by BEGIN and READY"
        return f"another clock, {how}: {', '.join(self.sources)}"


@dataclass(frozen=True, slots=True)
class _Sample:
    """One measurement. `offset`: D's time minus P's."""

    offset: float
    error: float


def related(files: Mapping[str, Sequence[_StageEvent]]) -> list[Clock]:
    """Return the clocks of these files. The first one is the reference."""
    clocks = _distinct(files)
    for clock in clocks:
        clock.shift = clock.ahead - clocks[0].ahead
    samples = _best(files, {source: index for index, clock in enumerate(clocks) for source in clock.sources})
    placed, waiting = {0}, dict(samples)
    if clocks:
        clocks[0].error_s = 0.0
    while waiting:
        pair = next((pair for pair in waiting if (pair[0] in placed) != (pair[1] in placed)), None)
        if pair is None:
            break
        (p, d), sample = pair, waiting.pop(pair)
        new, old, sign = (p, d, 1) if d in placed else (d, p, -1)
        clocks[new].shift = clocks[old].shift + sign * sample.offset
        clocks[new].error_s = (clocks[old].error_s or 0) + sample.error
        placed.add(new)
    return clocks


def by_boot(source: str, events: Iterable[_E]) -> dict[str, list[_E]]:
    """Divide a file's events where its host was started anew, as a process may get the pid of one before that."""
    divided: dict[str, list[_E]] = {source: []}
    name, ahead = source, None
    for event in events:
        if event.stage == "clock" and "wall" in event.facts:
            before, ahead = ahead, event.facts["wall"] - event.t
            if before is not None and abs(ahead - before) > REBOOT_S:
                name = f"{source} ({len(divided) + 1})"
        divided.setdefault(name, []).append(event)
    return divided


def _distinct(files: Mapping[str, Sequence[_StageEvent]]) -> list[Clock]:
    clocks: list[Clock] = []
    for source, events in files.items():
        opened = next((e for e in events if e.stage == "clock" and "wall" in e.facts), None)
        # A file without a `clock` line is taken to have the reference's clock.
        ahead = opened.facts["wall"] - opened.t if opened is not None else clocks[0].ahead if clocks else 0.0
        same = next((clock for clock in clocks if abs(clock.ahead - ahead) <= SAME_CLOCK_S), None)
        if same is None:
            clocks.append(Clock([source], ahead))
        else:
            same.sources.append(source)
    return clocks


def _best(files: Mapping[str, Sequence[_StageEvent]], clock_of: Mapping[str, int]) -> dict[tuple[int, int], _Sample]:
    """Return, for each pair of a P clock and a D clock, the measurement with the shortest round trip."""
    best: dict[tuple[int, int], _Sample] = {}
    for p_source, d_source, sample in _samples(files):
        pair = clock_of[p_source], clock_of[d_source]
        if pair[0] != pair[1] and (pair not in best or sample.error < best[pair].error):
            best[pair] = sample
    return best


def _samples(files: Mapping[str, Sequence[_StageEvent]]) -> Iterator[tuple[str, str, _Sample]]:
    begins: dict[_Key, tuple[str, float]] = {}
    readies: dict[_Key, tuple[str, float]] = {}
    for source, events in files.items():
        for event in events:
            if event.stage == "begin":
                begins[_question(source, event.facts)] = source, event.t
            elif event.stage == "ready" and "waited" not in event.facts:  # D's event
                readies[_answer(event.facts)] = source, event.t
    for source, events in files.items():
        for event in events:
            if event.stage != "ready" or "waited" not in event.facts:
                continue
            question = begins.get(_question(source, event.facts))
            answer = readies.get(_answer(event.facts))
            if question is not None and answer is not None:
                trip = event.t - question[1]
                yield source, answer[0], _Sample(answer[1] - (question[1] + event.t) / 2, trip / 2)


def _question(source: str, facts: Mapping[str, Any]) -> _Key:
    return source, facts.get("push"), facts.get("d_rank"), facts.get("seq")


def _answer(facts: Mapping[str, Any]) -> _Key:
    return facts.get("contributor"), facts.get("push"), facts.get("d_rank"), facts.get("seq")
