# SPDX-License-Identifier: Apache-2.0
"""Tests go through what an object does, or read what it shows: few accesses to another object's privates are left."""

from __future__ import annotations

import ast
from pathlib import Path

# Of all tests here. Most of what is left are privates of vLLM, torch and argparse, `os._exit`, and methods that a
# test's class overrides. Who takes some out lowers it.
MOST = 74
NAMED = ("_replace", "_asdict")  # public methods of named tuples


def foreign_privates(path: Path) -> list[str]:
    """Return the accesses to an attribute with a leading underscore of anything but `self` and `cls`."""
    return [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")) and node.attr not in NAMED
    ]


def test_few_tests_reach_for_another_objects_privates() -> None:
    uses = [one for path in sorted(Path(__file__).parent.rglob("*.py")) for one in foreign_privates(path)]
    assert len(uses) <= MOST, "\n".join(uses)
