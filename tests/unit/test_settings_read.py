# SPDX-License-Identifier: Apache-2.0
"""Each declared setting is read in the package: one that nothing reads would promise what does not happen."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.router.settings import Settings

PACKAGE = Path(__file__).parents[2] / "vllm_ascend_pd"
GROUPS = {f.name: f.default for f in dataclasses.fields(PushConfig) if dataclasses.is_dataclass(f.default)}
KEYS = [(group, f.name) for group, default in GROUPS.items() for f in dataclasses.fields(default)]  # type: ignore[arg-type]

# Names that the package gives to a group of the configuration, beside `config` and the group's own.
ALIASES = {"channel": {"site"}, "timers": {"_holding"}}
CHECKS = {"_check_together", "settings_of"} | {
    f"_check_{what}" for what in ("ports", "tls", "roles", "allowed", "events")
}


def reads(path: Path) -> Iterator[tuple[str, str]]:
    """Return each read of an attribute: the last name of its owner, and its own. The checks of values do not count."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name in CHECKS:
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            yield name, node.attr


READS = {(owner.lstrip("_"), name) for path in PACKAGE.rglob("*.py") for owner, name in reads(path)}
PROPERTIES = set(reads(PACKAGE / "router" / "settings.py"))  # of the settings themselves


@pytest.mark.parametrize(("group", "key"), KEYS)
def test_a_key_of_the_push_configuration_is_read(group: str, key: str) -> None:
    owners = {group, "config", *ALIASES.get(group, ())}
    assert any((owner.lstrip("_"), key) in READS for owner in owners)


@pytest.mark.parametrize("setting", [f.name for f in dataclasses.fields(Settings)])
def test_a_setting_of_the_metaserver_is_read(setting: str) -> None:
    assert ("settings", setting) in READS or ("self", setting) in PROPERTIES
