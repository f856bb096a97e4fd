# SPDX-License-Identifier: Apache-2.0
"""Several groups under vLLM before 0.32: the tables of a step, blocks to be cleared, failed loads by request.

tests/integration/test_releases_groups.py has the real engines of 0.23.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ascend_pd import first_token, older_groups


def made() -> type:
    """A scheduler like vLLM 0.23's, with the methods that the wrappers use."""

    class Older:
        def __init__(self, **facts: Any) -> None:
            self.requests: dict[str, Any] = {}
            self.failed_recving_kv_req_ids: set[str] = set()
            self.received: list[set[str]] = []
            self.connector: Any = None
            vars(self).update(facts)

        def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
            return connector(scheduler_output)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            return {}

        def _update_waiting_for_remote_kv(self, request: Any) -> None: ...

        def _update_from_kv_xfer_finished(self, output: Any) -> None:
            self.received.append(output.finished_recving)

        def finish_requests(self, request_id: str, status: Any) -> None:
            self.requests[request_id].status = status

    return Older


def config(scheduler: type, connector: str = first_token.CONNECTOR) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler),
    )


def test_a_steps_tables_are_the_schedulers_own_and_do_not_go_to_the_workers() -> None:
    scheduler, output = made(), SimpleNamespace()
    assert older_groups.install(config(scheduler)) == older_groups.install(config(scheduler)) == ""
    found = scheduler(kv_cache_manager="tables")._build_kv_connector_meta(
        lambda given: given.kv_connector_block_state, output
    )
    assert found == "tables" and not vars(output)


def test_a_connector_that_fails_leaves_no_tables_behind() -> None:
    scheduler, output = made(), SimpleNamespace()
    older_groups.install(config(scheduler))
    with pytest.raises(ZeroDivisionError):
        scheduler(kv_cache_manager="tables")._build_kv_connector_meta(lambda given: 1 // 0, output)
    assert not vars(output)


@pytest.mark.parametrize(("cleared", "left"), [([1, 2, 3, 9], [2, 9]), ([1, 3], None), (None, None)], ids=str)
def test_blocks_that_loads_write_are_not_cleared(cleared: list[int] | None, left: list[int] | None) -> None:
    scheduler, output = made(), SimpleNamespace(new_block_ids_to_zero=cleared)
    older_groups.install(config(scheduler))
    bind = SimpleNamespace(blocks=(np.array([1], np.int32), np.array([3, 7], np.int32)))
    step = SimpleNamespace(decode=SimpleNamespace(binds=(bind,)))
    assert scheduler(kv_cache_manager=0)._build_kv_connector_meta(lambda given: step, output) is step
    assert output.new_block_ids_to_zero == left


def test_without_loads_all_new_blocks_are_cleared() -> None:
    output = SimpleNamespace(new_block_ids_to_zero=[1, 2])
    older_groups.keep_loads(output, SimpleNamespace(decode=None))
    older_groups.keep_loads(output, SimpleNamespace())
    assert output.new_block_ids_to_zero == [1, 2]


def test_another_scheduler_or_connector_is_left_as_it_is() -> None:
    scheduler = made()
    scheduler._build_kv_connector_meta = lambda self, connector: 0  # type: ignore[attr-defined]
    assert "differs in _build_kv_connector_meta" in older_groups.install(config(scheduler))
    without = made()
    del without._update_waiting_for_remote_kv  # type: ignore[attr-defined]
    assert "_update_waiting_for_remote_kv" in older_groups.install(config(without))
    assert "MultiConnector" in older_groups.install(config(made(), "MultiConnector"))


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
    output = first_token.fail(scheduler, request)
    assert scheduler.received == [{"r"}]
    if recomputes:
        assert output is None and request.num_computed_tokens == 0 and scheduler.failed_recving_kv_req_ids == {"r"}
        assert request.status == "waiting"
    else:
        assert output.request_id == "r" and request.status.name == "FINISHED_ERROR"
        assert not scheduler.failed_recving_kv_req_ids
