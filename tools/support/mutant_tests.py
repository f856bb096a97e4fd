# SPDX-License-Identifier: Apache-2.0
"""Selection and runs of the tests that can detect a change of one line.

Which tests reach which line is recorded once; then only these run, quick ones first. Slow imports happen once, in this
process; each run is a fork of it that imports the package anew. A failing test must fail twice: a flaky failure detects
nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

COPIED = (
    "vllm_ascend_pd",
    "tests",
    "tools",
    "scripts",
    "csrc",
    "docs",
    "examples",
    "dashboards",
    "pyproject.toml",
    "setup.py",
)
# Imports of the tests from outside the repository, if installed.
HEAVY = (
    "torch",
    "hypothesis.stateful",
    "vllm.v1.request",
    "vllm.v1.outputs",
    "vllm.v1.core.sched.output",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.utils",
)
STARTS_PROCESSES = ("subprocess.Popen", "os.fork", "os.posix_spawn")
QUICK_S = 0.5
IMPORTED = -1  # reached by importing
SIMULATOR = "the simulator"
PROTOCOL, FRONT = "simulation.run", "simulation.front.run"
FIRST_SEED, FIRST_SEEDS = 1, 3  # seeds that run first: they are quicker than any test
SEEDS = 40  # for changes that the unit tests do not detect
SEED_S = 5  # most processor time of a seed; 0.2 s is usual


@dataclass(slots=True)
class Reach:
    """Results of watching one file of tests: seconds by test, and tests by line of the package."""

    state: str = ""  # digest of the tests
    sources: dict[str, str] = field(default_factory=dict)  # digests of the package's files when it was watched
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)  # by "path:line": indices into `seconds`, or IMPORTED
    always: bool = False  # it starts processes, whose lines are not recorded, or cannot be watched

    def of(self, path: str, lines: Iterable[int], source: str) -> dict[str, float]:
        """Return the tests that reach these lines; if the file has changed since, those that reach any of its lines."""
        same = self.sources.get(path) == source
        keys = [f"{path}:{line}" for line in lines] if same else [k for k in self.lines if k.startswith(f"{path}:")]
        numbers = {test for key in keys for test in self.lines.get(key, ())}
        if self.always or (same and IMPORTED in numbers):
            return self.seconds
        tests = list(self.seconds.items())
        return dict(tests[number] for number in numbers - {IMPORTED})


class Watch:
    """Plug-in of pytest that records which test reaches which line of the package."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self.reach = Reach()
        try:
            self._coverage: Any = importlib.import_module("coverage").Coverage(
                data_file=None, config_file=False, source=[str(package)], messages=False
            )
        except ImportError:  # without it any test may reach any line
            self._coverage, self.reach.always = None, True
        else:
            self._coverage.start()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in STARTS_PROCESSES:
            self.reach.always = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._coverage is not None:
            self._coverage.switch_context(str(len(self.reach.seconds)))
        began = time.monotonic()
        self.reach.seconds[item.nodeid] = 0.0
        try:
            return (yield)
        finally:
            self.reach.seconds[item.nodeid] = time.monotonic() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reach.always |= report.failed  # the test is slower while watched

    def pytest_sessionfinish(self) -> None:
        if self._coverage is None:
            return
        self._coverage.stop()
        data = self._coverage.get_data()
        for name in data.measured_files():
            path, outside = Path(name).relative_to(self._package.parent), _imported(Path(name))
            for line, tests in data.contexts_by_lineno(name).items():
                reached = {IMPORTED} if line in outside else {int(test or IMPORTED) for test in tests}
                self.reach.lines[f"{path}:{line}"] = sorted(reached)


def _imported(path: Path) -> set[int]:
    """Return the lines outside functions: the first import runs them for all tests."""
    tree = ast.parse(path.read_text())
    inside = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    }
    return set(range(1, len(path.read_text().splitlines()) + 1)) - inside


