# SPDX-License-Identifier: Apache-2.0
"""Lines of prose in the pages have up to 120 columns; tables and blocks of code may be wider."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 120
PAGES = subprocess.run(
    ("git", "-C", str(ROOT), "ls-files", "*.md"), check=True, capture_output=True, text=True
).stdout.split()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines outside tables, blocks of code and comments."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith(("|", "<!--")):
            yield number, line


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_up_to_120_columns(page: str) -> None:
    wide = [f"{page}:{number}: {len(line)}" for number, line in prose((ROOT / page).read_text()) if len(line) > WIDTH]
    assert not wide


def test_a_wide_line_is_found_where_it_is_prose_only() -> None:
    wide = "word " * 30
    text = f"{wide}\n```\n{wide}\n```\n| {wide} |\n{wide}\n"
    assert [number for number, line in prose(text) if len(line) > WIDTH] == [1, 6]
