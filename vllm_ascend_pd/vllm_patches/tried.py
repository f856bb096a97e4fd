# SPDX-License-Identifier: Apache-2.0
"""Releases with which each change of vLLM was tried: the only table of them.

What a release has is checked by name and signature as well. Where either is missing the change stays off; the log, a
metric and the doctor say so.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

VLLM, VLLM_ASCEND = "vLLM", "vllm-ascend"
FIRST_TOKEN, DRAFTS, GRAMMARS, STANDSTILL, GROUPS = "first token", "drafts", "grammars", "standstill", "groups"
GIVEN = "given tokens"

# By change and package. A package that is not named for a change does not matter for it.
TRIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    FIRST_TOKEN: {VLLM: ("0.23", "0.30", "0.31", "0.32", "0.33"), VLLM_ASCEND: ("0.23", "0.30")},
    DRAFTS: {VLLM: ("0.30", "0.32"), VLLM_ASCEND: ("0.30",)},  # on D, behind P's token
    GRAMMARS: {VLLM: ("0.32",)},  # the same grammar in P and D
    GIVEN: {VLLM: ("0.32",), VLLM_ASCEND: ()},  # on D, an answer that goes on there
    STANDSTILL: {VLLM: ("0.23", "0.30", "0.31", "0.32", "0.33")},
    GROUPS: {VLLM: ("0.23",)},  # from 0.30 on vLLM itself gives connectors what they need
}
# What it costs where one is off. (No router of ours asks for GIVEN yet.)
COST = {
    FIRST_TOKEN: "D computes the last token of each prompt again, a step more for each request",
    DRAFTS: "D with drafts computes the last token of each prompt again",
    GRAMMARS: "D computes the first token of structured outputs and forced tool calls",
    STANDSTILL: "if loaded requests hold all blocks of D and none finds one more, they wait for good",
}


def off(change: str, why: str) -> str:
    """Return a sentence for a change that is off: for the log, and the doctor."""
    return f"{change}: off, because {why}: {COST[change]}"


def installed(package: str) -> str:
    """Return the release of a package in this engine; empty: the engine does not run on it."""
    if package == VLLM:
        import vllm

        return str(vllm.__version__)
    from vllm_ascend_pd.vllm_patches.compat import is_vllm_ascend

    if not is_vllm_ascend():
        return ""
    try:
        return importlib.metadata.version("vllm_ascend")
    except importlib.metadata.PackageNotFoundError:  # it is on the path, and was not installed
        return "of an unknown release"


def untried(change: str, versions: Mapping[str, str] | None = None) -> str:
    """Return a sentence if a change was not tried with these releases, this engine's by default; empty: it was."""
    for package, releases in TRIED[change].items():
        version = installed(package) if versions is None else versions.get(package, "")
        if version and not version.startswith(tuple(f"{one}." for one in releases)):
            return f"{package} {version} was not tried"
    return ""
