# SPDX-License-Identifier: Apache-2.0
"""Several processes: workers with consistent instances and numbers, and two metaservers side by side."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tools.support.process import free_port
from unit.router.cluster import texts, until
from unit.router.command import COMMAND, ROOT, RunningMetaserver, metaserver, running, worker_number
from unit.router.fake_engine import FakeEngine, words

GOOD = "decode: ['{spare}']\n"


def get(url: str, path: str) -> dict[str, Any]:
    """Return the answer's JSON, or nothing if the connection fails."""
    try:
        return httpx.get(url + path, timeout=None, trust_env=False, verify=False).json()  # type: ignore[no-any-return]
    except httpx.TransportError:
        return {}


def members(url: str) -> dict[str, tuple[str, str, float, bool]]:
    """Instances that this worker knows."""
    facts = get(url, "/instances").get("instances", ())
    return {i["name"]: (i["role"], i["source"], i["weight"], i["state"] == "draining") for i in facts}


def kill(r: RunningMetaserver, worker: int) -> psutil.Process:
    """Kill the worker in this place; return its successor."""
    first = next(w for w in r.workers() if worker_number(w) == worker)
    first.kill()
    until(lambda: [w for w in r.workers() if w != first and worker_number(w) == worker])
    return next(w for w in r.workers() if w != first and worker_number(w) == worker)


def test_a_worker_that_comes_later_knows_what_the_others_know(tmp_path: Path) -> None:
    file = tmp_path / "instances.yaml"
    a, b, c = (f"127.0.0.1:{free_port()}" for _ in range(3))
    file.write_text(f"decode: ['{a}', '{b}']\n")
    with running("--instances", str(file), workers=2) as r:
        urls = r.urls()
        assert r.http.delete(f"/instances/{a}").status_code == 200
        assert r.http.post("/instances", json={"role": "decode", "url": b, "weight": 3}).status_code == 200
        assert r.http.post("/instances", json={"role": "decode", "url": c}).status_code == 201
        assert r.http.post(f"/instances/{c}/drain", json={}).status_code == 200
        for url in urls:
            until(lambda url=url: a not in members(url) and members(url)[b][2] == 3 and members(url)[c][3])
        file.write_text(f"decode: ['{a}', '{b}', '{c}']\n# changed\n")
        for url in urls:
            until(lambda url=url: a in members(url))
        known = members(urls[0])
        assert known[b] == ("decode", "file", 1.0, False) and known[c] == ("decode", "admin", 1.0, True)
        assert members(urls[1]) == known
        kill(r, 1)
        until(lambda: members(urls[1]))
        assert members(urls[1]) == known, "from its first answer on"
        file.write_text(f"decode: ['{b}']\n")
        for url in urls:
            until(lambda url=url: a not in members(url))
            assert c in members(url), "what the admin added is not the file's to remove"


def test_a_worker_that_comes_while_the_file_is_bad_has_the_last_good_list(tmp_path: Path) -> None:
    file, spare = tmp_path / "instances.yaml", f"127.0.0.1:{free_port()}"
    file.write_text(GOOD.format(spare=spare))
    with running("--instances", str(file), workers=2) as r:
        urls = r.urls()
        known = members(urls[0])
        assert spare in known
        file.write_text("decode: [\n")
        for url in urls:
            until(lambda url=url: "PD-CONF-007" in get(url, "/status")["file_error"])
        new = kill(r, 1)
        until(lambda: members(urls[1]))
        assert members(urls[1]) == known and "PD-CONF-007" in get(urls[1], "/status")["file_error"]
        assert r.complete("x").status_code == 200
        file.write_text("decode: []\n")
        for url in urls:
            until(lambda url=url: spare not in members(url) and not get(url, "/status")["file_error"])
        assert new.is_running() and new in r.workers()


