# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd <subcommand>`, also `python -m vllm_ascend_pd.cli`.

A subcommand is a module with `add_parser(subparsers) -> argparse.ArgumentParser` and `run(args) -> int`: here, or of
the router.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_ascend_pd import __version__
from vllm_ascend_pd.errors import PdError

DESCRIPTION = "Router, checks, plans and traces for prefill and decode engines of vLLM on Ascend NPUs."
SUBCOMMANDS = {
    "metaserver": "router.command",
    "sidecar": "router.sidecar",
    "doctor": "cli.doctor",
    "plan": "cli.plan",
    "trace": "cli.trace",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="vllm-ascend-pd", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = top.add_subparsers(dest="subcommand", required=True, metavar="|".join(SUBCOMMANDS))
    for where in SUBCOMMANDS.values():
        module = importlib.import_module(f"vllm_ascend_pd.{where}")
        module.add_parser(subparsers).set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    args.argv = words
    try:
        return int(args.run(args) or 0)
    except PdError as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
