# SPDX-License-Identifier: Apache-2.0
"""Why something failed, as one value. Text of it is made and read in `words.py` only, where messages are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A code of the catalogue, and what is known beyond it."""

    code: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.detail}"
