# SPDX-License-Identifier: Apache-2.0
"""Check of an *installed* package's ops: runs them once, compares with plain indexing, prints the platform.

For a wheel that was built with another Python or torch: see "One wheel" in docs/building.md. Run it outside the
repository's root, otherwise it tests the working tree.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

import vllm_ascend_pd
from vllm_ascend_pd.regroup import ops

BLOCKS, HEADS, TOKENS, CELL = 6, 4, 8, 16


def main() -> int:
    torch.manual_seed(0)
    cache = torch.randn(BLOCKS, HEADS, TOKENS, CELL)
    cell_bytes = CELL * cache.element_size()
    # Blocks 4 and 1, heads 1 and 2, all tokens, packed head after head: one row of CACHE_ROW each.
    box = 2 * TOKENS * cell_bytes
    rows = torch.tensor(
        [
            [0, block, 1, 0, 2, TOKENS, place * box, TOKENS * cell_bytes, cell_bytes]
            for place, block in enumerate((4, 1))
        ]
    )
    expected = cache[[4, 1], 1:3].contiguous()

    gathered = torch.zeros(2 * box, dtype=torch.uint8)
    ops.gather([cache], rows, gathered)
    scattered = torch.zeros_like(cache)
    ops.scatter(gathered, rows, [scattered])
    # The same bytes, token after token: one row of BUFFER_ROW for each block.
    turned = torch.zeros_like(gathered)
    token_bytes = 2 * cell_bytes
    orders = torch.tensor(
        [
            [cell_bytes, 2, TOKENS, i * box, TOKENS * cell_bytes, cell_bytes, i * box, cell_bytes, token_bytes]
            for i in range(2)
        ]
    )
    ops.assemble(gathered, orders, turned)

    results = {
        "gather": torch.equal(gathered.view(torch.float32).view_as(expected), expected),
        "scatter": torch.equal(scattered[[4, 1], 1:3], expected) and not scattered[[0, 2, 3, 5]].any(),
        "assemble": torch.equal(
            turned.view(torch.float32).view(2, TOKENS, 2, CELL), expected.transpose(1, 2).contiguous()
        ),
    }
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {Path(vllm_ascend_pd.__file__).parent}")
    print(", ".join(f"{name}: {'right' if right else 'WRONG'}" for name, right in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
