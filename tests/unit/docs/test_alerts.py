# SPDX-License-Identifier: Apache-2.0
"""dashboards/alerts.yaml: each alert fires on the metrics of its incident and on no good ones, and has its runbook.

The pages are written by the metaserver's own metrics, and for engines with the names of observe/tally.py and of vLLM.
`promql.py` evaluates them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from tests.unit.docs.metric_names import OF_VLLM, ours
from tests.unit.docs.promql import ScrapedPage, Scrapes, evaluate, firing
from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.observe.tally import METRICS, PREFIX
from vllm_ascend_pd.router import metrics as metaserver

ROOT = Path(__file__).resolve().parents[3]
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
SECONDS = {"m": 60}
END_S, STEP_S = 1800, 60
TARGETS = {"m": "10.0.0.1:8000", "p": "10.0.0.2:8100", "d": "10.0.0.3:8200"}
PREFILL, DECODE = ("prefill", TARGETS["p"]), ("decode", TARGETS["d"])


@dataclass
class WatchedCluster:
    """A metaserver with a P and a D that work, until a change makes something of them fail."""

    router: metaserver.Metrics = field(default_factory=metaserver.Metrics)
    engines: dict[str, dict[str, float]] = field(default_factory=lambda: {"p": {}, "d": {}})
    silent: set[str] = field(default_factory=set)

    def work(self) -> None:
        """A minute in which requests are answered, and one client leaves."""
        self.router.up.labels(*PREFILL).set(1)
        self.router.up.labels(*DECODE).set(1)
        self.router.ready.set(1)
        self.router.waiting.set(0)
        self.router.requests.labels("/v1/completions", 200).inc(60)
        self.router.loads.labels(TARGETS["p"], "received").inc(59)
        self.router.loads.labels(TARGETS["p"], "PD-XFER-002").inc()
        self.router.legs.labels(*DECODE, "served").inc(60)
        for name, at in self.engines.items():
            at.update({"vllm:kv_cache_usage_perc": 0.4, "vllm:num_requests_waiting": 0})
            levels = [metric for metric, known in METRICS.items() if known.kind == "level"]
            at.update({PREFIX + level: 0 for level in levels})
            self.grow(name, "num_failed_recvs_total" if name == "d" else "num_failed_transfers_total", "PD-XFER-002")
            at[f"{PREFIX}metaserver_time_seconds_count"] = 60 if name == "d" else 0

    def grow(self, engine: str, counter: str, reason: str) -> None:
        series = f'{PREFIX}{counter}{{reason="{reason}"}}'
        self.engines[engine][series] = self.engines[engine].get(series, 0) + 1

    def page(self, name: str) -> str:
        if name == "m":
            return generate_latest(self.router.registry).decode()
        return "".join(f"{series} {value}\n" for series, value in self.engines[name].items())


def recorded(change: Callable[[WatchedCluster], None] | None, since_s: int = 300) -> Scrapes:
    """Half an hour of pages, with a change to each minute from `since_s` on."""
    cluster, pages = WatchedCluster(), []
    for at in range(0, END_S + 1, STEP_S):
        cluster.work()
        if change and at >= since_s:
            change(cluster)
        for name, instance in TARGETS.items():
            if name not in cluster.silent:
                pages.append(ScrapedPage(at, {"instance": instance, "deployment": "one"}, cluster.page(name)))
    return Scrapes(pages)


def level(engine: str, name: str, value: float) -> Callable[[WatchedCluster], None]:
    return lambda cluster: cluster.engines[engine].__setitem__(PREFIX + name, value)


def gone(role: str) -> Callable[[WatchedCluster], None]:
    return lambda cluster: cluster.router.up.keep(frozenset(TARGETS.values()) - {dict([PREFILL, DECODE])[role]})


def full(cluster: WatchedCluster) -> None:
    cluster.engines["d"].update({"vllm:kv_cache_usage_perc": 0.99, "vllm:num_requests_waiting": 7})


# Each alert, a change that it is for, and the labels (besides the deployment) by which it names what is wrong.
INCIDENTS: list[tuple[str, Callable[[WatchedCluster], None], dict[str, str]]] = [
    ("PDNoMetaserver", lambda c: c.silent.add("m"), {}),
    ("PDNoPrefillEngine", lambda c: c.router.up.labels(*PREFILL).set(0), {"instance": TARGETS["m"]}),
    ("PDNoPrefillEngine", gone("prefill"), {"instance": TARGETS["m"]}),
    ("PDNoDecodeEngine", lambda c: c.router.up.labels(*DECODE).set(0), {"instance": TARGETS["m"]}),
    ("PDNoDecodeEngine", gone("decode"), {"instance": TARGETS["m"]}),
    ("PDEngineDown", lambda c: c.router.up.labels(*PREFILL).set(0), {"role": "prefill", "engine": TARGETS["p"]}),
    ("PDNotReady", lambda c: c.router.ready.set(0), {"instance": TARGETS["m"]}),
    ("PDLoadsFail", lambda c: c.router.loads.labels(TARGETS["p"], "PD-SEC-003").inc(), {"prefill": TARGETS["p"], "end": "PD-SEC-003"}),
    ("PDRequestsRefused", lambda c: c.router.requests.labels("/v1/completions", 429).inc(), {"route": "/v1/completions"}),
    ("PDMetaserverFull", lambda c: c.router.waiting.set(3), {"instance": TARGETS["m"]}),
    ("PDDecodeDropsRequests", lambda c: c.router.legs.labels(*DECODE, "dropped").inc(), {"engine": TARGETS["d"]}),
    ("PDDecodeCacheFull", full, {"instance": TARGETS["d"]}),
    ("PDDecodeLoadsFail", lambda c: c.grow("d", "num_failed_recvs_total", "PD-XFER-001"), {"instance": TARGETS["d"], "reason": "PD-XFER-001"}),
    ("PDPushesFail", lambda c: c.grow("p", "num_failed_transfers_total", "PD-XFER-003"), {"instance": TARGETS["p"], "reason": "PD-XFER-003"}),
    ("PDBlocksHeld", level("d", "blocks_quarantined", 12), {"instance": TARGETS["d"]}),
    ("PDSourcesExpire", lambda c: c.grow("p", "num_kv_expired_reqs_total", "hold"), {"instance": TARGETS["p"], "reason": "hold"}),
    ("PDRevocationPending", level("d", "revoking_seconds", 90), {"instance": TARGETS["d"]}),
    ("PDWriterDead", level("p", "writers_dead", 1), {"instance": TARGETS["p"]}),
    ("PDHooksOff", level("d", "hooks_off", 2), {"instance": TARGETS["d"]}),
]  # fmt: skip
GOOD = recorded(None)


def lasting(rule: dict[str, Any]) -> float:
    return int(rule.get("for", "0m")[:-1]) * SECONDS[rule.get("for", "0m")[-1]]


def fired(alert: str, recording: Scrapes) -> list[dict[str, str]]:
    rule = RULES[alert]
    return [dict(labels) for labels in firing(rule["expr"], recording, lasting(rule), END_S)]


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_is_silent_while_all_is_well(alert: str) -> None:
    assert fired(alert, GOOD) == []


@pytest.mark.parametrize(("alert", "change", "named"), INCIDENTS, ids=[alert for alert, _, _ in INCIDENTS])
def test_an_alert_fires_and_names_what_is_wrong(
    alert: str, change: Callable[[WatchedCluster], None], named: dict[str, str]
) -> None:
    expected = {**named, **({"deployment": "one"} if named else {})}
    assert fired(alert, recorded(change)) == [expected]


@pytest.mark.parametrize(
    ("alert", "change"), [(alert, change) for alert, change, _ in INCIDENTS if lasting(RULES[alert])]
)
def test_an_alert_waits_for_its_time(alert: str, change: Callable[[WatchedCluster], None]) -> None:
    assert fired(alert, recorded(change, since_s=END_S)) == []


def test_each_alert_has_its_incident() -> None:
    assert {alert for alert, _, _ in INCIDENTS} == set(RULES)


def test_a_full_prefill_engine_is_no_full_decode_engine() -> None:
    def change(cluster: WatchedCluster) -> None:
        cluster.engines["p"].update({"vllm:kv_cache_usage_perc": 0.99, "vllm:num_requests_waiting": 7})

    assert fired("PDDecodeCacheFull", recorded(change)) == []


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_how_bad_it_is_what_is_wrong_and_where_to_read(alert: str) -> None:
    rule = RULES[alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    named = next(named for name, _, named in INCIDENTS if name == alert)
    assert used <= named.keys()


@pytest.mark.parametrize("alert", RULES)
def test_metrics_and_codes_of_an_alert_exist(alert: str) -> None:
    expression = RULES[alert]["expr"]
    names = set(re.findall(r"(?:vllm:|ascend_pd_metaserver_)\w+", expression))
    assert names and all(ours(name) or name in OF_VLLM for name in names)
    assert set(re.findall(r"PD-[A-Z]+-\d+", expression)) <= set(CATALOGUE)


def test_vllm_has_the_gauges_that_alerts_and_panels_name() -> None:
    (where,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    text = (Path(where) / "v1" / "metrics" / "loggers.py").read_text()
    assert all(f'name="{name}"' in text for name in OF_VLLM)


@pytest.mark.parametrize(
    "expression",
    [
        "rate(a[5m]) > 0",
        "increase(a[5m]) > 3",
        "increase(a[5m])",
        "increase(a[1h]) > 0",
        "a / b",
        "sum(a)",
        "avg by (b) (a)",
        "a and b",
        "a == 0 b",
        'a{b="c"',
    ],
)
def test_a_form_that_is_not_evaluated_is_an_error(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression, GOOD, END_S)


def test_what_the_evaluator_makes_of_values_is_prometheus_own() -> None:
    """Compared by hand with promtool 2.42 (`promtool test rules`)."""
    pages = [ScrapedPage(at, {"i": "1"}, f'a{{l="x"}} {at / 60}\na{{l="y"}} 5\nb 1\n') for at in (0, 60, 120)]
    pages.append(ScrapedPage(180, {"i": "1"}, 'a{l="x"} 1\n'))
    series = Scrapes(pages)
    x, y, b = (frozenset({("i", "1"), *labels}) for labels in ([("l", "x")], [("l", "y")], []))
    assert evaluate("a", series, 120) == {x: 2, y: 5}
    assert evaluate('a{l!="x"}', series, 120) == {y: 5} and evaluate('a{l=~"x|z"} > 1', series, 120) == {x: 2}
    assert evaluate("sum by (i) (a)", series, 120) == {b: 7} and evaluate("min by (i) (a)", series, 120) == {b: 2}
    assert evaluate("a and on (i) b", series, 120) == {x: 2, y: 5} and evaluate("a unless on (i) b", series, 120) == {}
    assert evaluate("b or a", series, 120) == {b: 1, x: 2, y: 5}
    assert evaluate("increase(a[5m]) > 0", series, 180) == {x: 3}, "a counter that began anew"
    assert evaluate("absent(c)", series, 180) == {frozenset(): 1} and evaluate("absent(b)", series, 180) == {}
    assert evaluate("absent(b)", series, 120 + 300) == {frozenset(): 1}, "gone after five minutes"
