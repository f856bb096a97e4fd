# SPDX-License-Identifier: Apache-2.0
"""Pauses, shutdowns and resets: of a P that holds KV for a D which may still come, of a D in the middle of an answer.

Only the model is missing: vLLM's scheduler and core decide when nothing is held any more, and what is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from engine_without_model import BLOCK, EngineWithoutModel, run_until
from fake_metaserver import fake_metaserver, says_failed
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.request import RequestStatus

from tools.support.process import free_port

pytestmark = [pytest.mark.timeout(180)]

HOLDS = {"hold_sources": 4, "hold_s": 3600.0, "lease_s": 1.0, "resend_first_s": 0.05, "quiet_extra_s": 0.0}


@pytest.fixture
def prefill() -> Iterator[EngineWithoutModel]:
    engine = EngineWithoutModel("kv_producer", 2, HOLDS)
    yield engine
    engine.close()


def hold(engine: EngineWithoutModel, name: str) -> None:
    """Compute a prompt that waits for a D."""
    request = engine.add(name, [3 + 7 * i % 500 for i in range(2 * BLOCK)], {"do_remote_decode": True})
    run_until((engine,), request.is_finished)
    assert engine.scheduler.has_requests()


class EndingCore(EngineCoreProc):
    """vLLM's core, as far as its end concerns it."""

    def __init__(self, scheduler: Any, grace_s: int) -> None:
        self.scheduler, self.engines_running, self.batch_queue = scheduler, False, None
        self.vllm_config: Any = SimpleNamespace(shutdown_timeout=grace_s)
        self.shutdown_state = EngineShutdownState.REQUESTED

    def has_ended(self) -> bool:
        return not self._handle_shutdown()


def pause(engine: EngineWithoutModel, state: PauseState) -> Callable[[], bool]:
    engine.scheduler.set_pause_state(state)
    return lambda: not engine.scheduler.has_requests()


WAYS: dict[str, Callable[[EngineWithoutModel], Callable[[], bool]]] = {
    "a pause in which requests end": lambda engine: pause(engine, PauseState.PAUSED_NEW),
    "a pause in which requests are kept": lambda engine: pause(engine, PauseState.PAUSED_ALL),
    "a shutdown in which requests end": lambda engine: EndingCore(engine.scheduler, 30).has_ended,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_what_waits_until_nothing_is_held_waits_no_longer_than_a_lease(
    prefill: EngineWithoutModel, way: Callable[[EngineWithoutModel], Callable[[], bool]]
) -> None:
    free = prefill.free_blocks()
    hold(prefill, "r")
    run_until((prefill,), way(prefill))
    assert prefill.finished.sent == ["r"] and prefill.free_blocks() == free


@pytest.mark.parametrize("preempts", [False, True])
def test_a_reset_of_all_caches_frees_what_is_held(prefill: EngineWithoutModel, preempts: bool) -> None:
    """The blocks are back after the next step: vLLM's first answer says no, and the caller tries again."""
    free, scheduler = prefill.free_blocks(), prefill.scheduler
    for name in ("r", "s"):
        hold(prefill, name)
    with pytest.raises(RuntimeError, match="Failed to reset") if preempts else nullcontext():
        assert not scheduler.reset_prefix_cache(preempts, reset_connector=True)
    run_until((prefill,), lambda: not scheduler.has_requests())
    assert sorted(prefill.finished.sent) == ["r", "s"] and prefill.free_blocks() == free
    assert scheduler.reset_prefix_cache(preempts, True)


def test_an_answer_that_decode_computes_itself_is_its_own_after_a_preemption_too() -> None:
    """Its prompt was in D's cache, so nothing was loaded. A load that fails now would end a stream of good tokens."""
    port, prompt = free_port(), [3 + 7 * i % 500 for i in range(2 * BLOCK + 1)]
    url = f"http://127.0.0.1:{port}"
    with fake_metaserver(port, says_failed) as seen:
        decode = EngineWithoutModel("kv_consumer", 2, {"metaserver_urls": [url]}, prefixes=True)
        try:
            before = decode.add("before", prompt, {})
            run_until((decode,), before.is_finished)
            params = {"do_remote_prefill": True, "metaserver": url, "ticket": "r"}
            asked = decode.add("r", prompt, params, max_tokens=8)
            run_until((decode,), lambda: asked.num_output_tokens >= 3)
            assert decode.scheduler.reset_prefix_cache(reset_running_requests=True)
            run_until((decode,), asked.is_finished)
        finally:
            decode.close()
    assert asked.num_preemptions == 1 and not seen
    assert asked.status is RequestStatus.FINISHED_LENGTH_CAPPED and asked.num_output_tokens == 8


def test_the_core_names_the_weights_and_what_was_computed_before_is_not_held(prefill: EngineWithoutModel) -> None:
    hold(prefill, "r")
    engine = prefill.scheduler.connector._engine
    before = engine.fingerprint
    EndingCore(prefill.scheduler, 30).set_weight_version("step 2")
    run_until((prefill,), lambda: not prefill.scheduler.has_requests())
    assert prefill.finished.sent == ["r"] and engine.fingerprint != before
