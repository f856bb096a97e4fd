# SPDX-License-Identifier: Apache-2.0
"""Changes to vLLM: all are in one room, and each stands in the table of its page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "vllm_ascend_pd"
ROOM = PACKAGE / "vllm_patches"
TABLE = "\n".join(line for line in (ROOM / "README.md").read_text().splitlines() if line.startswith("| "))
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents)
PRIVATE = re.compile("_[a-z][a-z_]*")
# Those of named tuples, and torch's.
NOT_VLLM = {"_asdict", "_replace", "_get_backend", "_dispatch_has_kernel_for_dispatch_key", "_C"}
# Objects of vLLM's, by the name that this package gives them everywhere.
THEIRS = {"request", "scheduler", "vllm_config", "kv_cache_config", "scheduler_output", "sampling_params"}


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def imported_from_vllm(tree: ast.AST) -> set[str]:
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in ("vllm", "vllm_ascend")
    }


def defined(tree: ast.AST) -> Iterator[str]:
    """Return the names of functions and attributes that a module defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and root(node.value) in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def asked_by_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Return the private names that a function may give to `getattr` or `hasattr`, perhaps over a variable."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            where = node.args[1] if isinstance(node.args[1], ast.Constant) else function
            for word in ast.walk(where):
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and PRIVATE.fullmatch(word.value):
                    yield word.value


def reached_into(source: str) -> Iterator[str]:
    """Return the lines that change an object of vLLM's, or touch what is private elsewhere."""
    tree = ast.parse(source)
    ours = set(defined(tree))
    theirs = imported_from_vllm(tree) | THEIRS
    for node in ast.walk(tree):
        touched = ""
        if isinstance(node, ast.Attribute):
            private = PRIVATE.fullmatch(node.attr) and node.attr not in ours | NOT_VLLM
            written = not isinstance(node.ctx, ast.Load) and root(node.value) in theirs
            touched = ast.unparse(node) if private or written else ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            touched = ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            touched = ", ".join(name for name in asked_by_name(node) if name not in ours | NOT_VLLM)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            touched = ", ".join(alias.name for alias in node.names if alias.name.startswith("_"))
        if touched:
            yield f"{node.lineno}: {touched}"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_reaches_into_vllm(path: Path) -> None:
    assert not list(reached_into(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.v1.core.sched.scheduler import Scheduler\nScheduler.schedule = None",
        "import vllm\nvllm.envs.VLLM_USE_V1 = True",
        "setattr(owner, 'schedule', None)",
        "def take(request):\n    request.max_tokens = 1",
        "def take(request):\n    del request.sampling_params.bad_words",
        "def take(found):\n    return found._all_token_ids",
        "def take(found):\n    return getattr(found, '_all_token_ids', ())",
        "def take(found):\n    return [hasattr(found, name) for name in ('_bad_words_token_ids',)]",
        "from vllm.v1.attention.backends.cpu_attn import _get_attn_isa",
    ],
)
def test_reaching_into_vllm_is_recognised(source: str) -> None:
    assert list(reached_into(source))


def symbols(path: Path) -> Iterator[str]:
    """Return the names of vLLM's that a module wraps, and the private ones that it uses."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root(node.value) not in ("self", "cls"):
            if PRIVATE.fullmatch(node.attr) or (isinstance(node.ctx, ast.Store) and root(node.value)[:1].isupper()):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "wrap":
            yield from (word.value for word in node.args if isinstance(word, ast.Constant))
    wraps = any(isinstance(node, ast.alias) and node.name == "wrap" for node in ast.walk(tree))
    for statement in tree.body if wraps else ():  # names that are given to `wrap` over a variable
        if isinstance(statement, ast.Assign):
            words = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
            single = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            targets = statement.targets[0]
            if not isinstance(statement.value, ast.Tuple) or isinstance(targets, ast.Tuple):
                yield from (word for word in single if re.fullmatch("[a-z_]+", word) and not word.startswith("pd_"))


@pytest.mark.parametrize("path", sorted(ROOM.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_each_symbol_stands_in_the_table(path: Path) -> None:
    missing = {name for name in symbols(path) if not re.search(rf"[`.]{name}`", TABLE)}
    assert not missing


def test_the_table_names_nothing_that_is_gone() -> None:
    room = "".join(path.read_text() for path in ROOM.glob("*.py"))
    named = re.findall(r"`(?:[A-Za-z]+\.)?([a-z_]+)`", " ".join(row.split("|")[1] for row in TABLE.splitlines()[1:]))
    assert named and not [name for name in named if name not in room]
