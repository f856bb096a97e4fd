# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd metaserver`: the front door. Flags become `Settings`; the service is imported only when it runs."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "metaserver", help="the HTTP service that clients and decode engines talk to"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    parser.add_argument("--advertise", default="", metavar="URL", help="base URL that decode engines call back")
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="prefill instances")
    parser.add_argument("--decode", nargs="+", default=[], metavar="URL", help="decode instances")
    return parser


def run(args: argparse.Namespace) -> int:
    from vllm_ascend_pd.metaserver.service.run import serve
    from vllm_ascend_pd.metaserver.service.settings import Settings

    return serve(
        Settings(
            host=args.host,
            port=args.port,
            advertise=args.advertise,
            prefill=tuple(args.prefill),
            decode=tuple(args.decode),
        )
    )
