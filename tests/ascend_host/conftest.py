# SPDX-License-Identifier: Apache-2.0
"""Import paths of these tests: the plug-in's references, the native tests' builder, the integration tests' pair."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.support import environments

if TYPE_CHECKING:
    from engine_sets import Machine
    from host_build import HostBuild

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE / "plugin", HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def build() -> HostBuild:
    from host_build import HostBuild, environment

    if not (environment() / ".stamp").exists():
        pytest.skip("needs an environment of 8 GB, which tests/ascend_host/environment.sh makes")
    return HostBuild.of()


@pytest.fixture(scope="session")
def older() -> HostBuild:
    """The same of the release before, in an environment of its own, which is made if it is missing."""
    from host_build import OLDER, HostBuild

    environments.of_vllm_ascend(OLDER)
    return HostBuild.of(OLDER)


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Machine]]:
    """A function that returns a machine whose NPUs are stand-ins, with a release of vllm-ascend."""
    from engine_sets import Machine
    from host_build import BASE
    from pairs import engine_forks

    with engine_forks(tmp_path_factory.mktemp("forks")) as forks:
        yield lambda release=BASE: Machine.host(request.getfixturevalue("build" if release == BASE else "older"), forks)


@pytest.fixture(scope="session")
def host(hosts: Callable[..., Machine]) -> Machine:
    return hosts()
