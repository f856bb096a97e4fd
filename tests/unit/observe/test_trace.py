# SPDX-License-Identifier: Apache-2.0
"""Observation never affects what it observes: a full disk ends the trace, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from unit.device.caches import CacheModel
from unit.kits.connectors import connected_pair, output
from unit.kits.watching import running, until
from unit.router.cluster import cluster
from unit.runtime.sites import DecodeSite, PrefillSite
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.trace import TraceFile

FULL = Path("/dev/full")
STAGES = (
    "bound",
    "gate_open",
    "ready",
    "layer_computed",
    "step",
    "layer_submitted",
    "layer_pushed",
    "push_closed",
    "closed",
)


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceFile]:
    """A trace file on a full disk: writes fail at the first flush."""
    if not FULL.exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr(trace, "_opened", lambda _: FULL.open("a", buffering=1))
    made = TraceFile(str(tmp_path), "test")
    yield made
    made.close()


def test_a_full_disk_ends_the_trace_with_one_line(full: TraceFile, caplog: pytest.LogCaptureFixture) -> None:
    assert trace.enabled()
    for _ in range(3):
        trace.emit("bound", transfer="t")
    until(lambda: not trace.enabled(), "the end of the trace")
    assert [r.levelno for r in caplog.records if r.name == trace.__name__] == [logging.ERROR]
    assert "No space left" in caplog.text and "restart" in caplog.text


def test_a_disk_that_hangs_stops_nothing_and_what_it_does_not_take_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is a pipe that nobody reads at first: a write into it waits in the kernel, as for a disk."""
    reading, writing = os.pipe()
    monkeypatch.setattr(trace, "_opened", lambda _: os.fdopen(writing, "w", buffering=1 << 16))
    monkeypatch.setattr(trace, "MAX_WAITING", 2000, raising=False)
    file = TraceFile(str(tmp_path), "test")
    emitted = threading.Event()

    def work() -> None:
        for number in range(5000):
            trace.emit("bound", transfer="t" * 100, number=number)
        emitted.set()

    threading.Thread(target=work, name="work", daemon=True).start()
    unhindered = emitted.wait(60)
    said = [r.levelno for r in caplog.records if r.name == trace.__name__]
    written = bytearray()
    with os.fdopen(reading, "rb", buffering=0) as disk:  # it goes on
        read = threading.Thread(target=lambda: written.extend(disk.readall()), name="disk")
        read.start()
        file.close()
        read.join(60)
    assert unhindered, "the disk has stopped what was traced"
    assert said == [logging.ERROR], "said once"
    lines = [json.loads(line) for line in written.splitlines()]
    taken = [line["number"] for line in lines if line["stage"] == "bound"]
    assert taken == sorted(taken) and 0 < len(taken) < 5000
    assert sum(line["lines"] for line in lines if line["stage"] == "dropped") == 5000 - len(taken)


def test_the_end_of_a_process_waits_a_bounded_time_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(trace, "_opened", lambda _: os.fdopen(writing, "w", buffering=1 << 16))
    monkeypatch.setattr(trace, "CLOSE_S", 0.1)
    file = TraceFile(str(tmp_path), "test")
    for _ in range(3000):
        trace.emit("bound", transfer="t" * 100)
    file.close()
    assert "did not end within" in caplog.text and not trace.enabled()
    with os.fdopen(reading, "rb", buffering=0) as disk:  # it goes on
        assert disk.readall()
    until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "pd-trace-test"], "its thread", 30.0
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_subscriber_that_raises_at_any_stage_loses_no_transfer(stage: str) -> None:
    """Each stage is reported in the middle of other work: the engine's, the writer's or the loop's."""
    raised: list[str] = []

    def broken(name: str, facts: Any) -> None:
        if name == stage:
            raised.append(name)
            raise OSError(28, "No space left on device")

    unsubscribe = trace.subscribe(broken)
    model = CacheModel("opaque")
    p, d = PrefillSite(model, 1), DecodeSite(model, 1)
    try:
        with running(p, d):
            first, second = d.reserve("first", 30), d.reserve("second", 9)
            d.step()  # both are bound in one step
            p.prefill(first)
            p.prefill(second)
            d.complete(first, second)
    finally:
        unsubscribe()
    assert raised == [stage], "it happened, once, and the subscriber was dropped"


