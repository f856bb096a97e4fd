# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve`, whose own command does not start with vLLM's CPU wheel: its name in the environment is another.

python -m tools.bench_load_parts.serve FLAG …
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> int:
    parser: Any = FlexibleArgumentParser(prog="vllm bench serve")  # type: ignore[no-untyped-call]
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
