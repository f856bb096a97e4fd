# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it: real processes, signals, several workers, TLS, invalid flags."""

from __future__ import annotations

import datetime
import json
import logging
import re
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tools.support.process import free_port, freeze
from unit.router.cluster import streamed, texts, until
from unit.router.command import COMMAND, ROOT, RunningMetaserver, running, worker_number
from unit.router.fake_engine import words
from vllm_ascend_pd.cli.__main__ import main, parser
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import server, supervisor
from vllm_ascend_pd.router.command import JsonLines, LineByLine, settings_of
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.fleet import parse_specs
from vllm_ascend_pd.router.settings import read_token
from vllm_ascend_pd.shared.http_session import Origin


def test_the_command_serves_and_ends_well_on_a_signal() -> None:
    with running() as r:
        assert texts(r.complete("x")) == ["".join(words("x", 3))]
        r.process.terminate()
        assert r.process.wait(10) == 0


def test_one_worker_too_takes_its_engines_at_a_port_of_their_own_when_configured() -> None:
    worker_port = free_port()
    with running("--worker-port", str(worker_port)) as r:
        r.decode.metaservers(f"http://127.0.0.1:{worker_port}")  # the only allowed URL
        assert texts(r.complete("x")) == ["".join(words("x", 3))]
        assert r.decode.local_prefills == 0 and len(r.prefill.generations()) == 1


def test_a_signal_lets_requests_finish() -> None:
    with running("--grace", "10") as r:
        r.decode.behaviour.before_post_s = 1.0  # its post comes after the signal, and must be served
        got: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: got.append(r.complete("x", stream=True)), name="client")
        asking.start()
        until(r.decode.generations)
        r.process.terminate()
        asking.join(10)
        assert streamed(got[0]) == "".join(words("x", 3))
        assert r.decode.local_prefills == 0
        assert r.process.wait(10) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with running("--grace", "1000") as r:
        r.decode.behaviour.hold = True
        problems: list[Exception] = []
        asking = threading.Thread(target=_broken, args=(r, problems), name="client")
        asking.start()
        until(r.decode.generations)
        r.process.terminate()
        until(lambda: r.http.get("/v1/models").status_code == 503)  # it drains
        r.process.terminate()
        assert r.process.wait() == 0
        asking.join()
        assert isinstance(problems[0], httpx.TransportError)
        until(lambda: r.decode.generations()[-1].aborted)


def _broken(r: RunningMetaserver, problems: list[Exception]) -> None:
    try:
        r.complete("x")
    except httpx.TransportError as problem:
        problems.append(problem)


def test_several_workers_serve_on_one_port_and_die_alone() -> None:
    with running(workers=2) as r:
        for i in range(20):
            _ask_anew(r, f"p{i}")
        until(lambda: _ask_anew(r, "more") == 2)
        urls = r.urls()
        assert len(urls) == 2
        until(lambda: _served(r) >= 20)

        spare = f"127.0.0.1:{free_port()}"
        assert r.http.post("/instances", json={"role": "decode", "url": spare}).status_code == 201
        assert r.http.post(f"/instances/{spare}/drain", json={}).json()["state"] == "draining"
        for url in urls:
            until(lambda url=url: _state(url, spare) == "draining")

        first = r.workers()[0]
        first.kill()
        until(lambda: len(r.workers()) == 2 and first.pid not in [w.pid for w in r.workers()])
        for url in urls:  # the restarted worker has learnt it
            until(lambda url=url: _state(url, spare) == "draining")
        assert r.complete("after").status_code == 200
        page = r.http.get("/metrics").text
        assert 'requests_total{route="/v1/completions",status="200"}' in page
        workers = r.workers()
        r.process.terminate()
        assert r.process.wait(10) == 0
        assert not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]


def _ask_anew(r: RunningMetaserver, prompt: str) -> int:
    """Send a request on a connection of its own; return how many workers have served by then."""
    with httpx.Client(base_url=r.http.base_url, trust_env=False, verify=False) as fresh:
        assert fresh.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200
    return len({s.body["kv_transfer_params"]["metaserver"] for s in r.decode.generations()})


def _served(r: RunningMetaserver) -> int:
    return sum(i["served"] for i in r.http.get("/status").json()["instances"] if i["role"] == "decode")


