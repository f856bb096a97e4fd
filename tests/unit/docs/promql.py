# SPDX-License-Identifier: Apache-2.0
"""Evaluator of the few forms of PromQL that dashboards/alerts.yaml may use; any other form is an error.

No Python package has Prometheus' own evaluator. So that this one need not have Prometheus' arithmetic, `increase` may
only be compared with 0: there its extrapolation changes nothing.

    expression:          side ("or" side)*
    side:                compared (("and" | "unless") "on" (labels) compared)*
    compared:            value [("==" | ">") number]
    value:               ("sum" | "min" | "max") "by" (labels) (value) | "increase" (selector[5m])
                         | "absent" (selector) | selector
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

WINDOW_S = {"5m": 300}
STALE_S = 300  # a series that has had no sample for so long is gone
TOKEN = re.compile(r'\s*([A-Za-z_:][\w:]*|\d+m|\d+(?:\.\d+)?|"[^"]*"|==|=~|!~|!=|>|[(){}\[\],=])')
COMPARED: dict[str, Callable[[float, float], bool]] = {"==": operator.eq, ">": operator.gt}
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda text, pattern: bool(re.fullmatch(pattern, text)),
    "!~": lambda text, pattern: not re.fullmatch(pattern, text),
}
FOLDED: dict[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max}

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


class ScrapedPage(NamedTuple):
    """The answer of one target at one moment, with the labels that the scraper adds."""

    at_s: float
    target: dict[str, str]
    text: str


class Scrapes:
    """Pages of all targets over some time."""

    def __init__(self, pages: Iterable[ScrapedPage]) -> None:
        self._series: dict[tuple[str, Labels], list[tuple[float, float]]] = {}
        for page in sorted(pages, key=lambda page: page.at_s):
            for family in text_string_to_metric_families(page.text):
                for sample in family.samples:
                    labels = frozenset({**sample.labels, **page.target}.items())
                    self._series.setdefault((sample.name, labels), []).append((page.at_s, sample.value))

    def names(self) -> set[str]:
        return {name for name, _ in self._series}

    def select(
        self, name: str, matchers: list[tuple[str, str, str]], since: float, until: float
    ) -> dict[Labels, list[float]]:
        """Return the samples of the series that match, later than `since`."""
        selected = {}
        for (metric, labels), samples in self._series.items():
            label_values = dict(labels)
            if metric != name or not all(
                MATCHES[how](label_values.get(label, ""), wanted) for label, how, wanted in matchers
            ):
                continue
            if values := [value for at, value in samples if since < at <= until]:
                selected[labels] = values
        return selected


def evaluate(expression: str, recording: Scrapes, at_s: float) -> Vector:
    """Return the vector of an expression at a moment. Raise ValueError for a form that is not allowed."""
    return _ExpressionReader(expression, recording, at_s).whole()


def firing(expression: str, recording: Scrapes, for_s: float, until_s: float, step_s: float = 60) -> Vector:
    """Return what has been in the vector at each step of the last `for_s` seconds."""
    vector = evaluate(expression, recording, until_s)
    at = until_s - for_s
    while at < until_s:
        earlier = evaluate(expression, recording, at)
        vector = {labels: value for labels, value in vector.items() if labels in earlier}
        at += step_s
    return vector


class _ExpressionReader:
    def __init__(self, expression: str, recording: Scrapes, at_s: float) -> None:
        self._tokens: list[str] = []
        place = 0
        expression = expression.strip()
        while place < len(expression):
            if (token := TOKEN.match(expression, place)) is None:
                raise ValueError(f"not allowed here: {expression[place:]!r}")
            self._tokens.append(token[1])
            place = token.end()
        self._recording, self._at = recording, at_s

    def whole(self) -> Vector:
        vector = self._either()
        if self._tokens:
            raise ValueError(f"not allowed here: {self._tokens}")
        return vector

    def _next(self, *wanted: str) -> str:
        token = self._tokens.pop(0) if self._tokens else ""
        if wanted and token not in wanted:
            raise ValueError(f"{token!r} is not one of {wanted}")
        return token

    def _is(self, *tokens: str) -> bool:
        return self._tokens[:1] != [] and self._tokens[0] in tokens

    def _either(self) -> Vector:
        vector = self._side()
        while self._is("or"):
            self._next()
            vector = {**self._side(), **vector}
        return vector

    def _side(self) -> Vector:
        vector = self._compared()
        while self._is("and", "unless"):
            kept = self._next() == "and"
            self._next("on")
            labels = self._labels()
            there = {_only(other, labels) for other in self._compared()}
            vector = {series: value for series, value in vector.items() if (_only(series, labels) in there) == kept}
        return vector

    def _compared(self) -> Vector:
        before = list(self._tokens)
        vector = self._value()
        used = before[: len(before) - len(self._tokens)]
        if self._is(*COMPARED):
            how, number = COMPARED[self._next()], float(self._next())
            if "increase" in used and (how, number) != (operator.gt, 0):
                raise ValueError("an increase may only be compared by > 0")
            return {labels: value for labels, value in vector.items() if how(value, number)}
        if "increase" in used:
            raise ValueError("an increase is compared by > 0")
        return vector

    def _value(self) -> Vector:
        name = self._next()
        if name in FOLDED:
            self._next("by")
            labels = self._labels()
            self._next("(")
            inner = self._value()
            self._next(")")
            groups: dict[Labels, list[float]] = {}
            for series, value in inner.items():
                groups.setdefault(_only(series, labels), []).append(value)
            return {group: FOLDED[name](values) for group, values in groups.items()}
        if name in ("increase", "absent"):
            self._next("(")
            selected = self._selected(self._next(), ranged=name == "increase")
            self._next(")")
            if name == "absent":
                return {} if selected else {frozenset(): 1.0}
            return {labels: _grown(values) for labels, values in selected.items() if len(values) > 1}
        return {labels: values[-1] for labels, values in self._selected(name).items()}

    def _selected(self, name: str, ranged: bool = False) -> dict[Labels, list[float]]:
        matchers = []
        if self._is("{"):
            self._next()
            while not self._is("}"):
                label, how, wanted = self._next(), self._next(*MATCHES), self._next()
                matchers.append((label, how, wanted.strip('"')))
                if not self._is("}"):
                    self._next(",")
            self._next()
        window = STALE_S
        if ranged:
            self._next("[")
            window = WINDOW_S[self._next(*WINDOW_S)]
            self._next("]")
        return self._recording.select(name, matchers, self._at - window, self._at)

    def _labels(self) -> set[str]:
        self._next("(")
        labels = set()
        while not self._is(")"):
            labels.add(self._next())
            if not self._is(")"):
                self._next(",")
        self._next()
        return labels


def _only(labels: Labels, wanted: set[str]) -> Labels:
    return frozenset((name, value) for name, value in labels if name in wanted)


def _grown(values: list[float]) -> float:
    """Return by how much a counter has grown; one that falls began anew."""
    return sum(after - before if after >= before else after for before, after in itertools.pairwise(values))
