# SPDX-License-Identifier: Apache-2.0
"""Several groups under vLLM before 0.32: the tables of a step, blocks to be cleared, failed loads by request.

tests/integration/test_releases_groups.py has the real engines of 0.23.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.vllm_patches import older_groups, step_hooks


def made() -> type:
    """A scheduler like vLLM 0.23's, with the methods that the wrappers use."""

    class Older:
        def __init__(self, **facts: Any) -> None:
            self.requests: dict[str, Any] = {}
            self.failed_recving_kv_req_ids: set[str] = set()
            self.received: list[set[str]] = []
            self.connector: Any = None
            vars(self).update(facts)

        def schedule(self) -> Any:
            output = SimpleNamespace(new_block_ids_to_zero=self.cleared, kv_connector_metadata=None)  # type: ignore[attr-defined]
            if self.connector is not None:
                output.kv_connector_metadata = self.connector.build_connector_meta(output)
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            return {}

        def _update_waiting_for_remote_kv(self, request: Any) -> None: ...

        def _update_from_kv_xfer_finished(self, output: Any) -> None:
            self.received.append(output.finished_recving)

        def finish_requests(self, request_id: str, status: Any) -> None:
            self.requests[request_id].status = status

    return Older


def config(scheduler: type) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler))


class SteppingConnector(AscendPushConnector):
    """The connector, as far as a step asks it; `steps` makes the metadata of the output that its roles would see."""

    def __init__(self, steps: Callable[[Any], Any]) -> None:
        self.scheduler_role: Any = SimpleNamespace(metadata=steps)


def scheduled(scheduler: type, steps: Callable[[Any], Any], cleared: list[int] | None = None) -> Any:
    return scheduler(kv_cache_manager="tables", cleared=cleared, connector=SteppingConnector(steps)).schedule()


def test_a_steps_tables_are_the_schedulers_own_and_do_not_go_to_the_workers() -> None:
    scheduler = made()
    assert older_groups.install(config(scheduler)) == older_groups.install(config(scheduler)) == ""
    output = scheduled(scheduler, lambda given: given.kv_connector_block_state)
    assert output.kv_connector_metadata == "tables" and not hasattr(output, "kv_connector_block_state")


def test_a_newer_vllms_own_tables_are_left_as_they_are() -> None:
    output = SimpleNamespace(kv_connector_block_state="vLLM's")
    assert SteppingConnector(lambda given: given.kv_connector_block_state).build_connector_meta(output) == "vLLM's"  # type: ignore[comparison-overlap]
    assert output.kv_connector_block_state == "vLLM's"


def test_a_scheduler_is_wrapped_once_and_goes_on_without_a_connector() -> None:
    scheduler = made()
    older_groups.install(config(scheduler))
    once = vars(scheduler)["schedule"]
    older_groups.install(config(scheduler))
    assert vars(scheduler)["schedule"] is once
    assert scheduler(kv_cache_manager="tables", cleared=[4]).schedule().new_block_ids_to_zero == [4]


def test_a_prefix_counts_only_if_its_state_is_there_too() -> None:
    scheduler = made()
    older_groups.install(config(scheduler))

    class Coordinator:
        """As vllm-ascend's: its recompute scheduler asks for the prefix of attention alone."""

        def find_longest_cache_hit(self, hashes: str, longest: int) -> str:
            return "of all groups"

        def find_longest_cache_hit_per_group(self, hashes: str, longest: int) -> str:
            return "of attention"

    mine, without = Coordinator(), Coordinator()
    scheduler(kv_cache_manager=SimpleNamespace(coordinator=without), cleared=[]).schedule()
    manager = SimpleNamespace(coordinator=mine)
    scheduler(kv_cache_manager=manager, cleared=[], connector=SteppingConnector(lambda given: None)).schedule()
    assert mine.find_longest_cache_hit_per_group("hashes", 7) == "of all groups"
    assert without.find_longest_cache_hit_per_group("hashes", 7) == "of attention", "without a connector nothing loads"


def test_a_connector_that_fails_leaves_no_tables_behind() -> None:
    scheduler, seen = made(), []
    older_groups.install(config(scheduler))

    def failing(given: Any) -> None:
        seen.append(given)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scheduled(scheduler, failing)
    assert not hasattr(seen[0], "kv_connector_block_state")


@pytest.mark.parametrize(("cleared", "left"), [([1, 2, 3, 9], [2, 9]), ([1, 3], None), (None, None)], ids=str)
def test_blocks_that_loads_write_are_not_cleared(cleared: list[int] | None, left: list[int] | None) -> None:
    scheduler = made()
    older_groups.install(config(scheduler))
    blocks = np.array([1], np.int32), np.array([6, 7, 14], np.int32)  # of 3, and the first half of 7
    bind = Bind("r", TransferId("d", 1, "a uuid"), 0, 40, blocks, 1.0, (1, 2))
    step = SimpleNamespace(decode=SimpleNamespace(binds=(bind,)))
    output = scheduled(scheduler, lambda given: step, cleared)
    assert output.kv_connector_metadata is step and output.new_block_ids_to_zero == left


def test_without_loads_all_new_blocks_are_cleared() -> None:
    output = SimpleNamespace(new_block_ids_to_zero=[1, 2])
    older_groups.keep_loads(output, SimpleNamespace(decode=None))
    older_groups.keep_loads(output, SimpleNamespace())
    assert output.new_block_ids_to_zero == [1, 2]


def test_another_scheduler_is_left_as_it_is() -> None:
    scheduler = made()
    scheduler.update_from_output = lambda self, output: 0  # type: ignore[attr-defined]
    assert "differs in update_from_output" in older_groups.install(config(scheduler))
    without = made()
    del without.schedule  # type: ignore[attr-defined]
    assert "differs in schedule" in older_groups.install(config(without))
    without = made()
    del without._update_waiting_for_remote_kv  # type: ignore[attr-defined]
    assert "_update_waiting_for_remote_kv" in older_groups.install(config(without))


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_a_failed_load_follows_the_policy(monkeypatch: pytest.MonkeyPatch, recomputes: bool) -> None:
    request = SimpleNamespace(
        request_id="r",
        num_computed_tokens=64,
        status="waiting",
        trace_headers=None,
        take_events=lambda: None,
        get_finished_reason=lambda: None,
    )
    scheduler = made()(recompute_kv_load_failures=recomputes, requests={"r": request})
    output = step_hooks.fail(scheduler, request)
    assert scheduler.received == [{"r"}]
    if recomputes:
        assert output is None and request.num_computed_tokens == 0 and scheduler.failed_recving_kv_req_ids == {"r"}
        assert request.status == "waiting"
    else:
        assert output.request_id == "r" and request.status.name == "FINISHED_ERROR"
        assert not scheduler.failed_recving_kv_req_ids
