# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd sidecar`: the metaserver beside one D, for a router that chooses P and names it in a header."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_ascend_pd.router import command as metaserver

run = metaserver.run


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "sidecar",
        help="the metaserver beside one decode engine, for requests that name their prefill engine in a header",
        description="Takes the requests for one decode engine. Each names its prefill engines in x-prefiller-host-port, as llm-d's "
        "picker writes it; without the header the decode engine prefills by itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    groups = metaserver.common(parser, "sidecar")
    groups["instances"].add_argument("--decode", nargs=1, required=True, metavar="URL", help="the decode engine")
    parser.set_defaults(sidecar=True, no_canary=True)
    return parser
