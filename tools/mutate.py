# SPDX-License-Identifier: Apache-2.0
"""Small random changes of the package's own code, one at a time, each against the tests that should detect it.

The changes are drawn by seed from the syntax tree, as many from each folder: a comparison, a number, a call, two
arguments or one less, a condition or a part of it, a lock, an error handler, a function that returns nothing. Each is
made in a copy of the tree, never in place. The tests of its folder that reach
its lines run until one fails; then the simulator runs. A change that nothing detects needs a test, or a line in
`tools/mutants_equivalent.txt` with the reason why it changes nothing. `--only N` repeats one of them. With `--keep
DIR` an interrupted run continues, and a finished one repeats only the changes that survived.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path

from tools.support.mutant_tests import FRONT, PROTOCOL, Field

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.txt"
_BOOKS = (
    *("test_meetings", "test_first_tokens", "test_load_requests", "test_offers", "test_decisions_*", "test_connector"),
    *("test_rendezvous", "test_groups", "test_geometry_states", "test_runtime", "test_runtime_*"),
)
_PUSHES = ("test_writer", "test_batches", "test_missed", *_BOOKS, "test_regroup_*")
_ROUTER = ("router/test_*", "test_shown", "test_within")
# Tests by folder of the package.
TESTS: dict[str, tuple[str, ...]] = {
    "prefill/worker/core": (*_PUSHES, "test_trace", "test_metrics", "test_shown"),
    "prefill/scheduler/core": (*_PUSHES, "test_trace", "test_metrics", "test_shown"),
    "decode/worker/core": (*_BOOKS, "test_loads", "test_trace", "test_metrics"),
    "decode/scheduler/core": (*_BOOKS, "test_no_prompts", "test_trace", "test_metrics"),
    "protocol": (
        "test_shown",
        "test_protocol_*",
        "test_versions",
        "test_auth",
        "test_forged_requests",
        "test_bootstrap",
        "test_rendezvous",
        "test_router_shapes",
        "test_first_tokens",
        "test_fuzz",
        "test_runtime_*",
    ),
    "geometry": (
        "test_geometry_*",
        "test_decisions_push",
        "test_ops_*",
        "test_cli_plan",
        "test_runtime",
        "test_regroup_staging",
    ),
    "regroup": ("test_ops", "test_shown", "test_ops_*", "test_regroup_*"),
    "transport": ("test_transport_*", "test_batches", "test_mooncake", "test_mooncake_faults", "test_runtime_*"),
    "channel": ("test_channel", "test_channel_*"),
    "regroup/core": ("test_ops", "test_shown", "test_ops_*", "test_regroup_*"),
    "prefill/scheduler": (*_PUSHES, "test_bootstrap"),
    "prefill/worker": (*_PUSHES, "test_steps"),
    "decode/scheduler": (*_BOOKS, "test_metaserver_client", "test_httpx_transport", "test_no_prompts"),
    "decode/worker": (*_BOOKS, "test_loads"),
    "router": _ROUTER,
    "router/core": _ROUTER,
    "admission": ("test_admission", "test_admission_*", "test_connector", "test_imported_names"),
    "vllm_patches": (
        "vllm_patches/test_*",
        "test_first_tokens",
        "test_given",
        "test_no_prompts",
        "test_kernel_blocks",
        "test_connector",
    ),
}
USUAL = tuple(TESTS)[:8]
# Simulators of the folders that they run.
SIMULATED = {**dict.fromkeys(("protocol", "geometry", "regroup", "decode", "prefill"), PROTOCOL), "router": FRONT}

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
_LOCK_OR_SUPPRESS = re.compile(r"lock|\bsuppress\(")
_OTHERS = {"max": "min", "min": "max", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: the text between two offsets is replaced."""

    path: str  # relative to the root
    line: int
    begin: int
    end: int
    before: str
    after: str
    around: str  # the first line of the change
    column: int
    lines: tuple[int, int] = (0, 0)  # first and last line of the statement, without nested statements

    @property
    def name(self) -> str:
        """Return a name that stays the same as long as the line does, wherever it moves in the file."""
        return f"{self.path}: {_flat(self.around)}: {_flat(self.before)} → {_flat(self.after)} at {self.column}"

    def applied(self, text: str) -> str:
        return text[: self.begin] + self.after + text[self.end :]


def _flat(text: str) -> str:
    return " ".join(text.split())[:120]


