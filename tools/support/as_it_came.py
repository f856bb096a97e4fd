# SPDX-License-Identifier: Apache-2.0
"""The metaserver, with every prompt sent to P as it came: a D that is not asked for token ids posts none.

P then renders and tokenises a chat again. For comparisons only (`bench_pair.sh --chat`).
"""

from __future__ import annotations

import sys

import msgspec

from vllm_ascend_pd.cli.__main__ import main
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.pieces import Buffer

_parse = bodies.parse


def _as_it_came(route: str, body: Buffer) -> bodies.Request:
    return msgspec.structs.replace(_parse(route, body), send_tokens=False)


if __name__ == "__main__":
    bodies.parse = _as_it_came
    sys.exit(main())
