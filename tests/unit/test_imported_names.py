# SPDX-License-Identifier: Apache-2.0
"""Every name that tests, tools and package import from each other exists, also in tests that seldom run.

Mypy leaves test_*.py out, and pytest imports only what it collects: a renamed class would be noticed in the slow tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("vllm_ascend_pd", "tools", "tests", "examples")
PLUGINS = sorted((ROOT / "tests/integration/plugins").iterdir())  # each stands on the path of the engines it is for
FOLDERS = (".", "tests", "tests/integration", "tests/native", "tests/ascend_host", "tests/ascend_host/plugin", *PLUGINS)
ELSEWHERE = {"coverage", "mooncake", "torch_npu", "vllm_ascend"}  # not in every environment
FILES = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))


def path_of(module: str, near: Path) -> Path | None:
    """Return a module's file, or the folder of a package that has none, as Python finds it from a file in `near`."""
    candidates = [folder.joinpath(*module.split(".")) for folder in (near, *(ROOT / folder for folder in FOLDERS))]
    files = (
        file for place in candidates for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()
    )
    return next(files, None) or next((place for place in candidates if place.is_dir()), None)


@cache
def bound(path: Path) -> frozenset[str]:
    """Return the names that a module's own statements bind, in whichever branch."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names)


def defines(module: Path, name: str) -> bool:
    """Return whether a module binds the name, makes names when asked, or has a module of that name inside."""
    if module.is_file() and {name, "__getattr__"} & bound(module):
        return True
    folder = module.parent if module.name == "__init__.py" else module
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def wrong(source: str, near: Path) -> Iterator[str]:
    """Say of each import of a file in the folder `near` which module, or which name in it, is not there."""
    nodes = list(ast.walk(ast.parse(source)))
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]  # what they import is of another version
    for node in set(nodes).difference(*map(ast.walk, handlers)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            there, top = path_of(module, near), module.partition(".")[0]
            if there and name and not defines(there, name):
                yield f"line {node.lineno}: no {name} in {there.relative_to(ROOT)}"
            if not there and (path_of(top, near) or not (top in ELSEWHERE or find_spec(top))):
                yield f"line {node.lineno}: no module {module}"


def test_every_imported_name_exists() -> None:
    assert len(FILES) > 500
    answers = {path: list(wrong(path.read_text(), path.parent)) for path in FILES}
    assert {str(path.relative_to(ROOT)): lines for path, lines in answers.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "lacking"),
    [
        ("from tools.support.engine import NoSuchName", "NoSuchName in tools/support/engine.py"),
        ("from tools.support.absent import engine", "module tools.support.absent"),
        ("from tools import absent", "absent in tools/__init__.py"),
        ("from unit.router.cluster import NoSuchName", "NoSuchName in tests/unit/router/cluster.py"),
        ("from vllm_ascend_pd.config import Configuration", "Configuration in vllm_ascend_pd/config.py"),
        ("import vllm_ascend_pd.absent", "module vllm_ascend_pd.absent"),
        ("from simulation.settings import NoSuchName", "NoSuchName in tests/simulation/settings.py"),
        ("from absent_pairs import Pair", "module absent_pairs"),
        ("def inside() -> None: from pairs import NoSuchName", "NoSuchName in tests/integration/pairs.py"),
    ],
)
def test_a_wrong_name_is_detected(line: str, lacking: str) -> None:
    assert list(wrong(line, ROOT / "tests/integration")) == [f"line 1: no {lacking}"]
