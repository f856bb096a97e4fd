# SPDX-License-Identifier: Apache-2.0
"""Four prefill and two decode workers with one latent head, their reports combined by vLLM's own aggregator.

Also a P whose scheduler takes no step, as on a rank without work: its workers still renew their leases.

Only the model is missing: schedulers, aggregator, block pools, connectors, side channel and metaserver call are real.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_without_model import BLOCK, LAYERS, EngineWithoutModel, run_until
from fake_metaserver import fake_metaserver

from tools.support.process import free_port
from vllm_ascend_pd.transport import create as factory
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

pytestmark = [pytest.mark.timeout(180)]

TOKENS = 5 * BLOCK + 3
SHORT_TIMES = {"transfer_timeout_s": 5.0, "quiet_extra_s": 2.0, "lease_s": 3.0, "margin_s": 0.5}


class AggregatedEngines:
    """P with TP 4 and D with TP 2 behind a metaserver that only passes reservations on."""

    def __init__(self, port: int, reservations: queue.SimpleQueue[dict[str, Any]], times: dict[str, float]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.reservations = reservations
        self.prefill = EngineWithoutModel("kv_producer", 4, {"verify": "full", **times})
        self.decode = EngineWithoutModel("kv_consumer", 2, {"verify": "full", "metaserver_urls": [self.url], **times})
        self.prefill.fill(seed=1)

    @property
    def engines(self) -> tuple[EngineWithoutModel, EngineWithoutModel]:
        return self.prefill, self.decode

    def send(self, name: str) -> tuple[str, str]:
        """Send one request through D and P. Return its ids on each side."""
        tokens = [3 + (7 * i + zlib.crc32(name.encode())) % 500 for i in range(TOKENS)]
        self.decode.add(
            f"{name}-d", tokens, {"do_remote_prefill": True, "metaserver": self.url, "ticket": name}, max_tokens=2
        )
        self.decode.step()
        body = self.reservations.get(timeout=10.0)
        self.prefill.add(f"{name}-p", tokens, {"do_remote_decode": True, "reservation": body["reservation"]})
        return f"{name}-p", f"{name}-d"


@pytest.fixture
def make_site() -> Iterator[Callable[..., AggregatedEngines]]:
    reservations: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def script(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        reservations.put(body)
        return 200, [{"event": "accepted", "prefill": "here"}, {"event": "prefilled"}]

    port, sites = free_port(), []

    def make(**times: float) -> AggregatedEngines:
        sites.append(AggregatedEngines(port, reservations, {**SHORT_TIMES, **times}))
        return sites[-1]

    with fake_metaserver(port, script):
        yield make
        for site in sites:
            for engine in site.engines:
                engine.close()


def test_mla_4_to_2_completes_each_id_once_and_frees_both_pools(make_site: Callable[[], AggregatedEngines]) -> None:
    site = make_site()
    free = [engine.free_blocks() for engine in site.engines]
    ids = [site.send(f"r{i}") for i in range(3)]
    prefill, decode = site.engines
    seen: dict[str, list[int]] = {}
    checked: set[str] = set()

    def compare(p_id: str, d_id: str) -> None:
        theirs = decode.blocks_of(d_id)
        for name in LAYERS:
            source = prefill.tensors[0][name][seen[p_id]]
            for rank in range(2):
                landed = decode.tensors[rank][name][theirs[: len(seen[p_id])]]
                assert torch.equal(landed[:-1], source[:-1]), f"{d_id}: rank {rank}, {name}"
                assert torch.equal(landed[-1, 0, : TOKENS % BLOCK], source[-1, 0, : TOKENS % BLOCK])

    def all_received() -> bool:
        """Compare each request in the step that reports it: a few steps later D has freed its blocks.

        Returns whether all have been compared.
        """
        for p_id, d_id in ids:
            if p_id in prefill.scheduler.requests and prefill.blocks_of(p_id):
                seen[p_id] = prefill.blocks_of(p_id)
            if d_id in decode.finished.received and d_id not in checked:
                checked.add(d_id)
                compare(p_id, d_id)
        return len(checked) == len(ids)

    run_until(site.engines, all_received)
    run_until(site.engines, lambda: [engine.free_blocks() for engine in site.engines] == free)
    for _ in range(5):
        for engine in site.engines:
            engine.step()
    assert sorted(prefill.finished.sent) == sorted(p for p, _ in ids)
    assert sorted(decode.finished.received) == sorted(d for _, d in ids)
    assert not decode.finished.failed


def test_a_failure_on_one_of_four_workers_fails_the_request_on_all(
    make_site: Callable[[], AggregatedEngines], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[MemoryTransport] = []

    class OneBadWorker(MemoryTransport):
        """P's rank 2, the third transport made in this process, fails every write."""

        def land(self, write: Write) -> WriteState:
            return WriteState.FAILED if self is made[2] else super().land(write)

    def create(*_: Any, **__: Any) -> MemoryTransport:
        made.append(OneBadWorker())
        return made[-1]

    monkeypatch.setattr(factory, "create_target", create)
    monkeypatch.setattr(factory, "create_wire", create)
    site = make_site()
    prefill, decode = site.engines
    free = [engine.free_blocks() for engine in site.engines]
    p_id, d_id = site.send("bad")
    run_until(site.engines, lambda: bool(decode.finished.received), deadline_s=60.0)
    assert decode.finished.received == [d_id]
    assert decode.finished.failed == [d_id], "one rank's failure is the request's failure"
    run_until(site.engines, lambda: [engine.free_blocks() for engine in site.engines] == free, deadline_s=60.0)
    assert prefill.finished.sent == [p_id]
    assert decode.finished.received == [d_id]


@pytest.fixture
def landing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Event before which no write lands."""
    allowed = threading.Event()

    class Slow(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            return super().land(write) if allowed.is_set() else WriteState.PENDING

    def create(*_: Any, **__: Any) -> MemoryTransport:
        return Slow()

    monkeypatch.setattr(factory, "create_target", create)
    monkeypatch.setattr(factory, "create_wire", create)
    return allowed


def computed(site: AggregatedEngines, name: str) -> tuple[str, str]:
    """Send one request, and step both engines until P has computed it. From there on P's scheduler has no work."""
    p_id, d_id = site.send(name)
    p, _ = site.engines
    run_until(site.engines, lambda: p.scheduler.has_finished_requests() and not p.scheduler.has_unfinished_requests())
    return p_id, d_id


def test_leases_are_renewed_by_a_p_that_takes_no_step(
    make_site: Callable[..., AggregatedEngines], landing: threading.Event
) -> None:
    site = make_site()
    decode = site.decode
    _, d_id = computed(site, "slow")
    until = time.monotonic() + 2 * SHORT_TIMES["lease_s"]
    run_until((decode,), lambda: time.monotonic() > until)
    assert not decode.finished.received, "nothing has landed, and D still waits"
    landing.set()
    run_until((decode,), lambda: bool(decode.finished.received))
    assert decode.finished.received == [d_id] and not decode.finished.failed
