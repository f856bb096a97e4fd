# SPDX-License-Identifier: Apache-2.0
"""Checks of command line values: what cannot be used is refused with the flag, the value and the remedy."""

from __future__ import annotations

import math
from pathlib import Path

from vllm_ascend_pd.shared.settings import impossible

refuse = impossible


def at_least(key: str, value: int, low: int) -> int:
    if value < low:
        refuse(key, value, f"it must be at least {low}", "Give a positive number." if low else "Give 0 or more.")
    return value


def at_most(key: str, value: int, high: int) -> int:
    if value > high:
        refuse(key, value, f"it must be at most {high}", "Give a size that an engine can have.")
    return value


def positive(key: str, value: float, unit: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        refuse(key, value, "it must be above 0", f"Give {unit}.")
    return value


def port(key: str, value: int) -> int:
    if not 1 <= value <= 65535:
        refuse(key, value, "it is no port", "Give 1 to 65535.")
    return value


def host(key: str, value: str) -> str:
    try:
        value.encode("idna")
    except UnicodeError as problem:  # resolving it would raise this
        refuse(key, value, "it is no host's name or address", "Give the name or the address of a host.", problem)
    return value


def write_text(flag: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as problem:
        refuse(flag, path, f"it cannot be written ({_words(problem)})", "Name a file in a folder that exists.", problem)


def read_text(flag: str, value: str, path: Path, remedy: str) -> str:
    """Read a file that a flag names. `value` is the flag's."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        refuse(flag, value, f"{path} cannot be read ({_words(problem)})", remedy, problem)


def _words(problem: Exception) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