class Chosen:
    """Plug-in of pytest that runs only the chosen tests, quick ones first.

    Tests that wait come last, because they fail only at their deadline.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_file: dict[str, float] = defaultdict(float)
        for test, took in self._seconds.items():
            by_file[test.split("::")[0]] += took

        waits = {item.path: "until(" in item.path.read_text() for item in items}

        def order(item: pytest.Item) -> tuple[bool, bool, float, str, float]:
            took, file = self._seconds[item.nodeid], item.nodeid.split("::")[0]
            return waits[item.path], took > QUICK_S, by_file[file], file, took

        items[:] = sorted((item for item in items if item.nodeid in self._seconds), key=order)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for _ in range(2):  # a failure must happen twice
            item._initrequest()  # type: ignore[attr-defined]  # new fixtures
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if not any(report.failed for report in reports):
                return True
        self.failed = item.nodeid
        item.session.shouldstop = "it was seen"
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid or "a collection"


class Field:
    """Copy of the tree in which one file at a time is changed."""

    def __init__(self, source: Path, root: Path, keep: Path, heavy: Sequence[str] = HEAVY) -> None:
        self.root, self._keep = root, keep
        self._watched: dict[tuple[str, ...], dict[str, Reach]] = {}
        for name in COPIED:
            if (source / name).is_dir():
                shutil.copytree(source / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (source / name).exists():
                shutil.copy(source / name, root / name)
        _warm(heavy)

    def judge(
        self,
        path: str,
        change: Callable[[str], str],
        lines: tuple[int, int],
        patterns: tuple[str, ...],
        simulator: str,
        limit_s: float,
        quick: bool = False,
    ) -> str:
        """Return what detected the change: a test, the simulator, the time limit ("the clock"), or "" for nothing."""
        reached: dict[str, float] = {}
        unknown: dict[str, float] = {}  # tests whose child processes may reach it
        for reach in self.watched(patterns).values():
            seconds_of = reach.of(path, range(lines[0], lines[1] + 1), _digest([self.root / path]))
            (unknown if reach.always else reached).update(seconds_of)
        file = self.root / path
        text, deadline = file.read_text(), time.monotonic() + limit_s
        file.write_text(change(text))
        for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            stale.unlink()
        try:
            seen = self._simulated(simulator, FIRST_SEEDS, deadline) or self._failing(reached, deadline)
            if seen := seen or self._simulated(simulator, SEEDS, deadline):
                return seen.removeprefix("tests/unit/")
            return "" if quick else self._failing(unknown, deadline).removeprefix("tests/unit/")
        finally:
            file.write_text(text)

    def _simulated(self, simulator: str, seeds: int, deadline: float) -> str:
        if not simulator:
            return ""
        result = self._forked(lambda: _simulate(simulator, seeds), deadline)
        return "the clock" if result is None else result

    def watched(self, patterns: tuple[str, ...]) -> dict[str, Reach]:
        """Return the recorded results by file of tests; files that have changed are watched again."""
        if patterns not in self._watched:
            paths = {p: None for pattern in patterns for p in sorted((self.root / "tests/unit").rglob(pattern + ".py"))}
            self._watched[patterns] = {path.name: self._watch(path) for path in paths}
        return self._watched[patterns]

    def _watch(self, path: Path) -> Reach:
        kits = [p for p in (self.root / "tests/unit").rglob("*.py") if not p.name.startswith("test_")]
        state = _digest([path, *sorted(kits)])
        book = self._keep / f"{path.stem}.json"
        if book.exists() and (reach := Reach(**json.loads(book.read_text()))).state == state:
            return reach

        def run() -> str:
            watch = Watch(self.root / "vllm_ascend_pd")
            _pytest(["--timeout=600", str(path)], watch)
            return json.dumps([watch.reach.seconds, watch.reach.lines, watch.reach.always])

        result = self._forked(run, time.monotonic() + 1800)
        if result is None:
            raise TimeoutError(f"{path.name} does not end")
        package = sorted((self.root / "vllm_ascend_pd").rglob("*.py"))
        sources = {str(p.relative_to(self.root)): _digest([p]) for p in package}
        reach = Reach(state, sources, *json.loads(result))
        if not reach.seconds:
            raise RuntimeError(f"no test of {path.name} runs: {(self.root / 'output').read_text()[-2000:]}")
        book.write_text(json.dumps({name: getattr(reach, name) for name in Reach.__slots__}))
        return reach

    def _failing(self, seconds: dict[str, float], deadline: float) -> str:
        """Return the first of these tests that fails, or ""."""
        if not seconds:
            return ""

        def run() -> str:
            chosen = Chosen(seconds)
            code = _pytest([*sorted({str(self.root / test.split("::")[0]) for test in seconds})], chosen)
            return chosen.failed or ("" if code == 0 else "the tests")

        result = self._forked(run, deadline)
        return "the clock" if result is None else result

    def _forked(self, run: Callable[[], str], deadline: float) -> str | None:
        """Return the result of `run` from a forked process, or None if it does not end in time."""
        out = self.root / "result"
        out.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                os.chdir(self.root)
                with (self.root / "output").open("w") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                sys.path[:0] = [str(self.root), str(self.root / "tests")]
                os.environ["PYTHONPATH"] = f"{self.root}:{self.root / 'tests'}"
                for name in [
                    n for n in sys.modules if n.partition(".")[0] in ("vllm_ascend_pd", "tools", "simulation", "unit")
                ]:
                    del sys.modules[name]
                out.write_text(run())
                code = 0
            finally:
                os._exit(code)
        ended, status = 0, 0
        try:
            while not ended and time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.0 if ended else 0.02)
        finally:
            if not ended:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            return None
        return out.read_text() if status == 0 else "the process"


def _digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _warm(modules: Sequence[str]) -> None:
    before = dict(os.environ)  # vLLM changes it
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    os.environ.clear()
    os.environ.update(before)


def _pytest(words: list[str], plugin: object) -> int:
    from hypothesis import Phase, settings

    settings.register_profile("mutants", deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
    usual = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--timeout=60", "--hypothesis-profile", "mutants"]
    return int(pytest.main([*usual, *words], plugins=[plugin]))


def _simulate(module: str, seeds: int) -> str:
    max_s = seeds * SEED_S + int(time.process_time())  # processor time, so that other load does not matter
    resource.setrlimit(resource.RLIMIT_CPU, (max_s, max_s + 1))
    try:
        simulator: Any = importlib.import_module(module)
        return SIMULATOR if simulator.main(["--seeds", str(seeds), "--from", str(FIRST_SEED)]) else ""
    except Exception:  # noqa: BLE001  # any exception counts as detected
        traceback.print_exc()
        return SIMULATOR
