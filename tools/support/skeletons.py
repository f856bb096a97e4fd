# SPDX-License-Identifier: Apache-2.0
"""Skeletons of another release's modules: its names, classes and signatures, read with `ast` and without its code.

This package can be imported over them, so its own checks judge a release that is not installed. Of a function only the
parameters are left, of a class its bases, methods and fields, of a module what it defines and imports. A call of such a
function raises.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import linecache
import re
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, cast

INIT = ".__init__"
PACKAGES = ("vllm", "vllm_ascend")  # one of the two may be installed: its classes are bases of skeletons too


Parameters = tuple[str, ...]
MADE: list[type] = []  # all skeletons of classes
_NUMBERS = itertools.count()  # of modules: two releases have some of the same name


class Unread:
    """A value that is not read: that of an expression other than a literal."""


class Sources(MetaPathFinder, Loader):
    """Import of packages as skeletons. `texts`: the modules' code, by path (package/module.py)."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        names = {path.removesuffix(".py").replace("/", "."): text for path, text in texts.items()}
        self._packages = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
        self._tops = {name.partition(".")[0] for name in names}
        self.texts = dict.fromkeys(self._packages, "")  # a folder may have no __init__.py
        self.texts |= {name.removesuffix(INIT): text for name, text in names.items()}

    def install(self) -> None:
        """Import these packages as skeletons from now on. None of them may be imported yet."""
        assert not self._tops & sys.modules.keys()
        sys.meta_path.insert(0, self)

    @contextmanager
    def imported(self, name: str) -> Iterator[ModuleType]:
        """Lend a module's skeleton. Afterwards the packages are as if they had not been imported."""
        self.install()
        try:
            yield importlib.import_module(name)
        finally:
            sys.meta_path.remove(self)
            for each in [each for each in sys.modules if each.partition(".")[0] in self._tops]:
                del sys.modules[each]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.texts:
            return spec_from_loader(fullname, self, is_package=fullname in self._packages)
        if fullname.partition(".")[0] in self._tops:
            raise ModuleNotFoundError(f"{fullname} is not in this release", name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        _Reader(module, self.texts[module.__name__]).read()

    def classes(self, name: str) -> list[type]:
        """Return all classes of that name."""
        kinds = []
        for module, text in self.texts.items():
            if f"class {name}" in text:
                made = getattr(importlib.import_module(module), name, None)
                if isinstance(made, type) and made.__module__ == module:
                    kinds.append(made)
        return kinds


class _Reader:
    """Reading of one module. Classes are made, and imports followed, when they are asked for."""

    def __init__(self, module: ModuleType, text: str) -> None:
        self._module, self._file = module, f"<skeleton {next(_NUMBERS)} of {module.__name__}>"
        self._tree = ast.parse(text)
        self._later: dict[str, ast.ClassDef | ast.ImportFrom | ast.Import] = {}
        lines = text.splitlines(keepends=True)
        linecache.cache[self._file] = (len(text), None, lines, self._file)  # for inspect.getsource

    def read(self) -> None:
        module = self._module
        for statement in _statements(self._tree.body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                setattr(module, statement.name, self._function(statement))
            elif isinstance(statement, ast.ClassDef):
                self._later[statement.name] = statement
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    self._later[(alias.asname or alias.name).partition(".")[0]] = statement
            elif isinstance(statement, ast.AnnAssign) and statement.value is None:
                setattr(module, ast.unparse(statement.target), Unread())
            else:
                for name, value in _assigned(statement):
                    setattr(module, name, value)
        for name in self._later:  # rather than what a branch without it has in its place
            module.__dict__.pop(name, None)
        module.__dict__["__getattr__"] = self._get

    def _get(self, name: str) -> Any:
        statement = self._later.get(name)
        if statement is None:
            raise AttributeError(f"{self._module.__name__} has no {name} in this release")
        made = self._class(statement) if isinstance(statement, ast.ClassDef) else self._imported(statement, name)
        setattr(self._module, name, made)
        return made

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        """Return what an import gives; of a package that is not installed, nothing is known."""
        alias = next(one for one in statement.names if (one.asname or one.name).partition(".")[0] == name)
        try:
            if isinstance(statement, ast.Import):
                module = importlib.import_module(alias.name)
                return module if alias.asname else sys.modules[name]
            base = "." * statement.level + (statement.module or "")
            module = importlib.import_module(base, self._package())
            if hasattr(module, alias.name):
                return getattr(module, alias.name)
            return importlib.import_module(f"{module.__name__}.{alias.name}")
        except (ImportError, OSError, RuntimeError):
            return Unread()

    def _package(self) -> str:
        name = self._module.__name__
        return name if hasattr(self._module, "__path__") else name.rpartition(".")[0]

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
        """Return a function with these parameters, defaults for those that have some, and no code."""
        given = node.args
        bare = ast.arguments(
            [ast.arg(one.arg) for one in given.posonlyargs],
            [ast.arg(one.arg) for one in given.args],
            given.vararg and ast.arg(given.vararg.arg),
            [ast.arg(one.arg) for one in given.kwonlyargs],
            [None if default is None else ast.Constant(None) for default in given.kw_defaults],
            given.kwarg and ast.arg(given.kwarg.arg),
            [ast.Constant(None) for _ in given.defaults],
        )
        raising = ast.Raise(ast.Name("NotImplementedError", ast.Load()), None)
        made = ast.FunctionDef(node.name, bare, [raising], [])
        made.lineno = made.end_lineno = node.lineno  # inspect.getsource begins there
        made.col_offset = made.end_col_offset = 0
        space: dict[str, Any] = {"__name__": self._module.__name__}
        exec(compile(ast.fix_missing_locations(ast.Module([made], [])), self._file, "exec"), space)
        function = space[node.name]
        words = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
        function.__isabstractmethod__ = "abstractmethod" in words
        for kind in (classmethod, staticmethod, property):
            if kind.__name__ in words or (kind is property and "cached_property" in words):
                return kind(function)
        return function

    def _class(self, node: ast.ClassDef) -> type:
        space: dict[str, Any] = {"__module__": self._module.__name__}
        fields: dict[str, str] = {}
        instance: set[str] = set()
        for statement in _statements(node.body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                space[statement.name] = self._function(statement)
                instance |= _set_on_self(statement)
            elif isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                fields |= {ast.unparse(statement.target): ast.unparse(statement.annotation)}
                space |= dict(_assigned(statement))
            else:
                space |= dict(_assigned(statement))
        bases = list(dict.fromkeys(base for one in node.bases if isinstance(base := self._value(one), type)))
        bases = [one for one in bases if isinstance(one, _Skeleton) or one.__module__.partition(".")[0] in PACKAGES]
        inherited = dict.fromkeys(name for base in reversed(bases) for name in getattr(base, "__struct_fields__", ()))
        space |= {"__annotations__": fields, "__struct_fields__": (*(inherited | fields),)}
        space["__own_attributes__"] = frozenset(instance | fields.keys())
        space.pop("__slots__", None)
        try:
            made = _Skeleton(node.name, tuple(bases), space)
        except TypeError:  # bases in an order that only those that are left out explain
            made = _Skeleton(node.name, tuple(bases[:1]), space)
        MADE.append(made)
        how = " ".join(ast.unparse(one) for one in node.decorator_list)
        if re.search(r"\bdataclass\b", how):
            return cast("type", dataclasses.dataclass(kw_only=True, frozen="frozen=True" in how)(made))
        return made

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Subscript):
            return self._value(node.value)
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), node.attr, None)
        return getattr(self._module, node.id, None) if isinstance(node, ast.Name) else None


