# SPDX-License-Identifier: Apache-2.0
"""Instances from flags, file and Services, and the operation by which a supervisor sends them to its workers.

The file is YAML, read again when it changes; one that cannot be used changes nothing:

prefill:
  - http://10.0.0.1:8100
  - {url: 10.0.0.2:8100, weight: 2}
decode:
  - 10.0.0.3:8200
  - 10.0.0.4:8200+16
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.fleet import Fleet, Spec, parse_spec, parse_specs
from vllm_ascend_pd.router.kubernetes import KubernetesService
from vllm_ascend_pd.router.settings import Settings

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0
_NOT_A_VALUE = (LookupError, AttributeError)  # what PyYAML raises for `!!bool maybe`, `!!int ""` and `!!timestamp soon`


def read(path: str) -> list[Spec]:
    """Return the instances in the file. Raise ConfigError with what is wrong."""
    try:
        return _specs(_content(path))
    except (OSError, yaml.YAMLError, ValueError) as problem:
        raise ConfigError("PD-CONF-007", path=path, why=str(problem)) from problem


def _content(path: str) -> object:
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):  # to read a pipe would block
        raise ValueError("it is not a regular file")
    try:
        return yaml.safe_load(file.read_text())
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem
    except _NOT_A_VALUE as problem:
        raise ValueError(f"a value in it is not of the type it names ({problem})") from problem


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
                specs += parse_specs(role, entry.get("url"), entry.get("weight", 1.0))
            else:
                specs += parse_specs(role, entry)
    names = [spec.name for spec in specs]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise ValueError(f"{sorted(doubled)[0]} is named twice")
    return specs


class Members(Fleet):
    """A fleet and the problem of its file: what all workers must have alike, whenever they started."""

    file_problem = ""

    def snapshot(self) -> dict[str, Any]:
        """Return an operation that gives these members to another process."""
        instances = [
            {
                "role": i.role.value,
                "url": f"{i.origin.scheme}://{i.origin.netloc}",
                "weight": i.weight,
                "source": i.source,
                "draining": i.draining,
            }
            for i in self
        ]
        return {"op": "members", "file_problem": self.file_problem, "instances": instances}

    def become(self, snapshot: dict[str, Any]) -> None:
        """Apply the operation that `snapshot` returned. Instances that stay keep their state."""
        self.file_problem = snapshot["file_problem"]
        specs = [parse_spec(Role(facts["role"]), facts["url"], facts["weight"]) for facts in snapshot["instances"]]
        roles = {spec.name: spec.role for spec in specs}
        for instance in self:
            if roles.get(instance.name) is not instance.role:
                self.remove(instance.name)
        for spec, facts in zip(specs, snapshot["instances"], strict=True):
            instance = self.add(spec, facts["source"])
            instance.source, instance.draining = facts["source"], facts["draining"]


class InstancesFile:
    source = "instances file"

    def __init__(self, path: str, members: Members) -> None:
        self._path = path
        self._members = members
        self._mark: tuple[int, int, int] | None = None

    def load(self) -> None:
        """Read the file. Raise ConfigError and change nothing if it cannot be used."""
        self._mark = self._look()
        specs = read(self._path)
        try:
            self._members.replace(specs, "file")
        except ValueError as problem:
            raise ConfigError("PD-CONF-007", path=self._path, why=str(problem)) from problem

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Read the file whenever it changes. Call `changed` each time, also if the file cannot be used."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._look() == self._mark:
                continue
            try:
                self.load()
                self._members.file_problem = ""
                log.info("instances file %s read again", self._path)
            except ConfigError as problem:
                self._members.file_problem = str(problem)
                log.error("%s", problem)
            changed()

    def _look(self) -> tuple[int, int, int] | None:
        """Return what shows a change; the inode too, since editors and config maps replace the file."""
        try:
            facts = Path(self._path).stat()
        except OSError:
            return None
        return (facts.st_ino, facts.st_mtime_ns, facts.st_size)


InstancesSource: TypeAlias = InstancesFile | KubernetesService  # of instances that come and go


def configured(settings: Settings, members: Members) -> list[InstancesSource]:
    """Add the instances of flags and file; return the sources that are to be watched. Raise ConfigError."""
    for role, texts in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for text in texts:
            for spec in parse_specs(role, text):
                members.add(spec, "flag")
    sources: list[InstancesSource] = []
    if settings.instances_file:
        file = InstancesFile(settings.instances_file, members)
        file.load()
        sources.append(file)
    for role, text in ((Role.PREFILL, settings.prefill_service), (Role.DECODE, settings.decode_service)):
        if text:
            sources.append(KubernetesService(role, text, members, settings.kubernetes_api))
    return sources
