# SPDX-License-Identifier: Apache-2.0
"""One thing that was looked at: how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.errors import PdError

GOOD, NOTE, WARNING, FAILURE = "ok", "note", "warning", "FAILURE"


@dataclass(frozen=True, slots=True)
class Check:
    """`level`: ok; note, where there was nothing to look at; warning; FAILURE, which makes the exit code 1."""

    name: str
    level: str
    says: str
    remedy: str = ""

    def line(self) -> str:
        return f"{self.level:8} {self.name:20} {self.says}" + (f" → {self.remedy}" if self.remedy else "")


def good(name: str, says: str) -> Check:
    return Check(name, GOOD, says)


def note(name: str, says: str, remedy: str = "") -> Check:
    return Check(name, NOTE, says, remedy)


def warning(name: str, says: str, remedy: str) -> Check:
    return Check(name, WARNING, says, remedy)


def failure(name: str, says: str, remedy: str) -> Check:
    return Check(name, FAILURE, says, remedy)


def tried(name: str, attempt: Callable[[], str]) -> Check:
    """What `attempt` says, or the error of the catalogue that it raises."""
    try:
        return good(name, attempt())
    except PdError as error:
        return failure(name, f"{error.code}: {error.sentence}", error.remedy)
