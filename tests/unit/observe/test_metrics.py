# SPDX-License-Identifier: Apache-2.0
"""Operators' metrics: each fact once whatever the TP size, in vLLM's log line and in a real Prometheus registry."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from unit.schedulers.kit import engine, prefill, request
from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.decode.scheduler.core.routes import Ticket
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.geometry.layout import Group
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.observe import tally as tally_module
from vllm_ascend_pd.observe.metrics import PushPromMetrics, PushStats
from vllm_ascend_pd.observe.tally import MAX_TIMES, METRICS, PREFIX, Tally
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.vllm_patches.patience import Patience


def stats_of(tally: Tally) -> PushStats:
    """Return what vLLM gets from one worker or scheduler, after its serialiser."""
    data = tally.take()
    assert data is not None
    return PushStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(data)))


def added(*stats: PushStats) -> PushStats:
    total = PushStats()
    for one in stats:
        total = total.aggregate(one)  # type: ignore[assignment]
    return total


# -- the tally

TELLS = {
    "measure": ("time", "sum", "level"),
    "time": ("time",),
    "add": ("sum",),
    "count": ("count",),
    "totals": ("count",),
    "level": ("level",),
    "raise_level": ("level",),
}


def _called(node: ast.Call) -> str:
    """Return calls of a method of a tally, or of `measure` of P's core."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "measure":
        return "measure"
    on = node.func.value if isinstance(node.func, ast.Attribute) else None
    name = on.attr if isinstance(on, ast.Attribute) else on.id if isinstance(on, ast.Name) else ""
    return node.func.attr if isinstance(node.func, ast.Attribute) and name.endswith("tally") else ""


