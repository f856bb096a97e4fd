# SPDX-License-Identifier: Apache-2.0
"""Patient waiting: what ends a nap, when there is none, and that vLLM's own queues still deliver."""

from __future__ import annotations

import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
from vllm.v1.engine.core import EngineCoreProc

from tools.support.spec import PATIENT
from vllm_ascend_pd.vllm_patches import patience
from vllm_ascend_pd.vllm_patches.patience import Patience

FOREVER = 60.0  # instead of a quarter of a second: a nap that is not ended shows


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore vLLM's classes after the test."""
    monkeypatch.setattr(patience, "NAP_S", FOREVER)
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", EngineCoreProc._process_engine_step)


def napping(patient: Patience, inbox: queue.Queue[Any], waiting: int = 1) -> threading.Thread:
    thread = threading.Thread(target=patient.nap, args=(inbox, waiting), name="napper", daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(20.0)
    return not thread.is_alive()


def asleep(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return thread.is_alive()


WAKERS: list[tuple[str, Callable[[Patience, queue.Queue[Any]], None]]] = [
    ("news of a transfer", lambda patient, inbox: patient.news()),
    ("a new request or an abort", lambda patient, inbox: inbox.put("request")),
]


@pytest.mark.parametrize("wake", [wake for _, wake in WAKERS], ids=[name for name, _ in WAKERS])
def test_a_nap_is_ended_at_once(wake: Callable[[Patience, queue.Queue[Any]], None]) -> None:
    patient, inbox = Patience(lambda: 1), queue.Queue[Any]()
    thread = napping(patient, inbox)
    assert asleep(thread)
    wake(patient, inbox)
    assert ends(thread)


def test_news_that_came_before_the_nap_is_not_slept_over() -> None:
    patient, inbox = Patience(lambda: 1), queue.Queue[Any]()
    patient.news()
    assert ends(napping(patient, inbox))
    thread = napping(patient, inbox)
    assert asleep(thread), "and counts once"
    patient.news()
    assert ends(thread)


def test_input_that_came_before_the_nap_is_not_slept_over() -> None:
    patient, inbox = Patience(lambda: 1), queue.Queue[Any]()
    inbox.put("request")
    assert ends(napping(patient, inbox))


def test_there_is_no_nap_while_a_request_could_be_scheduled() -> None:
    patient, inbox = Patience(lambda: 1), queue.Queue[Any]()
    assert ends(napping(patient, inbox, waiting=2))


def test_after_news_the_answers_in_flight_are_read_without_a_nap() -> None:
    """A step that was given to the workers before a message does not report on it."""
    patient, inbox = Patience(lambda: 1), queue.Queue[Any]()
    patient.news()
    patient.nap(inbox, 1, in_flight=2)
    for _ in range(2):
        patient.nap(inbox, 1, in_flight=2)
    thread = napping(patient, inbox)
    assert asleep(thread), "what the news was about has been read"
    patient.news()
    assert ends(thread)


def test_a_nap_ends_when_something_is_due_of_which_no_news_comes() -> None:
    assert ends(napping(Patience(lambda: 1, lambda: 0.05), queue.Queue[Any]()))


def test_a_nap_has_an_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "NAP_S", 0.05)
    assert ends(napping(Patience(lambda: 1), queue.Queue[Any]()))


# -- inside vLLM's engine core


class NappingScheduler:
    """The parts of a scheduler that the nap uses."""

    def __init__(self, connector: object, counts: tuple[int, int], requests: bool = True) -> None:
        self._connector, self._counts, self._requests = connector, counts, requests

    def get_kv_connector(self) -> object:
        return self._connector

    def get_request_counts(self) -> tuple[int, int]:
        return self._counts

    def has_requests(self) -> bool:
        return self._requests


class PatientConnector:
    def __init__(self, patient: object) -> None:
        self.patience = patient


class IdleCore(EngineCoreProc):
    """An engine core without an engine."""

    def __init__(self, scheduler: NappingScheduler, executed: bool = False, batch_queue: Any = None) -> None:
        self.scheduler: Any = scheduler
        self.executed, self.batch_queue = executed, batch_queue
        self.input_queue: Any = queue.Queue()


def batch(tokens: int) -> Any:
    """Entry of vLLM's queue for a step whose output it has not read."""
    return Future[Any](), SimpleNamespace(total_num_scheduled_tokens=tokens), Future[Any]()


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[IdleCore], threading.Thread]:
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", lambda self: self.executed)
    assert patience.install_nap() and patience.install_nap()

    def run(core: IdleCore) -> threading.Thread:
        thread = threading.Thread(target=core._process_engine_step, name="core", daemon=True)
        thread.start()
        return thread

    return run


