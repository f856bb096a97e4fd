# SPDX-License-Identifier: Apache-2.0
"""tools/parts.py: parts run once per commit, failed or interrupted ones run again, and the table shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.parts import ROOT, SHARES, PartRecord, PartResult, commit, parts
from tools.support.checks import eventually

ONE = "def test_one() -> None:\n    pass\n"


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """Two parts: a folder, and a file that starts engines. pytest takes its settings from this folder."""
    folder = tmp_path / "tests"
    for name in ("unit", "integration"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--skips')\n")
    (folder / "unit/test_a.py").write_text(ONE)
    (folder / "integration/test_b.py").write_text(ONE)
    (folder / "integration/pairs.py").touch()
    return folder


HANGING = """
import time
from pathlib import Path

import pytest

ENGINES = Path(__file__).with_name("engines")


@pytest.fixture
def engines():
    ENGINES.write_text("run")
    yield
    ENGINES.write_text("stopped")


def test_a(engines):
    time.sleep(1000)
"""


def command(tests: Path, *words: str) -> list[str]:
    """Return the command as a shell's background job, which ignores SIGINT."""
    ignoring = ["env", "--ignore-signal=INT", sys.executable, "-m", "tools.parts"]
    return [*ignoring, "--tests", str(tests), "--out", str(tests.parent / "out"), *words]


def start(tests: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(command(tests, *words), cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def ran(said: str) -> list[str]:
    return re.findall(r"^\[\d+ of \d+\] (\S+) …$", said, re.MULTILINE)


def test_the_parts_of_this_project() -> None:
    names = list(parts(ROOT / "tests"))
    assert names[:3] == ["unit", "native", "simulation"]
    assert {"integration/gqa", "integration/drafts", "ascend_host/planted-1"} <= set(names)
    assert {name for share in SHARES for name in (share, f"{share}-1", f"{share}-2")} & set(names) == {
        f"{share}-{number}" for share in SHARES for number in (1, 2)
    }


def test_each_test_of_a_file_that_is_divided_is_in_one_part(tests: Path) -> None:
    ids = [
        *("[fp8-a]", "[fp8-b]", "[windows-a]"),
        *("[states-a]", "[mtp-a]", "[deltanet-a]", "[indexer-a]", "[drafts-fp8]"),
    ]
    (tests / "integration/test_cover.py").write_text(
        f"import pytest\n@pytest.mark.parametrize('x', range(8), ids={[i[1:-1] for i in ids]})\ndef test_cell(x): pass\n"
    )
    collected = []
    for name, words in parts(tests).items():
        if name.startswith("integration/cover"):
            listed = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *words],
                cwd=tests.parent,
                capture_output=True,
                text=True,
                check=True,
                timeout=120,
            )
            collected.append([line.partition("test_cell")[2] for line in listed.stdout.splitlines() if "::" in line])
    assert collected == [ids[:3], ids[3:4], ids[4:5], ids[5:6], ids[6:]]


def test_what_failed_runs_again_and_what_was_good_does_not(tests: Path) -> None:
    (tests / "integration/test_b.py").write_text("def test_b() -> None:\n    assert 1 == 2\n")
    first = start(tests)
    assert first.returncode == 1 and ran(first.stdout) == ["unit", "integration/b"], first.stdout + first.stderr
    assert "FAILED (1)" in first.stdout and "1 of 2 parts good" in first.stdout
    (tests / "integration/test_b.py").write_text(ONE)
    second = start(tests)
    assert second.returncode == 0 and ran(second.stdout) == ["integration/b"], second.stdout + second.stderr
    assert "2 of 2 parts good" in second.stdout and "1 passed" in second.stdout
    third = start(tests)
    assert third.returncode == 0 and ran(third.stdout) == []
    assert ran(start(tests, "unit").stdout) == ["unit"], "what is named runs, good or not"


def test_a_part_past_its_deadline_is_ended_and_has_failed(tests: Path) -> None:
    (tests / "unit/test_a.py").write_text(HANGING)
    said = start(tests, "--minutes", "0.5", "unit")
    assert said.returncode == 1 and "FAILED (124)" in said.stdout, said.stdout + said.stderr
    engines = tests / "unit/engines"  # absent if the deadline came before the test
    assert not engines.exists() or engines.read_text() == "stopped", "its fixtures have ended their engines"


def test_what_ends_the_command_ends_its_part_first(tests: Path) -> None:
    (tests / "unit/test_a.py").write_text(HANGING)
    engines = tests / "unit/engines"
    process = subprocess.Popen(command(tests, "unit"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(engines.exists, "the part has started its engines", 120.0)
        process.terminate()
        code = process.wait(300)
    finally:
        process.kill()
    assert code and engines.read_text() == "stopped"


def test_the_list_runs_nothing_and_an_unknown_part_is_refused(tests: Path) -> None:
    listed = start(tests, "--list")
    assert listed.returncode == 0 and listed.stdout.count("has not run on this commit") == 2
    refused = start(tests, "nonsense")
    assert refused.returncode == 2 and "no part nonsense; there are unit, integration/b" in refused.stderr


def test_the_list_names_the_newest_good_result_of_another_commit(tests: Path) -> None:
    for name, part, code, ended in (
        ("a", "unit", 0, "2026-01-01 10:00"),
        ("b", "unit", 0, "2026-01-02 09:00"),
        ("c", "unit", 1, "2026-01-03 09:00"),
        ("a", "integration/b", 0, "2026-01-01 11:00"),
        (commit(ROOT), "integration/b", 1, "2025-01-01 09:00"),
    ):
        folder = tests.parent / "out" / name
        folder.mkdir(parents=True, exist_ok=True)
        PartRecord(folder).add(PartResult(part, code, 90.0, "1 passed", ended))
    said = start(tests, "--list").stdout.splitlines()
    (of_unit,) = (row for row in said if row.startswith("unit "))
    assert of_unit.endswith("has not run on this commit; good on b, 1.5 min, 2026-01-02 09:00")
    (of_b,) = (row for row in said if row.startswith("integration/b "))
    assert "FAILED (1)" in of_b, "a commit's own result comes first"


def test_uncommitted_changes_are_another_commit(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(("git", "-C", str(tmp_path), *words), check=True, capture_output=True)

    assert commit(tmp_path) == "no-commit"
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "one")
    clean = commit(tmp_path)
    (tmp_path / "a").write_text("2")
    changed = commit(tmp_path)
    assert changed.startswith(clean + "-") and changed != clean
    (tmp_path / "b").touch()
    assert commit(tmp_path) not in (clean, changed)
