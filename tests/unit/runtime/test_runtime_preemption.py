# SPDX-License-Identifier: Apache-2.0
"""Preemption on P, at every moment: the push starts over on other blocks, or fails; no lost block is read."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from unit.device.caches import CacheModel, HeldDevice
from unit.kits.watching import running, traced, until
from unit.protocol.kit import D, reservation
from unit.runtime.sites import DecodeSite, PrefillSite, config
from unit.runtime.wires import SlowWire
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.metadata import PushSlice, PushStart
from vllm_ascend_pd.prefill.worker.core.claiming import IN_FLIGHT
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.prefill.worker.role import PrefillWorker
from vllm_ascend_pd.roles import StepMetadata
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

TUPLES = CacheModel("token")


@pytest.mark.parametrize("lost_after", [1, 2], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("device_held", [False, True], ids=["pushed", "not computed on the device yet"])
def test_a_preempted_request_starts_over_on_other_blocks(lost_after: int, device_held: bool) -> None:
    device = HeldDevice()
    p, d = PrefillSite(TUPLES, 2, push=config(preempt_drain_s=20.0), device=device), DecodeSite(TUPLES, 1)
    with traced() as events, running(p, d):
        if not device_held:
            device.open.set()
        request, other = d.reserve("r", 30), d.reserve("other", 30)
        d.step()
        assert p.admit(request) is None
        for count in (11, 10)[:lost_after]:
            p.compute((request, count))
        if device_held:
            until(
                lambda: sum(stage == "ready" for stage, _ in events) >= 4, "READY of two ranks, reported by both sides"
            )
        else:
            until(lambda: sum(stage == "layer_pushed" for stage, _ in events) >= 2)
        lost = list(request.p_blocks)
        p.preempt(request)
        for cache in p.caches.values():
            cache.scribble(lost, 99)
        p.prefill(other)
        device.open.set()
        assert d.received(other)[0].ok
        assert request.name not in d.done, "a request is done although it was preempted"
        for count in (20, 10):
            p.compute((request, count))
        assert d.received(request)[0].ok
        d.check(request, other)
        p.finish_and_free(request)


@pytest.mark.parametrize("device_held", [False, True], ids=["pushed", "not computed on the device yet"])
def test_a_request_preempted_after_its_last_chunk_is_right_or_fails(device_held: bool) -> None:
    device = HeldDevice()
    p, d = (
        PrefillSite(TUPLES, 2, push=config(verify="off"), device=device),
        DecodeSite(TUPLES, 1, push=config(verify="off")),
    )
    with running(p, d):
        if not device_held:
            device.open.set()
        request = d.bound("r", 30)
        p.prefill(request, 20, 10)
        if not device_held:
            assert d.received(request)[0].ok
        lost = list(request.p_blocks)
        p.preempt(request)
        for cache in p.caches.values():
            cache.scribble(lost, 99)
        device.open.set()
        p.compute((request, 30))
        (report,) = d.received(request)
        assert report.ok != device_held, report
        if report.ok:
            d.check(request)
        p.finish_and_free(request)


def test_a_request_preempted_after_some_ranks_have_finished_with_it_is_not_half_pushed() -> None:
    """Owners of tokens differ from step to step. A rank that finished before the preemption reports nothing more, so
    what the others would push in new steps does not match the missing part."""
    model, slow_device = CacheModel("latent", heads=1), HeldDevice()
    done = HeldDevice()
    done.open.set()
    p = PrefillSite(model, 2, push=config(verify="off"), device=lambda rank: (done, slow_device)[rank])
    d = DecodeSite(model, 1, push=config(verify="off"))
    with traced() as events, running(p, d):
        request, other = d.reserve("r", 64), d.reserve("other", 64)
        d.step()
        assert p.admit(request) is None and p.admit(other) is None
        p.compute((request, 64))
        until(lambda: any(stage == "push_closed" for stage, _ in events), "the rank whose device is fast")
        lost = list(request.p_blocks)
        p.preempt(request)
        for cache in p.caches.values():
            cache.scribble(lost, 99)
        slow_device.open.set()
        p.compute((other, 64), (request, 64))
        (report,) = d.received(request)
        if report.ok:
            d.check(request)
        d.complete(other)
        p.finish_and_free(request, other)


def test_preemption_waits_for_writes_that_are_out_and_starts_no_other() -> None:
    """Two batches are out, four layers wait behind them: these must not be read any more, even if one of the two
    returns long before the other."""

    class Turnstile(MemoryTransport):
        def __init__(self) -> None:
            super().__init__()
            self.tickets = threading.Semaphore(0)

        def land(self, write: Write) -> WriteState:
            return super().land(write) if self.tickets.acquire(blocking=False) else WriteState.PENDING

    wire, model = Turnstile(), CacheModel("token", layers=6)
    push = config(preempt_drain_s=20.0, fuse_layers=1)
    p, d = PrefillSite(model, 1, push=push, make_transport=lambda: wire), DecodeSite(model, 1)
    with traced() as events, running(p, d):

        def submitted() -> int:
            return sum(stage == "layer_submitted" for stage, _ in events)

        def one_by_one(worker: PrefillWorker, name: str, tensor: Any) -> None:
            worker.save_layer(name)
            index = model.names.index(name)
            if index < IN_FLIGHT:
                until(lambda: submitted() == index + 1, "a batch of its own")

        request = d.bound("r", 30)
        assert p.admit(request) is None
        p.compute((request, 1))  # nothing to push yet, but READY
        until(lambda: sum(stage == "ready" for stage, _ in events) >= 2)
        p.compute((request, 20), hook=one_by_one)
        openers = [
            threading.Timer(seconds, wire.tickets.release, (count,)) for seconds, count in ((0.5, 1), (0.8, 999))
        ]
        for opener in openers:
            opener.start()
        lost = list(request.p_blocks)
        p.preempt(request)
        for opener in openers:
            opener.join()
        assert submitted() == IN_FLIGHT
        for cache in p.caches.values():
            cache.scribble(lost, 99)
        p.compute((request, 30))
        d.complete(request)


def test_the_end_of_a_step_that_comes_after_a_preemption_does_not_end_the_push() -> None:
    """The writer's thread may learn that everything was computed only when the blocks are gone already."""
    device = HeldDevice()
    p = PrefillSite(TUPLES, 1, push=config(verify="off"), device=device)
    d = DecodeSite(TUPLES, 1, push=config(verify="off"))
    with traced() as events, running(p, d):
        request = d.bound("r", 30)
        p.prefill(request)
        until(lambda: sum(stage == "ready" for stage, _ in events) >= 2, "READY, reported by both sides")
        p.book.preempted(request.p_name)
        step = p.book.take_step()
        (worker,) = p.workers.values()
        worker.preempt(StepMetadata(prefill=step))
        device.open.set()
        until(
            lambda: device.seen_done >= TUPLES.layers, "the writer's thread to see the layers, and the end behind them"
        )
        time.sleep(0.05)
        worker.bind(StepMetadata(prefill=step))
        (report,) = d.received(request)
        assert not report.ok, "a request without any KV ended well"


