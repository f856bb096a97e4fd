# SPDX-License-Identifier: Apache-2.0
"""Import paths of these tests: the plug-in's references, the native tests' builder, the integration tests' pair."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine_sets import Machine
    from host_build import HostBuild

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE / "plugin", HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def build() -> HostBuild:
    from host_build import INTERPRETER, STAMP, HostBuild

    if not STAMP.exists():
        pytest.skip("needs an environment of 8 GB, which tests/ascend_host/environment.sh makes")
    return HostBuild(INTERPRETER).ensure()


@pytest.fixture(scope="session")
def host(build: HostBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine whose NPUs are stand-ins."""
    from engine_sets import Machine
    from pairs import engine_forks

    with engine_forks(tmp_path_factory.mktemp("forks")) as forks:
        yield Machine.host(build, forks)
