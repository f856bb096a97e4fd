# SPDX-License-Identifier: Apache-2.0
"""Timeline of one transfer, merged from the trace files of P, D and the metaserver.

Each process writes times of its own monotonic clock; `Trace` converts all of them to one clock (clocks.py). Files of
several hosts may lie in folders of their own below the directory. `vllm-ascend-pd trace` prints what is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.observe.trace import OLDER
from vllm_ascend_pd.viewer.clocks import Clock, by_boot, related
from vllm_ascend_pd.viewer.ending import TransferEnding

RESERVED, REPORTED = "D scheduler reserved", "D scheduler reported"


class _Line(msgspec.Struct):
    t: float
    stage: str


class _Named(msgspec.Struct):
    transfer: str


class _StepFacts(_Named):
    step: int


class _Computed(msgspec.Struct):
    step: int
    layer: int
    title: str = ""


class _BatchFacts(msgspec.Struct):
    peer: str
    layers: list[int]
    steps: Annotated[list[int], msgspec.Meta(min_length=1)]
    transfers: Annotated[list[str], msgspec.Meta(min_length=1)]


class _Pushed(_BatchFacts):
    ok: bool
    bytes: float
    descriptors: float
    took: float = 0.0


class _Clock(msgspec.Struct):
    wall: float


_LINE = msgspec.json.Decoder(_Line)
# Facts that the readers below need of an event: a line without them is not one of this package.
_FACTS: dict[str, Any] = {
    "clock": _Clock,
    "reserved": _Named,
    "step": _StepFacts,
    "layer_computed": _Computed,
    "layer_submitted": _BatchFacts,
    "layer_pushed": _Pushed,
}
_ENDINGS = ("done", "closed", "push_closed", "reported")  # every rank has one; the last counts


@dataclass(frozen=True)
class TraceEvent:
    t: float
    stage: str
    source: str  # the file's name: role and pid, behind its folder where there is one
    facts: Mapping[str, Any]

    @property
    def side(self) -> str:
        """Name of the process: P worker, D scheduler, metaserver …"""
        role = self.source.rpartition("/")[2].rpartition("-")[0]
        return role.replace("prefill-", "P ").replace("decode-", "D ")

    def names(self, transfer: str) -> bool:
        return self.facts.get("transfer") == transfer or transfer in (self.facts.get("transfers") or ())


@dataclass(frozen=True)
class TracedWrite:
    """A batch that carried bytes of the transfer. If it carried several transfers, each counts with an equal share."""

    source: str
    peer: str
    layers: tuple[int, ...]
    step: int
    submitted: float
    landed: float
    nbytes: float
    descriptors: float


@dataclass
class TransferTimeline:
    """Timeline of one transfer."""

    transfer: str
    moments: dict[str, float] = field(default_factory=dict)  # "D worker ready" → first time (of endings: last time)
    computed: dict[tuple[str, int, int], float] = field(default_factory=dict)  # (source, step, layer) → hook
    titles: dict[tuple[str, int], str] = field(default_factory=dict)  # (source, layer) → its name, components, group
    writes: list[TracedWrite] = field(default_factory=list)
    failed_writes: int = 0
    failure: str = ""  # code and detail (ending.py)

    @property
    def nbytes(self) -> int:
        return round(sum(write.nbytes for write in self.writes))

    @property
    def descriptors(self) -> int:
        return round(sum(write.descriptors for write in self.writes))

    def last_hooks(self) -> dict[str, float]:
        """Return, by P worker, when its last layer's hook of the last step fired."""
        last: dict[str, float] = {}
        for (source, _, _), at in self.computed.items():
            last[source] = max(at, last.get(source, at))
        return last

    def hidden(self) -> float:
        """Return the share of the bytes that had landed on D before their P worker's last layer's hook fired."""
        last = self.last_hooks()
        early = sum(w.nbytes for w in self.writes if w.landed <= last.get(w.source, 0.0))
        return early / self.nbytes if self.nbytes else 0.0

    def exposed_s(self) -> float:
        """Return the time from the last hook of any worker to the last byte on D: the push adds it to the prefill."""
        hooks = self.last_hooks().values()
        return max(0.0, max(w.landed for w in self.writes) - max(hooks)) if self.writes and hooks else 0.0


