# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's releases as admission meets them: versions, schedulers, and how they lay caches out.

Layouts are recognised by the release's own code, so that the next release needs no entry here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tools.support import sdist, skeletons
from tools.support.small import RECOMPUTES

FOLDER, RECIPE = "vllm_ascend", "Dockerfile"
_ASKED = re.compile(r"^ARG VLLM_TAG=v(\S+)", re.MULTILINE)
_SCHEDULERS = RECOMPUTES.removesuffix("_enable")  # the module with those that this switch puts in


@dataclass(frozen=True)
class Base:
    """A release of vllm-ascend."""

    version: str = ""
    vllm: str = ""  # the release of vLLM for which it is
    schedulers: tuple[type, ...] = ()  # its own, for a D that gives up requests when its blocks run out
    indexes_apart: bool = False  # an indexer's keys are a layer of their own
    in_tokens: bool = False  # a block of compressed entries is counted in tokens
    takes_turns: bool = False  # K and V of the kernels' blocks take turns in memory
    ascend: bool = True  # False: vLLM alone, without vllm-ascend
    int8_by_flags: bool = False  # vLLM's flags ask for a cache in int8, not --additional-config
    no_groups: str = ""  # why this package cannot serve several groups of a cache with its vLLM

    @classmethod
    def of(cls, version: str, texts: Mapping[str, str]) -> Base:
        """Return the release whose distribution has these texts, by path."""
        inside = sdist.under(texts, FOLDER)
        code = "\n".join(inside.values())
        return cls(
            version,
            asked_vllm(texts),
            _schedulers(inside),
            indexes_apart="class AscendSFAIndexerCacheSpec" in code,
            in_tokens="storage_block_size * self.compress_ratio" in code,
            takes_turns="2 * hidden_size," in code,
            int8_by_flags="attention_config.indexer_kv_dtype in" in code,
        )

    @property
    def minor(self) -> str:
        """Return the release's first two numbers, by which tests know it."""
        return ".".join(self.version.split(".")[:2])


UNNAMED = Base()  # laid out as 0.23 is; any change of vLLM was tried with it


def asked_vllm(texts: Mapping[str, str]) -> str:
    """Return the release of vLLM that vllm-ascend asks for, by the recipe of its own image."""
    match = _ASKED.search(texts.get(RECIPE, ""))
    if match is None:
        raise ValueError(f"{RECIPE} of vllm-ascend does not say (ARG VLLM_TAG) for which vLLM it is")
    return match[1]


def _schedulers(texts: Mapping[str, str]) -> tuple[type, ...]:
    """Return the recompute schedulers, as skeletons over the schedulers of the installed vLLM."""
    sources = skeletons.Sources({f"{FOLDER}/{path}": text for path, text in texts.items()})
    name = f"{FOLDER}.core.{_SCHEDULERS}"
    if name not in sources.texts:
        return ()
    with sources.imported(name) as module:
        made = [getattr(module, each) for each in re.findall(r"^class (\w+)", sources.texts[name], re.MULTILINE)]
        return tuple(one for one in made if hasattr(one, "update_from_output"))