@pytest.mark.parametrize("text", ["prefill: " + "[" * 5000, "prefill: !!bool maybe"], ids=["nested", "no value"])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_process_ends_over_a_file_that_cannot_be_read(tmp_path: Path, text: str, workers: int) -> None:
    file, spare = tmp_path / "instances.yaml", f"127.0.0.1:{free_port()}"
    file.write_text(GOOD.format(spare=spare))
    with running("--instances", str(file), workers=workers) as r:
        urls, before = r.urls(), r.workers()
        file.write_text(text)
        for url in urls:
            until(lambda url=url: "PD-CONF-007" in get(url, "/status").get("file_error", ""))
            assert spare in members(url)
        assert r.workers() == before and r.process.poll() is None


def test_a_process_that_ends_before_it_is_ready_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="ended before"), running("--no-such-flag"):
        pass
    assert "--no-such-flag" in capsys.readouterr().out


def test_a_start_without_room_for_the_workers_metrics_says_so(tmp_path: Path) -> None:
    tiny = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    tiny += ['mount -t tmpfs -o size=32k none "$TMPDIR" && exec "$@"', "sh"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    if subprocess.run([*tiny, "true"], env=env, check=False, timeout=20).returncode:
        pytest.skip("this machine allows no mount namespaces")
    port, engines = free_port(count=3), ("--prefill", f"127.0.0.1:{free_port()}", "--decode", "127.0.0.1:9")
    command = [*tiny, *COMMAND, "--workers", "2", "--port", str(port), *engines]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=30)
        finally:
            process.terminate()
    assert process.returncode == 2
    for part in ("PD-CONF-003", f"TMPDIR = '{tmp_path}'", "set TMPDIR to another folder"):
        assert part in said


def test_a_worker_that_ends_by_sigbus_has_its_folder_of_metrics_named(capsys: pytest.CaptureFixture[str]) -> None:
    with running(workers=2) as r:
        folder, first = metrics_of(r), first_worker(r)
        first.send_signal(signal.SIGBUS)
        until(lambda: first not in r.workers() and sorted(map(worker_number, r.workers())) == [0, 1])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "is started again" in line)
    assert f"room for its metrics in {folder}" in line and "TMPDIR" in line


def load(url: str) -> list[tuple[float, float]]:
    """Running and waiting requests, by `/metrics` and by `/status`."""
    page = httpx.get(url + "/metrics", timeout=None, trust_env=False, verify=False).text
    values = {s.name: s.value for family in text_string_to_metric_families(page) for s in family.samples}
    status = get(url, "/status")
    prefix = "ascend_pd_metaserver_requests_"
    return [(values[prefix + "running"], values[prefix + "waiting"]), (status["running"], status["waiting"])]


