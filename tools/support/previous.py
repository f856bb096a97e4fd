# SPDX-License-Identifier: Apache-2.0
"""This package as it was: the last release, or an earlier commit until there is one. PD_PREVIOUS names another one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tools.support.models import ROOT

PACKAGE = "vllm_ascend_pd"
BEFORE_RELEASES = "HEAD~100"


class NotThere(RuntimeError):
    """The checkout is too shallow for the previous state."""


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False, timeout=60)


def commit(root: Path = ROOT) -> str:
    """Return the name of the previous state: the newest tag of a release before this commit."""
    if named := os.environ.get("PD_PREVIOUS"):
        return named
    words = ["git", "-C", str(root), "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return found.stdout.strip() if found.returncode == 0 else BEFORE_RELEASES


def package(folder: Path, name: str) -> Path:
    """Write the package of the previous state into a folder, without its compiled ops. Raise NotThere."""
    if git("cat-file", "-e", f"{name}^{{commit}}").returncode:
        raise NotThere(f"this checkout has no {name}")
    files = git("archive", name, PACKAGE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=files, check=True, timeout=60)
    return folder


def with_todays_ops(folder: Path, name: str) -> Path:
    """Give the previous package today's C++ ops. Raise NotThere if they have changed since."""
    if git("diff", "--quiet", name, "--", "csrc").returncode:
        raise NotThere(f"the C++ ops have changed since {name}")
    for built in (ROOT / PACKAGE).glob("_C*.so"):
        shutil.copy(built, folder / PACKAGE)
    return folder
