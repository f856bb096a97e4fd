# SPDX-License-Identifier: Apache-2.0
"""dashboards/grafana.json: it shows every existing metric, no other of ours, and of vLLM's own those that vLLM has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.observe.tally import METRICS, PREFIX
from vllm_ascend_pd.router import metrics as metaserver

FILE = Path(__file__).resolve().parents[3] / "dashboards" / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"(?:vllm:ascend_pd_|ascend_pd_metaserver_)\w+")
OF_VLLM = re.compile(r"vllm:(?!ascend_pd_)\w+")
SUFFIXES = {"time": ("_bucket", "_sum", "_count"), "sum": ("_total",), "count": ("_total",), "level": ("",)}
OF_SCRAPER = {
    "instance",
    "job",
    "deployment",
}  # Prometheus adds these labels to every series
OF_PROMETHEUS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


def existing() -> dict[str, str]:
    """Map every series of the engines and the metaserver to its metric."""
    series = {f"{PREFIX}{name}{end}": name for name, metric in METRICS.items() for end in SUFFIXES[metric.kind]}
    for family in metaserver.Metrics().registry.collect():
        series.update({f"{family.name}{end}": family.name for end in OF_PROMETHEUS[family.type]})
    return series


def named() -> set[str]:
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return {name for expression in expressions for name in NAME.findall(expression)}


def test_every_metric_that_a_panel_names_exists() -> None:
    assert named() - set(existing()) == set()


def test_every_metric_that_exists_has_a_panel() -> None:
    series = existing()
    assert set(series.values()) - {series[name] for name in named() if name in series} == set()


def test_every_metric_of_vllm_that_a_panel_names_exists() -> None:
    (where,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    text = (Path(where) / "v1" / "metrics" / "loggers.py").read_text()
    names = {name for panel in PANELS for target in panel["targets"] for name in OF_VLLM.findall(target["expr"])}
    assert "vllm:kv_cache_usage_perc" in names
    assert {name for name in names if f'name="{re.sub("_(bucket|total)$", "", name)}"' not in text} == set()


def test_every_panel_shows_the_chosen_deployments_only() -> None:
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "deployment"]
    assert variable["allValue"] == ".*", "it also matches what has no such label"
    for target in (target for panel in PANELS for target in panel["targets"]):
        series = NAME.findall(target["expr"]) + OF_VLLM.findall(target["expr"])
        assert target["expr"].count('{deployment=~"$deployment"') == len(series), target["expr"]


def test_what_is_wrong_at_any_value_above_0_is_red_there() -> None:
    """Failures and held blocks are; and a metaserver that is not ready, or an engine that takes no requests, at 0."""
    red = {panel["title"]: panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps") for panel in PANELS}
    low = {title for title, steps in red.items() if steps and steps[0] == {"color": "red", "value": None}}
    assert low == {"Ready", "Instance takes requests"}
    high = {title for title, steps in red.items() if steps and 0 < steps[1]["value"] <= 1 and title not in low}
    assert high == {
        "Open circuits",
        "Failed pushes by reason",
        "Failed loads by reason",
        "Dead writers",
        "KV given up because time ran out",
        "Blocks in quarantine, and held for D's to come",
        "Access being revoked (no P can push to that rank)",
        "Changes to vLLM that an engine lacks",
        "KV cache in use",
    }


def own_labels() -> dict[str, set[str]]:
    """Map the metaserver's series to the labels of their metrics."""
    labels: dict[str, set[str]] = {}
    for metric in vars(metaserver.Metrics()).values():
        family = getattr(metric, "_family", metric)
        for described in family.describe() if hasattr(family, "describe") else ():
            for end in OF_PROMETHEUS[described.type]:
                labels[described.name + end] = set(family._labelnames)
    return labels


def test_no_metric_of_ours_has_a_label_that_the_scraper_sets() -> None:
    labels = own_labels()
    assert {"engine", "role"} <= set().union(*labels.values())
    assert {name: taken for name, label_names in labels.items() if (taken := label_names & OF_SCRAPER)} == {}


def test_panels_group_by_labels_that_their_metric_has() -> None:
    labels = own_labels()
    for target in (target for panel in PANELS for target in panel["targets"]):
        for grouped, name in re.findall(r"by \(([^)]*)\) \((?:rate\()?(ascend_pd_metaserver_\w+)", target["expr"]):
            wanted = {label.strip() for label in grouped.split(",")} - OF_SCRAPER - {"le"}
            assert wanted <= labels[name], target["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_one_thing_with_a_unit(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert NAME.search(target["expr"]) or OF_VLLM.search(target["expr"]), target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")
        for counter in re.findall(r"\w+_(?:total|bucket)\b", target["expr"]):
            assert "rate(" in target["expr"], f"{counter} only ever grows"


def test_panels_neither_overlap_nor_share_an_id() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
