# SPDX-License-Identifier: Apache-2.0
"""Names that operators write down: keys, flags, variables of scripts, metrics. A recorded one is still accepted.

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
from pathlib import Path

from vllm_ascend_pd import config
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.metaserver.service.metrics import METRICS as OF_METASERVER
from vllm_ascend_pd.observe.tally import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("public_names.json")
COMMAND = ".venv/bin/python -m tests.unit.test_public_names"
SCRIPTS = ("prefill", "decode", "metaserver", "launch_1p1d", "quickstart", "setup")
WRITTEN = re.compile(r"(?<=^  )--[a-z-]+|\b(?:VLLM_ASCEND_)?PD_[A-Z_]+", re.MULTILINE)


def names() -> dict[str, set[str]]:
    """Return the names that are accepted and exported, by where they belong."""
    [subcommands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    keys = {f.name for group in config._GROUPS.values() for f in dataclasses.fields(group)}
    found = {
        "kv_connector_extra_config": {*keys, *config._CHECKED_SIZES, *config._IGNORED},
        "metrics": {PREFIX + name for name in METRICS} | {family.name for family in OF_METASERVER.registry.collect()},
    }
    for name in ("metaserver", "sidecar"):
        flags = subcommands.choices[name]._option_string_actions.items()
        found[f"vllm-ascend-pd {name}"] = {flag for flag, action in flags if action.help != argparse.SUPPRESS}
    for name in SCRIPTS:
        script = f"scripts/{name}.sh"
        found[script] = set(WRITTEN.findall(subprocess.check_output([ROOT / script, "--help"], text=True, timeout=60)))
    return found


def recorded() -> dict[str, set[str]]:
    return {where: set(" ".join(lines).split()) for where, lines in json.loads(RECORD.read_text()).items()}


def lacking(whole: dict[str, set[str]], there: dict[str, set[str]]) -> dict[str, list[str]]:
    return {where: sorted(less) for where in whole if (less := whole[where] - there.get(where, set()))}


def test_a_recorded_name_is_accepted_and_an_accepted_one_is_recorded() -> None:
    now, before = names(), recorded()
    assert lacking(before, now) == {}, (
        "the old spelling is to be accepted or exported beside the new one for one version"
    )
    assert lacking(now, before) == {}, f"record them: {COMMAND}"


if __name__ == "__main__":
    both = recorded() if RECORD.exists() else {}
    for place, accepted in names().items():
        both[place] = both.get(place, set()) | accepted
    lines = {place: textwrap.wrap(" ".join(sorted(both[place])), 110, break_on_hyphens=False) for place in sorted(both)}
    RECORD.write_text(json.dumps(lines, indent=1) + "\n")
