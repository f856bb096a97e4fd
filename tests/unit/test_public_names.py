# SPDX-License-Identifier: Apache-2.0
"""Names that operators write down. A recorded one is still accepted, and does what it did.

Recorded are the connector's keys, the flags of `vllm-ascend-pd`, flags and variables of SCRIPTS, metrics and their
labels. Not recorded: the other scripts, which measure and test, HTTP paths and fields.

A name that changes keeps its old spelling for one version. So this file as a program only adds to the record; a name is
taken out by hand, in the version after the one that had both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.unit.kits.flags import flags_of, subcommands
from vllm_ascend_pd import config
from vllm_ascend_pd.cli.__main__ import SUBCOMMANDS, parser
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.observe.tally import METRICS, PREFIX
from vllm_ascend_pd.router.metrics import METRICS as OF_METASERVER

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("public_names.json")
COMMAND = ".venv/bin/python -m tests.unit.test_public_names"
SCRIPTS = ("prefill", "decode", "metaserver", "launch_1p1d", "quickstart", "setup")
WRITTEN = re.compile(r"(?<=^  )--[a-z-]+|\b(?:VLLM_ASCEND_)?PD_[A-Z_]+", re.MULTILINE)
KEYS, IGNORED = "kv_connector_extra_config", "kv_connector_extra_config, without effect"


def names() -> dict[str, set[str]]:
    """Return the names that are shown to operators, by where they belong."""
    by_owner = {
        KEYS: {f.name for group in config.GROUPS.values() for f in dataclasses.fields(group)} | {*config.CHECKED_SIZES},
        IGNORED: {*config.IGNORED},
        "metrics": metrics(),
    }
    for name in SUBCOMMANDS:
        by_owner[f"vllm-ascend-pd {name}"] = shown(subcommand(name))
    for name in SCRIPTS:
        by_owner[f"scripts/{name}.sh"] = of_script(name)
    return by_owner


def metrics() -> set[str]:
    metric_names = {PREFIX + name for name in METRICS}
    metric_names |= {f"{PREFIX}{name}{{reason}}" for name, metric in METRICS.items() if metric.kind == "count"}
    for family in OF_METASERVER.registry._collector_to_names:
        metric_names |= {family._name, *(f"{family._name}{{{label}}}" for label in family._labelnames)}  # type: ignore[attr-defined]
    return metric_names


def of_script(name: str) -> set[str]:
    """Return the flags and variables in a script's --help: it accepts no others (scripts/options.sh)."""
    text = subprocess.check_output([ROOT / f"scripts/{name}.sh", "--help"], text=True, timeout=60)
    return set(WRITTEN.findall(text.partition("Environment:")[2] if name == "setup" else text))


def subcommand(name: str) -> argparse.ArgumentParser:
    return subcommands(parser())[name]


def shown(made: argparse.ArgumentParser) -> set[str]:
    return {flag for flag, action in flags_of(made).items() if action.help != argparse.SUPPRESS}


def accepted(where: str, shown: set[str]) -> Callable[[str], bool]:
    """Return what says whether a name is accepted there: the parser, if there is one, for it may hide a name."""
    if where in (KEYS, IGNORED):
        return lambda key: is_key(key, PushConfig.parse, ignored=where == IGNORED)
    if where.startswith("vllm-ascend-pd "):
        return flags_of(subcommand(where.split()[1])).__contains__
    return shown.__contains__


def is_key(key: str, parse: Callable[[Mapping[str, Any]], PushConfig], *, ignored: bool = False) -> bool:
    """Return whether a configuration may have this key. An older spelling has no default here: it gets null."""
    try:
        parsed = parse({key: None})
    except ConfigError as refusal:
        return refusal.code != "PD-CONF-001"  # it is the value that is wrong
    return ignored or key not in parsed.ignored


def recorded() -> dict[str, set[str]]:
    return {where: set(" ".join(lines).split()) for where, lines in json.loads(RECORD.read_text()).items()}


def lacking(whole: dict[str, set[str]], there: dict[str, set[str]]) -> dict[str, list[str]]:
    return {where: sorted(less) for where in whole if (less := whole[where] - there[where])}


def test_a_recorded_name_is_accepted_and_a_shown_one_is_recorded() -> None:
    now, before = names(), recorded()
    assert now.keys() == before.keys()
    taken = {where: set(filter(accepted(where, now[where]), before[where])) for where in now}
    assert lacking(before, taken) == {}, "the old spelling is to be accepted or exported beside the new for one version"
    assert lacking(now, before) == {}, f"record them: {COMMAND}"


def test_an_older_spelling_counts_if_it_is_parsed_and_has_an_effect() -> None:
    def renamed(extra: Mapping[str, Any]) -> PushConfig:
        return PushConfig.parse({{"lease": "lease_s"}.get(key, key): value for key, value in extra.items()})

    assert is_key("lease", renamed)
    assert not is_key("lease", PushConfig.parse)
    assert not is_key("kv_port", PushConfig.parse) and is_key("kv_port", PushConfig.parse, ignored=True)


def test_a_hidden_flag_is_accepted_but_not_recorded_anew() -> None:
    assert accepted("vllm-ascend-pd metaserver", set())("--as-worker")
    assert "--as-worker" not in shown(subcommand("metaserver"))


if __name__ == "__main__":
    both = recorded() if RECORD.exists() else {}
    for place, present in names().items():
        both[place] = both.get(place, set()) | present
    lines = {place: textwrap.wrap(" ".join(sorted(both[place])), 110, break_on_hyphens=False) for place in sorted(both)}
    RECORD.write_text(json.dumps(lines, indent=1) + "\n")
