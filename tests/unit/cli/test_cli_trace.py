# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd trace` on a recorded trace (a real pair, TP 2 → 1, two chunks), as one host and as several."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.cli.__main__ import main
from vllm_ascend_pd.observe.trace import TraceFile, emit
from vllm_ascend_pd.router import page
from vllm_ascend_pd.viewer.timeline import REPORTED, RESERVED, Trace, picture, table

RECORDED = Path(__file__).parents[1] / "traces" / "tp2_to_tp1"
TRANSFER = "f8290347/28/d4729bfa"
TRIP_S = 0.2  # upper bound of the round trips in the recording


def write(path: Path, events: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def two_hosts(tmp_path: Path, *, monotonic: float, wall: float) -> Path:
    """P's files as from another host: its monotonic clock and its wall clock are shifted."""
    for path in RECORDED.glob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        if path.stem.startswith("prefill"):
            for event in events:
                event["t"] += monotonic
                if "wall" in event:
                    event["wall"] += wall
            write(tmp_path / "p-host" / path.name, events)
        else:
            write(tmp_path / "d-host" / path.name, events)
    return tmp_path


def metaserver(directory: Path) -> None:
    start = next(e.t for e in Trace(RECORDED).events if e.stage == "reserved")
    opened = json.loads((RECORDED / "decode-scheduler-25261.jsonl").read_text().splitlines()[0])
    events = [
        {**opened, "role": "metaserver"},
        {"t": start - 0.01, "stage": "meta.decode", "ticket": "ticket-1", "decode": "127.0.0.1:1"},
        {"t": start + 0.001, "stage": "meta.reserved", "ticket": "ticket-1", "transfer": TRANSFER},
        {"t": start + 0.002, "stage": "meta.prefill", "ticket": "ticket-1", "transfer": TRANSFER, "prefill": "p"},
        {"t": start + 0.5, "stage": "meta.decode", "ticket": "another", "decode": "127.0.0.1:1"},
        {"t": start + 0.7, "stage": "meta.prefilled", "ticket": "ticket-1", "transfer": TRANSFER},
    ]
    write(directory / "metaserver-9.jsonl", events)


LOST = "f8290347/7/aaaaaaaa"
LATE = "The transfer missed its deadline (metaserver)."


def no_answer(directory: Path) -> None:
    """Records of D's scheduler and the metaserver for a transfer that no prefill engine answered within 30 s."""
    opened = {"t": 0.0, "stage": "clock", "wall": 1000.0}
    well = {"code": "", "detail": "", "prefill": "p"}
    late = {"code": "PD-XFER-001", "detail": LATE, "prefill": ""}
    decode = [
        {"t": 1.0, "stage": "reserved", "transfer": LOST, "request": "cmpl-7", "ticket": "t", "first": 0, "end": 99},
        {"t": 1.001, "stage": "posted", "transfer": LOST, "attempt": 1},
        {"t": 1.004, "stage": "accepted", "transfer": LOST, **well},
        {"t": 31.0, "stage": "metaserver_failed", "transfer": LOST, **late},
        {"t": 31.25, "stage": "reported", "transfer": LOST, "request": "cmpl-7"},
    ]
    about = {"ticket": "t", "transfer": LOST}
    between = [
        {"t": 0.99, "stage": "meta.decode", "ticket": "t", "decode": "d"},
        {"t": 1.002, "stage": "meta.reserved", **about},
        {"t": 1.003, "stage": "meta.prefill", "prefill": "p", **about},
        {"t": 31.01, "stage": "meta.prefill_failed", "why": "D gave it up", **about},
    ]
    write(directory / "decode-scheduler-1.jsonl", [{**opened, "role": "decode-scheduler"}, *decode])
    write(directory / "metaserver-2.jsonl", [{**opened, "role": "metaserver"}, *between])


# -- reading


def test_the_way_of_the_recorded_transfer() -> None:
    trace = Trace(RECORDED)
    assert trace.transfers() == [TRANSFER]
    way = trace.timeline_of(TRANSFER)
    assert way.failure == "" and way.failed_writes == 0
    assert way.moments[RESERVED] < way.moments["P worker begin"] < way.moments["D worker ready"] < way.moments[REPORTED]
    assert len(way.computed) == 2 * 2 * 4  # workers, steps, layers
    sizes = [e.facts["bytes"] for e in trace.events if e.stage == "done"]
    assert way.nbytes >= sum(sizes) > 0
    assert 0.0 < way.hidden() < 1.0


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "decode-worker-25456.jsonl"
    path.write_text(path.read_text() + '{"t": 1.0, "stage": "clo')
    assert len(Trace(tmp_path).events) == len(Trace(RECORDED).events)


@pytest.mark.parametrize("word", [TRANSFER, "f8290347/28", "cmpl-1"])
def test_a_transfer_is_found_by_its_id_its_beginning_or_its_request(word: str) -> None:
    assert Trace(RECORDED).find(word) == TRANSFER


def test_what_the_metaserver_said_of_the_ticket_belongs_to_the_transfer(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    metaserver(tmp_path)
    way = Trace(tmp_path).timeline_of(TRANSFER)
    stages = [name for name in sorted(way.moments, key=way.moments.__getitem__) if name.startswith("metaserver")]
    assert stages == ["metaserver decode", "metaserver reserved", "metaserver prefill", "metaserver prefilled"]
    assert way.moments["metaserver decode"] < way.moments[RESERVED]


WORKER = {"stage": "closed", "transfer": LOST}


@pytest.mark.parametrize(
    ("records", "failure"),
    [
        ([], f"PD-XFER-001 {LATE}"),  # no file of a worker
        ([{"t": 31.2, **WORKER, "ok": False, "code": "PD-XFER-004", "detail": "P is gone"}], "PD-XFER-004 P is gone"),
        ([{"t": 30.9, **WORKER, "ok": True, "code": "", "detail": ""}], ""),  # the call broke after its load
        (
            [{"t": 31.2, **WORKER, "done": False, "bytes": 0}],
            f"PD-XFER-001 {LATE}",
        ),  # P's record has no result of a load
    ],
)
def test_a_transfer_failed_as_the_decode_worker_says_or_else_with_the_first_code(
    tmp_path: Path, records: list[dict[str, Any]], failure: str
) -> None:
    no_answer(tmp_path)
    write(tmp_path / "decode-worker-3.jsonl", [{"t": 0.0, "stage": "clock", "wall": 1000.0}, *records])
    assert Trace(tmp_path).timeline_of(LOST).failure == failure


# -- clocks


def test_files_of_one_host_have_one_clock() -> None:
    (clock,) = Trace(RECORDED).clocks
    assert clock.shift == 0.0 and len(clock.sources) == 4


@pytest.mark.parametrize(("monotonic", "wall"), [(5000.0, 0.0), (5000.0, 2.5), (-300.0, -1.0), (0.3, 0.0)])
def test_another_hosts_clock_is_found_from_begin_and_ready(tmp_path: Path, monotonic: float, wall: float) -> None:
    """With both of its clocks shifted, its events are placed as before."""
    trace = Trace(two_hosts(tmp_path, monotonic=monotonic, wall=wall))
    mine, other = trace.clocks
    assert [source.split("/")[0] for source in mine.sources] == ["d-host"] * 2
    assert [source.split("/")[0] for source in other.sources] == ["p-host"] * 2
    assert other.error_s is not None and 0 < other.error_s <= TRIP_S / 2
    assert abs(other.shift + monotonic) <= other.error_s
    was = {(e.stage, e.source.split("/")[-1], json.dumps(dict(e.facts))): e.t for e in Trace(RECORDED).events}
    for event in trace.events:
        if event.stage != "clock":
            key = event.stage, event.source.split("/")[-1], json.dumps(dict(event.facts))
            assert abs(event.t - was[key]) <= other.error_s + 1e-6


def test_the_shortest_round_trip_decides(tmp_path: Path) -> None:
    """A READY that took a second on its way back bounds the offset badly; one that took a millisecond bounds it
    well."""
    ask = {"push": "x", "contributor": "P0.0", "d_rank": 0, "transfer": "t"}
    p = [{"t": 100.0, "stage": "clock", "wall": 1000.0}]
    d = [{"t": 0.0, "stage": "clock", "wall": 1000.0}]
    for seq, (sent, answered, back) in enumerate([(101.0, 1.001, 102.0), (103.0, 3.0005, 103.001)], 1):
        p += [{"t": sent, "stage": "begin", "seq": seq, **ask}]
        p += [{"t": back, "stage": "ready", "seq": seq, "waited": back - sent, **ask}]
        d += [{"t": answered, "stage": "ready", "seq": seq, **ask}]
    write(tmp_path / "decode-worker-1.jsonl", d)
    write(tmp_path / "prefill-worker-2.jsonl", p)
    _, clock = Trace(tmp_path).clocks
    assert clock.shift == pytest.approx(-100.0, abs=1e-6)
    assert clock.error_s == pytest.approx(0.0005)


def test_a_host_that_nothing_was_said_with_is_related_by_the_wall_clock(tmp_path: Path) -> None:
    write(tmp_path / "decode-worker-1.jsonl", [{"t": 10.0, "stage": "clock", "wall": 1000.0}])
    write(tmp_path / "x" / "metaserver-2.jsonl", [{"t": 500.0, "stage": "clock", "wall": 1003.0}])
    trace = Trace(tmp_path)
    assert [event.t for event in trace.events] == [10.0, 13.0]
    assert trace.clocks[1].error_s is None
    assert "by the wall clock: x/metaserver-2" in table(trace)[-1]


# -- the command


def test_the_text_is_the_table_and_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(RECORDED)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].startswith(TRANSFER)
    assert "\n".join(picture(Trace(RECORDED).timeline_of(TRANSFER))) in said
    for stage in ("D scheduler reserved", "P worker begin", "D worker done", "D scheduler reported"):
        assert stage in said
    assert said.count("  layer ") == 8


@pytest.mark.parametrize("words", [[], ["--transfer", "cmpl-7"]])
def test_a_transfer_that_failed_before_any_layer_has_its_moments_and_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    no_answer(tmp_path)
    assert main(["trace", str(tmp_path), *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-12:] == [
        f"transfer {LOST}, milliseconds after D reserved its blocks",
        "      -10.0  metaserver decode",
        "        0.0  D scheduler reserved",
        "        1.0  D scheduler posted",
        "        2.0  metaserver reserved",
        "        3.0  metaserver prefill",
        "        4.0  D scheduler accepted",
        "    30000.0  D scheduler metaserver_failed",
        "    30010.0  metaserver prefill_failed",
        "    30250.0  D scheduler reported",
        f"  failed: PD-XFER-001 {LATE}",
        "  no layer was pushed",
    ]
    assert words or f"PD-XFER-001 {LATE}" in said[1]  # in the table's line


def test_the_status_pages_click_shows_the_same(tmp_path: Path) -> None:
    no_answer(tmp_path)
    shown = page.timeline(str(tmp_path), LOST)["picture"]
    assert shown == "\n".join(picture(Trace(tmp_path).timeline_of(LOST)))
    assert "D scheduler metaserver_failed" in shown and f"failed: PD-XFER-001 {LATE}" in shown


def test_layers_that_were_computed_are_shown_though_no_byte_left(tmp_path: Path) -> None:
    """One layer, for which READY never came; the push ends at its deadline."""
    no_answer(tmp_path)
    of_p = {"transfer": LOST, "d_rank": 0, "push": "x", "contributor": "P0.0"}
    events = [
        {"t": 0.0, "stage": "clock", "wall": 1000.0},
        {"t": 1.5, "stage": "begin", "seq": 1, **of_p},
        {"t": 1.6, "stage": "step", "transfer": LOST, "step": 1, "before": 0, "after": 99, "tokens": 99},
        {"t": 1.7, "stage": "layer_computed", "step": 1, "layer": 0, "of": 1, "title": "l.0 (kv)"},
        {"t": 30.0, "stage": "push_closed", "transfer": LOST, "ok": False, "code": "PD-XFER-004", "detail": "silent"},
    ]
    write(tmp_path / "prefill-worker-3.jsonl", events)
    said = picture(Trace(tmp_path).timeline_of(LOST))
    assert {"    29000.0  P worker push_closed", "  failed: PD-XFER-004 silent", "  no layer was pushed"} <= set(said)
    (row,) = (line for line in said if line.startswith("  layer "))
    assert row.count("c") == 1 and row.endswith("| l.0 (kv)")


def chrome(tmp_path: Path, directory: Path, *words: str) -> list[dict[str, Any]]:
    target = tmp_path / "trace.json"
    assert main(["trace", str(directory), "--perfetto", str(target), *words]) == 0
    content = json.loads(target.read_text())
    assert content["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_perfetto_gets_processes_spans_marks_and_arrows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = chrome(tmp_path, RECORDED)
    assert capsys.readouterr().out == ""
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {path.stem for path in RECORDED.glob("*.jsonl")}
    writes = [e for e in events if e["ph"] == "X" and e["cat"] == "layer_pushed"]
    assert len(writes) == len([e for e in Trace(RECORDED).events if e.stage == "layer_pushed"]) > 0
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["tid"] > 0 for e in events if e["ph"] == "X")
    whole = [e for e in events if e["ph"] == "X" and e["name"] == TRANSFER]
    assert {e["pid"] for e in whole} == {names["decode-scheduler-25261"], names["decode-worker-25456"]}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert set(starts) == set(ends) and len(starts) == 2
    assert all(starts[key]["ts"] <= ends[key]["ts"] and starts[key]["pid"] != ends[key]["pid"] for key in starts)


def test_perfetto_gets_the_marks_of_a_failed_transfer_and_how_long_each_side_had_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_answer(tmp_path / "all")
    events = chrome(tmp_path, tmp_path / "all", "--transfer", LOST)
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert marks == ["meta.decode", "reserved", "posted", "meta.reserved", "meta.prefill", "accepted",
                     "metaserver_failed", "meta.prefill_failed", "reported"]  # fmt: skip
    whole = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in whole} == {f"{LOST} FAILED"}
    assert [round(e["dur"] / 1e6, 3) for e in whole] == [30.008, 30.25]
    assert {e["args"]["failure"] for e in whole} == {f"PD-XFER-001 {LATE}"}
    assert capsys.readouterr().out == ""


def test_one_transfer_can_be_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RECORDED, tmp_path / "all")
    metaserver(tmp_path / "all")
    events = chrome(tmp_path, tmp_path / "all", "--transfer", "f8290347/28", "--text")
    stages = {e["name"] for e in events if e["ph"] == "i"}
    assert {"meta.decode", "reserved", "begin", "done"} <= stages
    assert sum(e["name"] == "meta.decode" for e in events) == 1  # the other ticket's event is left out
    assert capsys.readouterr().out.startswith(f"transfer {TRANSFER}")


