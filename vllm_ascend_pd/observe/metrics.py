# SPDX-License-Identifier: Apache-2.0
"""Classes that vLLM asks a connector for: they bring what is counted (tally.py) to vLLM's log line and /metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_ascend_pd.observe.tally import METRICS, PREFIX, Metric, empty

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass  # else the base's __init__ would not call __post_init__
class PushStats(KVConnectorStats):
    """vLLM's container for a tally's data: plain dictionaries, added up across workers and steps."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = empty()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        mine, theirs = self.data, other.data
        for name, times in theirs["times"].items():
            mine["times"].setdefault(name, []).extend(times)
        for name, amount in theirs["sums"].items():
            mine["sums"][name] = mine["sums"].get(name, 0) + amount
        for name, reasons in theirs["counts"].items():
            mine["counts"][name] = dict(Counter(mine["counts"].get(name, {})) + Counter(reasons))
        for name, by_reporter in theirs["levels"].items():
            mine["levels"][name] = {**mine["levels"].get(name, {}), **by_reporter}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values of the log line: totals, and the median and worst of each time."""
        words: dict[str, int | float] = {}
        for name, times in self.data["times"].items():
            label = name.removesuffix("_seconds").replace("_", " ")
            words[f"{label}, median ms"] = round(statistics.median(times) * 1e3, 3)
            words[f"{label}, worst ms"] = round(max(times) * 1e3, 3)
        for name, amount in self.data["sums"].items():
            if name == "bytes_transferred":
                words["MiB pushed"] = round(amount / 2**20, 1)
            else:
                words[name.replace("num_", "").replace("_", " ")] = amount
        for name, reasons in self.data["counts"].items():
            words[name.replace("num_", "").replace("_", " ")] = sum(reasons.values())
        for name, value in self.data["levels"].items():
            words[name.replace("_", " ")] = sum(value.values())
        return words


class PushPromMetrics(KVConnectorPromMetrics):
    """The same data at /metrics, under vLLM's labels and, for counts, a reason."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_engine: dict[str, Any] = {}
        self._by_reason: dict[str, Any] = {}
        for name, metric in METRICS.items():
            self._declare(name, metric, list(labelnames))

    def _declare(self, name: str, metric: Metric, labels: list[str]) -> None:
        full = PREFIX + name
        if metric.kind == "count":
            self._by_reason[name] = self._counter_cls(
                name=full, documentation=metric.words, labelnames=[*labels, "reason"]
            )
            return
        made: Any
        if metric.kind == "time":
            histogram: Any = self._histogram_cls
            made = histogram(name=full, documentation=metric.words, buckets=list(SECONDS), labelnames=labels)
        elif metric.kind == "sum":
            made = self._counter_cls(name=full, documentation=metric.words, labelnames=labels)
        else:
            # An engine with several API servers sends each message to one of them: the newest is the engine's.
            gauge: Any = self._gauge_cls
            made = gauge(name=full, documentation=metric.words, labelnames=labels, multiprocess_mode="mostrecent")
        self._by_engine[name] = create_metric_per_engine(made, self.per_engine_labelvalues)
        if metric.kind == "level":
            for level in self._by_engine[name].values():
                level.set(0)  # of several processes, a gauge that none has set is not at /metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data: Mapping[str, Mapping[str, Any]] = transfer_stats_data
        for name, times in data["times"].items():
            for seconds in times:
                self._by_engine[name][engine_idx].observe(seconds)
        for name, amount in data["sums"].items():
            self._by_engine[name][engine_idx].inc(amount)
        for name, by_reporter in data["levels"].items():
            # A reporter that is not in the message has a 0. What this process had before may be out of date.
            self._by_engine[name][engine_idx].set(sum(by_reporter.values()))
        labels = self.per_engine_labelvalues[engine_idx]
        for name, reasons in data["counts"].items():
            for reason, amount in reasons.items():
                self._by_reason[name].labels(*labels, reason).inc(amount)
