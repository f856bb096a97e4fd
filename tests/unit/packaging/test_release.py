# SPDX-License-Identifier: Apache-2.0
"""scripts/release.sh: what a release consists of is made and tried, and what would be wrong is refused before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd import __version__

ROOT = Path(__file__).resolve().parents[3]


def release(*arguments: str | Path, timeout: float = 60.0) -> tuple[int, str]:
    env = {**os.environ, "PYTHON": sys.executable}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [ROOT / "scripts" / "release.sh", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_folder_with_files_and_a_tag_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    code, said = release("--to", tmp_path)
    assert code == 1 and "is not empty" in said
    code, said = release("--to", tmp_path / "new", "--tag", "v9.9.9")
    assert code == 1 and f"__version__ is {__version__}" in said and not (tmp_path / "new").exists()
    assert release("--frob")[0] == release("--to")[0] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_archive_and_wheel_are_made_and_the_wheel_works_elsewhere(tmp_path: Path) -> None:
    code, said = release("--to", tmp_path, "--tag", f"v{__version__}", timeout=800.0)
    assert code == 0, said
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert {name: made[name] for name in sums} == sums and made.keys() - sums.keys() == {"SHA256SUMS"}
    assert sorted(Path(name).suffix for name in sums) == [".gz", ".whl"]
    assert said.count(": good, ") == 4
