# SPDX-License-Identifier: Apache-2.0
"""Isolation of a faulty peer: other decode engines, other requests and the forward pass go on."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from unit.device.caches import CacheModel
from unit.kits.watching import running, traced, until
from unit.runtime.sites import LOOPBACK, DecodeSite, PrefillSite, config
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

TUPLES = CacheModel("token")


def closed(events: list[Any], ok: bool | None = None) -> list[Any]:
    return [facts for stage, facts in events if stage == "push_closed" and ok in (None, facts["ok"])]


def test_a_decode_engine_that_accepts_and_stays_silent_delays_neither_the_forward_nor_others() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        p = PrefillSite(TUPLES, 1, push=config(ready_timeout_s=6.0))
        d, mute = DecodeSite(TUPLES, 1), DecodeSite(TUPLES, 1, seed=3)
        with traced() as events, running(p, d, mute):
            good, bad = d.reserve("good", 40), mute.reserve("bad", 40)
            unused = Endpoint(LOOPBACK, silent.getsockname()[1])
            bad.reservation = msgspec.structs.replace(bad.reservation, endpoints=(unused,))
            d.step()
            for request in (bad, good):
                assert p.admit(request) is None
            for _ in range(4):
                p.compute((bad, 10), (good, 10))
            assert not closed(events, ok=False), "the forward waited"
            assert d.received(good)[0].ok
            assert not closed(events, ok=False), "the good one waited for the bad one's timeout"
            d.check(good)
            p.finish_and_free(bad, good)
            assert len(closed(events, ok=False)) == 1


def test_a_destination_whose_writes_stall_delays_no_other() -> None:
    stalled: set[str] = set()
    release = threading.Event()

    class Selective(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            if write.session in stalled and not release.is_set():
                return WriteState.PENDING
            return super().land(write)

    p = PrefillSite(TUPLES, 1, make_transport=Selective)
    d, slow = DecodeSite(TUPLES, 1), DecodeSite(TUPLES, 1, seed=3)
    with running(p, d, slow):
        stalled.add(next(iter(slow.workers)).runtime.target.session)  # type: ignore[union-attr]
        one, other = slow.reserve("one", 40), d.reserve("other", 40)
        slow.step()
        d.step()
        for request in (one, other):
            assert p.admit(request) is None
        for _ in range(4):
            p.compute((one, 10), (other, 10))
        d.complete(other)
        slow.step()
        assert one.name not in slow.done
        release.set()
        slow.complete(one)


@pytest.mark.parametrize("block", [64, 1 << 20, -1], ids=["one too far", "far away", "negative"])
def test_blocks_that_decode_does_not_have_are_never_written(block: int) -> None:
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1, blocks=64)
    with running(p, d):
        request, other = d.reserve("r", 30), d.reserve("other", 30)
        ids = np.frombuffer(request.reservation.blocks[0], dtype="<i4").copy()
        ids[3] = block
        request.reservation = msgspec.structs.replace(request.reservation, blocks=(ids.tobytes(),))
        d.step()
        for each in (request, other):
            assert p.admit(each) is None
        p.compute((request, 30), (other, 30))
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-WIRE-003")
        d.complete(other)
        assert not d.written(request), "nothing of a request with a bad block is written"


def test_blocks_that_decode_reserved_for_others_are_its_own_word() -> None:
    """P writes exactly the blocks that the reservation names, not a range around them."""
    p, d = PrefillSite(TUPLES, 1, block=8), DecodeSite(TUPLES, 1, block=8)
    with running(p, d):
        requests = [d.reserve(f"r{i}", 3 + 5 * i) for i in range(4)]
        d.step()
        for request in requests[::2]:
            p.prefill(request)
        d.received(*requests[::2])
        d.check(*requests[::2])
        assert not d.written(*requests[1::2])


def test_a_decode_worker_that_stands_still_loses_its_writer_and_the_request_fails_on_both() -> None:
    """Without renewal P's authority runs out: it stops, and D notices when it goes on."""
    push = config(lease_s=2.0, margin_s=0.5, quiet_s=0.2)
    p, d = PrefillSite(TUPLES, 1, push=push), DecodeSite(TUPLES, 1, push=push)
    with traced() as events, running(p, d):
        request = p.begun(d, "r", 40, 20)
        until(lambda: any(stage == "layer_pushed" for stage, _ in events))
        runtime = d.runtime
        awake = threading.Event()
        runtime.loop.post(awake.wait, 20.0)
        until(lambda: closed(events), "the end of P's authority")
        assert "authority" in closed(events)[0]["detail"]
        before = d.copied()
        p.compute((request, 20))
        p.finish_and_free(request)
        assert d.holds(before), "a write without authority"
        awake.set()
        assert not d.received(request)[0].ok


