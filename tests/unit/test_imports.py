# SPDX-License-Identifier: Apache-2.0
"""The arrows of the house: no module imports itself over others, and what is pure stays so."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_ascend_pd"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
FOLDERS = ("geometry", "protocol", "prefill.core", "decode.core")
PURE = sorted(
    name
    for name in MODULES
    if name.startswith(tuple(f"vllm_ascend_pd.{folder}." for folder in FOLDERS))
    or name.endswith((".decisions", ".metadata", ".regroup.staging"))
)
# What of the package itself a pure module may use: other pure ones, and what only declares.
DECLARES = {
    "vllm_ascend_pd.errors",
    "vllm_ascend_pd.config",
    "vllm_ascend_pd.transport.base",
    "vllm_ascend_pd.shared.event",
}
ALLOWED = sys.stdlib_module_names - {"threading", "socket", "time", "random", "asyncio", "uuid"} | {"numpy", "msgspec"}


def imported(path: Path) -> Iterator[str]:
    """Everything that a file imports, inside functions and for types only too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def test_no_module_imports_itself_over_others() -> None:
    graph = {name: set(imported(path)) & MODULES.keys() - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"a cycle: {' → '.join(cycle.args[1])}")


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_imports_only_what_is_pure(name: str) -> None:
    """Time, identities and chance are arguments there; threads and sockets are elsewhere."""
    foreign = {top for top in imported(MODULES[name]) if not top.startswith("vllm_ascend_pd")}
    assert {word.partition(".")[0] for word in foreign} <= ALLOWED
    ours = {module for module in imported(MODULES[name]) if module in MODULES}
    assert ours <= set(PURE) | DECLARES | {f"vllm_ascend_pd.{folder}" for folder in FOLDERS}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_no_arrow_leads_from_one_side_to_the_other_or_back_up(side: str) -> None:
    """What both sides stand on imports neither; only what builds or judges both knows both."""
    above = ("connector", "cli.", "metaserver.", f"{side}.")
    for name, path in MODULES.items():
        if not name.removeprefix("vllm_ascend_pd.").startswith(above):
            assert not [module for module in imported(path) if module.startswith(f"vllm_ascend_pd.{side}.")], name