@pytest.mark.parametrize("words", [["nowhere"], [str(RECORDED), "--transfer", "unknown"]])
def test_what_is_not_there_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words]) == 2
    assert capsys.readouterr().err.startswith("PD-CONF-003")


def test_what_a_process_writes_is_what_the_command_reads(tmp_path: Path) -> None:
    written = TraceFile(str(tmp_path), "decode-scheduler")
    emit("reserved", transfer="d/1/u", request="r", ticket="t")
    emit("reported", transfer="d/1/u", request="r")
    written.close()
    emit("reported", transfer="d/2/u", request="r")
    trace = Trace(tmp_path)
    assert trace.transfers() == ["d/1/u"]
    assert list(trace.timeline_of("d/1/u").moments) == [RESERVED, REPORTED]


def test_the_files_of_a_process_are_a_bounded_ring_and_read_as_one(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "decode-scheduler", max_bytes=20_000)
    try:
        for number in range(1000):
            emit("reserved", transfer=f"t/{number}", request="r")
    finally:
        file.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 25_000
    trace = Trace(tmp_path)
    kept = trace.transfers()
    assert kept == [f"t/{number}" for number in range(1000 - len(kept), 1000)] and 100 < len(kept) < 400
    assert len({event.source for event in trace.events}) == 1 and len(trace.clocks) == 1


