# SPDX-License-Identifier: Apache-2.0
"""Imports of tools from tests/ascend_host, whose modules are in no package: they find each other on the import path."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tools.support.models import ROOT

if TYPE_CHECKING:
    from engine_sets import Engines
    from host_build import HostBuild


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
    pairs = _module("test_pairs")
    return [engines for engines, _ in (*pairs.EVERY_COMMIT, *pairs.MORE)]
