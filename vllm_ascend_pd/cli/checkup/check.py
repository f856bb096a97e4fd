# SPDX-License-Identifier: Apache-2.0
"""Result of one check of the doctor: what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.errors import PdError, one_line

GOOD, NOTE, WARNING, FAILURE = "ok", "note", "warning", "FAILURE"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check. `level`: ok; note, if there was nothing to check; warning; FAILURE, for an exit code of 1."""

    name: str
    level: str
    says: str
    remedy: str = ""

    def line(self) -> str:
        """Return it for a terminal, in one line: the other host's doctor has a say in it."""
        return one_line(
            f"{self.level:8} {self.name:20} {self.says}" + (f" → {self.remedy}" if self.remedy else ""), 4000
        )


def good(name: str, says: str) -> Check:
    return Check(name, GOOD, says)


def note(name: str, says: str, remedy: str = "") -> Check:
    return Check(name, NOTE, says, remedy)


def warning(name: str, says: str, remedy: str) -> Check:
    return Check(name, WARNING, says, remedy)


def failure(name: str, says: str, remedy: str) -> Check:
    return Check(name, FAILURE, says, remedy)


def tried(name: str, attempt: Callable[[], str]) -> Check:
    """Return a good check with what `attempt` returns, or a failure with the catalogue's error that it raises."""
    try:
        return good(name, attempt())
    except PdError as error:
        return failed(name, error)


def failed(name: str, error: PdError) -> Check:
    return failure(name, f"{error.code}: {error.sentence}", error.remedy)