def test_a_process_with_the_pid_of_an_ended_one_goes_on_with_its_ring(tmp_path: Path) -> None:
    """In containers each start has the same pid."""
    for start in range(30):
        file = TraceFile(str(tmp_path), "decode-scheduler", max_bytes=20_000)
        for number in range(50):
            emit("reserved", transfer=f"t/{start}/{number}", request="r")
        file.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 25_000
    kept = Trace(tmp_path).transfers()
    assert kept == [f"t/{start}/{number}" for start in range(30) for number in range(50)][-len(kept) :]
    assert len(kept) > 100


def test_a_line_that_a_killed_process_left_torn_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / f"decode-scheduler-{os.getpid()}.jsonl"
    path.write_text('{"t": 1.0, "sta')
    file = TraceFile(str(tmp_path), "decode-scheduler")
    file.close()
    trace = Trace(tmp_path)
    assert [event.stage for event in trace.events] == ["clock"] and len(trace.skipped) == 1


def test_two_processes_of_one_pid_write_a_file_each(tmp_path: Path) -> None:
    """They are of two containers that share the directory. The lock is of the open file: one process shows it too."""
    first = TraceFile(str(tmp_path), "decode-scheduler", max_bytes=20_000)
    second = TraceFile(str(tmp_path), "decode-scheduler", max_bytes=20_000)
    for number in range(200):
        emit("reserved", transfer=f"t/{number}", request="r")
    third = TraceFile(str(tmp_path), "decode-scheduler")
    for file in (first, second, third):
        file.close()
    pid, trace = os.getpid(), Trace(tmp_path)
    sides = {event.source: event.side for event in trace.events}
    assert list(sides) == [f"decode-scheduler-{pid}{number}" for number in ("", ".2", ".3")]
    assert set(sides.values()) == {"D scheduler"} and not trace.skipped
    TraceFile(str(tmp_path), "decode-scheduler").close()
    assert len({event.source for event in Trace(tmp_path).events}) == 3, "what has ended is free again"


