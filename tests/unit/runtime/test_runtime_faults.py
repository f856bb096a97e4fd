# SPDX-License-Identifier: Apache-2.0
"""Both runtimes with faults: late, aborted, cancelled, silent, corrupted, dead, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tools.support.process import is_free
from unit.device.caches import CacheModel, HeldDevice, TokenMajorDevice
from unit.kits.watching import own_threads, running, traced, until
from unit.runtime.sites import DecodeSite, PrefillSite, config, heard_ready
from unit.runtime.wires import DyingWire, FlippingWire, LossyWire, SlowWire
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.prefill.worker.core import batches
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.prefill.worker.sums import PushSums
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Memory
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.roles import StepMetadata
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

PLANES = CacheModel("opaque")
TUPLES = CacheModel("token")


# -- late


def test_a_step_that_binds_late_loses_nothing() -> None:
    """BEGIN comes before D's workers know the transfer, P is ready long before; a DONE can never be early."""
    p, d = PrefillSite(PLANES, 2), DecodeSite(PLANES, 1)
    with traced() as events, running(p, d):
        first, late = d.reserve("first", 5), d.reserve("late", 21)
        p.prefill(late, 10, 11)
        p.prefill(first)
        until(lambda: sum(stage == "begin" for stage, _ in events) > 8, "BEGIN repeated before the first step of D")
        assert not any(stage == "ready" for stage, _ in events)
        d.step()
        d.complete(first, late)


def test_nothing_is_written_before_the_device_has_finished_what_ran_before() -> None:
    device = HeldDevice()
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1, device=device)
    with traced() as events, running(p, d):
        request = d.bound("r", 21)
        p.prefill(request)
        until(lambda: sum(stage == "begin" for stage, _ in events) > 4, "BEGIN repeated before the gate")
        assert not d.written(request)
        assert not any(stage in ("ready", "layer_submitted") for stage, _ in events)
        device.open.set()
        d.complete(request)


def test_the_gate_is_behind_what_clears_the_last_blocks() -> None:
    """P may write as soon as it opens. Clearing that came later would take the next token's KV away."""
    cleared: list[bool] = []

    class LookingDevice(TokenMajorDevice):
        def record(self) -> Any:
            cleared.append(not any(view[request.d_blocks[-1], :, 1:].any() for view in d.ranks[0].views[0]))
            return super().record()

    d = DecodeSite(TUPLES, 1, device=LookingDevice())
    with running(d):
        request = d.reserve("r", 21)
        d.step()
        assert cleared == [True]


def test_a_gate_that_opens_after_its_transfer_is_over_holds_up_no_other() -> None:
    device = HeldDevice()
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1, device=device)
    with running(p, d):
        gone, kept = d.reserve("gone", 21), d.reserve("kept", 13)
        d.step()
        d.book.request_finished(gone.name)
        assert not d.received(gone)[0].ok
        d.step()  # tells the workers that it has ended
        device.open.set()
        p.prefill(kept)
        d.complete(kept)


# -- the request ends early on one side


def test_an_abort_on_prefill_fails_the_load_at_once_and_releases_the_blocks() -> None:
    p, d = PrefillSite(PLANES, 2), DecodeSite(PLANES, 1)
    with running(p, d):
        request = p.begun(d, "r", 30, 20)
        assert p.finish(request), "its blocks are held until nothing reads them"
        p.released_blocks_of(request)
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-002")
        assert p.released == {request.p_name}


def test_a_request_that_ends_without_blocks_says_so_to_decode() -> None:
    """vLLM 0.23 ends a request that was preempted in its last step with an empty list of blocks."""
    p, d = PrefillSite(PLANES, 1), DecodeSite(PLANES, 1)
    with running(p, d):
        request = p.begun(d, "r", 30, 20)
        p.preempt(request)
        assert not p.finish(request, holds_blocks=False)
        p.idle()
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-002")
        runtime = p.runtime
        until(lambda: p.idle().empty and not runtime.core.records, "nothing is left of it")
        assert not p.seen[0, 0] and not p.released, "vLLM does not wait for this request"