@contextmanager
def no_descriptor(r: RunningMetaserver) -> Iterator[None]:
    """Leave the supervisor none that is free."""
    used = {int(path.name) for path in Path(f"/proc/{r.process.pid}/fd").iterdir()}
    soft, hard = resource.prlimit(r.process.pid, resource.RLIMIT_NOFILE)
    lowest = next(number for number in count() if number not in used)
    resource.prlimit(r.process.pid, resource.RLIMIT_NOFILE, (lowest, hard))
    yield
    resource.prlimit(r.process.pid, resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_room(r: RunningMetaserver) -> Iterator[None]:
    """Let the folder of the workers' metrics take nothing, and give nothing back."""
    folder = metrics_of(r)
    aside = folder.with_suffix(".aside")
    folder.rename(aside)
    folder.write_text("no folder")
    yield
    folder.unlink()
    aside.rename(folder)


@contextmanager
def cleaned(r: RunningMetaserver) -> Iterator[None]:
    """Remove that folder, as what cleans temporary files does."""
    shutil.rmtree(metrics_of(r))
    yield


@contextmanager
def kept(r: RunningMetaserver) -> Iterator[None]:
    """Let a file of the first worker's metrics be one that cannot be removed."""
    blocking = metrics_of(r) / f"gauge_livesum_{first_worker(r).pid}.db"
    blocking.unlink()
    blocking.mkdir()
    yield
    blocking.rmdir()


def metrics_of(r: RunningMetaserver) -> Path:
    return Path(r.workers()[0].environ()["PROMETHEUS_MULTIPROC_DIR"])


def gone(process: psutil.Process) -> bool:
    """Return whether a process has ended. Its parent may reap it between two looks."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def first_worker(r: RunningMetaserver) -> psutil.Process:
    return next(worker for worker in r.workers() if worker_number(worker) == 0)


def ask_anew(r: RunningMetaserver, prompt: str) -> httpx.Response:
    """Send a request on a connection of its own: the kept ones may lead to a worker that is gone."""
    body = {"prompt": prompt, "max_tokens": 3}
    return httpx.post(r.http.base_url.join("/v1/completions"), json=body, timeout=None, trust_env=False, verify=False)


@pytest.mark.parametrize("without", [no_descriptor, no_room, cleaned, kept])
def test_a_worker_that_cannot_be_started_is_tried_again_and_the_others_serve(
    without: Callable[[RunningMetaserver], AbstractContextManager[None]],
) -> None:
    with running(workers=2) as r:
        assert len(r.urls()) == 2  # both have opened what is taken away
        first = first_worker(r)
        with without(r):
            first.kill()
            until(partial(gone, first))
            time.sleep(2.5)  # two tries
            assert r.process.poll() is None
            assert texts(ask_anew(r, "x")) == ["".join(words("x", 3))]
        until(lambda: sorted(map(worker_number, r.workers())) == [0, 1])
        assert len(r.urls()) == 2
        assert texts(ask_anew(r, "y")) == ["".join(words("y", 3))]
        r.process.terminate()
        assert r.process.wait(20) == 0


def test_metrics_and_status_of_each_worker_say_alike_what_runs_and_what_waits() -> None:
    with running("--max-running", "1", workers=2) as r:
        urls = r.urls()
        r.decode.behaviour.hold = True
        asking = [
            threading.Thread(target=httpx.post, args=(url + "/v1/completions",), kwargs={
                "json": {"prompt": f"{i}", "max_tokens": 1}, "timeout": None, "trust_env": False,
            }, name=f"client {i}")
            for url in urls for i in range(3)
        ]  # fmt: skip
        for thread in asking:
            thread.start()
        for url in (*urls, *urls):  # read twice: no number is out of date
            until(lambda url=url: load(url) == [(2, 4), (2, 4)])
        r.decode.behaviour.hold = False
        for thread in asking:
            thread.join()
        for url in urls:
            until(lambda url=url: load(url) == [(0, 0), (0, 0)])


def test_two_metaservers_share_their_engines_and_nothing_else() -> None:
    first = free_port(count=2)
    urls = (f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}")
    prefill, decode = FakeEngine("p"), FakeEngine("d", metaservers=urls)
    try:
        with metaserver(urls[0], prefill, decode) as one, metaserver(urls[1], prefill, decode) as other:
            for r, url in ((one, urls[0]), (other, urls[1])):
                proofs = len(prefill.generations())
                assert texts(r.complete("x")) == ["".join(words("x", 3))]
                assert decode.generations()[-1].body["kv_transfer_params"]["metaserver"] == url
                assert len(prefill.generations()) == proofs + 1
            decode.behaviour.hold = True  # each has a request in progress when one of them dies
            got: list[httpx.Response] = []
            proofs = len(prefill.generations())
            left = threading.Thread(target=lambda: _broken_off(one), name="client of the one")
            stays = threading.Thread(target=lambda: got.append(other.complete("y")), name="client of the other")
            for thread in (left, stays):
                thread.start()
            until(lambda: sum(seen.finished for seen in prefill.generations()[proofs:]) == 2)
            assert decode.running == 2
            one.process.kill()
            until(lambda: decode.running == 1)  # D gets the request
            decode.behaviour.hold = False
            for thread in (left, stays):
                thread.join()
            assert texts(got[0]) == ["".join(words("y", 3))]
            assert texts(other.complete("z")) == ["".join(words("z", 3))]
            assert other.http.get("/readiness").status_code == 200
            assert decode.local_prefills == 0
    finally:
        prefill.stop()
        decode.stop()


def _broken_off(r: RunningMetaserver) -> None:
    with pytest.raises(httpx.TransportError):
        r.complete("lost")