class Trace:
    """All events of a directory, in order of time. `skipped`: places of lines that are torn, or no events of ours."""

    def __init__(self, directory: Path) -> None:
        self.skipped: list[str] = []
        sources: dict[str, list[TraceEvent]] = {}
        for path in sorted(directory.rglob("*.jsonl")):  # the older file of a ring comes before the newer one
            source = path.relative_to(directory).with_suffix("").as_posix().removesuffix(OLDER)
            try:
                sources.setdefault(source, []).extend(self._events(source, path))
            except OSError as problem:
                self.skipped.append(f"{path} ({problem.strerror})")
        sources = {name: part for source, events in sources.items() for name, part in by_boot(source, events).items()}
        self.clocks: list[Clock] = related(sources)
        shifts = {source: clock.shift for clock in self.clocks for source in clock.sources}
        self.events: list[TraceEvent] = []
        for source, events in sources.items():
            self.events += [TraceEvent(e.t + shifts[source], e.stage, source, e.facts) for e in events]
        self.events.sort(key=lambda event: event.t)

    def _events(self, source: str, path: Path) -> Iterator[TraceEvent]:
        for number, line in enumerate(_lines(path), 1):
            try:
                event = _LINE.decode(line)
                facts = {key: value for key, value in msgspec.json.decode(line).items() if key not in ("t", "stage")}
                msgspec.convert(facts, _FACTS.get(event.stage, dict))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
                self.skipped.append(f"{path}:{number} ({problem})")
                continue
            yield TraceEvent(event.t, event.stage, source, facts)

    def transfers(self, since: float = 0.0, until: float = float("inf")) -> list[str]:
        """Return the transfers reserved within a span of time, in order."""
        reserved = (e for e in self.events if e.stage == "reserved" and since <= e.t <= until)
        return list(dict.fromkeys(str(e.facts["transfer"]) for e in reserved))

    def find(self, word: str) -> str | None:
        """Return the transfer meant by its id, by the beginning of its id, or by (part of) the id of its request."""
        for event in self.events:
            if event.stage == "reserved" and word:
                transfer, request = str(event.facts["transfer"]), str(event.facts.get("request", ""))
                if transfer.startswith(word) or word in request:
                    return transfer
        return None

    def of(self, transfer: str) -> list[TraceEvent]:
        """Return the events that name the transfer, and the metaserver's that name its ticket only."""
        tickets = {e.facts.get("ticket") for e in self.events if e.names(transfer)} - {None, ""}
        return [
            e
            for e in self.events
            if e.names(transfer) or ("transfer" not in e.facts and e.facts.get("ticket") in tickets)
        ]

    def timeline_of(self, transfer: str) -> TransferTimeline:
        timeline, ending = TransferTimeline(transfer), TransferEnding()
        named = {id(event) for event in self.of(transfer)}
        steps = {(e.source, e.facts["step"]) for e in self.events if e.stage == "step" and e.names(transfer)}
        submitted: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], float] = {}
        for event in self.events:
            if event.stage == "layer_computed":
                if (event.source, event.facts["step"]) in steps:
                    timeline.computed[event.source, event.facts["step"], event.facts["layer"]] = event.t
                    timeline.titles[event.source, event.facts["layer"]] = event.facts.get("title", "")
            elif id(event) not in named:
                continue
            elif event.stage == "layer_submitted":
                submitted[_batch(event)] = event.t
            elif event.stage == "layer_pushed":
                self._pushed(timeline, event, submitted)
            elif event.stage != "step":
                ending.add(event.stage, event.facts)
                name = f"{event.side} {event.stage.removeprefix('meta.')}"
                if name not in timeline.moments or event.stage in _ENDINGS:
                    timeline.moments[name] = event.t
        timeline.failure = ending.failure
        return timeline

    @staticmethod
    def _pushed(timeline: TransferTimeline, event: TraceEvent, submitted: Mapping[Any, float]) -> None:
        if not event.facts["ok"]:
            timeline.failed_writes += 1
            return
        share = 1.0 / len(event.facts["transfers"])
        timeline.writes.append(
            TracedWrite(
                source=event.source,
                peer=event.facts["peer"],
                layers=tuple(event.facts["layers"]),
                step=max(event.facts["steps"]),
                submitted=submitted.get(_batch(event), event.t),
                landed=event.t,
                nbytes=event.facts["bytes"] * share,
                descriptors=event.facts["descriptors"] * share,
            )
        )