def _broken(stages: tuple[str, ...]) -> tuple[Callable[[], None], list[str]]:
    """Subscribe one failing subscriber for each of these stages; return a function that removes them, and their
    failures."""
    raised: list[str] = []

    def breaking(wanted: str) -> trace.Subscriber:
        def broken(stage: str, facts: Any) -> None:
            if stage == wanted:
                raised.append(stage)
                raise OSError(28, "No space left on device")

        return broken

    removers = [trace.subscribe(breaking(stage)) for stage in stages]

    def remove() -> None:
        for each in removers:
            each()

    return remove, raised


def test_the_schedulers_go_on_when_their_trace_fails() -> None:
    stages = ("reserved", "posted", "attached", "prefilled", "reported", "released")
    remove, raised = _broken(stages)
    try:
        with connected_pair() as pair:
            asked = pair.load()
            pair.prefilled(asked)
            until(pair.results, "the load")
            connector_output = KVConnectorOutput(finished_recving={"r"}, kv_connector_worker_meta=pair.news())
            pair.decode.update_connector_output(connector_output)
            pair.metaserver.end = b'{"event":"prefilled"}\n'
            blocks_held, _ = pair.prefill.request_finished_all_groups(asked, ([1, 6],))
            pair.decode.request_finished_all_groups(asked, ([3, 5],))
            sent: list[str] = []
            finished = frozenset({"r-p"})
            until(lambda: sent.extend(pair.prefill_step(output(), finished=finished).finished_sending) or sent, "sent")
            pair.prefill.update_connector_output(KVConnectorOutput(finished_sending=set(sent)))
            assert blocks_held and connector_output.finished_recving == {"r"} and sent == ["r-p"]
    finally:
        remove()
    assert {"posted", "attached", "reported", "released"} <= set(raised)


def test_the_metaserver_goes_on_when_its_trace_fails() -> None:
    remove, raised = _broken(("meta.decode", "meta.reserved", "meta.prefill", "meta.prefilled", "meta.first_byte"))
    try:
        with cluster() as c:
            assert [c.complete(f"p{n}", stream=bool(n % 2)).status_code for n in range(3)] == [200] * 3
    finally:
        remove()
    assert len(raised) == len(set(raised)) == 5, raised


@pytest.mark.parametrize("max_bytes", [0, 100, 5000])
def test_a_file_that_takes_no_more_stops_no_process(max_bytes: int, tmp_path: Path) -> None:
    """A limit on the size of files, which the kernel enforces like a full disk; 0: full before the start."""
    program = (
        "import resource\n"
        "from vllm_ascend_pd.observe import trace\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))\n"
        f"file = trace.TraceFile({str(tmp_path)!r}, 'test')\n"
        "for n in range(3000):\n"
        "    trace.emit('bound', transfer='t' * 60)\n"
        "file._thread.join(30)\n"
        "print(trace.enabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("the trace ends here") == 1
    (written,) = tmp_path.iterdir()
    assert written.stat().st_size == max_bytes


def test_the_end_of_a_process_is_not_disturbed_by_a_full_disk() -> None:
    program = (
        "import pathlib, sys, tempfile\n"
        "from vllm_ascend_pd.observe import trace\n"
        "file = trace.TraceFile(tempfile.mkdtemp(), 'test')\n"
        "file._file = pathlib.Path('/dev/full').open('a', buffering=1 << 16)\n"
        "trace.emit('bound', transfer='t')\n"  # stays in the buffer until the end
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