@pytest.mark.parametrize("in_flight", [None, [], [batch(0)]], ids=["one step at a time", "none", "an empty one"])
def test_a_core_that_only_waits_for_remote_loads_naps_until_there_is_news(
    in_flight: Any, step: Callable[[IdleCore], threading.Thread]
) -> None:
    patient = Patience(lambda: 2)
    core = IdleCore(NappingScheduler(PatientConnector(patient), (0, 2)), batch_queue=in_flight)
    thread = step(core)
    assert asleep(thread)
    core.input_queue.put("request")
    assert ends(thread)
    assert core._process_engine_step() is False


BUSY: list[tuple[str, Callable[[Patience], IdleCore]]] = [
    (
        "tokens were computed",
        lambda patient: IdleCore(NappingScheduler(PatientConnector(patient), (0, 1)), executed=True),
    ),
    (
        "a batch is in flight",
        lambda patient: IdleCore(NappingScheduler(PatientConnector(patient), (0, 1)), batch_queue=[batch(0), batch(3)]),
    ),
    ("requests run", lambda patient: IdleCore(NappingScheduler(PatientConnector(patient), (1, 1)))),
    ("a request waits for blocks", lambda patient: IdleCore(NappingScheduler(PatientConnector(patient), (0, 2)))),
    (
        "nothing is there to do",
        lambda patient: IdleCore(NappingScheduler(PatientConnector(patient), (0, 0), requests=False)),
    ),
    ("another connector", lambda patient: IdleCore(NappingScheduler(object(), (0, 1)))),
    (
        "another connector's patience",
        lambda patient: IdleCore(NappingScheduler(PatientConnector("of its own"), (0, 1))),
    ),
    ("no connector", lambda patient: IdleCore(NappingScheduler(None, (0, 1)))),
]


@pytest.mark.parametrize("make", [make for _, make in BUSY], ids=[name for name, _ in BUSY])
def test_a_core_that_has_something_else_to_do_does_not_nap(
    make: Callable[[Patience], IdleCore], step: Callable[[IdleCore], threading.Thread]
) -> None:
    assert ends(step(make(Patience(lambda: 1))))


# -- vLLM's shared-memory queue


@pytest.fixture
def queues() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    writer = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=1 << 20, max_chunks=4)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready, name="writer")
    ready.start()
    reader.wait_until_ready()
    ready.join()
    yield writer, reader
    for each in (reader, writer):
        each.shutdown()


def delivered(writer: MessageQueue, reader: MessageQueue) -> tuple[float, float]:
    """Send messages at several distances, then pause. Return the reader's polls per second during the pause, and its
    yields per poll, which do not depend on its share of a core."""
    looks, slept, got, wait = [0], [0], [], SpinCondition.wait

    def counted(self: SpinCondition, timeout_ms: int | None = None) -> None:
        looks[0] += 1
        slept[0] = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        wait(self, timeout_ms)

    SpinCondition.wait = counted  # type: ignore[method-assign]

    def read() -> None:
        while (message := reader.dequeue(timeout=30)) is not None:
            got.append(message)

    thread = threading.Thread(target=read, name="reader")
    thread.start()
    sent = []
    for pause in (0, 0, 0.002, 0.01, 0.05, 0):
        sent.append(f"after {pause}")
        writer.enqueue(sent[-1])
        time.sleep(pause)
    before, asleep, since = looks[0], slept[0], time.monotonic()
    while looks[0] - before < 50 and time.monotonic() - since < 30:
        time.sleep(0.1)
    during = looks[0] - before
    rate, sleeps = during / (time.monotonic() - since), (slept[0] - asleep) / during
    writer.enqueue("last")
    writer.enqueue(None)
    assert ends(thread)
    assert got == [*sent, "last"]
    return rate, sleeps


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what the plug-in of tests and benchmarks runs in each process of an engine."""
    monkeypatch.syspath_prepend(PATIENT)
    (plugin,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "pd_bench_patient"]
    entry: Callable[[], None] = plugin.load()
    return entry


def test_messages_arrive_and_waiting_for_them_is_no_spinning(
    patient: Callable[[], None], queues: tuple[MessageQueue, MessageQueue]
) -> None:
    for _ in range(2):  # the second time nothing is changed
        patient()
    rate, sleeps = delivered(*queues)
    assert rate <= 1.1 * 1000 and sleeps > 0.9  # a millisecond is the shortest wait


def test_without_it_the_reader_spins(queues: tuple[MessageQueue, MessageQueue]) -> None:
    """Shows that the test above can fail."""
    _, sleeps = delivered(*queues)
    assert sleeps < 0.1


def test_a_vllm_that_waits_otherwise_is_left_alone(
    patient: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SpinCondition, "wait")
    monkeypatch.delattr(EngineCoreProc, "_process_engine_step")
    patient()
    assert not patience.install_nap()
    assert not hasattr(EngineCoreProc, "_process_engine_step") and not hasattr(SpinCondition, "wait")