class _Source:
    """Offsets of a file's nodes: the syntax tree counts lines, and bytes within them."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = text.splitlines(keepends=True)

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError("a node without an end")
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def swap(self, node: ast.expr | ast.stmt, after: str) -> Mutant:
        begin, end = self.span(node)
        return self.cut(node.lineno, begin, end, after)

    def cut(self, line: int, begin: int, end: int, after: str) -> Mutant:
        around, column = self._lines[line - 1], begin - self._starts[line - 1]
        return Mutant(self.path, line, begin, end, self.text[begin:end], after, around, column)

    def of(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def between(self, left: ast.expr, right: ast.expr, word: str, other: str) -> Mutant | None:
        """Return the replacement of the operator between two operands."""
        begin, end = self.span(left)[1], self.span(right)[0]
        place = self.text.find(word, begin, end)
        if place < 0:
            return None
        whole = self.text[self.span(left)[0] : self.span(right)[1]]
        cut = place - self.span(left)[0]
        after = whole[:cut] + other + whole[cut + len(word) :]
        return self.cut(left.lineno, self.span(left)[0], self.span(right)[1], after)


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Return all changes that can be made to a file, in the order of the tree."""
    source, tree = _Source(path, text), ast.parse(text)
    lines = _lines_of(tree)
    skipped = {id(inner) for node in ast.walk(tree) for inner in ast.walk(node) if _is_no_code(node)}
    return [
        replace(mutant, lines=lines[id(_reached_by(node))])
        for node in ast.walk(tree)
        if id(node) not in skipped
        for mutant in _changes(source, node)
        if mutant.before != mutant.after
    ]


def _reached_by(node: ast.AST) -> ast.AST:
    """Return the part of a changed node that runs only where the change matters: of a handler, and of a function."""
    body = _body(node)
    return body[0] if body else node


