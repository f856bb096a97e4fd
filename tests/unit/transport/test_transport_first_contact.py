# SPDX-License-Identifier: Apache-2.0
"""First contact outside the writer thread, and cutting connections to peers that do not answer."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from unit.kits.refusing import no_more_threads
from unit.kits.watching import address_of, listening, until
from unit.transport.clock import ManualClock
from vllm_ascend_pd.transport.contact import IDLE_S, MAX_IDLE, Contacts
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.mooncake_sockets import shorten_accept, shut_connections
from vllm_ascend_pd.transport.peer_probes import FRESH_S, MAX_AT_ONCE, PeerProbes, ProbeAnswer, watched

LOOPBACK = "127.0.0.1"


def reads_forever(address: str) -> bool:
    """A probe like Mooncake's: connect, then read without a useful limit."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        return sock.recv(1) == b"y"


def answer(probes: PeerProbes, address: str, limit_s: float = 5.0) -> ProbeAnswer:
    deadline = time.monotonic() + limit_s
    while (said := probes.ask(address)) is ProbeAnswer.ASKING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return said


@pytest.mark.parametrize("reply, expected", [(b"y", ProbeAnswer.YES), (b"n", ProbeAnswer.NO)])
def test_the_answer_is_the_peers(reply: bytes, expected: ProbeAnswer) -> None:
    with listening() as listener:
        probes = PeerProbes(reads_forever, 5.0, time.monotonic)
        assert probes.ask(address_of(listener)) is ProbeAnswer.ASKING
        sock, _ = listener.accept()
        with sock:
            sock.sendall(reply)
            assert answer(probes, address_of(listener)) is expected
        assert probes.close()


def test_a_silent_peer_is_hung_up_on_and_its_thread_ends() -> None:
    with listening() as listener:
        probes = PeerProbes(reads_forever, 0.2, time.monotonic)
        assert answer(probes, address_of(listener)) is ProbeAnswer.NO
        until(no_probe_runs)


def test_a_peer_is_asked_once_at_a_time_and_again_later() -> None:
    asked: list[str] = []
    probes = PeerProbes(lambda address: bool(asked.append(address)) or True, 5.0, ManualClock())
    assert answer(probes, "127.0.0.1:1") is ProbeAnswer.YES
    assert answer(probes, "127.0.0.1:1") is ProbeAnswer.YES
    assert asked == ["127.0.0.1:1", "127.0.0.1:1"]


def no_probe_runs() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("pd-probe")]


def test_an_answer_grows_old_and_is_asked_for_again() -> None:
    clock, says = ManualClock(), iter([True, False])
    probes = PeerProbes(lambda _: next(says), 5.0, clock)
    assert probes.ask("127.0.0.1:1") is ProbeAnswer.ASKING
    until(no_probe_runs)
    clock.now = FRESH_S + 0.1
    assert probes.ask("127.0.0.1:1") is ProbeAnswer.ASKING, "what it said then proves nothing now"
    until(no_probe_runs)
    assert probes.ask("127.0.0.1:1") is ProbeAnswer.NO


def test_an_answer_is_no_answer_of_another_process_at_the_address() -> None:
    asked: list[str] = []
    probes = PeerProbes(lambda address: bool(asked.append(address)) or True, 5.0, ManualClock())
    assert probes.ask("127.0.0.1:1/first") is ProbeAnswer.ASKING
    until(no_probe_runs)
    assert probes.ask("127.0.0.1:1/second") is ProbeAnswer.ASKING
    assert answer(probes, "127.0.0.1:1/second") is ProbeAnswer.YES
    assert asked == ["127.0.0.1:1", "127.0.0.1:1"]


def test_a_peer_that_is_forgotten_is_hung_up_on_and_asked_afresh() -> None:
    with listening() as listener:
        probes = PeerProbes(reads_forever, 5.0, time.monotonic)
        assert probes.ask(address_of(listener)) is ProbeAnswer.ASKING
        silent, _ = listener.accept()
        probes.forget(address_of(listener))
        with silent:
            assert silent.recv(1) == b"", "it is hung up on"
        assert probes.ask(address_of(listener)) is ProbeAnswer.ASKING
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"y")
            assert answer(probes, address_of(listener)) is ProbeAnswer.YES, "the old NO is not this one's"
        assert probes.close()


def test_probes_are_bounded_and_finished_ones_make_room() -> None:
    gate = threading.Event()
    probes = PeerProbes(lambda _: gate.wait(10), 60.0, time.monotonic)
    first = [probes.ask(f"127.0.0.1:{n}") for n in range(1, MAX_AT_ONCE + 1)]
    assert set(first) == {ProbeAnswer.ASKING}
    assert probes.ask("127.0.0.1:9999") is ProbeAnswer.NO
    gate.set()
    deadline = time.monotonic() + 5
    while probes.ask("127.0.0.1:9999") is ProbeAnswer.NO:
        assert time.monotonic() < deadline
    assert probes.close()


def test_without_a_thread_for_it_the_answer_is_no_and_a_first_contact_is_not_allowed() -> None:
    probes = PeerProbes(lambda _: True, 5.0, time.monotonic)
    with no_more_threads("pd-") as refused:
        assert probes.ask(f"{LOOPBACK}:1") is ProbeAnswer.NO
        with watched(f"{LOOPBACK}:1", 0.5) as allowed:
            assert not allowed
        with watched(f"{LOOPBACK}:1", None) as allowed:
            assert allowed, "it is no first contact"
    assert refused == [f"pd-probe-{LOOPBACK}:1", f"pd-watch-{LOOPBACK}:1"]
    assert answer(probes, f"{LOOPBACK}:1") is ProbeAnswer.YES
    assert probes.close()