def _state(url: str, name: str) -> str:
    try:
        instances = httpx.get(url + "/instances", trust_env=False, verify=False).json()["instances"]
    except httpx.TransportError:
        return "unreachable"
    return next((i["state"] for i in instances if i["name"] == name), "unknown")


def test_one_canary_proves_a_pair_for_all_workers_also_for_one_that_comes_later() -> None:
    with running(workers=2, canary=True) as r:
        urls = r.urls()
        assert len(urls) == 2
        for url in urls:
            until(lambda url=url: _is_ready(url))
        assert len(r.prefill.generations()) == 1
        r.prefill.served.kill()
        for url in urls:
            until(lambda url=url: not _is_ready(url))
        r.prefill.served.start()
        second = r.workers()[1]
        second.kill()
        until(lambda: len(r.workers()) == 2 and second.pid not in [w.pid for w in r.workers()])
        for url in urls:
            until(lambda url=url: _is_ready(url))
        assert len(r.prefill.generations()) >= 2


def test_readiness_outlives_the_worker_that_sends_the_canaries() -> None:
    with running(workers=2, canary=True) as r:
        urls = r.urls()  # /status lists the answering worker first, so it is read once
        for url in urls:
            until(lambda url=url: _is_ready(url))
        first, second = sorted(r.workers(), key=worker_number)
        first.kill()
        seen = []
        while (
            len(r.workers()) < 2 or first.pid in [w.pid for w in r.workers()] or not _is_ready(urls[0]) or len(seen) < 2
        ):
            seen.append(_is_ready(urls[1]))
        assert all(seen) and len(seen) > 1, "the other worker was ready all the time"
        assert second.pid in [w.pid for w in r.workers()]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/readiness", timeout=None, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def test_workers_end_when_their_supervisor_is_killed() -> None:
    with running(workers=2) as r:
        workers = r.workers()
        freeze(r.process.pid)
        time.sleep(1.0)  # unread reports collect, so that its death resets the connection instead of ending it
        r.process.kill()
        until(lambda: not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE])


