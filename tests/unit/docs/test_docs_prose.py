# SPDX-License-Identifier: Apache-2.0
"""Prose of pages and docstrings: lines of up to 120 columns in pages, where tables and blocks of code may be wider, and
docstrings that begin with what a thing does or is."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 120
FOLDERS = ("vllm_ascend_pd", "tools", "tests", "examples")
# A docstring that begins so is a clause: it says neither what a function does nor what a thing is.
CLAUSES = re.compile(r"(How|If|What|Whatever|When|Whether|Which|Who|Whoever)\b")
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


def clauses(source: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered first lines of the docstrings that begin with a clause."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said and CLAUSES.match(said):
                yield node.body[0].lineno, said.splitlines()[0]


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_up_to_120_columns(page: str) -> None:
    wide = [f"{page}:{number}: {len(line)}" for number, line in prose((ROOT / page).read_text()) if len(line) > WIDTH]
    assert not wide


def test_a_wide_line_is_found_where_it_is_prose_only() -> None:
    wide = "word " * 30
    text = f"{wide}\n```\n{wide}\n```\n| {wide} |\n{wide}\n"
    assert [number for number, line in prose(text) if len(line) > WIDTH] == [1, 6]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_begins_with_an_act_or_a_thing(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in (ROOT / folder).rglob("*.py")
        for number, line in clauses(path.read_text())
    ]
    assert not wrong


def test_a_clause_is_found_at_the_head_of_a_docstring_only() -> None:
    source = '''"""What it is."""
class Whole:
    """Which of them."""
    async def act(self):
        """Whether it acts."""
def whole():
    """Return whether it is one.

    If it is none, nothing.
    """
    return "What", """Who"""
def plain(): """Whichever."""
'''
    assert sorted(number for number, _ in clauses(source)) == [1, 3, 5]