def test_each_metric_is_reported_somewhere_and_by_what_fits_its_kind() -> None:
    """An unknown name would end P's writer thread at its first use."""
    package, seen = Path(tally_module.__file__).parents[1], set[str]()
    for path in [*package.glob("prefill/**/*.py"), *package.glob("decode/**/*.py"), *package.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            kinds = TELLS.get(_called(node))
            if kinds is not None:
                name = str(node.args[0].value)
                assert name in METRICS, f"{path.name}:{node.lineno} tells {name}, which is no metric"
                assert METRICS[name].kind in kinds, f"{path.name}:{node.lineno} tells {name}, a {METRICS[name].kind}"
                seen.add(name)
    assert seen == set(METRICS)


def test_a_collection_is_reported_once() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.add("bytes_transferred", 5)
    tally.time("xfer_time_seconds", 0.25)
    tally.count("num_failed_transfers", "PD-XFER-001")
    data = tally.take()
    assert data is not None and data["sums"] == {"bytes_transferred": 5}
    assert data["times"] == {"xfer_time_seconds": [0.25]}
    assert data["counts"] == {"num_failed_transfers": {"PD-XFER-001": 1}}
    assert tally.take() is None


def test_a_level_is_reported_while_it_is_not_zero_and_once_when_it_is_again() -> None:
    tally = Tally()
    tally.level("reservations_open", 0)
    assert tally.take() is None
    tally.level("reservations_open", 2)
    for _ in range(2):
        assert list(stats_of(tally).data["levels"]["reservations_open"].values()) == [2]
    tally.level("reservations_open", 0)
    assert list(stats_of(tally).data["levels"]["reservations_open"].values()) == [0]
    assert tally.take() is None


def test_times_between_two_collections_are_bounded() -> None:
    tally = Tally()
    for _ in range(MAX_TIMES + 10):
        tally.time("ready_wait_seconds", 0.001)
    assert len(stats_of(tally).data["times"]["ready_wait_seconds"]) == MAX_TIMES


def test_threads_that_add_at_once_lose_nothing() -> None:
    tally, taken = Tally(), []

    def add() -> None:
        for _ in range(2000):
            tally.add("num_descriptors", 1)

    threads = [threading.Thread(target=add, name=f"adder-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(tally.take())
    for thread in threads:
        thread.join(10)
    taken.append(tally.take())
    assert sum(data["sums"]["num_descriptors"] for data in taken if data) == 8000


# -- across ranks and steps


def test_workers_and_steps_add_up_and_nothing_is_multiplied() -> None:
    """Two workers of P, of which the first reports the times; two steps; each byte was written by one worker."""
    first, second = Tally(), Tally()
    steps = []
    for _ in range(2):
        first.time("xfer_time_seconds", 0.1)
        first.add("bytes_transferred", 600)
        second.add("bytes_transferred", 400)
        steps.append(added(stats_of(first), stats_of(second)))
    total = added(*steps)
    assert total.data["sums"] == {"bytes_transferred": 2000}
    assert total.data["times"] == {"xfer_time_seconds": [0.1, 0.1]}


def test_adding_up_leaves_what_was_added_as_it_was() -> None:
    one, other = Tally(), Tally()
    for tally in (one, other):
        tally.time("ready_wait_seconds", 0.1)
        tally.count("num_failed_recvs", "PD-XFER-004")
        tally.level("writers_dead", 1)
    a, b = stats_of(one), stats_of(other)
    added(a, b)
    assert a.data["times"] == b.data["times"] == {"ready_wait_seconds": [0.1]}
    assert a.data["counts"] == b.data["counts"] == {"num_failed_recvs": {"PD-XFER-004": 1}}
    assert len(a.data["levels"]["writers_dead"]) == len(b.data["levels"]["writers_dead"]) == 1


def test_reasons_stay_apart() -> None:
    tally = Tally()
    for reason in ("PD-XFER-001", "PD-XFER-004", "PD-XFER-001"):
        tally.count("num_failed_transfers", reason)
    assert stats_of(tally).data["counts"]["num_failed_transfers"] == {"PD-XFER-001": 2, "PD-XFER-004": 1}


def test_stats_are_empty_until_something_is_reported() -> None:
    assert PushStats().is_empty()
    assert AscendPushConnector.build_kv_connector_stats().is_empty()  # type: ignore[union-attr]
    tally = Tally()
    tally.level("reservations_open", 1)
    assert not stats_of(tally).is_empty()


# -- vLLM's log line


def test_the_log_line_says_the_same_in_words() -> None:
    tally = Tally()
    for seconds in (0.010, 0.030, 0.020):
        tally.time("xfer_time_seconds", seconds)
    tally.add("bytes_transferred", 3 * 2**20)
    tally.add("num_descriptors", 7)
    tally.count("num_failed_transfers", "PD-XFER-001")
    tally.count("num_failed_transfers", "PD-XFER-004")
    tally.level("writers_dead", 2)
    assert stats_of(tally).reduce() == {
        "xfer time, median ms": 20.0,
        "xfer time, worst ms": 30.0,
        "MiB pushed": 3.0,
        "descriptors": 7,
        "failed transfers": 2,
        "writers dead": 2,
    }


def test_vllms_own_logger_prints_it_once_per_interval() -> None:
    logging = KVConnectorLogging(None)
    logging.connector_cls = AscendPushConnector
    lines: list[str] = []
    for amount in (2**20, 2**21):
        tally = Tally()
        tally.add("bytes_transferred", amount)
        logging.observe(stats_of(tally).data)
    logging.log(lambda text, *values: lines.append(text % values))
    logging.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: MiB pushed=3.0"]


def test_a_level_in_the_log_line_is_the_sum_over_the_workers_whichever_of_them_changed() -> None:
    """The line's accumulator is a new one after each interval, and each worker knows its own level only."""
    logging, scrape = KVConnectorLogging(None), Scrape()
    logging.connector_cls = AscendPushConnector
    first, second = Tally(), Tally()
    said: list[tuple[str, float | None]] = []
    for levels in ((2, 3), (1, 3), (1, 3), (1, 0), (0, 0), (0, 0)):
        for tally, value in zip((first, second), levels, strict=True):
            tally.level("writers_dead", value)
        if step := [PushStats(data=data) for data in (first.take(), second.take()) if data is not None]:
            logging.observe(added(*step).data)
            scrape.metrics.observe(added(*step).data)
        logging.log(lambda text, *values: said.append((text % values, scrape.value("writers_dead"))))
    assert said == [(f"KV Transfer metrics: writers dead={value}", value) for value in (5, 4, 4, 1, 0)]


# -- /metrics


class Scrape:
    """A registry of its own, filled through the class that vLLM uses."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def bound(kind: Any) -> Any:
            return lambda **keys: kind(registry=registry, **keys)

        types: Any = {Counter: bound(Counter), Gauge: bound(Gauge), Histogram: bound(Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        self.labels = {0: ["m", "0"], 1: ["m", "1"]}
        self.metrics = PushPromMetrics(config, types, ["model_name", "engine"], self.labels)

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        return self.registry.get_sample_value(PREFIX + name, {"model_name": "m", "engine": str(engine), **labels})


def test_every_metric_has_its_name_and_words_at_metrics() -> None:
    page = generate_latest(Scrape().registry).decode()
    for name, metric in METRICS.items():
        assert f"# HELP {PREFIX}{name}" in page and metric.words in page
        kind = {"time": "histogram", "sum": "counter", "count": "counter", "level": "gauge"}[metric.kind]
        assert f"# TYPE {PREFIX}{name}{'_total' if kind == 'counter' else ''} {kind}" in page


def test_prometheus_gets_sums_times_reasons_and_levels() -> None:
    scrape, tally = Scrape(), Tally()
    for _ in range(2):
        tally.add("bytes_transferred", 100)
        tally.time("xfer_time_seconds", 0.02)
        tally.count("num_failed_recvs", "PD-XFER-004")
        tally.level("reservations_open", 3)
        scrape.metrics.observe(stats_of(tally).data)
        tally.level("reservations_open", 1)
    assert scrape.value("bytes_transferred_total") == 200
    assert scrape.value("xfer_time_seconds_count") == 2
    assert scrape.value("xfer_time_seconds_sum") == pytest.approx(0.04)
    assert scrape.value("xfer_time_seconds_bucket", le="0.01") == 0
    assert scrape.value("xfer_time_seconds_bucket", le="0.025") == 2
    assert scrape.value("num_failed_recvs_total", reason="PD-XFER-004") == 2
    assert scrape.value("reservations_open") == 3


def test_engines_are_distinguished() -> None:
    scrape, tally = Scrape(), Tally()
    tally.add("bytes_transferred", 7)
    scrape.metrics.observe(stats_of(tally).data, engine_idx=1)
    assert (scrape.value("bytes_transferred_total", 0), scrape.value("bytes_transferred_total", 1)) == (0, 7)


def test_a_level_is_the_sum_over_the_workers_of_one_message() -> None:
    scrape, first, second = Scrape(), Tally(), Tally()
    first.level("writers_dead", 2)
    second.level("writers_dead", 1)
    both = added(stats_of(first), stats_of(second))
    assert both.reduce()["writers dead"] == 3
    scrape.metrics.observe(both.data)
    assert scrape.value("writers_dead") == 3
    first.level("writers_dead", 0)
    scrape.metrics.observe(added(stats_of(first), stats_of(second)).data)
    assert scrape.value("writers_dead") == 1
    scrape.metrics.observe(stats_of(second).data)  # the first has said its 0
    assert scrape.value("writers_dead") == 1


FRONT_END = """
import json, sys
from unit.observe.test_metrics import Scrape
metrics = Scrape().metrics
print("ready", flush=True)
for line in sys.stdin:
    metrics.observe(json.loads(line), engine_idx=0)
    print("done", flush=True)
"""


class FrontEnd:
    """A process of its own, like one of several API servers: it gets some of the engine's messages."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FRONT_END],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> FrontEnd:
        self._wait_for("ready")
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()

    def observe(self, stats: PushStats) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(stats.data) + "\n")
        self.process.stdin.flush()
        self._wait_for("done")

    def _wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == word + "\n"


def test_a_level_is_the_engines_whichever_api_server_got_its_message(tmp_path: Path) -> None:
    registry, first, second = CollectorRegistry(), Tally(), Tally()
    MultiProcessCollector(registry, str(tmp_path))

    def shown() -> list[float]:
        samples = (sample for metric in registry.collect() for sample in metric.samples)
        return [s.value for s in samples if s.name == f"{PREFIX}writers_dead" and s.labels["engine"] == "0"]

    with FrontEnd(tmp_path) as one, FrontEnd(tmp_path) as other:
        assert shown() == [0], "before the first message"
        seen = []
        for front_end, levels in ((one, (2, 3)), (other, (0, 3)), (one, (0, 3)), (other, (0, 0))):
            first.level("writers_dead", levels[0])
            second.level("writers_dead", levels[1])
            front_end.observe(added(*(PushStats(data=d) for d in (first.take(), second.take()) if d is not None)))
            seen.append(shown())
    assert seen == [[5], [3], [3], [0]]


# -- failures of whole requests: the scheduler counts them, once for all ranks


def test_a_failed_push_counts_once_over_two_workers() -> None:
    scheduler = prefill()
    scheduler.failed(
        frozenset({("d:1:u", Failure("PD-XFER-003", "why")), ("d:2:u", Failure("PD-XFER-001"))})
    )  # the first worker's step
    scheduler.failed(frozenset({("d:1:u", Failure("PD-XFER-004"))}))  # the second worker's, a step later
    data = scheduler.stats()
    assert data is not None
    assert data["counts"]["num_failed_transfers"] == {"PD-XFER-003": 1, "PD-XFER-001": 1}
    assert data["counts"]["num_kv_expired_reqs"] == {"PD-XFER-001": 1}
    assert scheduler.stats() is None


def loading(recomputes: bool) -> tuple[DecodeScheduler, TransferId]:
    """A D scheduler with one open load of request `r`."""
    scheduler = DecodeScheduler(engine(), Patience(lambda: 0), recomputes=recomputes)
    asked = request()
    scheduler.book.route("r", lambda: Ticket("http://metaserver", "ticket"), asked)
    assert scheduler.book.wanted("r", asked.num_prompt_tokens, 0)
    bind = scheduler.book.reserve("r", asked.num_prompt_tokens, [[1, 2, 3]], [Group(4)], 30.0, "u")
    return scheduler, bind.transfer


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_failed_load_counts_once_over_two_workers(recomputes: bool) -> None:
    scheduler, _ = loading(recomputes)
    scheduler.ended(frozenset({LoadEnd("r", Failure("PD-XFER-001"), "p.1")}))
    scheduler.ended(frozenset({LoadEnd("r", Failure("PD-XFER-004"), "p.1")}))
    assert scheduler.received("r")
    assert not scheduler.received("r")
    data = scheduler.stats()
    assert data is not None
    expected = {"num_failed_recvs": {"PD-XFER-001": 1}, "num_kv_expired_reqs": {"PD-XFER-001": 1}}
    assert data["counts"] == {**expected, **({"num_recomputed_reqs": {"PD-XFER-001": 1}} if recomputes else {})}


def test_a_complete_load_counts_no_failure() -> None:
    scheduler, _ = loading(recomputes=True)
    assert scheduler.received("r")
    assert scheduler.stats() is None


def test_open_reservations_and_quarantined_blocks_are_levels_of_decode() -> None:
    scheduler, transfer = loading(recomputes=True)
    data = scheduler.stats()
    assert data is not None and set(data["levels"]) == {"reservations_open"}
    scheduler.book.answered(transfer, Failure("PD-META-006", "prefill failed"))
    data = scheduler.stats()
    assert data is not None and list(data["levels"]["blocks_quarantined"].values()) == [3]
    scheduler.received("r")
    data = scheduler.stats()
    assert data is not None
    assert {name: sum(value.values()) for name, value in data["levels"].items()} == {
        "reservations_open": 0,
        "blocks_quarantined": 0,
    }
