# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd trace DIR`: the pieces that P, D and the metaserver wrote (`trace_dir`), merged by transfer.

Prints a table of all transfers and the way of one as text; `--perfetto FILE` writes it for ui.perfetto.dev. Files of
several hosts are copied into one directory, each host into a folder of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.observe.perfetto import chrome_trace
from vllm_ascend_pd.observe.timeline import Trace, picture, table


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace", help="the way of a transfer, from the files in trace_dir", description=__doc__.split("\n\n", 1)[0]
    )
    parser.add_argument("directory", metavar="DIR", help="where the trace files are, also in folders below")
    parser.add_argument(
        "--transfer", default="", metavar="ID", help="a transfer (or its beginning), or a request's id; none: the last"
    )
    parser.add_argument("--perfetto", default="", metavar="FILE", help="write a Chrome/Perfetto trace (JSON)")
    parser.add_argument("--text", action="store_true", help="print the text also when --perfetto is given")
    return parser


def run(args: argparse.Namespace) -> int:
    trace = Trace(Path(args.directory))
    if not trace.events:
        remedy = "Set trace_dir on both engines and --trace-dir on the metaserver, and give that directory."
        _refuse("DIR", args.directory, "it holds no trace files", remedy)
    transfers = trace.transfers()
    chosen = trace.find(args.transfer) if args.transfer else transfers[-1] if transfers else None
    if args.transfer and chosen is None:
        _refuse("--transfer", args.transfer, "no transfer or request is called so", "Leave it out to see the list.")
    if args.perfetto:
        events = trace.of(chosen) if args.transfer and chosen else trace.events
        Path(args.perfetto).write_text(json.dumps(chrome_trace(events), default=str))
    if args.text or not args.perfetto:
        if not args.transfer:
            print("\n".join(table(trace)))
        if chosen is not None:
            print("\n".join(picture(trace.way(chosen))))
    return 0


def _refuse(key: str, value: str, why: str, remedy: str) -> None:
    raise ConfigError("PD-CONF-003", key=key, value=value, why=why, remedy=remedy)
