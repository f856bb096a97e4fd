# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the repository on the import path, and a reason for each test that cannot run here."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Each test gives back the environment it got.

    vLLM's CPU platform sets LD_PRELOAD (tcmalloc, libgomp) in the process that makes a configuration; with that, programs
    built with a sanitizer refuse to start.
    """
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _npu_present() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch

    npu = getattr(torch, "npu", None)
    return bool(npu is not None and npu.is_available())


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("npu")]
    if marked and not _npu_present():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="there is no Ascend NPU on this machine"))
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engines"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