def test_writes_that_do_not_return_before_preemption_fail_the_push_first() -> None:
    wire = SlowWire()
    p = PrefillSite(TUPLES, 1, push=config(preempt_drain_s=0.05), make_transport=lambda: wire)
    d = DecodeSite(TUPLES, 1)
    with traced() as events, running(p, d):
        request = p.begun(d, "r", 30, 20)
        until(wire.asked.is_set, "a write that is out")
        p.preempt(request)
        until(lambda: any(stage == "fencing" for stage, _ in events), "D learns that it failed")
        for _ in range(10):
            d.step()
        assert request.name not in d.done, "the write may still land: D keeps its blocks"
        wire.open.set()
        (report,) = d.received(request)
        assert not report.ok and report.why.code == "PD-XFER-001" and set(report.blocks) == set(request.d_blocks)
        p.compute((request, 30))  # it goes on without being pushed
        p.finish_and_free(request)


def test_a_push_that_starts_over_without_a_reported_loss_is_a_bug_and_says_so() -> None:
    """Otherwise its new blocks would be appended to the lost ones."""
    push = Push.of(PushStart("r", "push", reservation(D, 40)), D, (), (), ())
    push.tables[0].extend(np.arange(3, dtype=np.int32))
    restarted = PushSlice("push", 0, 8, (np.array([5], dtype=np.int32),), restart=True, final=False)
    with pytest.raises(LocalProtocolError, match="push push starts over"):
        push.extend(2, restarted)
    push.forget()
    push.extend(2, restarted)
    assert push.tables[0].known == 1
