# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd trace DIR`: the files that P, D and the metaserver wrote (`trace_dir`), merged by transfer.

Prints a table of all transfers and the way of one as text; `--perfetto FILE` writes it for ui.perfetto.dev. Files of
several hosts are copied into one directory, each host into a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_ascend_pd.cli.flag_values import refuse, write_text
from vllm_ascend_pd.observe.trace import TraceFile, emit
from vllm_ascend_pd.viewer.perfetto import chrome_trace
from vllm_ascend_pd.viewer.timeline import Trace, picture, table

_EVENTS = 20_000


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace", help="the way of a transfer, from the files in trace_dir", description=__doc__.split("\n\n", 1)[0]
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", help="where the trace files are, also in folders below")
    parser.add_argument("--cost", action="store_true", help="measure what an event costs here, switched off and on")
    parser.add_argument(
        "--transfer", default="", metavar="ID", help="a transfer (or its beginning), or a request's id; none: the last"
    )
    parser.add_argument("--perfetto", default="", metavar="FILE", help="write a Chrome/Perfetto trace (JSON)")
    parser.add_argument("--text", action="store_true", help="print the text also when --perfetto is given")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.cost:
        print("\n".join(_cost(Trace(Path(args.directory)) if args.directory else None)))
        return 0
    trace = Trace(Path(args.directory)) if args.directory else None
    if trace is None or not trace.events:
        remedy = "Set trace_dir on both engines and --trace-dir on the metaserver, and give that directory."
        refuse("DIR", args.directory or "", "it holds no trace files", remedy)
    transfers = trace.transfers()
    chosen = trace.find(args.transfer) if args.transfer else transfers[-1] if transfers else None
    if args.transfer and chosen is None:
        refuse("--transfer", args.transfer, "no transfer or request is called so", "Leave it out to see the list.")
    if args.perfetto:
        events = trace.of(chosen) if args.transfer and chosen else trace.events
        write_text("--perfetto", args.perfetto, json.dumps(chrome_trace(events), default=str))
    if args.text or not args.perfetto:
        if not args.transfer:
            print("\n".join(table(trace)))
        if chosen is not None:
            print("\n".join(picture(trace.timeline_of(chosen))))
    return 0


def _cost(trace: Trace | None) -> list[str]:
    """Measure events on the emitting thread. A transfer's cost is that in the process that emits most of its events."""
    off = _per_event(20 * _EVENTS)
    with tempfile.TemporaryDirectory() as directory:
        file = TraceFile(directory, "cost")
        on = _per_event(_EVENTS)
        file.close()
    lines = [f"switched off: {off * 1e9:.0f} ns for an event", f"switched on: {on * 1e6:.1f} µs for an event"]
    transfers = trace.transfers() if trace is not None else []
    if trace is not None and transfers:
        counts = Counter(event.source for transfer in transfers for event in trace.of(transfer))
        source, count = counts.most_common(1)[0]
        each = count / len(transfers)
        lines.append(
            f"a transfer here has {each:.0f} events in {source}: {each * on * 1e3:.2f} ms, spread over its time"
        )
    return lines


def _per_event(count: int) -> float:
    """Return the seconds per event: the best of five rounds, because other programs use this machine too."""
    facts: dict[str, Any] = {"transfers": ["abcdef01/1/abcdef01"], "peer": "10.0.0.1:9", "layers": [3], "steps": [1]}
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count // 5):
            emit("layer_pushed", bytes=1 << 20, descriptors=8, ok=True, took=0.001, **facts)
        best = min(best, (time.perf_counter() - began) / (count // 5))
    return best
