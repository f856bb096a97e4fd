# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in one process for tests: fake engines, a worker of the metaserver in front of them, a client."""

from __future__ import annotations

import itertools
import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from tools.support.process import free_port
from unit.router.fake_engine import FakeEngine, words
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.server import HttpServer, listen
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.shared.loop import LoopThread

HEAD = "a common beginning of many prompts; " * 100  # 3,500 bytes: three marks


class ServedWorker:
    """A worker of the metaserver behind its own HTTP server, on a loop thread."""

    def __init__(self, worker: WorkerProcess, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.loop = LoopThread("metaserver")
        self._server = HttpServer(worker, [listen("127.0.0.1", port)])
        self._serving = self.loop.submit(self._server.serve(last_words_s=2.0))

    def stop(self) -> None:
        self.loop.call(self._stop(), 10)
        self._serving.result(10)
        self.loop.stop()

    async def _stop(self) -> None:
        self._server.stop()


@dataclass
class FakeCluster:
    worker: WorkerProcess
    served: ServedWorker
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    http: httpx.Client

    def complete(self, prompt: object = "a prompt", **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, "max_tokens": 3, **more})

    @contextmanager
    def leaving(self, prompt: str) -> Iterator[None]:
        """Send a request, and close the connection at the end of the block without reading an answer."""
        body = json.dumps({"model": "fake", "prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.served.port), 20) as client:
            client.sendall(head.encode() + body)
            yield

    def legs(self) -> list[dict[str, Any]]:
        return [seen.body for p in self.prefill for seen in p.generations()]


@contextmanager
def cluster(
    prefill: int = 1, decode: int = 1, fingerprints: Sequence[str] = (), **settings: Any
) -> Iterator[FakeCluster]:
    """Start a cluster. `fingerprints`: of the P's and the D's; if empty, all are of one version."""
    engines = [FakeEngine(f"fake-{i}") for i in range(prefill + decode)]
    for engine, fingerprint in zip(engines, fingerprints, strict=False):
        engine.fingerprint = fingerprint
    port = free_port()  # after the engines, which might get the same port
    url = f"http://127.0.0.1:{port}"
    for engine in engines:
        engine.metaservers(url)
    ps, ds = engines[:prefill], engines[prefill:]
    worker = WorkerProcess(
        replace(
            Settings(
                port=port,
                prefill=tuple(e.address for e in ps),
                decode=tuple(e.address for e in ds),
                probe_every_s=0.1,
                probe_timeout_s=10.0,  # on a loaded machine a healthy engine may be slow
                heartbeat_s=0.2,
                canary=False,
            ),
            **settings,
        ),
        url,
    )
    served = ServedWorker(worker, port)
    http = httpx.Client(base_url=url, timeout=30, trust_env=False, verify=False)
    try:
        until(lambda: http.get("/readiness").status_code == 200 or prefill == 0 or decode == 0)
        names = {engine.address for engine in engines}  # a silent engine is not chosen while others have answered
        until(lambda: all(instance.answered for instance in worker.fleet if instance.name in names))
        yield FakeCluster(worker, served, ps, ds, http)
    finally:
        http.close()
        served.stop()
        for engine in engines:
            engine.stop()


def asked_until(c: FakeCluster, reached: Callable[[], Any], least: int = 1) -> int:
    """Send requests until the condition holds, at least `least`, and check each answer; return how many. The choice
    of an engine is random."""
    for count in itertools.count(1):
        prompt = f"asked {count}"
        assert texts(c.complete(prompt)) == ["".join(words(prompt, 3))]
        if count >= least and reached():
            return count
    raise AssertionError


def until(promise: Callable[[], Any], timeout_s: float = math.inf) -> None:
    """Wait until the condition holds. By default without a limit, as machines differ in speed: the test's own
    timeout ends it, and its traceback shows this wait."""
    end = time.monotonic() + timeout_s
    while not promise():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def texts(answer: httpx.Response) -> list[str]:
    return [choice["text"] for choice in answer.json()["choices"]]


def events(answer: httpx.Response) -> list[str]:
    assert answer.headers["content-type"].startswith("text/event-stream"), f"{answer.status_code}: {answer.text}"
    return data(answer.content)


def data(stream: bytes) -> list[str]:
    return [line[6:] for line in stream.decode().split("\n") if line.startswith("data: ")]


def streamed(answer: httpx.Response) -> str:
    *pieces, last = events(answer)
    assert last == "[DONE]"
    return "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)