def test_an_engine_is_crowded_by_peers_that_nothing_was_written_to_for_long() -> None:
    clock, engine = ManualClock(), object.__new__(OpenEngine)
    contacts = Contacts(lambda _: True, True, clock)
    sessions = [f"{LOOPBACK}:{n}/tag" for n in range(1, MAX_IDLE + 3)]
    for session in sessions:
        contacts.met(engine, session, True)
    assert not contacts.crowded(engine)
    clock.now = IDLE_S + 1.0
    assert contacts.crowded(engine)
    for session in sessions[:2]:
        contacts.at(session)
    assert not contacts.crowded(engine)
    clock.now += 1.0
    assert not contacts.crowded(engine)
    assert not contacts.crowded(object.__new__(OpenEngine)), "a new engine knows none"


@pytest.mark.parametrize("answering", [0, 1])
def test_a_name_is_looked_up_by_the_probe_alone_and_known_by_the_address_that_answered(
    answering: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent name server holds a look-up for ten seconds: the writer, which asks, would hold all peers' writes."""
    looking, answered, by = threading.Event(), threading.Event(), list[str]()

    def slowly(_: str, port: int, **more: object) -> list[tuple[object, ...]]:
        by.append(threading.current_thread().name)
        looking.set()
        answered.wait(30)
        addresses = "127.0.0.2", "127.0.0.3"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    probed: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    clock = ManualClock()
    probes = PeerProbes(lambda at: probed.append(at) or at == f"127.0.0.{2 + answering}:1", 1.0, clock)
    forgotten = PeerProbes(lambda _: True, 1.0, clock)
    for each in (probes, forgotten):
        assert each.ask("d.example:1/tag") is ProbeAnswer.ASKING
    assert looking.wait(30)
    forgotten.forget("d.example:1/tag")
    answered.set()
    assert answer(probes, "d.example:1/tag", 30) is ProbeAnswer.YES
    assert probes.at("d.example:1") == probed[-1] == f"127.0.0.{2 + answering}:1"
    assert set(by) == {"pd-probe-d.example:1"}
    assert probes.close() and forgotten.close()


def test_a_peer_whose_name_is_not_found_in_time_is_not_asked_and_the_writer_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()

    def silent(*_: object, **__: object) -> list[object]:
        assert threading.current_thread().name.startswith("pd-probe"), "the writer looks a name up"
        answered.wait(30)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    probes = PeerProbes(lambda _: not answered.wait(30), 0.0, time.monotonic)
    assert [probes.ask("d.example:1/tag") for _ in range(5)] == [ProbeAnswer.ASKING] * 5
    answered.set()
    assert answer(probes, "d.example:1/tag", 30) is ProbeAnswer.NO
    assert probes.close()


NO_ADDRESSES = ["", "x", "10.1.2.3", "10.1.2.3:x", "10.1.2.3:0", f"10.1.2.3:{2**70}", "x" * 70 + ".d:1", "a\0b:1"]


@pytest.mark.parametrize("address", NO_ADDRESSES, ids=lambda address: repr(address[:12]))
def test_a_session_that_is_no_address_costs_the_writer_thread_nothing(address: str) -> None:
    """D names its session; the writer thread, which serves all peers, cuts the connection of an unanswered probe."""
    probes = PeerProbes(lambda _: True, 0.0, time.monotonic)
    assert probes.ask(f"{address}/other") is ProbeAnswer.ASKING
    probes.forget(f"{address}/other")
    assert answer(probes, f"{address}/tag") is ProbeAnswer.NO
    assert probes.close()
    with watched(address, 0.0):
        pass


@pytest.mark.parametrize("address", NO_ADDRESSES, ids=lambda address: repr(address[:12]))
def test_an_engine_that_can_only_connect_gets_no_answer_from_what_is_no_address(address: str) -> None:
    class ProbelessEngine:
        def initialize(self, *_: str) -> int:
            return 0

        def get_rpc_port(self) -> int:
            return 1

    assert not OpenEngine(ProbelessEngine, LOOPBACK, "tcp").answers(address)  # type: ignore[arg-type]


def test_no_peer_is_hung_up_on_once_the_first_contact_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next connection to the same peer belongs to another use."""
    inside, returned = threading.Event(), threading.Event()

    def slow(address: str) -> int:
        inside.set()
        returned.wait(0.2)  # the contact ends meanwhile
        returned.set()
        return 0

    monkeypatch.setattr("vllm_ascend_pd.transport.peer_probes.shut_connections", slow)
    with watched("127.0.0.1:1", 0.0):
        assert inside.wait(10)
    assert returned.is_set(), "the watching thread is still at it"


def test_hanging_up_cuts_only_connections_to_that_address() -> None:
    with listening() as one, listening() as other:
        cut = socket.create_connection(one.getsockname())
        kept = socket.create_connection(other.getsockname())
        near, far = one.accept()[0], other.accept()[0]
        assert shut_connections(f"{LOOPBACK}:{one.getsockname()[1]}") == 1
        assert cut.recv(1) == b""
        far.sendall(b"x")
        assert kept.recv(1) == b"x"
        for sock in (cut, kept, near, far):
            sock.close()


def test_hanging_up_leaves_no_descriptor_behind() -> None:
    from pathlib import Path

    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        shut_connections(f"{LOOPBACK}:1")
        shorten_accept(1, 0.1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_the_accept_timeout_of_a_listener_is_shortened() -> None:
    with listening() as listener:
        assert shorten_accept(listener.getsockname()[1], 0.25)
        seconds, micros = struct.unpack("ll", listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        assert seconds == 0 and 240_000 <= micros <= 260_000  # the kernel rounds
        assert not shorten_accept(1, 0.25)
