# SPDX-License-Identifier: Apache-2.0
"""Conditions of a loaded request's giving back of its blocks. tests/unit/releases has real schedulers of vLLM."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.vllm_patches import standstill
from vllm_ascend_pd.vllm_patches.standstill import MAX_STEPS, Standstill
from vllm_ascend_pd.vllm_patches.wrapping import WRAPPED


class RequestQueue(deque[Any]):
    def remove_request(self, request: Any) -> None:
        self.remove(request)


class ScriptedScheduler:
    """Stand-in for vLLM's: its queues and its preemption."""

    def __init__(self, *requests: Any, older: bool = False) -> None:
        self.running: list[Any] = []
        self.waiting = RequestQueue()
        self.requests = {request.request_id: request for request in requests}
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.holding = RequestQueue(requests)
        setattr(self, "skipped_waiting" if older else "kv_holding_waiting", self.holding)
        self.paused, self.free = False, 0
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def get_num_unfinished_requests(self) -> int:
        return 0 if self.paused else sum(self.get_request_counts())

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting) + len(self.holding)

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        assert request.status == RequestStatus.RUNNING
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def load(self, request: Any) -> None:
        self.finished_recving_kv_req_ids.add(request.request_id)


class WaitingRequest(SimpleNamespace):
    __hash__ = object.__hash__


def loads(name: str) -> WaitingRequest:
    return WaitingRequest(
        request_id=name, status=RequestStatus.WAITING_FOR_REMOTE_KVS, num_computed_tokens=64, num_preemptions=0
    )


def waits(name: str) -> WaitingRequest:
    request = loads(name)
    request.status = RequestStatus.WAITING
    return request


@pytest.fixture
def given() -> list[str]:
    return []


@pytest.fixture
def still(given: list[str]) -> Standstill:
    return Standstill(given.append)


def step(still: Standstill, scheduler: ScriptedScheduler, tokens: int = 0) -> None:
    still.scheduled(tokens)
    still.after(scheduler, {})


@pytest.mark.parametrize("older", [False, True])
def test_the_last_loaded_request_gives_its_blocks_back(still: Standstill, given: list[str], older: bool) -> None:
    first, last, fresh = waits("first"), loads("last"), waits("fresh")
    fresh.num_computed_tokens = 0
    scheduler = ScriptedScheduler(first, last, older=older)
    scheduler.waiting.append(fresh)
    scheduler.requests["fresh"] = fresh
    scheduler.load(last)
    scheduler.failed_recving_kv_req_ids.add("last")
    step(still, scheduler)
    assert not given, "no step has passed them over yet"
    step(still, scheduler)
    assert given == ["last"]
    assert list(scheduler.waiting) == [last, fresh]
    assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids
    assert last.status == RequestStatus.WAITING and last.num_computed_tokens == 0


def test_steps_that_were_scheduled_before_it_loaded_do_not_count(still: Standstill, given: list[str]) -> None:
    """With asynchronous scheduling a step is scheduled before the one before it is read."""
    one, two = loads("one"), loads("two")
    scheduler = ScriptedScheduler(one, two)
    still.scheduled(0)
    still.scheduled(0)
    scheduler.load(one)
    scheduler.load(two)
    still.after(scheduler, {})  # both are known to be loaded from here on
    still.scheduled(0)
    still.after(scheduler, {})
    assert not given, "that step was scheduled before"
    still.after(scheduler, {})
    assert given == ["two"]


def test_steps_in_flight_take_no_second_one(still: Standstill, given: list[str]) -> None:
    scheduler = ScriptedScheduler(waits("one"), waits("two"), waits("three"))
    step(still, scheduler)
    for _ in range(3):
        still.scheduled(0)
    for _ in range(3):
        still.after(scheduler, {})
    assert given == ["three"]
    step(still, scheduler)
    assert given == ["three", "two"], "the next step that was scheduled later passed them over again"


def test_a_request_that_has_run_goes_back_as_one_that_was_preempted(still: Standstill, given: list[str]) -> None:
    """It lost its blocks before it loaded. Workers know it, with its tokens: as a new one it would lose them."""
    one, two = waits("one"), waits("two")
    two.status, two.num_preemptions = RequestStatus.PREEMPTED, 1
    scheduler = ScriptedScheduler(one, two)
    step(still, scheduler)
    step(still, scheduler)
    assert given == ["two"] and two.status == RequestStatus.PREEMPTED


def test_nothing_is_taken_while_something_runs_or_computes(still: Standstill, given: list[str]) -> None:
    scheduler = ScriptedScheduler(waits("one"), waits("two"))
    step(still, scheduler)
    step(still, scheduler, tokens=1)
    scheduler.running = [object()]
    step(still, scheduler)
    scheduler.running = []  # it has preempted itself, and vLLM tried no waiting request in that step
    step(still, scheduler)
    assert not given
    scheduler.paused = True
    step(still, scheduler)
    scheduler.paused = False
    step(still, scheduler)
    assert not given, "that step was scheduled while vLLM paused"
    step(still, scheduler)
    assert given == ["two"]


def test_nothing_is_taken_if_blocks_have_come_free_meanwhile(still: Standstill, given: list[str]) -> None:
    scheduler = ScriptedScheduler(waits("one"), waits("two"), waits("three"))
    step(still, scheduler)
    scheduler.free = 2  # an abort, or the end of a quarantine
    step(still, scheduler)
    del scheduler.holding[1]
    step(still, scheduler)
    assert not given
    step(still, scheduler)
    assert given == ["three"]


def test_a_single_one_waits_for_blocks_that_will_come_free(still: Standstill, given: list[str]) -> None:
    """Those of loads, and of ended requests whose blocks are held: P's, or in quarantine."""
    one, two = waits("one"), loads("two")
    scheduler = ScriptedScheduler(one, two)
    scheduler.requests["ended"] = waits("ended")
    for _ in range(5):
        step(still, scheduler)
    assert not given
    scheduler.load(two)
    step(still, scheduler)
    step(still, scheduler)
    assert given == ["two"]
    assert scheduler.waiting.popleft() is two
    del scheduler.requests["two"]
    for _ in range(5):
        step(still, scheduler)
    assert given == ["two"]
    del scheduler.requests["ended"]
    step(still, scheduler)
    step(still, scheduler)
    assert given == ["two", "one"], "nothing is left to wait for: a request without KV is before it in the queue"


def test_steps_that_nobody_reads_are_not_kept(still: Standstill) -> None:
    """A connector inside another one gets no outputs to read."""
    for _ in range(2 * MAX_STEPS):
        still.scheduled(0)
    assert len(still._steps) == MAX_STEPS
    Standstill(lambda _: None).after(ScriptedScheduler(), {})


def test_it_is_installed_where_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    class Other:
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            return {}

    def config() -> Any:
        return SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Other))

    assert standstill.install(config()) == (
        "the scheduler Other has no _preempt_request, get_num_unfinished_requests, get_request_counts"
    )
    for name in standstill.USED:
        monkeypatch.setattr(Other, name, lambda *_: None, raising=False)
    assert standstill.install(config()) == standstill.install(config()) == ""
    assert hasattr(Other.update_from_output, WRAPPED)
    monkeypatch.setattr(Other, "update_from_output", lambda self, output: {})
    assert standstill.install(config()) == "the scheduler Other differs in update_from_output"
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert standstill.install(config()) == "vLLM 0.99.0 was not tried"
