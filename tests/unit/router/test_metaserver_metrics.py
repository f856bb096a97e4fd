# SPDX-License-Identifier: Apache-2.0
"""The page of metrics: it holds up nothing, and has what is there now and no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prometheus_client import Metric

from unit.kits.refusing import no_more_threads
from unit.router.cluster import FakeCluster, asked_until, cluster, until
from unit.router.command import running
from unit.router.fake_engine import FakeEngine
from vllm_ascend_pd.router.metrics import METRICS

WAIT_S = 10.0  # only where the promise is broken


class Gate:
    """A metric whose value comes when the test opens the gate: in its place, very many series."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Event()
        self.pages = 0

    def collect(self) -> Iterator[Metric]:
        self.pages += 1
        self.entered.release()
        self.open.wait(WAIT_S)
        return iter(())


@contextmanager
def gate() -> Iterator[Gate]:
    made = Gate()
    METRICS.registry.register(made)
    try:
        yield made
    finally:
        made.open.set()
        METRICS.registry.unregister(made)


@contextmanager
def asking(c: FakeCluster, callers: int) -> Iterator[list[httpx.Response]]:
    """Ask for the page from several threads, and wait for all answers at the end of the block."""
    got: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: got.append(c.http.get("/metrics")), name=f"scrape {i}") for i in range(callers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        for thread in threads:
            thread.join()


def test_a_page_that_takes_long_holds_up_no_request() -> None:
    with cluster() as c, gate() as made:
        with asking(c, 1) as got:
            assert made.entered.acquire(timeout=WAIT_S)
            assert c.complete("x").status_code == 200
            in_time = not got and not made.open.is_set()
            made.open.set()
        assert in_time and got[0].status_code == 200, "the request was answered while the page was being made"


def test_however_many_ask_one_page_is_made_at_a_time() -> None:
    with cluster() as c, gate() as made:
        with asking(c, 1):
            assert made.entered.acquire(timeout=WAIT_S)
            with asking(c, 7) as got:
                for _ in range(20):  # the others have been read by then, or come later: no more is made in either case
                    assert c.http.get("/health").status_code == 200
                assert made.pages == 1
                made.open.set()
        assert len(got) == 7 and all(answer.status_code == 200 for answer in got)


def test_a_page_is_made_and_a_worker_ends_without_a_thread_for_it() -> None:
    """At the limit of processes. Nothing has asked for a page before, so no idle thread is there."""
    with no_more_threads("asyncio") as refused:
        with cluster() as c:
            assert c.http.get("/metrics").status_code == 200
        assert refused


def lines_of(page: str, engine: str) -> list[str]:
    return [line for line in page.splitlines() if engine in line]


def test_the_series_of_an_engine_end_with_it() -> None:
    with cluster(prefill=2) as c:
        gone = c.prefill[0]
        asked_until(c, gone.generations)
        until(lambda: lines_of(c.http.get("/metrics").text, gone.address))
        instance = c.worker.fleet.get(gone.address)
        assert instance is not None
        with c.worker.fleet.leg(instance, 1.0):  # a request that ends after its engine was removed
            assert c.http.delete(f"/instances/{gone.address}").status_code == 200
        page = c.http.get("/metrics").text
        assert not lines_of(page, gone.address) and lines_of(page, c.prefill[1].address)
        assert c.http.post("/instances", json={"role": "prefill", "url": gone.address}).status_code == 201
        until(lambda: any("instance_up" in line for line in lines_of(c.http.get("/metrics").text, gone.address)))


def test_the_series_of_an_engine_end_with_it_at_all_workers() -> None:
    spare = FakeEngine("spare")
    try:
        with running(workers=2) as r:
            urls = r.urls()
            added = httpx.post(urls[0] + "/instances", json={"role": "prefill", "url": spare.address}, trust_env=False)
            assert added.status_code == 201
            pages = [lambda url=url: httpx.get(url + "/metrics", timeout=None, trust_env=False).text for url in urls]
            for page in pages:
                until(lambda page=page: lines_of(page(), spare.address))
            assert httpx.delete(f"{urls[1]}/instances/{spare.address}", trust_env=False).status_code == 200
            for page in pages:
                until(lambda page=page: not lines_of(page(), spare.address))
                assert lines_of(page(), r.prefill.address)
    finally:
        spare.stop()


def test_loads_are_counted_by_p_and_not_by_pair() -> None:
    with cluster(prefill=2, decode=2) as c:
        asked_until(c, lambda: len(c.worker.fleet.proven()) == 4)
        loads = [line for line in c.http.get("/metrics").text.splitlines() if "_loads_total{" in line]
        assert len([line for line in loads if any(p.address in line for p in c.prefill)]) == 2
        assert not any(d.address in line for d in c.decode for line in loads)
