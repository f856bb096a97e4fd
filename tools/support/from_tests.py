# SPDX-License-Identifier: Apache-2.0
"""Imports of tools from tests/ascend_host, whose modules are in no package: they find each other on the import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tools.support.cluster import fresh_directory
from tools.support.models import ROOT

if TYPE_CHECKING:
    from engine_sets import Engines
    from host_build import HostBuild

    from tools.support.fork_server import ForkServers
    from tools.support.resuming import MakeSpecs


def _module(name: str) -> Any:
    for folder in ("native", "integration", "ascend_host"):
        if (path := str(ROOT / "tests" / folder)) not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


def older_host_build() -> HostBuild:
    """Return the libraries that stand in for CANN under the older release of vllm-ascend, built if needed."""
    module = _module("host_build")
    build: HostBuild = module.HostBuild.of(module.OLDER)
    return build


def engine_sets() -> list[Engines]:
    """Return the sets of engines of tests/ascend_host/test_pairs.py."""
    return [engines for engines, _ in asked_sets()]


def asked_sets() -> list[tuple[Engines, tuple[str, ...]]]:
    """Return the same sets, each with the names of what is asked of it."""
    pairs = _module("test_pairs")
    return [(one, tuple(cell.__name__ for cell in cells)) for one, cells in (*pairs.EVERY_COMMIT, *pairs.MORE)]


@contextmanager
def dropping_engines(decodes: int) -> Iterator[tuple[MakeSpecs, int, ForkServers | None]]:
    """Yield what makes vllm-ascend's engines whose D's drop requests, the length of a prompt, and what forks them."""
    streams, build = _module("test_streams"), _module("host_build").HostBuild.of()
    with _module("pairs").engine_forks(fresh_directory("forks")) as forks:
        yield streams.dropping(_module("engine_sets").Machine.host(build, forks), decodes), streams.LENGTH, forks
