# SPDX-License-Identifier: Apache-2.0
"""A run that counts fails where a test is skipped for a reason that is not listed in tests/skips.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import skips

ROOT = Path(__file__).resolve().parents[3]
LISTED = "vLLM has no prefix cache for MLA on a CPU"
OTHERS = {
    "called": "def test_one():\n    pytest.skip('Mooncake is not installed')\n",
    "marked": "@pytest.mark.skipif(True, reason='the package index cannot be reached')\ndef test_one():\n    pass\n",
    "at_import": "pytest.skip('Mooncake is not installed', allow_module_level=True)\n",
    "import_or_skip": "def test_one():\n    pytest.importorskip('a_module_that_nobody_has')\n",
    "fixture": "@pytest.fixture\ndef nm():\n    pytest.skip('nm is not installed')\ndef test_one(nm):\n    pass\n",
    "expected_to_fail": "def test_one():\n    pytest.xfail('not today')\n",
    "behind_a_listed_one": f"def test_one():\n    pytest.skip('no compiler, and {LISTED}')\n",
}


def run(tmp_path: Path, *words: str, **bodies: str) -> subprocess.CompletedProcess[str]:
    """Run a test that passes, and others, with this folder's conftest.py."""
    markers = "markers =\n    npu: needs one\n    engines: starts them\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{markers}")
    for name, body in {"good": "def test_good():\n    pass\n", **bodies}.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{body}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest", "--rootdir", str(tmp_path)]
    return subprocess.run(
        [*command, "-c", str(tmp_path / "pytest.ini"), *words, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PD_LEFT_OUT": ""},
    )


@pytest.mark.parametrize("spread", [(), ("-n", "2")], ids=["one process", "two"])
def test_a_skip_for_another_reason_fails_the_run_and_is_named(tmp_path: Path, spread: tuple[str, ...]) -> None:
    done = run(
        tmp_path, "--skips", "listed", *spread, **OTHERS, listed=f"def test_it():\n    pytest.skip({LISTED!r})\n"
    )
    assert done.returncode == 1, done.stdout
    _, _, said = done.stdout.partition(" NOT RUN ")
    for name in OTHERS:
        assert f"test_{name}.py" in said, (name, done.stdout)
    assert "test_listed.py" not in said and "tests/skips.py" in said and "1 passed" in said, done.stdout


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--skips", "listed"), 1)], ids=["while working", "in CI"])
def test_one_is_enough(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """Nothing else fails in this run, and nothing else is collected at all."""
    done = run(tmp_path, *words, at_import=OTHERS["at_import"], good="")
    assert done.returncode == (code or pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout


def test_listed_reasons_are_no_failure_and_what_needs_an_npu_is_deselected(tmp_path: Path) -> None:
    npu = "mark = pytest.mark\n@mark.npu\ndef test_one():\n    raise OSError\n"
    done = run(tmp_path, "--skips", "listed", npu=npu, listed=f"def test_one():\n    pytest.skip({LISTED!r})\n")
    assert done.returncode == 0 and "NOT RUN" not in done.stdout, done.stdout
    assert "1 passed, 1 skipped, 1 deselected" in done.stdout, done.stdout


def test_the_status_of_a_run_that_ends_otherwise_stays(tmp_path: Path) -> None:
    done = run(tmp_path, "--skips", "listed", "--no-such-option", at_import=OTHERS["at_import"])
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def test_each_listed_reason_is_one_that_a_test_gives() -> None:
    """One that no test gives any more goes."""
    others = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    text = "\n".join(path.read_text() for path in others if path.name not in ("skips.py", Path(__file__).name))
    assert [reason for reason in skips.LISTED if reason not in text] == []
