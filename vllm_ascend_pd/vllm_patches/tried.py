# SPDX-License-Identifier: Apache-2.0
"""Releases with which the changes of vLLM were tried, and what it costs where one is off.

Which of them a release gets follows from what it has: names, signatures, code (each change's own module). But a release
that was never tried gets none, because it may have all that and mean something else; the log, a metric and the doctor
say so.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

VLLM, VLLM_ASCEND = "vLLM", "vllm-ascend"
FIRST_TOKEN, GRAMMARS, GIVEN, STANDSTILL = "first token", "grammars", "answers that go on", "standstill"
ACCEPTED, MASKS = "accepted drafts", "masks of allowed tokens"

TRIED: Mapping[str, tuple[str, ...]] = {VLLM: ("0.23", "0.30", "0.31", "0.32", "0.33"), VLLM_ASCEND: ("0.23", "0.30")}
TRIED_GIVEN: Mapping[str, tuple[str, ...]] = {VLLM: ("0.23", "0.30", "0.32", "0.33"), VLLM_ASCEND: ("0.30",)}
# What it costs where one is off.
COST = {
    FIRST_TOKEN: "D computes the last token of each prompt again, a step more for each request",
    GRAMMARS: "D computes the first token of structured outputs and forced tool calls",
    GIVEN: "answers that other D's had begun begin anew on D",
    STANDSTILL: "if loaded requests hold all blocks of D and none finds one more, they wait for good",
    MASKS: "tokens of a request may be chosen among those that another one allows",
    ACCEPTED: "with drafts beside recurrent states, a D that runs out of blocks may go on with wrong text",
}

# What fewer releases have been tried with: drafts on D, grammars, and vLLM's second model runner on D.
TRIED_DRAFTS: Mapping[str, tuple[str, ...]] = {VLLM: ("0.30", "0.32"), VLLM_ASCEND: ("0.30",)}
TRIED_GRAMMARS: Mapping[str, tuple[str, ...]] = {VLLM: ("0.30", "0.32", "0.33"), VLLM_ASCEND: ("0.30",)}
TRIED_DIVIDED_DRAFTS: Mapping[str, tuple[str, ...]] = {VLLM_ASCEND: ("0.30",)}  # MTP with context parallelism
TRIED_SECOND: Mapping[str, tuple[str, ...]] = {VLLM: ("0.30", "0.32", "0.33"), VLLM_ASCEND: ()}


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


def untried(versions: Mapping[str, str] | None = None, tried: Mapping[str, tuple[str, ...]] = TRIED) -> str:
    """Return a sentence if one of these releases, this engine's by default, was never tried; empty: all were."""
    for package, releases in tried.items():
        version = installed(package) if versions is None else versions.get(package, "")
        if version and not version.startswith(tuple(f"{one}." for one in releases)):
            return f"{package} {version} was not tried"
    return ""
