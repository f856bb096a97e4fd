# SPDX-License-Identifier: Apache-2.0
"""A page of docs/ with a table that a tool writes between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Marks(NamedTuple):
    begin: str
    end: str

    @classmethod
    def of(cls, command: str) -> Marks:
        """Return the marks that name the command which writes between them."""
        return cls(f"<!-- {command} --write: begin -->", f"<!-- {command} --write: end -->")

    def split(self, page: str) -> tuple[str, str, str]:
        """Return what stands before, between and after the marks, without them. Raise ValueError if one is missing."""
        before, begun, rest = page.partition(self.begin + "\n")
        between, ended, after = rest.partition(self.end)
        if not begun or not ended:
            raise ValueError(f"a page lacks a line {self.begin} or {self.end}")
        return before, between, after

    def filled(self, page: str, lines: Iterable[str]) -> str:
        """Return the page with these lines between its marks."""
        before, _, after = self.split(page)
        return "\n".join((before + self.begin, *lines, self.end)) + after
