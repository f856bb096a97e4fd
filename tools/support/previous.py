# SPDX-License-Identifier: Apache-2.0
"""This package as it was: the last release, or an earlier commit until there is one. PD_PREVIOUS names another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.support.models import ROOT

PACKAGE = "vllm_ascend_pd"
BEFORE_RELEASES = "HEAD~100"
RECORDED = "tests/unit/protocol/wire_recorded.json"


class NotThere(RuntimeError):
    """This checkout is too shallow to have a previous state."""


def git(*words: str, root: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(root or ROOT), *words], capture_output=True, check=False, timeout=60)


def commit(root: Path = ROOT) -> str:
    """Return the name of the previous state: the newest tag of a release before this commit.

    Until there is one, a change of the wire needs no older reader. So the state is at least as new as the last commit
    that changed the recorded bytes.
    """
    if named := os.environ.get("PD_PREVIOUS"):
        return named
    words = ["git", "-C", str(root), "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"]
    described = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if described.returncode == 0:
        return described.stdout.strip()
    recorded = git("log", "-1", "--format=%H", "--", RECORDED, root=root).stdout.decode().strip()
    older = git("merge-base", "--is-ancestor", recorded, BEFORE_RELEASES, root=root)
    return recorded if recorded and older.returncode == 1 else BEFORE_RELEASES


def package(folder: Path, name: str) -> Path:
    """Write the package of the previous state into a folder, without its compiled ops.

    Raise NotThere in a shallow checkout. One that was named or released, or is missing in a workflow, is an error:
    otherwise tests would be skipped there unseen.
    """
    if git("cat-file", "-e", f"{name}^{{commit}}").returncode:
        if name != BEFORE_RELEASES or os.environ.get("GITHUB_ACTIONS"):
            raise RuntimeError(f"this checkout has no {name}: fetch the history and its tags (fetch-depth: 0)")
        raise NotThere(f"NOT SHOWN, no state before this one beside it: this checkout has no {name}")
    _extract(folder, name, PACKAGE)
    return folder


def with_ops(folder: Path, name: str) -> Path:
    """Give the previous package its C++ ops: today's, or built from its own source if that was another one."""
    built = ROOT / PACKAGE
    if git("diff", "--quiet", name, "--", "csrc").returncode:
        source = folder / "source"
        source.mkdir()
        _extract(source, name)
        env = {**os.environ, "VLLM_ASCEND_PD_NPU": "0"}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=source, env=env, check=True, timeout=600)
        built = source / PACKAGE
    for library in built.glob("_C*.so"):
        shutil.copy(library, folder / PACKAGE)
    return folder


def _extract(folder: Path, name: str, *paths: str) -> None:
    files = git("archive", name, *paths).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=files, check=True, timeout=60)