def _batch(event: TraceEvent) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    facts = event.facts
    return event.source, facts["peer"], tuple(facts["layers"]), tuple(facts["steps"])


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):  # the last one may be half written
                yield line


def skipped(trace: Trace) -> list[str]:
    """Return one line on how many lines could not be read, and where the first one is; nothing if all could."""
    if not trace.skipped:
        return []
    return [
        f"{len(trace.skipped)} lines are no events of this package, or torn, and were skipped: {one_line(trace.skipped[0])}"
    ]


def picture(timeline: TransferTimeline, width: int = 64) -> list[str]:
    """Return the transfer as text: its stages in order, how it failed, and a row per layer and P worker.

    A row has `c` where the layer's compute ended, `=` while its bytes were on the way, and `#` when they had landed.
    """
    zero = timeline.moments.get(RESERVED, min(timeline.moments.values(), default=0.0))
    rows = [f"transfer {timeline.transfer}, milliseconds after D reserved its blocks"]
    for stage, at in sorted(timeline.moments.items(), key=lambda item: item[1]):
        rows.append(f"  {(at - zero) * 1e3:9.1f}  {stage}")
    if timeline.failure:
        rows.append(f"  failed: {timeline.failure}")
    if timeline.failed_writes:
        rows.append(f"  {timeline.failed_writes} writes failed")
    if not timeline.writes:
        rows.append("  no layer was pushed")
    if timeline.computed:
        rows += _layers(timeline, zero, width)
    if timeline.writes:
        rows.append(
            f"  {timeline.hidden():.1%} of {timeline.nbytes:,} bytes had landed before the last layer's hook fired"
        )
    return rows


def _layers(timeline: TransferTimeline, zero: float, width: int) -> Iterator[str]:
    """Yield a title and the rows of each P worker that computed a layer."""
    first = min(timeline.computed.values())
    end = max(
        *timeline.computed.values(), *(w.landed for w in timeline.writes), first + 1e-6
    )  # a single hook has no length
    first -= (end - first) / width
    scale = (end - first) / (width - 1)
    span = f"{(first - zero) * 1e3:.0f} to {(end - zero) * 1e3:.0f} ms"
    for source in sorted({key[0] for key in timeline.computed}):
        yield f"  {source}: c computed, = on the way, # landed; {span}"
        yield from _layer_rows(timeline, source, first, scale, width)


def _layer_rows(timeline: TransferTimeline, source: str, first: float, scale: float, width: int) -> Iterable[str]:
    """Yield one row per layer. The marks of several steps (chunks) share it."""
    for layer in sorted({key[2] for key in timeline.computed if key[0] == source}):
        cells = [" "] * width
        for write in timeline.writes:
            if write.source == source and layer in write.layers:
                begin, landed = (round((t - first) / scale) for t in (write.submitted, write.landed))
                cells[begin:landed] = "=" * (landed - begin)
                cells[min(landed, width - 1)] = "#"
        for (owner, _, index), at in timeline.computed.items():
            if owner == source and index == layer:
                column = round((at - first) / scale)
                cells[column] = "c" if cells[column] in " =" else cells[column]
        yield f"  layer {layer:2d} |{''.join(cells)}| {one_line(timeline.titles.get((source, layer), ''))}".rstrip()


def table(trace: Trace) -> list[str]:
    """Return a line for each transfer, and one for each clock other than the reference."""
    rows = [f"{'transfer':32} {'KV bytes':>12} {'descriptors':>11} {'hidden':>7} {'exposed ms':>10}"]
    for transfer in trace.transfers():
        timeline = trace.timeline_of(transfer)
        exposed = f"{timeline.exposed_s() * 1e3:10.1f}"
        row = f"{transfer:32} {timeline.nbytes:12,} {timeline.descriptors:11,} {timeline.hidden():7.1%} {exposed}"
        rows.append(f"{row}  {timeline.failure}".rstrip())
    rows += skipped(trace)
    return rows + [clock.words() for clock in trace.clocks[1:]]