def test_a_cancel_on_decode_stops_the_push_and_fences_the_blocks() -> None:
    wire = SlowWire()
    p, d = PrefillSite(PLANES, 1, make_transport=lambda: wire), DecodeSite(PLANES, 1)
    with running(p, d):
        request, other = d.reserve("r", 30), d.reserve("other", 10)
        d.step()
        assert p.admit(request) is None
        p.compute((request, 20))
        until(wire.asked.is_set, "a write that is out")
        d.book.request_finished(request.name)
        for _ in range(10):
            d.step()
        assert request.name not in d.done, "a write is out: the blocks stay"
        wire.open.set()
        (report,) = d.received(request)
        assert not report.ok
        before = d.copied()
        p.compute((request, 10))
        p.finish_and_free(request)
        assert d.holds(before), "nothing lands after the report"
        p.prefill(other)
        assert d.received(other)[0].ok


def test_blocks_are_used_again_after_a_cancel_without_a_trace_of_the_old_request() -> None:
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1, blocks=8)
    with running(p, d):
        first = p.begun(d, "first", 32, 20)
        d.book.request_finished(first.name)
        d.received(first)
        d.release(first)
        second = d.reserve("second", 32, seed=77)
        assert set(second.d_blocks) == set(first.d_blocks)
        d.step()
        p.prefill(second)
        p.compute((first, 12))
        d.complete(second)


# -- silence


def test_a_decode_engine_that_never_listens_fails_the_push_at_once(caplog: pytest.LogCaptureFixture) -> None:
    p, d = PrefillSite(PLANES, 1), DecodeSite(PLANES, 1)
    with traced() as events, running(p, d):
        good = d.bound("good", 9)
        p.prefill(good)
        assert d.received(good)[0].ok
        request = d.reserve("r", 30)
        unused = Endpoint("127.0.0.1", 1)
        request.reservation = msgspec.structs.replace(request.reservation, endpoints=(unused,))
        p.prefill(request)
        p.finish_and_free(request)
        until(lambda: len([1 for stage, _ in events if stage == "push_closed"]) == 2, "both ends")
        closed = {facts["transfer"]: facts for stage, facts in events if stage == "push_closed"}
        failed = closed[str(request.reservation.transfer)]
        assert failed["ok"] is False and failed["code"] == "PD-XFER-004"
        said = [record.getMessage() for record in caplog.records if "push of transfer" in record.getMessage()]
        assert len(said) == 1 and said[0].startswith(f"push of transfer {failed['transfer']} failed: PD-XFER-004")


def test_a_decode_engine_that_never_answers_costs_no_more_than_the_timeout() -> None:
    p = PrefillSite(PLANES, 1, push=config(ready_timeout_s=0.4))
    d = DecodeSite(PLANES, 1)
    with traced() as events, running(p, d):
        request = d.reserve("r", 30)  # D never steps
        p.prefill(request, 20, 10)
        p.finish_and_free(request)
        closed = [facts for stage, facts in events if stage == "push_closed"]
        assert closed[0]["ok"] is False and "no READY" in closed[0]["detail"]


def test_a_push_ends_at_the_deadline_of_its_reservation() -> None:
    device = HeldDevice()
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1, device=device)
    with traced() as events, running(p, d):
        request = d.reserve("r", 30, deadline_s=0.5)
        d.step()  # the gate never opens
        p.prefill(request)
        p.finish_and_free(request)
        closed = [facts for stage, facts in events if stage == "push_closed"]
        assert closed[0]["ok"] is False
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-001")


