# SPDX-License-Identifier: Apache-2.0
"""Builds of the native runners, once per content: binaries in .cache/native, named by a hash of all inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = ROOT / ".cache" / "native"
COMMON = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", f"-I{HERE}/emulation", f"-I{HERE}", f"-I{ROOT}/csrc"]
FLAVOURS = {
    "plain": ["-O2"],
    "asan": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "aarch64": ["-O2", "-static"],
}
COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}


def _fingerprint(command: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout)
    for folder in (HERE, ROOT / "csrc"):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cpp")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def built(source: str, flavour: str = "plain", extra: Sequence[str] = ()) -> Path:
    """Return the binary of tests/native/`source`, compiled if it is not cached. Skips without the compiler."""
    compiler = COMPILERS.get(flavour, os.environ.get("CXX", "g++"))
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, *COMMON, *FLAVOURS[flavour], str(HERE / source), *extra, "-pthread"]
    binary = CACHE / f"{Path(source).stem}-{flavour}-{_fingerprint(command)}"
    if not binary.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = binary.with_name(f"{binary.name}.{os.getpid()}")
        subprocess.run([*command, "-o", str(fresh)], check=True, timeout=300)
        for stale in CACHE.glob(f"{Path(source).stem}-{flavour}-*"):
            if stale != fresh and "." not in stale.name:
                stale.unlink(missing_ok=True)
        fresh.replace(binary)
    return binary
