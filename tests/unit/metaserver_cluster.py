# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in one process for tests: pretended engines, the metaserver's worker before them, a client."""

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
from fake_engine import FakeEngine, Served, words

from vllm_ascend_pd.metaserver.service.app import Worker
from vllm_ascend_pd.metaserver.service.intake import Protocol
from vllm_ascend_pd.metaserver.service.settings import Settings


@dataclass
class Cluster:
    worker: Worker
    served: Served
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    http: httpx.Client

    def complete(self, prompt: object = "a prompt", **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, "max_tokens": 3, **more})

    @contextmanager
    def leaving(self, prompt: str) -> Iterator[None]:
        """A client that has asked, and leaves at the end of the block, whatever it was answered."""
        body = json.dumps({"model": "fake", "prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.served.port), 20) as client:
            client.sendall(head.encode() + body)
            yield

    def legs(self) -> list[dict[str, Any]]:
        return [seen.body for p in self.prefill for seen in p.generations()]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def cluster(prefill: int = 1, decode: int = 1, fingerprints: Sequence[str] = (), **settings: Any) -> Iterator[Cluster]:
    """`fingerprints`: of the P's and the D's; none: all are of one version."""
    engines = [FakeEngine(f"fake-{i}") for i in range(prefill + decode)]
    for engine, told in zip(engines, fingerprints, strict=False):
        engine.fingerprint = told
    port = free_port()  # after the engines, one of which might be given it
    url = f"http://127.0.0.1:{port}"
    for engine in engines:
        engine.metaservers(url)
    ps, ds = engines[:prefill], engines[prefill:]
    worker = Worker(
        replace(
            Settings(
                port=port,
                prefill=tuple(e.address for e in ps),
                decode=tuple(e.address for e in ds),
                probe_every_s=0.1,
                probe_timeout_s=10.0,  # a busy machine is no ill engine
                heartbeat_s=0.2,
                canary=False,
            ),
            **settings,
        ),
        url,
    )
    served = Served(worker.app(), "metaserver", port, lifespan="on", protocol=Protocol)
    http = httpx.Client(base_url=url, timeout=30, trust_env=False)
    try:
        until(lambda: http.get("/readiness").status_code == 200 or prefill == 0 or decode == 0)
        names = {engine.address for engine in engines}  # one that has not answered is not chosen while others have
        until(lambda: all(instance.answered for instance in worker.fleet if instance.name in names))
        yield Cluster(worker, served, ps, ds, http)
    finally:
        http.close()
        served.stop()
        for engine in engines:
            engine.stop()


def asked_until(c: Cluster, reached: Callable[[], Any], least: int = 1) -> int:
    """Ask until it is so, and so often at least, each answer being right; how often. Which of two engines is chosen is chance."""
    for count in itertools.count(1):
        prompt = f"asked {count}"
        assert texts(c.complete(prompt)) == ["".join(words(prompt, 3))]
        if count >= least and reached():
            return count
    raise AssertionError


def until(promise: Callable[[], Any], timeout_s: float = math.inf) -> None:
    """Wait for something that must come to be true. How fast is the machine's business: what never comes ends with the
    test's own hang guard, whose traceback shows this wait."""
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
