# SPDX-License-Identifier: Apache-2.0
"""One setting as it is declared: default, bounds, meaning. The connector's are keys (config.py), the router's flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_ascend_pd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    default: Any
    meaning: str  # for operators
    low: float | None = None
    above: float | None = None  # a bound that is itself impossible
    high: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value out of bounds."""
        if why := self._wrong(value):
            usual = "" if self.default is None else f"; the default is {self.default!r}"
            impossible(name, value, why, f"Give {self._possible()}{usual}.")

    def _wrong(self, value: Any) -> str:
        if self.choices and value not in self.choices:
            return "there is no such choice"
        if not isinstance(value, int | float):
            return ""
        if isinstance(value, float) and not math.isfinite(value):
            return "it is not a finite number"
        if self.above is not None and value <= self.above:
            return f"it is not above {self.above:.10g}"
        if self.low is not None and value < self.low:
            return f"it is below {self.low:.10g}"
        return f"it is above {self.high:.10g}" if self.high is not None and value > self.high else ""

    def _possible(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        return self.range.replace("–", " to ") or "a number"

    @property
    def range(self) -> str:
        """Return its bounds for a table of settings."""
        if self.choices:
            return ", ".join(f"`{choice}`" if choice else "not set" for choice in self.choices)
        if self.above is not None:
            return f"above {self.above:.10g}"
        if self.low is None:
            return ""
        return f"{self.low:.10g}–{self.high:.10g}" if self.high is not None else f"{self.low:.10g} or more"


def impossible(name: str, value: object, why: str, remedy: str, because: BaseException | None = None) -> NoReturn:
    raise ConfigError("PD-CONF-003", key=name, value=value, why=why, remedy=remedy) from because