def test_a_host_that_was_started_anew_has_another_clock_in_the_same_file(tmp_path: Path) -> None:
    before = [{"t": 5000.0, "stage": "clock", "wall": 10_000.0}, {"t": 5001.0, "stage": "x"}]
    same = [{"t": 5100.0, "stage": "clock", "wall": 10_100.2}, {"t": 5101.0, "stage": "x"}]  # the wall clock was set
    after = [{"t": 20.0, "stage": "clock", "wall": 10_200.0}, {"t": 21.0, "stage": "x"}]
    write(tmp_path / "decode-worker-1.before.jsonl", before + same)
    write(tmp_path / "decode-worker-1.jsonl", after)
    trace = Trace(tmp_path)
    assert [event.t for event in trace.events] == [5000.0, 5001.0, 5100.0, 5101.0, 5200.0, 5201.0]
    assert len({event.side for event in trace.events}) == 1
    assert [clock.sources for clock in trace.clocks] == [["decode-worker-1"], ["decode-worker-1 (2)"]]


def test_the_cost_of_tracing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(RECORDED), "--cost"]) == 0
    said = capsys.readouterr().out
    off = float(said.split("switched off: ")[1].split()[0])
    on = float(said.split("switched on: ")[1].split()[0])
    assert off < 1000 * on  # nanoseconds and microseconds
    assert "a transfer here has" in said


# -- mistakes


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(RECORDED), "--perfetto", "/nowhere/at/all.json"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("PD-CONF-003: --perfetto = '/nowhere/at/all.json'") and said.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"t": "soon", "stage": "clock", "wall": 1.0}',
        '{"t": 1.0, "wall": 1.0}',
        "[1]",
        '{"t": 1.0, "stage": "reserved"}',
        '{"t": 1.0, "stage": "layer_pushed", "transfers": [], "steps": []}',
        '{"t": 1.0, "stage": "cl',
        "\xff\xfe",
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_event_is_skipped_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert main(["trace", str(RECORDED)]) == 0
    whole = capsys.readouterr().out
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "decode-worker-25456.jsonl"
    lines = path.read_text().splitlines()
    path.write_bytes("\n".join([*lines[:2], line, *lines[2:], ""]).encode("latin-1"))
    (tmp_path / "folder.jsonl").mkdir()
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 lines are no events of this package, or torn, and were skipped" in said
    assert f"{path}:3" in said
    assert [row for row in said.splitlines() if "skipped" not in row] == whole.splitlines()
    answer = page.timeline(str(tmp_path), Trace(RECORDED).transfers()[0])
    assert "skipped" in answer["picture"]
