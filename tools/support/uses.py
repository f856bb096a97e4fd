# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM and vllm-ascend that this package uses, read from its own code: none is listed by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_ascend_pd"
ROOM = PACKAGE / "vllm_patches"
READ, CHECKED = "read", "checked"  # its absence is an AttributeError; is noticed
_NAME = re.compile(r"[A-Za-z_]\w*")
_THEIRS = ("vllm", "vllm_ascend")


@dataclass(frozen=True)
class Imported:
    """A name that a module imports from them; `checked`: the module goes on without it, or as it was."""

    module: str
    name: str
    checked: bool


@dataclass
class Uses:
    """All of it. `read` and `looked_for` are names of attributes, each behind what it is read from.

    `files` has for each file its words, and those in strings: a name that is checked may stand in a list.
    `defined` are the names that this package defines itself.
    """

    imports: list[Imported] = field(default_factory=list)
    read: set[tuple[str, str]] = field(default_factory=set)
    looked_for: set[tuple[str, str]] = field(default_factory=set)
    files: list[tuple[set[str], set[str]]] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path = PACKAGE) -> Uses:
        uses = cls()
        for path in sorted(folder.rglob("*.py")):
            uses._add(ast.parse(path.read_text()), path.parent == folder / ROOM.name)
        return uses

    def _add(self, tree: ast.AST, checks: bool) -> None:
        """Add a module. `checks`: it checks at the start that what it uses is as it was."""
        words, strings = set[str](), set[str]()
        guarded = {id(inner) for node in ast.walk(tree) if _goes_on(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _THEIRS:
                for alias in node.names:
                    self.imports.append(Imported(node.module or "", alias.name, checks or id(node) in guarded))
                    words.add(alias.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
                strings.add(node.value)
            elif isinstance(node, ast.Attribute):
                if _receiver(node.value) == "self" and isinstance(node.ctx, ast.Store):
                    self.defined.add(node.attr)
                self.read.add((flat(_receiver(node.value)), node.attr))
                words.add(node.attr)
            elif isinstance(node, ast.Call) and (name := _looked_for(node)):
                self.looked_for.add((flat(_receiver(node.args[0])), name))
            elif isinstance(node, ast.Name):
                words.add(node.id)
                self.defined |= {node.id} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.arg | ast.keyword):
                words.add(node.arg or "")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined.add(node.name)
        self.files.append((words, strings))

    @property
    def strings(self) -> set[str]:
        return {word for _, strings in self.files for word in strings}

    @property
    def words(self) -> set[str]:
        return self.strings.union(*(words for words, _ in self.files))

    def use(self, kind: str, name: str, kinds: Collection[str]) -> str:
        """Return what this package does with a name of one of their classes: CHECKED, READ; empty: perhaps nothing.

        Whose attribute it is follows from the variable: `scheduler` is a Scheduler, `spec` any class with such an end.
        """
        known = {flat(one) for one in kinds}

        def is_it(receiver: str) -> bool:
            ends = len(receiver) >= len("spec") and receiver not in known and flat(kind).endswith(receiver)
            return receiver == flat(kind) or ends

        if any(one == name and is_it(receiver) for receiver, one in self.looked_for):
            return CHECKED
        if any(name in strings and flat(kind) in map(flat, words | strings) for words, strings in self.files):
            return CHECKED
        return READ if any(one == name and is_it(receiver) for receiver, one in self.read) else ""


def flat(name: str) -> str:
    """Return a name as it is in classes and variables alike."""
    return name.replace("_", "").lower()


def _goes_on(node: ast.AST) -> bool:
    return isinstance(node, ast.Try) and any("ImportError" in ast.unparse(one.type or node) for one in node.handlers)


def _receiver(node: ast.expr) -> str:
    """Return the last name of what an attribute is read from; empty: it has none."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _looked_for(node: ast.Call) -> str:
    """Return the attribute for which a call looks; empty: for none, or it fails without it."""
    what = ast.unparse(node.func)
    if what == "hasattr" or (what == "getattr" and len(node.args) > 2):
        name = node.args[1]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return ""
