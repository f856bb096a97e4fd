# SPDX-License-Identifier: Apache-2.0
"""Which releases understand each other. One table: what this release speaks, and the words that `needs` may hold.

A release reads every version from its oldest to its newest, and writes each message in the oldest version in which it is
right. A reservation and BEGIN say which that is; a greeting says what its side reads. Unknown fields of a message are
ignored; what must not be ignored is named in its `needs`, where this very message uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
        """Why a message that is written in `version` cannot be understood rightly."""
        if not self.oldest <= version <= self.newest:
            return PdError("PD-CTRL-003", theirs=version, ours=self)
        unknown = next((word for word in needs if word not in self.features), None)
        return None if unknown is None else PdError("PD-CTRL-004", word=unknown)


OURS = Release()
