# SPDX-License-Identifier: Apache-2.0
"""Wrapping of methods of vLLM's, once each, and our connectors in what such a method sees."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Ours = TypeVar("Ours")

WRAPPED = "pd_wrapped"  # set on our wrappers: others wrap vLLM's methods too


def wrap(theirs: type, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a class's method by `around(method)`, in the class that it has it from, unless that was done."""
    owner = next(owner for owner in theirs.__mro__ if name in vars(owner))
    original = getattr(owner, name)
    if hasattr(original, WRAPPED):
        return
    wrapper = functools.wraps(original)(around(original))
    setattr(wrapper, WRAPPED, True)
    setattr(owner, name, wrapper)


def differing(*methods: tuple[Callable[..., Any], tuple[str, ...]]) -> list[str]:
    """Return the names of those methods that have other parameters than these."""
    return [method.__qualname__ for method, names in methods if tuple(inspect.signature(method).parameters) != names]


def contained(connector: Any, kind: type[Ours]) -> Iterator[Ours]:
    """Return the connectors of a kind: this one, or those inside a MultiConnector."""
    for one in getattr(connector, "_connectors", (connector,)):
        if isinstance(one, kind):
            yield one