class _Skeleton(ABCMeta):
    """The class of skeletons of classes."""

    __struct_fields__: tuple[str, ...]
    __own_attributes__: frozenset[str]


def fields(kind: Any) -> tuple[str, ...]:
    """Return the fields of a skeleton of a data class, with those that it inherits."""
    names: tuple[str, ...] = kind.__struct_fields__
    return names


def members(kind: type) -> dict[str, Parameters | None]:
    """Return the names that objects of a skeleton have, and of methods the parameters."""
    by_name: dict[str, Parameters | None] = {}
    for one in reversed(kind.__mro__):
        if isinstance(one, _Skeleton):
            by_name |= dict.fromkeys(one.__own_attributes__)
            by_name |= {
                name: parameters(value) for name, value in vars(one).items() if not name.startswith(("__", "_abc_"))
            }
    return by_name


def parameters(value: Any) -> Parameters | None:
    """Return a method's parameters: "=" is behind those with a default, "*" before the rest; None for what is none."""
    function = getattr(value, "__func__", value)
    if not hasattr(function, "__code__"):
        return None
    return tuple(
        "*" * (one.kind == one.VAR_POSITIONAL)
        + "**" * (one.kind == one.VAR_KEYWORD)
        + one.name
        + "=" * (one.default is not one.empty)
        for one in inspect.signature(function, follow_wrapped=False).parameters.values()
    )


def accepts(ours: Parameters, theirs: Parameters) -> bool:
    """Return whether a function can be called in each way that one with their parameters can."""
    if any(one.startswith("**") for one in ours) and any(one.startswith("*") for one in ours if one[1] != "*"):
        return True
    names = [one.strip("=") for one in theirs if not one.startswith("*")]
    positional = [one for one in ours if not one.startswith("*")]
    more = positional[len(names) :]
    return [one.strip("=") for one in positional[: len(names)]] == names and all(one.endswith("=") for one in more)


def extends(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether a call that fits the earlier parameters fits these too."""
    old, new = ([one for one in each if not one.startswith("*")] for each in (before, now))
    same = [one.strip("=") for one in new[: len(old)]] == [one.strip("=") for one in old]
    lax = all(one.endswith("=") for one, was in zip(new, old, strict=False) if was.endswith("="))
    return same and lax and all(one.endswith("=") for one in new[len(old) :])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a body, with those of its branches: which one is taken is not known here."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            parts = [statement.body, getattr(statement, "orelse", []), getattr(statement, "finalbody", [])]
            parts += [handler.body for handler in getattr(statement, "handlers", [])]
            for part in parts:
                yield from _statements(part)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, Any]]:
    """Return names and values of an assignment. A field whose default is made for each object is none of its class."""
    if isinstance(statement, ast.Assign):
        targets = [one for target in statement.targets for one in getattr(target, "elts", [target])]
        given: ast.expr | None = statement.value
    elif isinstance(statement, ast.AnnAssign):
        given = statement.value
        if isinstance(given, ast.Call) and ast.unparse(given.func).endswith(("field", "Field")):
            given = next((word.value for word in given.keywords if word.arg == "default"), None)
        targets = [statement.target]
    else:
        return
    if given is None:
        return
    try:
        value = ast.literal_eval(given)
    except (ValueError, TypeError):
        value = Unread()
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, value if len(targets) == 1 else Unread()


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
