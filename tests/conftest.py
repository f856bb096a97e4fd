# SPDX-License-Identifier: Apache-2.0
"""Setup shared by all tests: the repository on the import path, and what becomes of a test that cannot run here."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import skips
import stagger
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Images for containers set it, and then each of some hundred processes compiles all that it imports: with vLLM that is
# 25 s of the processor instead of 10, with torch 5 instead of 2.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("any machine", deadline=None)  # the speed of an example depends on the machine
settings.register_profile("few", deadline=None, max_examples=25)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", choices=("few", "ci", "all"), default="all", help="how many the simulators play")
    parser.addoption(
        "--skips",
        choices=("any", "listed"),
        default="any",
        help="listed: a skip for a reason not in skips.py is a failure",
    )
    parser.addoption("--stagger", type=int, metavar="SEED", help="let the package's threads stand still now and then")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seeds") == "few":
        settings.load_profile("few")
    if (seed := config.getoption("--stagger")) is not None:
        stagger.start(seed)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a run that counts fail where a test was skipped for a reason that is not listed."""
    if _not_run(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _not_run(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.getplugin("terminalreporter")  # none in a process of -n, whose reports go to ours
    if reporter is None or config.getoption("--skips") == "any":
        return []
    return skips.unlisted(report for how in ("skipped", "xfailed") for report in reporter.stats.get(how, []))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """End the summary with what was skipped against the list, and what scripts/test.sh leaves out, why, what to do."""
    yield
    if not_run := _not_run(terminalreporter.config):
        terminalreporter.section("NOT RUN", bold=True, red=True)
        for line in not_run:
            terminalreporter.write_line(line)
        terminalreporter.write_line("These reasons are not in tests/skips.py, so this run has failed: mend them.")
    if left_out := os.environ.get("PD_LEFT_OUT"):
        terminalreporter.section("LEFT OUT", bold=True, red=True)
        terminalreporter.write_line(left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Keep LD_PRELOAD from passing from one test to the next.

    vLLM's CPU platform sets it (tcmalloc, libgomp) in the process that makes a configuration; with it, programs built
    with a sanitizer refuse to start. A hook and not a fixture, because fixtures of a wider scope make configurations
    too.
    """
    before = os.environ.get("LD_PRELOAD")
    try:
        return (yield)
    finally:
        if before is not None:
            os.environ["LD_PRELOAD"] = before
        else:
            os.environ.pop("LD_PRELOAD", None)


@pytest.fixture(autouse=True)
def logs_reach_pytest() -> None:
    """Let pytest receive the package's log messages.

    vLLM's plug-ins, if a test starts them, redirect those to vLLM's handlers alone.
    """
    logging.getLogger("vllm_ascend_pd").propagate = True


@pytest.fixture(scope="session")
def progress(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that prints progress lines although pytest captures output.

    A worker of a run on several cores has no reporter: its lines go to the standard error that it shares with the run.
    """
    plugins = request.config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")

    def show(line: str) -> None:
        if capture is None:
            return
        with capture.global_and_fixture_disabled():
            if reporter is not None:
                reporter.ensure_newline()
                reporter.write_line(line)
            else:
                print(f"\n{line}", end="", file=sys.stderr, flush=True)

    return show


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Schedule with `-n`: files in their order, each on one worker; a folder whose files share engines also on one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            folder = nodeid.split("/", 2)[1] if nodeid.startswith("tests/") else ""
            return folder if folder in ("integration", "ascend_host", "native") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


def _npu_present() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch

    npu = getattr(torch, "npu", None)
    return bool(npu is not None and npu.is_available())


# What prints otherwise in another process: the order of a set of strings, the address of an object.
CHANGING = re.compile(r"set\(\{[^}]*,|\{'[^':]*', |0x[0-9a-f]{8}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if CHANGING.search(item.nodeid):
            raise pytest.UsageError(f"the name of {item.nodeid} is another in another process: give it an id")
    marked = [item for item in items if item.get_closest_marker("npu")]
    if marked and not _npu_present():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if not item.get_closest_marker("npu")]
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engines"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
