# SPDX-License-Identifier: Apache-2.0
"""The harness itself: it must detect a wrong token, a process left behind, and late bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, cast

import httpx
import psutil
import pytest
from pairs import Pair

from tools.support.client import TimedAnswer, lines_of
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally, TokensDiffer, apart, first_difference
from tools.support.engine import RunningServer
from tools.support.models import ROOT
from tools.support.on_cpu import no_fp8
from tools.support.process import Child, free_port
from vllm_ascend_pd.viewer.timeline import Trace, picture


@contextlib.contextmanager
def reference(gap: float) -> Iterator[str]:
    """A single engine whose two best tokens, 5 and 6, are always `gap` apart."""

    class SilentHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            top = {"token_id:5": -1.0, "token_id:6": -1.0 - gap}
            payload = json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), SilentHandler)
    thread = threading.Thread(target=server.serve_forever, name="reference", kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


def test_a_missing_token_is_a_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_a_token_that_differs_without_a_tie_fails_and_names_the_gap() -> None:
    with reference(gap=0.01) as url, pytest.raises(TokensDiffer, match=r"1\.000e-02 worse"):
        AnswerTally().check("answer", [7], [1, 5], [1, 6], url)


def test_a_tie_is_excused_once_in_a_run_of_less_than_a_thousand() -> None:
    tally = AnswerTally()
    with reference(gap=5e-5) as url:
        tally.check("first", [7], [1, 5], [1, 6], url)
        assert tally.summary().endswith("1 excused")
        with pytest.raises(TokensDiffer, match="too many"):
            tally.check("second", [7], [1, 5], [1, 6], url)


def test_what_counts_as_a_tie_and_how_often_depends_on_the_type() -> None:
    tally = AnswerTally(tie=0.1, excused_share=0.5)
    with reference(gap=0.05) as url:
        tally.check("equal", [7], [1, 2], [1, 2], url)
        tally.check("excused", [7], [1, 5], [1, 6], url)
        with pytest.raises(TokensDiffer, match="too many"):
            tally.check("once too often", [7], [1, 5], [1, 6], url)


def test_the_share_of_ties_is_judged_from_a_number_of_answers_on_and_at_the_end() -> None:
    tally = AnswerTally(tie=0.1, excused_share=0.5, judged_from=4)
    with reference(gap=0.05) as url:
        for number in range(2):
            tally.check(f"chance {number}", [7], [1, 5], [1, 6], url)
        with pytest.raises(TokensDiffer, match="2 excused answers of 2 are too many"):
            tally.check_share()
        for number in range(2):
            tally.check(f"equal {number}", [7], [1, 5], [1, 5], url)
        tally.check_share()
        with pytest.raises(TokensDiffer, match="3 excused answers of 5 are too many"):
            tally.check("once too often", [7], [1, 5], [1, 6], url)


def test_a_token_beside_a_tie_is_not_excused() -> None:
    with reference(gap=0.0) as url, pytest.raises(TokensDiffer, match="inf worse"):
        AnswerTally().check("answer", [7], [1, 5], [1, 7], url)


def test_each_token_behind_an_excused_one_is_compared_too() -> None:
    """The two best tokens are 5 and 6, whatever is before them."""
    with reference(gap=5e-5) as url:
        AnswerTally().check("answer", [7], [1, 5, 2, 3], [1, 6, 5, 6], url)
        with pytest.raises(TokensDiffer, match="token 3 is inf worse"):
            AnswerTally().check("answer", [7], [1, 5, 2, 3], [1, 6, 5, 3], url)


def test_a_token_that_one_of_two_engines_chooses_is_excused() -> None:
    with reference(gap=0.01) as one, reference(gap=0.0) as other:
        AnswerTally().check("answer", [7], [1, 5], [1, 6], one, other)


def test_equal_tokens_that_are_less_probable_than_they_should_be_are_wrong() -> None:
    tally = AnswerTally(limit=1e-4)
    tally.check("answer", [7], [1, 5], [1, 5], chances=([-1.0, -2.0], [-1.0, -2.00005]))
    assert "2 log-probabilities at most 5.0e-05 apart, 0.0001 allowed" in tally.summary()
    for got in ([-1.0, -2.001], [-1.0, math.nan], [math.nan, -2.0]):
        with pytest.raises(TokensDiffer, match="apart"):
            tally.check("answer", [7], [1, 5], [1, 5], chances=([-1.0, -2.0], got))
    with pytest.raises(TokensDiffer, match="1 log-probabilities of 2 equal tokens"):
        tally.check("answer", [7], [1, 5], [1, 5], chances=([-1.0, -2.0], [-1.0]))


def test_behind_a_token_that_differs_nothing_is_as_probable() -> None:
    with reference(gap=1e-5) as url:
        tally = AnswerTally(limit=1e-4)
        tally.check("answer", [7], [1, 5, 5], [1, 6, 6], url, chances=([-1.0, -2.0, -9.0], [-1.0, -2.5, -3.0]))
        assert tally.chances == 1 and len(tally.excused) == 1
        with pytest.raises(TokensDiffer, match="token 0 has log-probability -1"):
            tally.check("answer", [7], [1, 5, 5], [1, 6, 6], url, chances=([-1.0, -2.0], [-1.2, -2.5]))


def test_log_probabilities_are_compared_only_where_a_limit_says_how_close_they_must_be() -> None:
    tally = AnswerTally()
    tally.check("answer", [7], [1, 5], [1, 5], chances=([], []))
    assert tally.summary() == "1 answers, 2 tokens compared, 0 excused"


def test_a_pair_asks_for_what_its_tally_compares_and_an_answer_without_it_is_wrong(tmp_path: Path) -> None:
    engine = RunningServer("engine", 1, tmp_path)  # nothing is asked of it: the tokens are equal

    def pair(limit: float) -> Pair:
        return Pair(Cluster(tmp_path), engine, engine, (engine,), AnswerTally(limit=limit))

    want, less, none = (TimedAnswer(tokens=(7, 8), chances=chances) for chances in ([-0.1, -0.2], [-0.1, -0.3], []))
    assert pair(math.inf).asked == {} and pair(1e-4).asked == {"logprobs": 1}
    pair(math.inf).judge_all("only tokens", [1, 2], want, none)
    pair(1e-4).judge_all("as probable", [1, 2], want, want)
    for got in (less, none):
        with pytest.raises(TokensDiffer):
            pair(1e-4).judge_all("less probable, or nobody asked", [1, 2], want, got)


def test_how_far_two_engines_put_the_same_tokens_apart() -> None:
    with reference(gap=0.01) as one, reference(gap=0.04) as other:
        assert apart(one, other, [[7], [8]]) == pytest.approx(0.03)
        assert apart(one, one, [[7]]) == 0


def test_a_shorter_answer_is_never_excused() -> None:
    with reference(gap=0.0) as url, pytest.raises(TokensDiffer, match="shorter"):
        AnswerTally().check("answer", [7], [1, 2], [1], url)
    with reference(gap=0.0) as url, pytest.raises(TokensDiffer, match="shorter"):
        AnswerTally().check("answer", [7], [1, 5, 2], [1, 6], url)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def _start(code: str, directory: Path) -> Child:
    return Child("child", [sys.executable, "-c", code], directory / "log", os.environ, directory)


def test_what_a_model_says_does_not_cut_its_stream() -> None:
    """Line separators known only to Unicode, in a stream that is split at any byte."""
    event = json.dumps({"text": "a\u2028b\x85c\x0bd"}, ensure_ascii=False).encode()

    async def cut() -> list[bytes]:
        response = httpx.Response(200, stream=Pieces(b"data: " + event + b"\n\ndata: [DONE]"))
        return [line async for line in lines_of(response)]

    assert asyncio.run(cut()) == [b"data: " + event, b"", b"data: [DONE]"]


class Pieces(httpx.AsyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._data), 5):
            yield self._data[at : at + 5]


def test_a_process_that_does_not_end_is_killed_and_named_with_its_descendants(tmp_path: Path) -> None:
    child = _start(STUBBORN, tmp_path)
    until = time.monotonic() + 20.0
    while not child.log.read_text().strip() and time.monotonic() < until:
        time.sleep(0.05)
    grandchild = int(child.log.read_text())
    leaks = child.stop(grace_s=0.5)
    assert any(str(child.pid) in line for line in leaks)
    assert not child.alive
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_ends_when_asked_is_no_leak(tmp_path: Path) -> None:
    assert _start("import time; time.sleep(600)", tmp_path).stop() == []


def test_a_grandchild_that_survives_its_parent_is_named(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    child = _start(code, tmp_path)
    until = time.monotonic() + 20.0
    while child.alive and time.monotonic() < until:
        time.sleep(0.05)
    leaks = child.stop()
    assert len(leaks) == 1, leaks


def test_ports_are_given_once() -> None:
    ports: list[int] = []
    for count in (1, 3) * 10:
        first = free_port(count=count)
        ports.extend(range(first, first + count))
    assert len(set(ports)) == 40


TAKES_TEN = (
    "from tools.support.process import free_port as f; print(*(f(12000) for _ in range(10)), flush=True); input()"
)


def test_two_processes_get_different_ports_and_what_they_had_is_free_again(tmp_path: Path) -> None:
    def taken(count: int) -> list[str]:
        """Start processes that run until all have taken their ports, and return these."""
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(_python(TAKES_TEN, tmp_path)) for _ in range(count)]
            return [port for process in started for port in cast(IO[str], process.stdout).readline().split()]

    ports = taken(2)
    assert len(ports) == len(set(ports)) == 20
    assert set(taken(1)) <= set(ports)


def _python(code: str, temporary: Path) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, **pipes)


def _trace(directory: Path, late: bool) -> Trace:
    """Return a trace of two layers of 100 bytes; the first lands before or after the second layer's hook."""
    worker = [
        {"t": 0.0, "stage": "clock", "wall": 1000.0, "role": "prefill-worker"},
        {"t": 1.0, "stage": "step", "transfer": "x", "step": 1, "before": 0, "after": 8},
        {"t": 2.0, "stage": "layer_computed", "step": 1, "layer": 0, "of": 2},
        {"t": 2.1, "stage": "layer_submitted", **_batch(0)},
        {"t": 2.2, "stage": "layer_pushed", "ok": True, **_batch(0)},
        {"t": 3.0, "stage": "layer_computed", "step": 1, "layer": 1, "of": 2},
        {"t": 3.1, "stage": "layer_submitted", **_batch(1)},
        {"t": 3.2, "stage": "layer_pushed", "ok": True, **_batch(1)},
    ]
    if late:
        worker[4]["t"] = 3.05
    scheduler = [
        {"t": 100.0, "stage": "clock", "wall": 1000.0, "role": "decode-scheduler"},
        {"t": 100.5, "stage": "reserved", "transfer": "x"},
        {"t": 103.5, "stage": "reported", "transfer": "x"},
    ]
    for name, events in (("prefill-worker-1", worker), ("decode-scheduler-2", scheduler)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"t": 9')
    return Trace(directory)


def _batch(layer: int) -> dict[str, object]:
    return {"peer": "h:1", "layers": [layer], "steps": [1], "bytes": 100, "descriptors": 1, "transfers": ["x"]}


@pytest.mark.parametrize(("late", "hidden"), [(False, 0.5), (True, 0.0)])
def test_only_bytes_that_landed_before_the_last_hook_are_hidden(tmp_path: Path, late: bool, hidden: float) -> None:
    trace = _trace(tmp_path, late)
    assert trace.transfers() == ["x"]
    way = trace.timeline_of("x")
    assert (way.nbytes, way.descriptors, way.hidden()) == (200, 2, hidden)
    assert way.exposed_s() == pytest.approx(0.2)
    assert any("layer  1" in row for row in picture(way))


def test_clocks_of_two_hosts_are_brought_together_by_the_wall_clock(tmp_path: Path) -> None:
    moments = _trace(tmp_path, late=False).timeline_of("x").moments
    assert moments["D scheduler reported"] - moments["D scheduler reserved"] == pytest.approx(3.0)
    way = _trace(tmp_path, late=False).timeline_of("x")
    first = min(way.computed.values())
    assert first - way.moments["D scheduler reserved"] == pytest.approx(1.5)


def test_fp8_caches_need_what_vllm_needs_for_them(tmp_path: Path) -> None:
    """On other processors their tests are skipped, with the missing instructions as the reason."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f avx512bw avx512dq avx512vl\n")
    assert no_fp8(cpuinfo) == ""
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f\n")
    assert no_fp8(cpuinfo).endswith("has no avx512bw, avx512dq, avx512vl")
    cpuinfo.write_text("Features\t: fp asimd\n")
    assert "AVX-512" in no_fp8(cpuinfo) and "AVX-512" in no_fp8(tmp_path / "nothing")
