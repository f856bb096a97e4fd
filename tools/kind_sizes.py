# SPDX-License-Identifier: Apache-2.0
"""Print which kind of cache has a test at which TP of P and D, from the tests' own parameters. One table.

Tests say their kind and sizes by a mark (`sizes`), which is checked when they start engines. A kind without a title
here fails, so that the table leaves nothing out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.support.pages import Marks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kinds.md"
MARKS = Marks.of("python -m tools.kind_sizes")
FILES = ("windows", "indexers", "states", "drafts", "quantised", "cover")
COLUMNS = ((1, 1), (2, 1), (1, 2), (4, 2))
TITLES = {
    "gptoss": "windows beside full attention (gpt-oss)",
    "gemma3": "windows, six groups (Gemma-3)",
    "windowed": "windows in all layers (Mistral)",
    "gemma3n": "layers that share a cache (Gemma-3n)",
    "indexed": "MLA with a sparse indexer, vLLM's form",
    "indexed-tuple": "the same in vllm-ascend's form",
    "indexed-int8": "the same in int8 with scales (C8)",
    "indexed-eagle3": "Eagle3 with heads beside MLA and indexers",
    "indexed-drafts": "a draft model with indexers",
    "nemotronh": "Mamba-2 before attention (Nemotron-H)",
    "falconh1": "Mamba-2 beside attention in each layer (Falcon-H1)",
    "granite": "Mamba-2 with experts (Granite 4)",
    "mamba2": "Mamba-2 alone",
    "qwen3next": "Gated DeltaNet (Qwen3-Next)",
    "qwen3next-mtp": "MTP beside Gated DeltaNet",
    "mtp": "MTP beside MLA (DeepSeek-V3)",
    "spec-eagle3": "Eagle3 with other heads than the target's",
    "spec-eagle": "Eagle",
    "spec": "a separate draft model",
    "spec-flash-dflash": "DFlash",
    "fp8": "fp8",
    "fp8-gptoss": "fp8 with windows (gpt-oss)",
    "fp8-nemotronh": "fp8 beside states (Nemotron-H)",
}

Sizes = dict[tuple[str, int, int], set[str]]  # where it is shown: CI, all, cover


class Collected:
    """A pytest plug-in that reads the marks of all collected tests."""

    def __init__(self) -> None:
        self.marked: Sizes = {}

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            for mark in item.iter_markers("sizes"):
                where = "all" if item.get_closest_marker("slow") else "CI"
                if item.path.name == "test_cover.py":
                    where = "cover"
                self.marked.setdefault(tuple(mark.args), set()).add(where)


def collected() -> Sizes:
    """Return what the tests' marks say. No test runs."""
    import pytest

    collecting, said = Collected(), io.StringIO()
    words = [f"tests/integration/test_{name}.py" for name in FILES]
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", *words], plugins=[collecting])
    if code:
        raise SystemExit(said.getvalue())
    return collecting.marked


def table(marked: Sizes) -> list[str]:
    if strange := sorted({kind for kind, *_ in marked} - set(TITLES)):
        raise SystemExit(f"kinds without a title in tools/kind_sizes.py: {', '.join(strange)}")
    if more := sorted({(p, d) for _, p, d in marked} - set(COLUMNS)):
        raise SystemExit(f"sizes without a column in tools/kind_sizes.py: {more}")
    lines = ["| kind | " + " | ".join(f"TP {p}→{d}" for p, d in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, title in TITLES.items():
        cells = [_words(marked.get((kind, *sizes), ())) for sizes in COLUMNS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def _words(where: Iterable[str]) -> str:
    """Return CI or all, whichever runs more often, and the cover beside it."""
    tier = "CI" if "CI" in where else "all" if "all" in where else ""
    return ", ".join(filter(None, (tier, "cover" if "cover" in where else ""))) or "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/kinds.md")
    parser.add_argument("--check", action="store_true", help="fail if docs/kinds.md has another one")
    args = parser.parse_args()
    page, lines = PAGE.read_text(), table(collected())
    if args.write:
        PAGE.write_text(MARKS.filled(page, lines))
    print("\n".join(lines))
    if args.check and MARKS.filled(page, lines) != page:
        print("docs/kinds.md has another table: python -m tools.kind_sizes --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