def test_a_prefill_that_never_comes_costs_decode_its_deadline() -> None:
    d = DecodeSite(PLANES, 2)
    with running(d):
        request = d.bound("r", 30, deadline_s=0.5)
        reports = d.received(request)
        assert [(report.ok, report.why.code) for report in reports] == [(False, "PD-XFER-001")] * 2


def test_a_prefill_that_has_ended_well_must_deliver_within_a_lease() -> None:
    d = DecodeSite(PLANES, 1, push=config(lease_s=0.5, margin_s=0.1))
    with running(d):
        request = d.bound("r", 30, deadline_s=3600.0)
        d.book.answered(request.reservation.transfer)
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-001")


# -- broken things


def test_a_flipped_bit_is_found_and_its_layer_named() -> None:
    d = DecodeSite(PLANES, 1)
    bad = d.ranks[0].views[1][0]
    spoiled = range(bad.ctypes.data, bad.ctypes.data + bad.nbytes)
    p = PrefillSite(PLANES, 2, make_transport=lambda: FlippingWire(spoiled))
    with running(p, d):
        request = d.bound("r", 30)
        p.prefill(request)
        (report,) = d.received(request)
        assert (report.ok, report.why.code, report.why.detail) == (False, "PD-WIRE-004", f"{PLANES.names[1]} (kv)")
        assert set(report.blocks) == set(request.d_blocks)


@pytest.mark.parametrize("at", ["submit", "poll"])
def test_a_dead_writer_fails_every_push_and_releases_the_blocks_when_they_are_quiet(at: str) -> None:
    push, device = config(quiet_s=0.3), HeldDevice()
    p = PrefillSite(TUPLES, 1, push=push, make_transport=lambda: DyingWire(at), device=device)
    d, e = DecodeSite(TUPLES, 1, push=push), DecodeSite(TUPLES, 2, push=push, seed=9)
    with traced() as events, running(p, d, e):
        request, other, later = d.reserve("r", 30), e.reserve("other", 30), d.reserve("later", 9)
        d.step()
        e.step()
        for each in (request, other):
            assert p.admit(each) is None
        p.compute((request, 30), (other, 30))
        until(lambda: len(heard_ready(events)) == 3, "P has heard READY of three ranks")
        device.open.set()  # now each has a batch
        assert {report.why.code for report in e.received(other)} == {"PD-XFER-003"}
        assert d.received(request)[0].why.code in ("PD-XFER-003", "" if at == "poll" else "PD-XFER-003")
        p.prefill(later)
        assert d.received(later)[0].why.code == "PD-XFER-003"
        p.finish_and_free(request, other, later)
        (worker,) = p.workers.values()
        assert list((worker.stats() or {})["levels"]["writers_dead"].values()) == [1]
        with pytest.raises(PdError, match="PD-XFER-007"):
            worker.runtime.check()


@pytest.mark.parametrize("wrong", ["a layer too few", "a region too few", "no layer"])
def test_a_decode_engine_with_wrong_addresses_fails_its_own_pushes_only(wrong: str) -> None:
    push = config(quiet_s=0.3)
    p = PrefillSite(TUPLES, 1, push=push)
    d, e = DecodeSite(TUPLES, 1, push=push), DecodeSite(TUPLES, 1, push=push, seed=9)
    runtime = d.runtime
    session, blocks, bases = msgspec.structs.astuple(runtime.addresses())
    cut = {"a layer too few": bases[:-1], "a region too few": tuple(base[:-1] for base in bases), "no layer": ()}
    runtime.core._addresses = lambda: Memory(session, blocks, cut[wrong])  # type: ignore[method-assign]
    with running(p, d, e):
        request, other = d.reserve("r", 30), e.reserve("other", 30)
        d.step()
        e.step()
        for each in (request, other):
            assert p.admit(each) is None
        p.compute((request, 30), (other, 30))
        assert d.received(request)[0].why.code == "PD-WIRE-005"
        e.complete(other)
        p.finish_and_free(request, other)
        later = e.bound("later", 9)
        p.prefill(later)
        assert e.received(later)[0].ok, "the writer lives"


