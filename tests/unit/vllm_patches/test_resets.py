# SPDX-License-Identifier: Apache-2.0
"""A reset of the prefix cache that preempts running requests, by a scheduler that lists them in no step.

tests/unit/releases has the real scheduler of vLLM 0.23.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from unit.kits.watching import until
from unit.schedulers.kit import output, prefill, remote_decode, request, reservation
from unit.schedulers.rendezvous import P_ID, TOY, pair
from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import seal
from vllm_ascend_pd.vllm_patches import resets


def made() -> type:
    """A scheduler like vLLM 0.23's, as far as a reset concerns it."""

    class OlderReset:
        def __init__(self, connector: Any, *running: Request) -> None:
            self.connector, self.running, self.fails = connector, list(running), False

        def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            while reset_running_requests and self.running:
                self.running.pop()
            if self.fails:
                raise RuntimeError("Failed to reset KV cache")
            return not self.running

    return OlderReset


class ToldConnector(AscendPushConnector):
    """The connector, as far as a reset concerns it."""

    def __init__(self, role: PrefillScheduler | DecodeScheduler) -> None:
        self.scheduler_role, self._engine = role, role.engine


def installed(connector: Any, *running: Request) -> Any:
    scheduler = made()
    config = SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler))
    resets.install(config)
    once = vars(scheduler)["reset_prefix_cache"]
    resets.install(config)
    assert vars(scheduler)["reset_prefix_cache"] is once
    return scheduler(connector, *running)


def pushing() -> tuple[PrefillScheduler, Request]:
    """P's scheduler with a request of which a step has computed 8 of 10 tokens."""
    role, asked = prefill(), request()
    asked.kv_transfer_params = remote_decode(seal(reservation(asked), None))
    role.allocated(asked)
    role.build_step(output([("r", 0, 8, [1, 2])]))
    return role, asked


@pytest.mark.parametrize("how", ["alone", "behind a MultiConnector", "the reset fails"])
def test_the_very_next_step_drains_what_a_reset_has_preempted(how: str) -> None:
    role, asked = pushing()
    connector: Any = ToldConnector(role)
    if how == "behind a MultiConnector":
        connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    scheduler = installed(connector, asked)
    scheduler.fails = how == "the reset fails"
    if scheduler.fails:
        with pytest.raises(RuntimeError, match="Failed to reset"):
            scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
    (push,) = role.build_step(output([("another", 0, 8, [1, 2])])).preempted
    resumed = role.build_step(output(cached=[("r", 0, 10, [5, 6, 7])], resumed={"r"}))
    (slice_,) = resumed.slices
    assert slice_.push == push and slice_.restart and not resumed.preempted


def test_a_reset_that_leaves_requests_running_interrupts_no_push() -> None:
    role, asked = pushing()
    assert not installed(ToldConnector(role), asked).reset_prefix_cache()
    step = role.build_step(output(cached=[("r", 8, 2, [3])]))
    assert not step.preempted and not step.slices[0].restart


def test_a_scheduler_that_lists_them_itself_is_left_to_it() -> None:
    role, asked = pushing()
    scheduler = installed(ToldConnector(role), asked)
    scheduler.reset_preempted_req_ids = set()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not role.build_step(output()).preempted
    assert len(role.build_step(output(preempted={"r"})).preempted) == 1


def test_a_scheduler_without_a_connector_resets_as_before() -> None:
    assert installed(None, request()).reset_prefix_cache(reset_running_requests=True)


def test_blocks_that_a_reset_took_are_not_pushed_for_a_d_that_comes_then() -> None:
    with pair() as both:
        asked = request(P_ID, TOY)
        both.p.allocated(asked)
        both.p.build_step(output([(P_ID, 0, 8, [1, 2])]))
        installed(ToldConnector(both.p), asked).reset_prefix_cache(reset_running_requests=True)
        both.load({**both.address(), "remote_request_id": "router-1"})
        until(lambda: both.p.book.tracks(P_ID), "the binding")
        assert not both.p.build_step(output([("another", 0, 8, [1, 2])])).computed
        step = both.p.build_step(output(cached=[(P_ID, 0, 10, [5, 6, 7])], resumed={P_ID}))
        (slice_,) = step.slices
        assert (slice_.before, slice_.after, slice_.new_blocks[0].tolist()) == (0, 10, [5, 6, 7])


@pytest.mark.parametrize("version", ["2", "a long word for it " * 100])
def test_engines_whose_weights_have_other_versions_do_not_fit(version: str) -> None:
    """The version is that of the moment: what was held under the last one is freed."""
    with pair() as both:
        before = both.d.engine.fingerprint
        _, _, answer = both.prefilled()
        ToldConnector(both.d).weights(version)
        assert both.steps.cancelled(both.load(answer).transfer) == "PD-GEO-001"
        assert both.d.engine.fingerprint != before == both.p.engine.fingerprint
        ToldConnector(both.p).weights(version)
        assert both.p.build_step(output()).freed == (P_ID,) and both.p.released(P_ID)
        assert both.d.engine.fingerprint == both.p.engine.fingerprint
        _, _, answer = both.prefilled(name="cmpl-router-2-0-aaaaaaaa")
        both.load(answer, name="cmpl-router-2-0-bbbbbbbb")
        until(both.p.book.must_step, "the binding")
        ToldConnector(both.d).weights("default")
        assert both.d.engine.fingerprint == before
