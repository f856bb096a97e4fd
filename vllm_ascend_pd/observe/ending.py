# SPDX-License-Identifier: Apache-2.0
"""How a transfer ended, by what its processes told of it.

D's workers have the last word: a call that breaks after its load is complete has failed nothing. Where none of them
closed the transfer, it failed with the first code that anybody told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Ending:
    """Told every event of one transfer, in order of time."""

    def __init__(self) -> None:
        self._loaded = False
        self._closed = self._code = self._why = ""

    def tell(self, stage: str, facts: Mapping[str, Any]) -> None:
        words = f"{facts.get('code', '')} {facts.get('detail', '')}".strip()
        if stage == "closed" and facts.get("ok") is False:
            self._closed = words
        elif stage == "closed" and facts.get("ok") is True:  # P's has no such fact
            self._loaded = True
        elif facts.get("code"):
            self._code = self._code or words
        elif stage == "meta.prefill_failed":  # the metaserver tells the code to D
            self._why = self._why or str(facts.get("why", ""))

    @property
    def failure(self) -> str:
        """Code and detail; empty where nothing is known to have failed."""
        return self._closed or ("" if self._loaded else self._code or self._why)