@pytest.mark.parametrize("at", ["spans", "checksum"])
def test_a_write_that_cannot_be_prepared_fails_its_own_push_only(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    push = config(quiet_s=0.3)
    broken: list[str] = []

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any) -> Any:
            names = [each.name if isinstance(each, Push) else getattr(each, "push", None) for each in args]
            runtime = p.runtime
            if any(push.request_id in broken for push in list(runtime.core.records.values()) if push.name in names):
                raise RuntimeError("the device is gone")
            return function(*args)

        return maybe

    if at == "spans":
        monkeypatch.setattr(batches, "spans_of", wrapped(batches.spans_of))
    else:
        monkeypatch.setattr(PushSums, "direct", wrapped(PushSums.direct))
    p, d, e = PrefillSite(TUPLES, 1, push=push), DecodeSite(TUPLES, 1, push=push), DecodeSite(TUPLES, 1, push=push)
    with running(p, d, e):
        request, other = d.reserve("r", 30), e.reserve("other", 30)
        broken.append(request.p_name)
        d.step()
        e.step()
        for each in (request, other):
            assert p.admit(each) is None
        p.compute((request, 30), (other, 30))
        assert d.received(request)[0].why.code == "PD-XFER-003"
        e.complete(other)
        p.finish_and_free(request, other)


def test_what_was_decided_before_an_error_is_still_done() -> None:
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1)
    with running(p, d):
        request = p.begun(d, "r", 30, 20)
        runtime = p.runtime
        (push,) = runtime.core.records.values()
        with pytest.raises(KeyError), runtime.deciding() as pushes:
            pushes.abort(time.monotonic(), push.name, Failure("PD-XFER-002", "the test"))
            raise KeyError(push.name)
        assert d.received(request)[0].why.code == "PD-XFER-002"
        p.finish_and_free(request)


class BrokenEvent:
    """Event of a failed device."""

    def done(self) -> bool:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("at", ["start", "bind", "gate", "compare"])
def test_what_goes_wrong_with_one_request_on_decode_is_that_requests(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1)
    runtime = d.runtime
    assert runtime.verifier is not None
    names: list[Any] = []  # of the failing request, as soon as it is known

    def breaking(function: Callable[..., Any], of: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any) -> Any:
            if of(*args) in names:
                raise RuntimeError("the device is gone")
            return function(*args)

        return maybe

    verifier = runtime.verifier
    with running(p, d):
        bad, good, cancelled = d.reserve("bad", 30), d.reserve("good", 9), d.reserve("cancelled", 5)
        names.append(bad.reservation.transfer)
        if at == "start":  # at the first bind
            first = [RuntimeError("no port is free")]
            addresses = runtime.core._addresses

            def once() -> Memory:
                if first:
                    raise first.pop()
                return addresses()

            monkeypatch.setattr(runtime.core, "_addresses", once)
        elif at == "bind":
            monkeypatch.setattr(Receiver, "bind", breaking(Receiver.bind, lambda _, now, transfer, *rest: transfer))
        elif at == "compare":
            compare = verifier.first_difference
            monkeypatch.setattr(
                verifier, "first_difference", breaking(compare, lambda bind, sums, pushed: bind.transfer)
            )
        elif at == "gate":
            look = runtime.core.look

            def break_and_look(now: float) -> None:
                for transfer in names:
                    if transfer in runtime.core.gates:
                        runtime.core.gates[transfer] = BrokenEvent()
                look(now)

            monkeypatch.setattr(runtime.core, "look", break_and_look)
        d.book.request_finished(cancelled.name)
        d.step()
        for each in (bad, good):
            p.prefill(each)
        assert d.received(good)[0].ok
        (report,) = d.received(bad)
        assert (report.ok, report.why.code) == (False, "PD-WIRE-004" if at == "compare" else "PD-XFER-002")
        assert "the device is gone" in report.why.detail or "no port is free" in report.why.detail
        assert set(report.blocks) == set(bad.d_blocks)
        assert not d.received(cancelled)[0].ok
        d.check(good)
        until(lambda: not runtime.core.binds and not runtime.core.gates, "the end of all three")
        later = d.bound("later", 9)
        p.prefill(later)
        assert d.received(later)[0].ok, "the loop goes on"


