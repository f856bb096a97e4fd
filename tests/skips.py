# SPDX-License-Identifier: Apache-2.0
"""Reasons for which a test may be skipped in a run that counts (--skips listed): what a machine cannot have.

Any other tool, a package, a history or an index that is missing is not one of them: there the run fails until it is
there.
Tests that need an NPU are deselected where there is none (conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

# How a reason begins, and what makes it good.
LISTED = {
    "vLLM's fp8 caches on a CPU need AVX-512": "the processor",
    "this machine allows no network namespaces": "containers and users without the right to make them",
    "this machine allows no mount namespaces": "containers and users without the right to make them",
    "nft is not installed here": "a host without Debian's packages",
    "kubectl is not installed here": "a host without it: the base that Kustomize builds from is checked all the same",
    "nginx is not installed here": "a host without Debian's packages: the same requests also come without it in front",
    "vLLM has no prefix cache for MLA on a CPU": "vLLM; such a cell of a set of engines has nothing to compare",
}


def unlisted(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Return a line for each skipped or expected failure whose reason is not listed."""
    skipped = {(report.nodeid, _reason(report)): None for report in reports}
    return [f"{name}: {reason}" for name, reason in skipped if not reason.startswith(tuple(LISTED))]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if (expected := getattr(report, "wasxfail", None)) is not None:
        return f"expected to fail: {expected}"
    place = report.longrepr  # of a skip: file, line, reason
    return str(place[2] if isinstance(place, tuple) else place).removeprefix("Skipped: ")
