# SPDX-License-Identifier: Apache-2.0
"""The plot of a run: goodput over rate, a panel for each share of common prefix. As SVG; Chromium makes PNG of it."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from tools.bench_load_parts.figures import MeasuredPoint, of, spread
from tools.support import browser

COLOURS = ("#c2571a", "#1f5fa8", "#3c8d40", "#8a3f97")
DASHES = ("7 4", "", "2 3", "9 3 2 3")
WIDTH, HEIGHT = 460, 330  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 44, 52
BESIDE = 5  # between the bars of two systems at one rate


def svg(points: Sequence[MeasuredPoint], names: Mapping[str, str], limits: str) -> str:
    """Return the plot of all points with a rate; each line is a system's medians, each bar its range."""
    rated = [one for one in points if one.case.kind == "rate"]
    panels = sorted({one.case.prefix for one in rated})
    systems = [system for system in names if any(one.system == system for one in rated)]
    said = limits.split("; ")
    width, height = max(1, len(panels)) * WIDTH, HEIGHT + 24 * -(-len(systems) // 2) + 15 * len(said) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, prefix in enumerate(panels):
        mine = [one for one in rated if one.case.prefix == prefix]
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *_panel(mine, systems, prefix), "</g>"]
    for place, system in enumerate(systems):
        x, y = 30 + place % 2 * 210, HEIGHT + 16 + place // 2 * 24
        parts.append(_line([(x, y - 4), (x + 34, y - 4)], place))
        parts.append(f'<text x="{x + 42}" y="{y}">{escape(names[system])}</text>')
    for place, words in enumerate(reversed(said)):
        parts.append(f'<text x="30" y="{height - 10 - 15 * place}" fill="#555" font-size="11">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(mine: Sequence[MeasuredPoint], systems: Sequence[str], prefix: int) -> list[str]:
    cases = sorted({one.case for one in mine}, key=lambda case: case.value)
    rates = {(s, c): spread(of(mine, s, c), "request_goodput") for s in systems for c in cases}
    x_step, y_step = tick_step(cases[-1].value), tick_step(max([one[2] for one in rates.values() if one], default=0.0))
    x_most, y_most = (
        step * max(1, math.ceil(most / step - 1e-9))
        for step, most in (
            (x_step, cases[-1].value),
            (y_step, max([one[2] for one in rates.values() if one], default=0.0)),
        )
    )

    def at(x: float, y: float) -> tuple[float, float]:
        inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + inner_w * x / x_most, TOP + inner_h * (1 - y / y_most)

    parts = [f'<text x="{LEFT}" y="24" font-weight="bold">{prefix} % of each prompt common to all</text>']
    for tick in range(round(y_most / y_step) + 1):
        x, y = at(0, tick * y_step)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#e2e2e2"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick * y_step:g}</text>')
    for tick in range(round(x_most / x_step) + 1):
        x, y = at(tick * x_step, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick * x_step:g}</text>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts += [
        f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">requests/s that come</text>',
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">good answers/s</text>',
    ]
    for place, system in enumerate(systems):
        shown = [(case.value, value) for case in cases if (value := rates[system, case])]
        aside = BESIDE * (place - (len(systems) - 1) / 2)  # so that no bar hides another
        parts.append(f'<g transform="translate({aside} 0)">')
        parts.append(_line([at(x, middle) for x, (middle, _, _) in shown], place))
        for x, (middle, low, high) in shown:
            (px, py), (_, top), (_, bottom) = at(x, middle), at(x, high), at(x, low)
            colour = COLOURS[place % len(COLOURS)]
            parts.append(f'<path d="M{px:.1f} {top:.1f}V{bottom:.1f}" stroke="{colour}" stroke-width="1.2"/>')
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.6" fill="{colour}"/>')
        parts.append("</g>")
    return parts


def _line(points: Sequence[tuple[float, float]], number: int) -> str:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    pairs = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{pairs}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'


def tick_step(most: float) -> float:
    """Return a round distance between ticks, so that there are four to ten of them."""
    if most <= 0:
        return 1.0
    size: float = 10.0 ** math.floor(math.log10(most))
    return next(size * part for part in (0.1, 0.2, 0.5, 1.0) if most / (size * part) <= 10)


def png(picture: str, file: Path) -> str:
    """Write the plot as PNG. Return why not; empty if it was written."""
    if not browser.executable():
        return browser.MISSING
    width, height = (int(word.split('"')[1]) for word in picture.split(" ")[2:4])
    folder = Path(tempfile.mkdtemp(prefix="bench-load-"))
    try:
        page = folder / "plot.html"
        page.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0;overflow:hidden">{picture}')
        with browser.browser(folder / "profile") as tab:
            tab.open(page.as_uri())
            tab.picture(file, width, height)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""