@pytest.mark.parametrize("at", ["cancel", "settle"])
def test_a_word_of_the_scheduler_that_goes_wrong_on_decode_gives_up_its_transfer(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = DecodeSite(TUPLES, 1)
    with running(d):
        request, broken, function = d.reserve("r", 30), [RuntimeError("the device is gone")], getattr(Receiver, at)
        d.step()

        def once(*args: Any) -> Any:
            if broken:
                raise broken.pop()
            return function(*args)

        monkeypatch.setattr(Receiver, at, once)
        if at == "cancel":
            d.book.request_finished(request.name)
        else:
            d.book.answered(request.reservation.transfer)
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-002") and "the device is gone" in report.why.detail


def test_a_bind_that_went_wrong_is_reported_once_though_its_request_is_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = DecodeSite(TUPLES, 1)

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Receiver, "bind", broken)
    with running(d):
        request = d.reserve("r", 30)
        (worker,) = d.workers
        worker.bind(StepMetadata(decode=d.book.take_step(None, d.geometry)))
        d.book.request_finished(request.name)
        worker.bind(StepMetadata(decode=d.book.take_step(None, d.geometry)))
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-002") and "the device is gone" in report.why.detail


def test_an_end_that_goes_wrong_on_decode_is_that_transfers_and_nothing_is_reported_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d = PrefillSite(TUPLES, 1), DecodeSite(TUPLES, 1)
    runtime, load_over = d.runtime, Receiver.load_over
    with traced() as events, running(p, d):
        bad, good = d.reserve("bad", 30), d.reserve("good", 9)
        d.step()
        broken: list[TransferId] = []

        def breaking(receiver: Receiver, now: float, transfer: TransferId) -> Any:
            if transfer == bad.reservation.transfer:
                broken.append(transfer)
                raise RuntimeError("the device is gone")
            return load_over(receiver, now, transfer)

        monkeypatch.setattr(Receiver, "load_over", breaking)
        for each in (bad, good):
            p.prefill(each)
        assert all(report.ok for report in d.received(bad, good))
        d.step()
        until(lambda: not runtime.core.binds, "the end of both")
        assert broken
        later = d.bound("later", 9)
        p.prefill(later)
        assert d.received(later)[0].ok, "the loop goes on"
        ends = Counter(facts["transfer"] for stage, facts in list(events) if stage == "closed" and "ok" in facts)
        assert ends == {str(each.reservation.transfer): 1 for each in (bad, good, later)}, "nothing of D's ended twice"


def test_blocks_of_a_write_that_failed_are_released_only_when_it_is_quiet() -> None:
    push, wire = config(quiet_s=0.6), LossyWire()
    p, d = PrefillSite(PLANES, 1, push=push, make_transport=lambda: wire), DecodeSite(PLANES, 1, push=push)
    with running(p, d):
        request = d.bound("r", 30)
        p.prefill(request)
        p.finish_and_free(request)
        assert time.monotonic() - wire.lost[0] >= 0.6
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-003")


class UnwillingWire(MemoryTransport):
    """Wire whose peer refuses: no write was ever issued to it."""

    def land(self, write: Write) -> WriteState:
        return WriteState.UNISSUED


