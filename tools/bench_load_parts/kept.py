# SPDX-License-Identifier: Apache-2.0
"""Points of a run in its folder: a run that was ended goes on with those that are missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench_load_parts.figures import COUNTED, KEYS, MeasuredPoint
from tools.bench_load_parts.loads import LoadCase

_FIGURES = (*KEYS, *COUNTED, "completed", "failed", "duration")
_ERRORS = 3  # kept of a point


class OtherRun(ValueError):
    """The folder has a run with other settings."""


class KeptPoints:
    """Settings and points. A line of `points.jsonl` is a point, whole or not there."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, about = folder / "points.jsonl", folder / "settings.json"
        wanted = json.loads(json.dumps(settings))
        if not about.exists():
            about.write_text(json.dumps(wanted, indent=1))
        elif (recorded := json.loads(about.read_text())) != wanted:
            other = sorted(key for key in {*recorded, *wanted} if recorded.get(key) != wanted.get(key))
            raise OtherRun(f"{folder} has a run with another {', '.join(other)}: name another folder with --out")
        self._points: dict[tuple[str, LoadCase, int], MeasuredPoint] = {}
        lines = self._file.read_text().split("\n") if self._file.exists() else []
        for line in lines[:-1]:  # what follows the last end of a line was cut off
            said = json.loads(line)
            self._keep(MeasuredPoint(said["system"], LoadCase(**said["case"]), said["repeat"], said["figures"]))
        if lines and lines[-1]:
            self._file.write_text("".join(f"{line}\n" for line in lines[:-1]))

    @property
    def points(self) -> list[MeasuredPoint]:
        return list(self._points.values())

    def _keep(self, point: MeasuredPoint) -> None:
        self._points[point.system, point.case, point.repeat] = point

    def has(self, system: str, case: LoadCase, repeat: int) -> bool:
        """Return whether a point has figures. One that failed is measured again when the run goes on."""
        point = self._points.get((system, case, repeat))
        return point is not None and not point.failed

    def add(self, point: MeasuredPoint) -> None:
        figures = {name: point.figures[name] for name in _FIGURES if name in point.figures}
        figures["errors"] = [str(error)[:300] for error in point.figures.get("errors", ())][:_ERRORS]
        self._keep(MeasuredPoint(point.system, point.case, point.repeat, figures))
        line = {"system": point.system, "case": asdict(point.case), "repeat": point.repeat, "figures": figures}
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")