def test_a_lease_is_renewed_while_the_prefill_takes_its_time() -> None:
    push = config(lease_s=3.6, margin_s=1.0)
    p, d = PrefillSite(TUPLES, 1, push=push), DecodeSite(TUPLES, 1, push=push)
    with traced() as events, running(p, d):
        request = p.begun(d, "r", 40, 20)

        def renewed() -> int:
            return max((facts["seq"] for stage, facts in events if stage == "begin"), default=0)

        until(lambda: renewed() >= 3, "two more BEGINs, each a third of a lease after the one before")
        p.compute((request, 20))
        d.complete(request)


def test_engines_with_different_secrets_never_meet() -> None:
    p = PrefillSite(TUPLES, 1, secrets=Secrets(b"p" * 32))
    d = DecodeSite(TUPLES, 1, secrets=Secrets(b"d" * 32))
    with traced() as events, running(p, d):
        request = d.bound("r", 20, deadline_s=2.0)
        p.prefill(request)
        p.finish_and_free(request)
        assert "PD-SEC-003" in closed(events)[0]["detail"]
        assert not d.received(request)[0].ok
        assert not d.written(request)


def test_a_decode_engine_that_verifies_says_when_prefill_does_not() -> None:
    p, d = PrefillSite(TUPLES, 1, push=config(verify="off")), DecodeSite(TUPLES, 1, push=config(verify="full"))
    with running(p, d):
        request = d.bound("r", 20)
        p.prefill(request)
        (report,) = d.received(request)
        assert report.why.code == "PD-WIRE-004" and "no checksums" in report.why.detail


def test_a_prefill_engine_that_verifies_serves_a_decode_engine_that_does_not() -> None:
    p, d = PrefillSite(TUPLES, 1, push=config(verify="full")), DecodeSite(TUPLES, 1, push=config(verify="off"))
    with running(p, d):
        request = d.bound("r", 20)
        p.prefill(request)
        d.complete(request)


def test_a_writer_that_stands_still_inside_a_write_is_shut_out_and_writes_nothing_when_it_wakes() -> None:
    """D waits for its answer until the hold is over, then revokes access, frees the blocks and serves others."""
    push = config(lease_s=2.0, margin_s=0.5, quiet_s=0.3)
    release = threading.Event()

    class StoppedTransport(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            return super().land(write) if release.is_set() else WriteState.PENDING

    p = PrefillSite(TUPLES, 1, push=push, make_transport=StoppedTransport)
    other = PrefillSite(TUPLES, 1, push=push, seed=8)
    d = DecodeSite(TUPLES, 1, push=push)
    with traced() as events, running(p, other, d):
        request = p.begun(d, "r", 40, 20)
        until(lambda: any(stage == "layer_submitted" for stage, _ in events), "a write that is out")
        runtime = p.runtime
        awake = threading.Event()
        runtime.loop.post(awake.wait, 30.0)
        session = d.runtime.target.session
        d.book.request_finished(request.name)
        assert not d.received(request)[0].ok
        assert d.runtime.target.session != session
        assert [facts["proof"] for stage, facts in events if stage == "quiet"] == ["revoked"]
        before = d.copied()
        release.set()
        awake.set()
        p.compute((request, 20))
        p.finish_and_free(request)
        assert d.holds(before), "it wrote after it was shut out"
        later, retried = d.reserve("later", 30), d.reserve("again", 30)
        d.step()
        other.prefill(later)
        p.prefill(retried)
        assert all(report.ok for report in d.received(later, retried)), "both are served under the new session"
        d.check(later, retried)
