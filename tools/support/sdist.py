# SPDX-License-Identifier: Apache-2.0
"""Pinned source distributions from the package index, kept in .cache and never committed.

pip downloads them, so its indexes, proxies and certificates apply. pip also asks the distribution's build for metadata;
a stand-in for the build answers, so that no code of the distribution runs and nothing else is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP_S = 300.0  # for 15 MB; without a network pip gives up within CONNECT_S and RETRIES
CONNECT_S, RETRIES = 15, 1

_BUILD = """
from pathlib import Path

def get_requires_for_build_wheel(settings=None):
    return []

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder, "{stem}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return info.name
"""


class Unreachable(Exception):
    """The package index did not deliver the file; the text gives the reason and a remedy."""


class NotThePinned(Exception):
    """A file with the pinned name has other contents."""


@dataclass(frozen=True)
class Pin:
    """A release, and the checksum of its source distribution; "": of a release of today, which has none here."""

    name: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}"

    @property
    def file(self) -> str:
        return f"{self.stem}.tar.gz"


VLLM_ASCEND = Pin("vllm-ascend", "0.30.0rc2", "05cb51448c0cd174ea338b16ebbfc8e215f44b373ea2a0d65f1314523a01152f")
OLDER = Pin("vllm-ascend", "0.23.0.post1", "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1")


def ensure(pin: Pin, cache: Path = ROOT / ".cache" / "sdist") -> Path:
    """Return the file, downloaded if needed. Raise Unreachable or NotThePinned."""
    path = cache / pin.file
    if path.is_file():
        return checked(pin, path)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        fetched = checked(pin, _fetch(pin, Path(scratch)))
        fetched.replace(path)  # atomic: two downloads at once leave a whole file
    return path


def checked(pin: Pin, path: Path) -> Path:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if pin.sha256 and digest != pin.sha256:
        raise NotThePinned(f"{path} is not the pinned {pin.file}: its sha256 is {digest}, not {pin.sha256}. Remove it.")
    return path


def read(path: Path, folder: str, suffix: str | tuple[str, ...]) -> dict[str, str]:
    """Return the texts of the files under `folder` in the distribution, by their path below it; "": of all."""
    begin = f"{folder}/" if folder else ""
    return under(
        {
            name: text.decode()
            for name, text in _members(path, lambda name: name.startswith(begin) and name.endswith(suffix))
        },
        folder,
    )


def under(texts: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the texts whose path is under a folder, by their path below it."""
    begin = f"{folder}/" if folder else ""
    return {name.removeprefix(begin): text for name, text in texts.items() if name.startswith(begin)}


def _members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Return names and contents of the files in a wheel, or in a source distribution below its only folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if wanted(name))
        return
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and wanted(name) and (stream := archive.extractfile(member)) is not None:
                yield name, stream.read()


def _fetch(pin: Pin, scratch: Path) -> Path:
    build = scratch.resolve() / "build" / "setuptools"  # pip's build has another working directory
    build.mkdir(parents=True)
    (build / "__init__.py").touch()
    (build / "build_meta.py").write_text(_BUILD.format(stem=pin.stem, name=pin.name, version=pin.version))
    said = _pip(pin.name, pin.version, scratch, "--no-binary", ":all:", "--no-build-isolation", PYTHONPATH=build.parent)
    if not (path := scratch / pin.file).is_file():
        raise Unreachable(_words(pin, said))
    return path


def _pip(name: str, version: str, to: Path, *options: str, **variables: Path) -> str:
    """Let pip download a release. Return what it said last."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--no-cache-dir"),
        *("--timeout", str(CONNECT_S), "--retries", str(RETRIES), "--progress-bar", "off", "--no-deps"),
        *(*options, "--dest", str(to), f"{name}=={version}"),
    ]
    environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
    try:
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=PIP_S)
    except subprocess.TimeoutExpired:
        return f"pip did not end within {PIP_S:g} s"
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return said[-1] if said else f"pip ended with {done.returncode}"


def wheel(name: str, version: str, cache: Path) -> Path:
    """Return a release's wheel for this machine, downloaded if needed: its files are read, it is not installed."""
    stem = f"{name.replace('-', '_')}-{version}-"
    if wheels := sorted(cache.glob(f"{stem}*.whl")):
        return wheels[0]
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _pip(name, version, Path(scratch), "--only-binary", ":all:")
        for path in Path(scratch).glob(f"{stem}*.whl"):
            return path.replace(cache / path.name)
    raise Unreachable(f"the package index has no wheel of {name} {version} for this machine")


def released(name: str) -> list[str]:
    """Return a project's releases in the index, the newest first. Raise Unreachable."""
    command = [
        *(sys.executable, "-m", "pip", "index", "versions", name, "--pre", "--no-input"),
        *("--timeout", str(CONNECT_S), "--retries", str(RETRIES), "--disable-pip-version-check"),
    ]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PIP_S)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"pip did not name the releases of {name} within {PIP_S:g} s") from None
    for line in done.stdout.splitlines():
        if line.startswith("Available versions: "):
            return line.removeprefix("Available versions: ").split(", ")
    raise Unreachable(f"the package index did not name the releases of {name}: {done.stderr.strip()[-200:]}")


def _words(pin: Pin, why: str) -> str:
    return (
        f"{pin.file} could not be fetched: {why}. Where the package index is not reachable, fetch it elsewhere "
        f"(https://pypi.org/project/{pin.name}/{pin.version}/#files) and name it with --sdist FILE."
    )
