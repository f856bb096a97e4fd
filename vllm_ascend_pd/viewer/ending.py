# SPDX-License-Identifier: Apache-2.0
"""End of a transfer, by the events of its processes.

D's workers decide: a call that breaks after the load is complete has failed nothing. If none of them closed the
transfer, it failed with the first code in any event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TransferEnding:
    """End of one transfer. `add` takes all its events, in order of time."""

    def __init__(self) -> None:
        self._loaded = False
        self._closed = self._code = self._why = ""

    def add(self, stage: str, facts: Mapping[str, Any]) -> None:
        words = f"{facts.get('code', '')} {facts.get('detail', '')}".strip()
        if stage == "closed" and facts.get("ok") is False:
            self._closed = words
        elif stage == "closed" and facts.get("ok") is True:  # P's event has no such fact
            self._loaded = True
        elif facts.get("code"):
            self._code = self._code or words
        elif stage == "meta.prefill_failed":  # the metaserver sends the code to D
            self._why = self._why or str(facts.get("why", ""))

    @property
    def failure(self) -> str:
        """Code and detail of the failure; empty if none is known."""
        return self._closed or ("" if self._loaded else self._code or self._why)