def test_blocks_of_a_write_that_was_never_issued_wait_for_nothing() -> None:
    push = config(quiet_s=100.0)
    p, d = PrefillSite(PLANES, 1, push=push, make_transport=UnwillingWire), DecodeSite(PLANES, 1, push=push)
    with traced() as events, running(p, d):
        request = d.bound("r", 30)
        p.prefill(request)
        p.finish(request)
        p.released_blocks_of(request)  # long before the quiet time ends: nothing of it can land
        (report,) = d.received(request)
        assert (report.ok, report.why.code) == (False, "PD-XFER-003")
        closed = [facts for stage, facts in events if stage == "push_closed"]
        assert "nothing was sent" in closed[0]["detail"]


class ListeningWire(MemoryTransport):
    """Wire that keeps the runtime's query for the last message, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[float | None] = []

    def listen(self, heard: Callable[[str], float | None]) -> None:
        self._ask = heard

    def land(self, write: Write) -> WriteState:
        self.heard += [self._ask(write.session), self._ask("unknown")]
        return super().land(write)


def test_the_transport_can_ask_when_a_peer_was_last_heard() -> None:
    wire = ListeningWire()
    p, d = PrefillSite(PLANES, 1, make_transport=lambda: wire), DecodeSite(PLANES, 1)
    with running(p, d):
        request = d.bound("r", 30)
        begun = time.monotonic()
        p.prefill(request)
        assert d.received(request)[0].ok
        (ours, nobodys), now = wire.heard[:2], time.monotonic()
        assert ours is not None and begun <= ours <= now and nobodys is None


def test_a_dead_writer_gathers_nothing() -> None:
    """Prefill goes on without this decode engine, perhaps for days."""
    p, d = PrefillSite(TUPLES, 1, make_transport=lambda: DyingWire("submit")), DecodeSite(TUPLES, 1)
    with traced() as events, running(p, d):
        first, later = d.reserve("first", 9), d.reserve("later", 30)
        d.step()
        p.prefill(first)
        assert d.received(first)[0].why.code == "PD-XFER-003"
        runtime = p.runtime
        until(
            lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("pd-writer")], "its end"
        )
        assert p.admit(later) is None
        before = len(events)
        for _ in range(10):
            p.compute((later, 3))
            assert runtime.writing._inbox.empty(), "nothing takes it out any more"
        assert "layer_computed" not in {stage for stage, _ in events[before:]}, "nothing would use a plan"


# -- closing


@pytest.mark.parametrize("sides", ["p", "d", "both"])
def test_closing_with_transfers_in_flight_joins_threads_and_frees_ports(
    sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, closed, shut = SlowWire(), list[MemoryTransport](), MemoryTransport.close

    def close(transport: MemoryTransport) -> None:
        closed.append(transport)
        shut(transport)

    monkeypatch.setattr(MemoryTransport, "close", close)
    p, d = PrefillSite(PLANES, 2, make_transport=lambda: wire), DecodeSite(PLANES, 2)
    with running(p, d):
        p.begun(d, "r", 30, 20)
        until(wire.asked.is_set, "a write that is out")
        for site in {"p": (p,), "d": (d,), "both": (d, p)}[sides]:
            site.close()
            site.close()
        left = own_threads()
        if sides != "d":
            assert not any("P0." in name for name in left), left
        if sides != "p":
            assert not any(name.startswith("pd-receive") for name in left), left
            assert all(is_free(endpoint.port, endpoint.host) for endpoint in d.endpoints)
            assert {id(worker.runtime.target) for worker in d.workers} <= set(map(id, closed)), "nothing lands then"


def test_a_prefill_engine_that_closes_needs_no_revocation_on_decode() -> None:
    """It reports that its transfer engine was closed before it left."""
    push = config(quiet_s=0.3, lease_s=1.4, margin_s=0.2)
    wire = SlowWire()
    p, d = PrefillSite(PLANES, 1, push=push, make_transport=lambda: wire), DecodeSite(PLANES, 1, push=push)
    with traced() as events, running(p, d):
        request = p.begun(d, "r", 30, 20)
        until(wire.asked.is_set, "a write that is out")
        p.close()
        (report,) = d.received(request)
        assert not report.ok
        assert [facts["proof"] for stage, facts in events if stage == "quiet"] == ["gone"]
        assert not any(stage == "revoking" for stage, _ in events)


def test_a_decode_worker_whose_port_is_taken_leaves_no_thread() -> None:
    d = DecodeSite(PLANES, 1)
    with running(d):
        taken = config(side_channel_port=d.endpoints[0].port)
        before = own_threads()
        with pytest.raises(Exception, match="PD-CTRL-001"):
            DecodeSite(PLANES, 1, push=taken)
        assert own_threads() == before


class Witness(CpuDevice):
    """Device that records the threads bound to it."""

    def __init__(self) -> None:
        self.attached: list[str] = []

    def attach_thread(self) -> None:
        self.attached.append(threading.current_thread().name)


def test_every_thread_that_may_touch_the_device_is_bound_to_it() -> None:
    device = Witness()
    p, d = PrefillSite(PLANES, 1, device=device), DecodeSite(PLANES, 1, device=device)
    with running(p, d):
        until(lambda: {"pd-writer-P0.0", "pd-receive-0.0"} <= set(device.attached), str(device.attached))


# -- one rank knows more than another


def test_a_push_that_failed_on_one_rank_does_not_change_which_ranks_write_the_others() -> None:
    """Ranks that hold the same head divide a step's tokens among them. Each rank's part must follow from the step
    alone: if a rank left out a request that failed on it, there would be holes in the others."""
    model = CacheModel("latent", heads=1)
    p, d = PrefillSite(model, 2), DecodeSite(model, 1)
    with traced() as events, running(p, d):
        failed, fine = d.reserve("failed", 64), d.reserve("fine", 64)
        d.step()
        for request in (failed, fine):
            assert p.admit(request) is None
        p.compute((failed, 8), (fine, 8))
        until(lambda: sum(stage == "ready" for stage, _ in events) >= 8, "READY of two ranks, reported by both sides")
        knows, ignorant = (worker.runtime for worker in p.workers.values())
        assert knows is not None and ignorant is not None
        deaf = threading.Event()
        ignorant.loop.post(deaf.wait, 20.0)  # blocks its loop: it gets no message
        with knows.deciding() as pushes:
            (push,) = (push.name for push in list(pushes.records.values()) if push.request_id == failed.p_name)
            pushes.abort(time.monotonic(), push, Failure("PD-XFER-002", "as if its writes had failed"))
        until(lambda: any(stage == "push_closed" for stage, _ in events), "the end of the push on the rank that knows")
        for _ in range(7):
            p.compute((failed, 8), (fine, 8))
        deaf.set()
        d.complete(fine)
        assert not d.received(failed)[0].ok


def test_a_timer_that_was_set_is_not_put_off_by_a_later_one() -> None:
    """Two threads decide one after the other, and their posts to the loop may arrive in the other order."""
    p = PrefillSite(TUPLES, 1)
    with running(p):
        runtime = p.runtime

        async def armed() -> float:
            now = time.monotonic()
            runtime.arm(now + 1000.0)
            runtime.arm(now + 2000.0)
            assert runtime.timer is not None
            first = runtime.timer.when()
            runtime.arm(now + 500.0)
            return first - runtime.timer.when()

        assert 400.0 < runtime.loop.call(armed(), 10.0) < 600.0


def test_a_loop_that_does_not_answer_in_time_raises_the_built_in_time_out() -> None:
    """On Python 3.10 concurrent.futures has another TimeoutError, which `except TimeoutError` would miss."""
    loop = LoopThread("pd-test-loop")
    try:
        with pytest.raises(TimeoutError):
            loop.call(asyncio.sleep(60), 0.05)
    finally:
        loop.stop()
    assert not loop.alive
    loop.post(print)  # does nothing after the end, and raises nothing
    loop.stop()
