# SPDX-License-Identifier: Apache-2.0
"""The instances file: YAML, read again when it changes. A file that cannot be used changes nothing.

prefill:
  - http://10.0.0.1:8100
  - {url: 10.0.0.2:8100, weight: 2}
decode:
  - 10.0.0.3:8200
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import yaml

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.metaserver.decisions import Role
from vllm_ascend_pd.metaserver.service.fleet import Fleet, Spec, parse_spec

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0


def read(path: str) -> list[Spec]:
    """Raises ConfigError with what is wrong."""
    try:
        content = yaml.safe_load(Path(path).read_text())
        return _specs(content)
    except (OSError, yaml.YAMLError, ValueError) as problem:
        raise ConfigError("PD-CONF-007", path=path, why=str(problem)) from problem


def _specs(content: object) -> list[Spec]:
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping with the keys prefill and decode")
    unknown = set(content) - {role.value for role in Role}
    if unknown:
        raise ValueError(f"unknown key {sorted(map(str, unknown))[0]!r}; prefill and decode are known")
    specs = []
    for role in Role:
        entries = content.get(role.value) or []
        if not isinstance(entries, list):
            raise ValueError(f"{role.value} is not a list")
        for entry in entries:
            if isinstance(entry, dict):
                if set(entry) - {"url", "weight"}:
                    raise ValueError(f"{entry!r} has keys other than url and weight")
                specs.append(parse_spec(role, entry.get("url"), entry.get("weight", 1.0)))
            else:
                specs.append(parse_spec(role, entry))
    names = [spec.name for spec in specs]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise ValueError(f"{sorted(doubled)[0]} is named twice")
    return specs


class InstancesFile:
    def __init__(self, path: str, fleet: Fleet) -> None:
        self._path = path
        self._fleet = fleet
        self._mark: tuple[int, int, int] | None = None
        self.problem = ""

    def load(self) -> None:
        """At the start: raises ConfigError."""
        self._mark = self._look()
        self._apply()

    def _apply(self) -> None:
        specs = read(self._path)
        try:
            self._fleet.replace(specs, "file")
        except ValueError as problem:
            raise ConfigError("PD-CONF-007", path=self._path, why=str(problem)) from problem

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            mark = self._look()
            if mark == self._mark:
                continue
            self._mark = mark
            try:
                self._apply()
                self.problem = ""
                log.info("instances file %s read again", self._path)
            except ConfigError as problem:
                self.problem = str(problem)
                log.error("%s", problem)

    def _look(self) -> tuple[int, int, int] | None:
        """Inode too: editors and config maps replace the file."""
        try:
            facts = Path(self._path).stat()
        except OSError:
            return None
        return (facts.st_ino, facts.st_mtime_ns, facts.st_size)
