# SPDX-License-Identifier: Apache-2.0
"""Import rules: no import cycles; pure modules import only pure ones. And a class or type alias has its own name."""

from __future__ import annotations

import ast
import re
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
# Modules of the package that a pure module may import besides pure ones: those with declarations only.
DECLARES = {
    "vllm_ascend_pd.errors",
    "vllm_ascend_pd.config",
    "vllm_ascend_pd.transport.base",
    "vllm_ascend_pd.shared.backoff",
    "vllm_ascend_pd.shared.event",
}
# Stand-ins by vllm-ascend's name, by which admission knows the class: for the tools, and in engines, which have none.
OF_VLLM_ASCEND = {"AscendMLAAttentionSpec"}
ALLOWED = sys.stdlib_module_names - {"threading", "socket", "time", "random", "asyncio", "uuid"} | {"numpy", "msgspec"}


def imported(path: Path) -> Iterator[str]:
    """Return everything that a file imports, including inside functions and for type checking."""
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
    """Time, identities and randomness are arguments there; threads and sockets are elsewhere."""
    foreign = {top for top in imported(MODULES[name]) if not top.startswith("vllm_ascend_pd")}
    assert {word.partition(".")[0] for word in foreign} <= ALLOWED
    ours = {module for module in imported(MODULES[name]) if module in MODULES}
    assert ours <= set(PURE) | DECLARES | {f"vllm_ascend_pd.{folder}" for folder in FOLDERS}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_no_arrow_leads_from_one_side_to_the_other_or_back_up(side: str) -> None:
    """Common modules import neither side; only modules that build or check both import both."""
    above = ("connector", "cli.", f"{side}.")
    for name, path in MODULES.items():
        if not name.removeprefix("vllm_ascend_pd.").startswith(above):
            assert not [module for module in imported(path) if module.startswith(f"vllm_ascend_pd.{side}.")], name


def test_the_http_client_is_below_all_that_use_it_and_an_engine_needs_no_metaserver() -> None:
    for name, path in MODULES.items():
        ours = {module for module in imported(path) if module in MODULES}
        if name.startswith("vllm_ascend_pd.http."):
            assert all(module.startswith(("vllm_ascend_pd.http", "vllm_ascend_pd.shared.")) for module in ours), name
        if name.startswith(("vllm_ascend_pd.prefill.", "vllm_ascend_pd.decode.")):
            assert not [module for module in ours if module.startswith("vllm_ascend_pd.metaserver")], name


def test_what_tests_share_is_in_no_test_file() -> None:
    """Such a file is collected and not checked for types; what others use of it stands in a kit beside it."""
    shared = []
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                words = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                if any(part.startswith("test_") for word in words for part in word.split(".")):
                    shared.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}")
    assert not shared


def test_a_class_name_is_that_of_one_class() -> None:
    """Private and nested ones too, and those of tools and tests: a name in a traceback or in a search is one thing."""
    where: dict[str, list[str]] = {}
    for folder in ("vllm_ascend_pd", "tools", "tests", "examples"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    where.setdefault(node.name, []).append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1}.keys() == OF_VLLM_ASCEND


def aliases(path: Path) -> Iterator[tuple[str, str]]:
    """Return name and definition of each type alias and class of a module: what a CamelCase name is given to there."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, f"class of {path.relative_to(PACKAGE)}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and re.fullmatch("[A-Z][a-z]\\w*", target.id):
                    yield target.id, ast.unparse(node.value)


def test_a_type_alias_is_the_name_of_one_type() -> None:
    """Nor is it a class's name. Modules may define an alias once more, in the same words."""
    where: dict[str, set[str]] = {}
    for path in MODULES.values():
        for name, definition in aliases(path):
            where.setdefault(name, set()).add(definition)
    assert not {name: meanings for name, meanings in where.items() if len(meanings) > 1}