def test_tls_works_both_ways(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=cert)
    with running("--tls-cert", str(cert), "--tls-key", str(key), scheme="https", verify=trust) as r:
        r.decode.metaservers(str(r.http.base_url), tls_ca_file=str(cert))
        assert texts(r.complete("x")) == ["".join(words("x", 3))]
        assert r.decode.local_prefills == 0
        r.decode.metaservers(str(r.http.base_url))  # without our CA D does not trust it
        assert r.complete("y").status_code == 200
        assert r.decode.local_prefills == 1 and r.decode.failed("PD-META-002")
        assert not r.decode._client.counters["reservation_repeated"]  # a retry would not be trusted either


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prefill", "ftp://x"], "ftp://x"),
        (["--workers", "0"], "--workers"),
        (["--workers", "2", "--port", "0"], "--port"),
        (["--prefiller-hosts", "a", "b", "--prefiller-ports", "1"], "--prefiller-hosts"),
        (["--tls-cert", "x"], "--tls-cert"),
        (["--instances", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--instances", "/nowhere.yaml", "--workers", "2", "--port", str(free_port())], "/nowhere"),
        (["--admin-token-file", "/nowhere"], "/nowhere"),
        (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_flags_stop_the_start_with_a_sentence(flags: list[str], says: str) -> None:
    done = subprocess.run([*COMMAND, "--port", "0", *flags], cwd=ROOT, check=False, capture_output=True, timeout=20)
    assert done.returncode == 2
    assert says in done.stderr.decode() and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--port 99999", "--port", "99999"),
        ("--port -1", "--port", "-1"),
        ("--worker-port 70000", "--worker-port", "70000"),
        ("--port 65535 --workers 2", "--port", "65535"),
        ("--port 8000 --worker-port 65534 --workers 3", "--worker-port", "65534"),
        ("--prefill h:1 --decode g:2 http://h:1", "--decode", "'http://h:1'"),
        ("--prefiller-hosts h --prefiller-ports 1 --decode h:1", "--decode", "'h:1'"),
        ("--prefill h:0", "--prefill", "'h:0'"),
        ("--prefill h:1+0", "--prefill", "'h:1+0'"),
        ("--prefill h:65535+2", "--prefill", "'h:65535+2'"),
        ("--prefill h:1+5000", "--prefill", "'h:1+5000'"),
        ("--prefill h:8000+4 --decode h:8003", "--decode", "'h:8003'"),
        ("--decoder-hosts h --decoder-hosts-num 2 2 --decoder-ports 1 2", "--decoder-hosts-num", "[2, 2]"),
        ("--decoder-hosts h h --decoder-ports 1 --decoder-ports-inc 0", "--decoder-ports-inc", "[0]"),
        ("--decoder-hosts h --decoder-ports 1 --decoder-ports-inc 9999999999", "--decoder-ports-inc", "[9999999999]"),
        ("--prefill h:70000", "--prefill", "'h:70000'"),
        ("--max-waiting -1", "--max-waiting", "-1"),
        ("--max-wait -5", "--max-wait", "-5.0"),
        ("--max-wait nan", "--max-wait", "nan"),
        ("--grace inf", "--grace", "inf"),
        ("--retry-delay -1", "--retry-delay", "-1.0"),
        ("--max-retries -1", "--max-retries", "-1"),
        ("--trace-dir /dev/null/traces", "--trace-dir", "'/dev/null/traces'"),
        ("--trace-dir /dev/null", "--trace-dir", "'/dev/null'"),
        ("--advertise-host http://x:1", "--advertise-host", "'http://x:1'"),
        ("--advertise-host x:1", "--advertise-host", "'x:1'"),
        ("--advertise-host [10.0.0.1]", "--advertise-host", "'[10.0.0.1]'"),
        ("--probe-every 1e-9", "--probe-every", "1e-09"),
    ],
)
def test_an_impossible_flag_is_named_with_its_value_and_what_to_do(
    flags: str, key: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "run_worker", _started)  # runs if the flags are accepted
    monkeypatch.setattr(supervisor.Supervisor, "run", _started)
    assert main(["metaserver", *([] if "--port" in flags else ["--port", "0"]), *flags.split()]) == 2
    said = capsys.readouterr().err
    assert f"PD-CONF-003: {key} = {value} is impossible: " in said
    assert said.rstrip().endswith(".") and (" Give " in said or " Name " in said)
    assert "pd-log" not in {thread.name for thread in threading.enumerate()}


def _started(*_: object) -> int:
    return 0


@pytest.mark.parametrize(
    "flags",
    [
        *("--max-waiting 0 --max-wait 0", "--retry-delay 0 --max-retries 0", "--port 65533 --workers 2"),
        *("--advertise-host pd-metaserver.ns_1.svc", "--advertise-host ::1", "--advertise-host [::1]"),
        "--probe-every 0.01",
    ],
)
def test_the_last_possible_values_are_taken(flags: str) -> None:
    settings_of(parser().parse_args(["metaserver", *flags.split()]))


def test_a_token_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff" * 32)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"PD-SEC-004.*token"):
        read_token(str(file))


def test_a_taken_port_is_named() -> None:
    with running() as r:
        port = r.http.base_url.port
        done = subprocess.run([*COMMAND, "--port", str(port)], cwd=ROOT, check=False, capture_output=True, timeout=20)
        assert done.returncode == 2 and b"PD-CONF-008" in done.stderr and str(port).encode() in done.stderr


def test_the_predecessors_flags_are_understood() -> None:
    words = "metaserver --prefiller-hosts h1 h2 --prefiller-ports 1 2 --decoder-hosts ::1 --decoder-ports 3 --max-retries 5 --retry-delay 0.001"
    settings = settings_of(parser().parse_args(words.split()))
    assert settings.prefill == ("h1:1", "h2:2") and settings.decode == ("[::1]:3",)
    assert settings.retry.attempts == 5 and settings.retry.backoff.first_s == 0.001


def test_ranks_with_servers_of_their_own_are_named_at_once() -> None:
    """In the form of vllm-ascend's guide for large expert parallelism, and in ours."""
    words = "metaserver --prefiller-hosts a b --prefiller-hosts-num 2 2 --prefiller-ports 9000 9100 --prefiller-ports-inc 2 2"
    settings = settings_of(parser().parse_args([*words.split(), "--decode", "https://c:9000+3", "[::1]:1+2"]))
    assert settings.prefill == ("a:9000", "a:9001", "b:9100", "b:9101")
    origins = [spec.origin for text in settings.decode for spec in parse_specs(Role.DECODE, text)]
    assert origins == [
        *(Origin("https", "c", 9000 + rank) for rank in range(3)),
        *(Origin("http", "::1", 1 + n) for n in (0, 1)),
    ]


def test_an_engine_can_import_the_client_without_the_service() -> None:
    code = (
        "import sys, vllm_ascend_pd.decode.scheduler.metaserver; "
        "bad = {'starlette', 'uvicorn', 'fastapi', 'aiohttp.web', 'prometheus_client', 'yaml'} & set(sys.modules); "
        "bad |= {m for m in sys.modules if m.startswith('vllm_ascend_pd.router')}; sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr.decode()


def test_memory_stays_flat_over_many_requests() -> None:
    with running() as r:
        memory = psutil.Process(r.process.pid).memory_info
        with httpx.Client(base_url=r.http.base_url, trust_env=False, verify=False) as http:

            def ask(count: int) -> int:
                for i in range(count):
                    assert (
                        http.post("/v1/completions", json={"prompt": f"{i}" * 1000, "max_tokens": 1}).status_code == 200
                    )
                return memory().rss

            first = ask(300)
            assert ask(600) < first + (8 << 20)


def test_a_flag_that_is_given_again_adds_to_what_came_before() -> None:
    words = "metaserver --prefill a:1 --prefill b:2 c:3 --decode d:4 --prefiller-hosts e --prefiller-ports 5"
    words += " --prefiller-hosts f --prefiller-ports 6"
    settings = settings_of(parser().parse_args(words.split()))
    assert settings.prefill == ("a:1", "b:2", "c:3", "e:5", "f:6") and settings.decode == ("d:4",)
    assert settings_of(parser().parse_args(["metaserver"])).prefill == ()  # the default has not been extended


def test_an_engines_words_never_look_like_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "2026-01-01 00:00:00,000 CRITICAL forged"
    with running("--attempts", "1", "--circuit-failures", "1", canary=True) as r:
        r.decode.usual.wedged, r.decode.usual.said = True, f"\n{forged}\r\x1b[2K\u2028{forged}".encode()
        assert r.complete("x").status_code == 500
        asked = len(r.decode.generations())
        until(
            lambda: len(r.decode.generations()) > asked + 1
        )  # by canaries, its circuit's trials: the first has failed
    lines = re.split("[\n\r\u2028\x1b]", capsys.readouterr().out.strip())
    assert sum("answered 500" in line for line in lines) and sum("not proven" in line for line in lines)
    assert sum("forged" in line for line in lines) >= 2
    assert not [line for line in lines if not re.match(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ (?!forged)", line)]


def test_a_log_in_json_is_an_object_in_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers and their supervisor write such lines too, and no word of an engine ends one."""
    forged = '{"level": "CRITICAL", "message": "forged"}'
    with running("--attempts", "1", "--circuit-failures", "1", "--log-format", "json", canary=True) as r:
        r.decode.usual.wedged, r.decode.usual.said = True, f'"}}\n{forged}\r\x1b[2K\u2028{forged}'.encode()
        assert r.complete("x").status_code == 500
    with running("--log-format", "json", workers=2):
        pass
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert {"INFO", "WARNING"} <= {record["level"] for record in records} <= {"INFO", "WARNING", "ERROR"}
    assert any("forged" in record["message"] for record in records)
    assert all(datetime.datetime.fromisoformat(record["time"]).tzinfo for record in records)
    assert all(record["logger"] for record in records)


def test_a_record_in_json_has_its_code_and_is_bounded() -> None:
    try:
        raise ValueError("\n\u2028" * 10_000)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "%s", ("PD-META-011: no\n" * 1000,), sys.exc_info())
    line = JsonLines().format(record)
    assert line.isascii() and line.isprintable() and len(line) < 50_000
    logged = json.loads(line)
    assert logged["code"] == "PD-META-011" and len(logged["message"]) == len(logged["traceback"]) == 4000
    plain = json.loads(JsonLines().format(logging.LogRecord("x", logging.INFO, __file__, 1, "well", (), None)))
    assert plain.keys() == {"time", "level", "logger", "message"}


def test_a_traceback_in_the_log_has_no_line_that_looks_like_a_record() -> None:
    try:
        raise ValueError("an engine said\n2026-01-01 00:00:00,000 CRITICAL forged\x1b[2K")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed: %s", ("a\nb",), sys.exc_info())
    first, *more = LineByLine("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "ERROR it failed: a\\nb"
    assert all(line.startswith("  ") and line.isprintable() for line in more) and "forged" in more[-1]