def _body(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of an error handler, or of a function that returns nothing, after its docstring."""
    if isinstance(node, ast.ExceptHandler):
        return node.body
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__init__":
        return []
    returns_nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
    return node.body[ast.get_docstring(node, clean=False) is not None :] if returns_nothing else []


def _lines_of(tree: ast.Module) -> dict[int, tuple[int, int]]:
    """Return for each node the lines of the innermost statement around it."""
    lines_of: dict[int, tuple[int, int]] = {}
    for statement in ast.walk(tree):  # inner ones come later
        if not isinstance(statement, ast.stmt):
            continue
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        first_and_last = (
            min([first, *(d.lineno for d in getattr(statement, "decorator_list", ()))]),
            max(first, body[0].lineno - 1) if body else last,
        )
        lines_of |= dict.fromkeys((id(node) for node in ast.walk(statement)), first_and_last)
    return lines_of


def _is_no_code(node: ast.AST) -> bool:
    """Return whether a node is not for tests: types, their defaults, log lines, names of a class."""
    if isinstance(node, ast.AnnAssign | ast.arg | ast.ImportFrom | ast.Import):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).startswith(("log.", "trace.", "METRICS."))
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "trace.enabled()")


def _is_another(mutant: Mutant, text: str) -> bool:
    """Return whether the mutant is a valid program that differs in more than a record's immutability.

    Writes to immutable records are for the type checker to find.
    """
    if mutant.around[: mutant.column].endswith(("frozen=", "slots=")):
        return False
    try:
        ast.parse(mutant.applied(text))
    except (SyntaxError, ValueError):
        return False
    return True


def _changes(source: _Source, node: ast.AST) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        mutant = source.between(node.left, node.comparators[0], *_COMPARISONS[type(node.ops[0])])
        if mutant is not None:
            yield mutant
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        mutant = source.between(node.left, node.right, *_OPERATORS[type(node.op)])
        if mutant is not None:
            yield mutant
    elif isinstance(node, ast.BoolOp):
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        mutant = source.between(node.values[0], node.values[1], f" {word} ", f" {other} ")
        if mutant is not None:
            yield mutant
        for value in node.values:
            yield source.swap(value, "True" if word == "and" else "False")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.swap(node, repr(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield source.swap(node, repr(node.value + 1))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.swap(node, f"({source.of(node.operand)})")
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield source.swap(node.test, f"not ({source.of(node.test)})")
    elif isinstance(node, ast.Call):
        yield from _of_call(source, node)
    elif isinstance(node, ast.With) and _LOCK_OR_SUPPRESS.search(ast.unparse(node.items[0].context_expr)):
        yield source.swap(node.items[0].context_expr, "__import__('contextlib').nullcontext()")
    elif isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(
        getattr(node, "value", None), ast.Yield | ast.Await
    ):
        yield source.swap(node, "pass")
    elif body := _body(node):
        begin, end = source.span(body[0])[0], source.span(body[-1])[1]
        yield source.cut(body[0].lineno, begin, end, "raise" if isinstance(node, ast.ExceptHandler) else "pass")
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield source.swap(node, "return None")


def _of_call(source: _Source, node: ast.Call) -> Iterator[Mutant]:
    if isinstance(node.func, ast.Name) and node.func.id in _OTHERS:
        yield source.swap(node.func, _OTHERS[node.func.id])
    given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
    for index, keyword in enumerate(given):
        if not isinstance(keyword, ast.keyword) or keyword.arg in (None, "frozen", "slots"):
            continue
        if index:
            begin, end = source.span(given[index - 1])[1], source.span(keyword)[1]
        else:
            begin, end = source.span(keyword)[0], source.span(given[1] if len(given) > 1 else keyword)[len(given) == 1]
        yield source.cut(keyword.lineno, begin, end, "")
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    if len(plain) >= 2:
        first, second = plain[0], plain[1]
        begin, end = source.span(first)[0], source.span(second)[1]
        between = source.text[source.span(first)[1] : source.span(second)[0]]
        after = source.of(second) + between + source.of(first)
        yield source.cut(first.lineno, begin, end, after)


def drawn(folders: Sequence[str], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Return changes of each folder in turn; the same seed draws the same ones from the same code."""
    turns = [_shuffled(folder, seed, root) for folder in folders]
    return list(islice((mutant for turn in zip_longest(*turns) for mutant in turn if mutant is not None), count))


def _shuffled(folder: str, seed: int, root: Path) -> Iterator[Mutant]:
    place = root / "vllm_ascend_pd" / folder
    paths = [place] if place.is_file() else sorted(place.glob("*.py"))
    every = [mutant for path in paths for mutant in mutants_of(str(path.relative_to(root)), path.read_text())]
    random.Random(f"{folder} {seed}").shuffle(every)
    return (mutant for mutant in every if _is_another(mutant, (root / mutant.path).read_text()))


def known() -> dict[str, str]:
    """Return the changes that change nothing, with their reasons."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = [line.rsplit(" # ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return {name.strip(): reason for name, reason in pairs}


def own_tests(mutant: Mutant) -> tuple[str, ...]:
    path = mutant.path.removeprefix("vllm_ascend_pd/")
    return TESTS[path.rpartition("/")[0]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutate.sh", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mutants", type=int, default=20, help="how many changes are drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (%(default)s)")
    parser.add_argument(
        "--folder", action="append", choices=sorted(TESTS), help=f"of the package; none: {', '.join(USUAL)}"
    )
    parser.add_argument("--only", type=int, help="only the change of this number")
    parser.add_argument("--keep", type=Path, help="directory of results, from which a run continues")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for one change's tests; then it counts as detected"
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out tests that start processes; then run again without it"
    )
    parser.add_argument("--list", action="store_true", help="print the drawn changes, and run nothing")
    args = parser.parse_args(argv)
    mutants = list(enumerate(drawn(args.folder or USUAL, args.mutants, args.seed)))
    chosen = [pair for pair in mutants if args.only in (None, pair[0])]
    if args.list:
        for number, mutant in chosen:
            print(f"{number:4} {mutant.path}:{mutant.line}  {_flat(mutant.before)}  →  {_flat(mutant.after)}")
        return 0
    if importlib.util.find_spec("coverage") is None:
        print(
            "coverage is not installed: each change runs all tests of its folder, which takes much longer", flush=True
        )
    counts = Counter[str]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its children end with it
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        for number, kind, line in _judged(chosen, Path(directory), args):
            counts[kind] += 1
            print(f"{number:4} {kind:10} {line}", flush=True)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{len(chosen)} changes, seed {args.seed}: {summary}")
    return 1 if counts["SURVIVED"] else 0


def _judged(
    chosen: list[tuple[int, Mutant]], directory: Path, args: argparse.Namespace
) -> Iterator[tuple[int, str, str]]:
    keep: Path = args.keep or directory
    keep.mkdir(parents=True, exist_ok=True)
    reasons, book = known(), keep / "seen.json"
    earlier: dict[str, str] = json.loads(book.read_text()) if book.exists() else {}
    field: Field | None = None
    for number, mutant in chosen:
        began, key = time.monotonic(), f"{mutant.line} {mutant.name}"
        if mutant.name in reasons:
            kind, seen = "equivalent", reasons[mutant.name]
        elif key in earlier:
            kind, seen = "seen", earlier[key]
        else:
            field = field or Field(ROOT, directory / "tree", keep)
            seen = field.judge(
                mutant.path,
                mutant.applied,
                mutant.lines,
                own_tests(mutant),
                simulator_of(mutant),
                args.limit,
                args.quick,
            )
            kind = "seen" if seen else "SURVIVED"
            if seen:
                earlier[key] = seen
                book.write_text(json.dumps(earlier, indent=1))
        change = f"{_flat(mutant.before)}  →  {_flat(mutant.after)}"
        yield number, kind, f"{mutant.path}:{mutant.line}  {change}  [{seen}, {time.monotonic() - began:.0f} s]"


def simulator_of(mutant: Mutant) -> str:
    """Return the simulator's module, or nothing."""
    return SIMULATED.get(mutant.path.split("/")[1], "")


if __name__ == "__main__":
    sys.exit(main())
