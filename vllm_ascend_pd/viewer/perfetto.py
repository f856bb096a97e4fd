# SPDX-License-Identifier: Apache-2.0
"""A merged trace in the JSON form that Perfetto (ui.perfetto.dev) and chrome://tracing read.

Each process of P, D and the metaserver is a process there. Writes, waits and whole transfers are spans, the other
stages are marks, and an arrow leads from each BEGIN to the READY that answered it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_ascend_pd.viewer.ending import TransferEnding
from vllm_ascend_pd.viewer.timeline import TraceEvent

_HIDDEN = ("clock", "layer_submitted")
_WHOLE = {  # ends → begins, per process
    "reported": "reserved",
    "closed": "bound",
    "meta.prefilled": "meta.reserved",
    "meta.prefill_failed": "meta.reserved",
}


def chrome_trace(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """Return the trace of `events`, which are in order of time."""
    events = list(events)
    endings = _endings(events)
    zero = events[0].t if events else 0.0
    sources = {source: pid for pid, source in enumerate(sorted({event.source for event in events}), 1)}
    made: list[dict[str, Any]] = []
    for source, pid in sources.items():
        made.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": source}})
    tracks: dict[tuple[int, str], int] = {}
    open_: dict[tuple[str, str, str], TraceEvent] = {}
    for event in events:
        pid = sources[event.source]
        for name, track, begin, end in _spans(event, open_):
            tid = tracks.setdefault((pid, track), len(tracks) + 1)
            span = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(begin - zero), "dur": _us(end - begin)}
            args = dict(event.facts)
            if event.stage in _WHOLE and (failure := endings[name].failure):
                span["name"], args["failure"] = f"{name} FAILED", failure
            made.append({**span, "cat": event.stage, "args": args})
        if event.stage not in _HIDDEN:
            tid = tracks.setdefault((pid, "stages"), len(tracks) + 1)
            mark = {"ph": "i", "s": "t", "name": event.stage, "pid": pid, "tid": tid, "ts": _us(event.t - zero)}
            made.append({**mark, "cat": "stage", "args": dict(event.facts)})
            made += _arrow(event, pid, tid, zero)
    for (pid, track), tid in tracks.items():
        made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
    return {"displayTimeUnit": "ms", "traceEvents": made}


def _endings(events: Iterable[TraceEvent]) -> dict[str, TransferEnding]:
    endings: dict[str, TransferEnding] = {}
    for event in events:
        if "transfer" in event.facts:
            endings.setdefault(str(event.facts["transfer"]), TransferEnding()).add(event.stage, event.facts)
    return endings


def _spans(event: TraceEvent, open_: dict[tuple[str, str, str], TraceEvent]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the spans that this event ends: name, track, begin, end."""
    facts, transfer = event.facts, str(event.facts.get("transfer", ""))
    if event.stage == "layer_pushed":
        layers = facts["layers"]
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"
        yield (
            f"{name}{'' if facts['ok'] else ' FAILED'}",
            f"to {facts['peer']}",
            event.t - facts.get("took", 0.0),
            event.t,
        )
    elif event.stage == "ready" and "waited" in facts:
        yield f"wait for D{facts.get('d_rank')}", "waits", event.t - facts["waited"], event.t
    elif event.stage == "exchanged" and "waited" in facts:
        yield f"exchange of layer {facts.get('layer')}", "exchanges", event.t - facts["waited"], event.t
    if event.stage in _WHOLE.values():
        open_.setdefault((event.source, event.stage, transfer), event)
    begun = open_.pop((event.source, _WHOLE.get(event.stage, ""), transfer), None)
    if begun is not None:
        yield transfer, f"transfer {transfer}", begun.t, event.t


def _arrow(event: TraceEvent, pid: int, tid: int, zero: float) -> list[dict[str, Any]]:
    """Return this event's end of an arrow from P's BEGIN to D's READY, if it has one."""
    facts = event.facts
    if event.stage == "begin":
        arrow_end: dict[str, Any] = {"ph": "s"}
    elif event.stage == "ready" and "waited" not in facts:
        arrow_end = {"ph": "f", "bp": "e"}
    else:
        return []
    place = {"pid": pid, "tid": tid, "ts": _us(event.t - zero)}
    return [{**arrow_end, "name": "BEGIN → READY", "cat": "handshake", "id": _arrow_id(facts), **place}]


def _arrow_id(facts: Mapping[str, Any]) -> int:
    words = (str(facts.get(name, "")) for name in ("push", "contributor", "d_rank", "seq"))
    return zlib.crc32("/".join(words).encode())


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
