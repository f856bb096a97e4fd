# SPDX-License-Identifier: Apache-2.0
"""Compatibility of releases: the versions that this release reads, and the words in `needs` that it understands.

A release reads every version from its oldest to its newest, and writes each message in the oldest version in which it
is right. A reservation and a BEGIN carry this version; a greeting carries the versions that its side reads. Unknown
fields of a message are ignored. If a message uses a field that must not be ignored, its `needs` names it.

A fingerprint is one short word with what two engines must have in common to be a pair, for routers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Release:
    newest: int = PROTOCOL_VERSION
    oldest: int = PROTOCOL_VERSION
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.newest) if self.newest == self.oldest else f"{self.oldest} to {self.newest}"

    def speaks_with(self, other: Release) -> bool:
        return min(self.newest, other.newest) >= max(self.oldest, other.oldest)

    def refusal(self, version: int, needs: Iterable[str]) -> PdError | None:
        """Return why a message of this version and with these `needs` cannot be understood; None if it can."""
        if not self.oldest <= version <= self.newest:
            return PdError("PD-CTRL-003", theirs=version, ours=self)
        unknown = next((word for word in needs if word not in self.features), None)
        return None if unknown is None else PdError("PD-CTRL-004", word=unknown)


WHOLE = "whole"  # in a reservation: D can start only with the token behind the prompt, P's or one that it has already

OURS = Release(features=("seed", WHOLE))

MAX_FINGERPRINT = 64
_FINGERPRINT = re.compile(r"([0-9a-f]{12})\.v(\d{1,4})-(\d{1,4})")


@lru_cache(maxsize=16)
def fingerprint(model: str, release: Release = OURS) -> str:
    """Return one word for an engine's model and the versions of messages that it reads: `0123456789ab.v2-3`."""
    return f"{hashlib.sha256(model.encode()).hexdigest()[:12]}.v{release.oldest}-{release.newest}"


@lru_cache(maxsize=4096)
def may_pair(one: str, other: str) -> bool:
    """Return whether engines with these fingerprints may be a pair.

    True also if a fingerprint is not known, or not understood here: P itself refuses what does not fit.
    """
    ours, theirs = _FINGERPRINT.fullmatch(one), _FINGERPRINT.fullmatch(other)
    if ours is None or theirs is None:
        return True
    releases = [Release(newest=int(match[3]), oldest=int(match[2])) for match in (ours, theirs)]
    return ours[1] == theirs[1] and releases[0].speaks_with(releases[1])
