# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake over TCP when the other side dies, stops, restarts, never answers or revokes access."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

if importlib.util.find_spec("mooncake") is None:  # not imported here: its environment must be set first
    pytest.skip("Mooncake is not installed", allow_module_level=True)

from tools.support.fork_server import ForkServers
from unit.kits.beside import Beside, Delays
from unit.kits.watching import address_of, listening, until
from unit.transport.mooncake_child import MODULE, WIRE, ReceivingChild, settle, target_of, wire_from
from vllm_ascend_pd.transport import contact
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.contact import HEARD_S
from vllm_ascend_pd.transport.create import create_target
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.mooncake_sockets import _own_sockets, numeric
from vllm_ascend_pd.transport.wire import MooncakeWire

SIZE = 64 << 20
SPAN = 64 << 10
RANKS = 12
LIMIT_S = 30.0  # of a wait whose end is proven otherwise
SPANS = SIZE // SPAN // 2
# What a peer that fails may cost others of the time until it is given up, by the clock of writes that another engine
# makes beside them. First contact is let go after two fifths of it; nothing is given up before who waits for it.
OF_A_WRITE, OF_A_CONTACT = 1 / 7, 1 / 2


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """Return what forks the children, which imports once for all of them."""
    with ForkServers((MODULE,), tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    return np.ones(SIZE, dtype=np.uint8)


@pytest.fixture
def wire(memory: np.ndarray) -> Iterator[MooncakeWire]:
    opened = wire_from(memory)
    yield opened
    opened.close()


@contextlib.contextmanager
def beside(memory: np.ndarray, forks: ForkServers) -> Iterator[Beside]:
    """Write a byte again and again to a peer that nothing happens to, by an engine that knows no other."""
    with (
        ReceivingChild(1024, forks) as healthy,
        contextlib.closing(wire_from(memory)) as wire,
        Beside(lambda: one(wire, healthy, memory)) as clock,
    ):
        yield clock


@contextlib.contextmanager
def contacts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the addresses of all writes that reach an engine."""
    given: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("submit", "write"):
            real = getattr(OpenEngine, name)
            patch.setattr(
                OpenEngine, name, lambda self, at, *more, real=real: given.append(at) or real(self, at, *more)
            )
        yield given


def half_closed() -> int:
    """Return how many connections of this process the other side has closed, and this one has not."""
    states = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for sock in _own_sockets()]
    return states.count(8)  # TCP_CLOSE_WAIT


def one(wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray) -> WriteState:
    return settle(wire, wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [1]))


def many(wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray) -> int:
    """A write of half the memory in spans that cannot be merged, so that it takes long."""
    n = np.arange(SPANS) * 2 * SPAN
    return wire.submit(receiver.session, memory.ctypes.data + n, receiver.base + n, np.full(SPANS, SPAN))


def test_a_receiver_killed_in_the_middle_fails_the_write_soon(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers
) -> None:
    with ReceivingChild(SIZE, forks) as receiver, ReceivingChild(SIZE, forks) as other:
        assert one(wire, receiver, memory) is one(wire, other, memory) is WriteState.LANDED
        handle = many(wire, receiver, memory)
        wire.poll(handle)
        receiver.kill()
        assert settle(wire, handle, limit_s=4.0) is WriteState.FAILED
        assert one(wire, other, memory) is WriteState.LANDED
        assert one(wire, receiver, memory) is WriteState.UNISSUED


def test_a_failed_write_is_over_when_it_says_so(wire: MooncakeWire, memory: np.ndarray, forks: ForkServers) -> None:
    """A stopped receiver: after FAILED only what its kernel already holds arrives."""
    with ReceivingChild(SIZE, forks) as receiver, ReceivingChild(1024, forks) as other, beside(memory, forks) as clock:
        assert one(wire, receiver, memory) is one(wire, other, memory) is WriteState.LANDED
        receiver.ask("clear")
        handle = many(wire, receiver, memory)
        receiver.stop()
        begun, before, writes = time.monotonic(), clock.pieces, Delays(clock, "writes to another peer")
        while wire.poll(handle) is WriteState.PENDING:
            assert time.monotonic() - begun < LIMIT_S
            with writes.one():
                assert one(wire, other, memory) is WriteState.LANDED
        print(f"failed after {time.monotonic() - begun:.1f} s; {writes}")
        assert writes.share(clock.pieces - before, time.monotonic() - begun) < OF_A_WRITE
        source = memory.copy()
        try:
            memory[:] = 100  # the source is reused: the new contents must never arrive
            receiver.wake()
            time.sleep(0.3)
            landed = receiver.sum()
            time.sleep(0.7)
            assert receiver.sum() == landed, "bytes went on landing after FAILED"
            assert landed < SPANS * SPAN, "the whole write landed: the receiver was not stopped in time"
        finally:
            memory[:] = source
        assert one(wire, receiver, memory) is WriteState.LANDED, "the peer is used again once it answers"


def test_after_a_revocation_nothing_of_the_old_session_lands(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers
) -> None:
    with ReceivingChild(SIZE, forks) as receiver:
        assert one(wire, receiver, memory) is WriteState.LANDED
        old = receiver.session
        handle = many(wire, receiver, memory)
        wire.poll(handle)
        receiver.session = receiver.ask("revoke")
        assert receiver.session != old
        receiver.ask("clear")  # the blocks have another owner now
        ended = settle(wire, handle)
        stale = settle(wire, wire.submit(old, [memory.ctypes.data], [receiver.base], [SPAN]))
        assert receiver.sum() == 0, "a write of the old session landed after revoke returned"
        assert (ended, stale) == (WriteState.FAILED, WriteState.UNISSUED)
        assert one(wire, receiver, memory) is WriteState.LANDED
        assert receiver.sum() == 1


def test_a_peer_that_names_its_host_is_written_to_by_number(
    wire: MooncakeWire, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks a name up under the mutex that every write needs."""
    named = create_target(WIRE, "localhost")
    target, given = np.zeros(SIZE, dtype=np.uint8), list[str]()
    named.register([(target.ctypes.data, SIZE)])
    submit = OpenEngine.submit
    monkeypatch.setattr(OpenEngine, "submit", lambda self, at, *more: given.append(at) or submit(self, at, *more))
    try:
        for _ in range(2):
            spans = [memory.ctypes.data], [target.ctypes.data], [SPAN]
            assert settle(wire, wire.submit(named.session, *spans)) is WriteState.LANDED
        assert len(given) == 2 and given[0] == given[1] in numeric(named.session.partition("/")[0])
    finally:
        named.close()


def test_connections_to_peers_that_have_ended_do_not_pile_up(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact, "IDLE_S", -1.0, raising=False)  # a peer counts as idle right after a write
    monkeypatch.setattr(contact, "MAX_IDLE", 1, raising=False)
    before = half_closed()
    for _ in range(4):
        with ReceivingChild(SPAN, forks) as receiver:
            assert one(wire, receiver, memory) is WriteState.LANDED
    until(lambda: wire.engines.run_due() or half_closed() - before <= 2, half_closed)


@pytest.mark.parametrize("free", [2, 4])  # an engine keeps 5, and takes a sixth now and then while it opens
def test_a_revocation_without_descriptors_succeeds_once_there_are_some(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers, free: int
) -> None:
    with ReceivingChild(SIZE, forks) as receiver:
        assert one(wire, receiver, memory) is WriteState.LANDED
        old = receiver.session
        receiver.ask("starve", free)
        for _ in range(3):
            assert receiver.ask("revoke").startswith("failed: PD-WIRE-001"), "Mooncake's failure, and not one of ours"
        receiver.ask("feed")
        receiver.session = receiver.ask("revoke")
        assert "failed" not in receiver.session and receiver.session != old
        receiver.ask("clear")
        stale = settle(wire, wire.submit(old, [memory.ctypes.data], [receiver.base], [SPAN]))
        assert stale is not WriteState.LANDED and not receiver.sum()
        assert one(wire, receiver, memory) is WriteState.LANDED


def test_without_a_descriptor_the_wait_of_accept_stays_as_it_is(forks: ForkServers) -> None:
    """As for an engine that was opened with the last one: /proc/self/fd cannot be read."""
    with ReceivingChild(SIZE, forks) as receiver:
        assert receiver.ask("shorten") == "True"
        receiver.ask("starve", 0)
        assert receiver.ask("shorten") == "False"


def test_a_sender_that_is_stopped_over_the_revocation_lands_nothing_when_it_wakes(
    memory: np.ndarray, forks: ForkServers
) -> None:
    """The case that the fence exists for: the *sender* sleeps in the middle of a write, wakes up later, and must
    write nothing."""
    target = np.zeros(SIZE, dtype=np.uint8)
    receiving = target_of(target)
    with ReceivingChild(SIZE, forks) as sender:
        for _ in range(10):
            sender.ask(f"push {receiving.session} {target.ctypes.data} 4 {SIZE // 8}")
            deadline = time.monotonic() + 10
            while not target[0]:
                assert time.monotonic() < deadline
            sender.stop()
            if target.sum(dtype=np.int64) < SIZE // 2:
                break
            sender.wake()  # it finished before the stop
            sender.ask("settle")
            target[:] = 0
        else:
            pytest.fail("the sender was never caught in the middle of a write")
        receiving.revoke()
        target[:] = 0
        sender.wake()
        assert sender.ask("settle") == "failed"
        assert not target.any()
    receiving.close()


def test_another_process_at_a_known_address_gets_an_engine_that_does_not_know_it(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers
) -> None:
    with ReceivingChild(1024, forks) as receiver:
        assert one(wire, receiver, memory) is WriteState.LANDED
        before = wire.engines.current
        receiver.session = receiver.session.partition("/")[0] + "/another"
        assert one(wire, receiver, memory) is WriteState.LANDED
        assert wire.engines.current is not before and before is not None
        deadline = time.monotonic() + 2
        while not before.closed:
            assert one(wire, receiver, memory) is WriteState.LANDED
            assert time.monotonic() < deadline, "the replaced engine was not closed"


@pytest.mark.slow
def test_a_receiver_restarted_on_the_same_port_is_reached_without_our_restart(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers
) -> None:
    with ReceivingChild(1024, forks) as receiver:
        assert one(wire, receiver, memory) is WriteState.LANDED
        port = receiver.port
    with ReceivingChild(1024, forks, port) as successor:
        assert successor.port == port
        assert one(wire, successor, memory) is WriteState.LANDED
        assert successor.sum() == 1


def test_a_silent_peer_delays_no_other(
    wire: MooncakeWire, memory: np.ndarray, forks: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that accepts connections and never answers: Mooncake alone blocks for 60 s."""
    with (
        ReceivingChild(1024, forks) as receiver,
        listening() as silent,
        beside(memory, forks) as clock,
        contacts(monkeypatch) as contacted,
    ):
        assert one(wire, receiver, memory) is WriteState.LANDED
        begun, before, writes = time.monotonic(), clock.pieces, Delays(clock, "writes to another peer")
        with writes.one():
            handle = wire.submit(f"{address_of(silent)}/silent", [memory.ctypes.data], [4096], [10])
        state = WriteState.PENDING
        while state is WriteState.PENDING:
            assert time.monotonic() - begun < LIMIT_S
            with writes.one():
                state = wire.poll(handle)
                assert one(wire, receiver, memory) is WriteState.LANDED
        print(f"the silent peer failed after {time.monotonic() - begun:.1f} s; {writes}")
        assert address_of(silent) not in contacted, "it was only probed"
        assert writes.share(clock.pieces - before, time.monotonic() - begun) < OF_A_WRITE


@pytest.mark.parametrize("protocol", ["tcp", "ascend"])  # the path for Ascend, over TCP
def test_of_peers_that_fall_silent_between_answer_and_opening_one_costs_others_a_part_of_its_time(
    protocol: str, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch, forks: ForkServers
) -> None:
    """The window that a probe leaves open. Many ranks of one engine: their delays must not add up."""
    with opened(protocol, memory, monkeypatch) as wire, contextlib.ExitStack() as stack:
        receiver, clock = stack.enter_context(ReceivingChild(1024, forks)), stack.enter_context(beside(memory, forks))
        silent = [stack.enter_context(listening()) for _ in range(RANKS)]
        assert one(wire, receiver, memory) is WriteState.LANDED
        answers, once = OpenEngine.answers, {address_of(sock) for sock in silent}
        said: list[str] = []

        def answers_once(engine: OpenEngine, address: str) -> bool:
            if address in once and address not in said:
                said.append(address)
                return True
            return answers(engine, address)

        monkeypatch.setattr(OpenEngine, "answers", answers_once)
        contacted = stack.enter_context(contacts(monkeypatch))
        begun, before, writes = time.monotonic(), clock.pieces, Delays(clock, "writes to another peer")
        handles = [wire.submit(f"{address_of(sock)}/silent", [memory.ctypes.data], [4096], [10]) for sock in silent]
        states: dict[int, WriteState] = {}
        while len(states) < len(handles):
            assert time.monotonic() - begun < LIMIT_S
            with writes.one():
                for handle in handles:
                    if handle not in states and (state := wire.poll(handle)) is not WriteState.PENDING:
                        states[handle] = state
                assert one(wire, receiver, memory) is WriteState.LANDED
        print(f"{protocol}: given up after {time.monotonic() - begun:.1f} s; {writes}")
        assert WriteState.LANDED not in states.values() and len(said) == RANKS
        assert sum(at in once for at in contacted) == 1, "of all these one alone was contacted without an answer"
        assert writes.share(clock.pieces - before, time.monotonic() - begun) < OF_A_CONTACT


def test_an_answer_is_not_kept_for_a_later_write(wire: MooncakeWire, memory: np.ndarray, forks: ForkServers) -> None:
    with ReceivingChild(1024, forks) as receiver:
        receiver.stop()
        assert one(wire, receiver, memory) is WriteState.UNISSUED
        receiver.wake()
        assert one(wire, receiver, memory) is WriteState.LANDED, "it is asked again"


def test_where_the_engine_cannot_ask_first_contact_needs_a_word_on_the_side_channel(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch, forks: ForkServers
) -> None:
    """A connection proves nothing: the kernel of a stopped process accepts it."""
    monkeypatch.setattr("vllm_ascend_pd.transport.engine.can_ask", lambda kind: False)
    heard: dict[str, float] = {}
    with opened("tcp", memory, monkeypatch) as wire, ReceivingChild(1024, forks) as receiver, listening() as silent:
        wire.listen(heard.get)
        name = f"{address_of(silent)}/silent"
        heard[name] = time.monotonic() - HEARD_S  # a message came, but not recently
        state = settle(wire, wire.submit(name, [memory.ctypes.data], [4096], [10]))
        assert state is WriteState.UNISSUED
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
        waits = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [1])
        for _ in range(50):
            assert wire.poll(waits) is WriteState.PENDING
            time.sleep(0.001)
        heard[receiver.session] = time.monotonic()
        assert settle(wire, waits) is WriteState.LANDED
        heard.clear()
        assert one(wire, receiver, memory) is WriteState.LANDED, "a known peer need not be heard"


@contextlib.contextmanager
def opened(protocol: str, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeWire]:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    wire = wire_from(memory, protocol)
    try:
        yield wire
    finally:
        wire.close()
