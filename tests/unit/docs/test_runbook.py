# SPDX-License-Identifier: Apache-2.0
"""docs/runbook.md: each incident has its three parts, and every alert, metric, code and log line in it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.unit.docs.metric_names import OF_VLLM, ours
from tests.unit.kits.flags import subcommands
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.errors import CATALOGUE

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "runbook.md").read_text()
INCIDENTS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
GROUPS = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "vllm_ascend_pd").rglob("*.py")))
QUOTED = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", PAGE, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("incident", INCIDENTS)
def test_an_incident_says_what_is_seen_what_happens_and_what_to_do(incident: str) -> None:
    assert re.findall(r"^\* \*\*([\w ]+)\*\*:", INCIDENTS[incident], re.MULTILINE) == ["Seen", "By itself", "Do"]


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_is_named_where_it_leads(alert: str) -> None:
    anchor = RULES[alert]["annotations"]["runbook"].partition("#")[2]
    (incident,) = [title for title in INCIDENTS if title.lower().replace(" ", "-") == anchor]
    assert f"`{alert}`" in INCIDENTS[incident]


def test_alerts_that_are_named_exist() -> None:
    assert set(re.findall(r"\bPD[A-Z][a-z]\w+", PAGE)) == set(RULES)


def test_codes_that_are_named_exist() -> None:
    assert set(re.findall(r"PD-[A-Z]+-\d{3}", PAGE)) <= set(CATALOGUE)


def test_metrics_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:vllm:|ascend_pd_metaserver_)\w+)`", PAGE):
        assert name in OF_VLLM or ours(name), name


def test_flags_that_are_named_exist() -> None:
    known = "".join(command.format_help() for command in subcommands(parser()).values())
    for flag in [word.split()[0] for word in QUOTED if word.startswith("--")]:
        assert flag in known, flag


@pytest.mark.parametrize(
    "quoted", [q for q in QUOTED if re.search(r"[a-z] [a-z]", q) and not q.startswith(("--", "vllm"))]
)
def test_a_line_of_a_log_is_one_that_the_package_writes(quoted: str) -> None:
    assert " ".join(quoted.split()) in SOURCE
