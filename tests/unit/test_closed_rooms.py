# SPDX-License-Identifier: Apache-2.0
"""Optional features have a room each, behind one seam: while it is closed, none of its functions run."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from unit.kits.connectors import connected_pair, output, request
from unit.kits.rooms import FOREIGN_ROUTERS, TOKENS_OF_OTHERS
from unit.kits.walk import Walk
from unit.kits.watching import until
from unit.schedulers.rendezvous import pair
from vllm_ascend_pd.plugin import CONNECTOR, register


def files(room: tuple[str, ...]) -> set[str]:
    return {f"{name.replace('.', '/')}.py" for name in room}


@pytest.fixture(autouse=True)
def as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what other tests of this process have wrapped, and register the plug-in as vLLM does."""
    for name in ("put", "get", "get_nowait"):
        monkeypatch.setattr(RequestOutputCollector, name, inspect.unwrap(getattr(RequestOutputCollector, name)))

    monkeypatch.delitem(sys.modules, "vllm.v1.engine.async_llm", raising=False)  # as without a server

    def __init__(self: Any, vllm_config: Any) -> None: ...  # noqa: N807

    monkeypatch.setattr(InputProcessor, "__init__", __init__)
    register()


def passed_in_d_s_front_end(**keys: str) -> None:
    """Start a D's front end as far as it reads the configuration, and let an output pass to a client's task."""
    transfer = SimpleNamespace(kv_connector=CONNECTOR, kv_role="kv_consumer", kv_connector_extra_config=keys)
    InputProcessor(SimpleNamespace(kv_transfer_config=transfer))  # type: ignore[arg-type]
    queue, said = RequestOutputCollector(RequestOutputKind.DELTA, "r"), SimpleNamespace(kv_transfer_params=None)
    queue.put(said)  # type: ignore[arg-type]
    assert queue.get_nowait() is said


def passed_in_a_transfer(**keys: str) -> set[str]:
    """Let a prompt cross from P to D, with all that both connectors are asked, and return the files that it passed."""
    with Walk() as walk, connected_pair(**keys) as both:
        passed_in_d_s_front_end(**keys)
        asked = both.load()
        both.prefilled(asked)
        until(both.results, "the load")
        both.decode.update_connector_output(
            KVConnectorOutput(finished_recving={"r"}, kv_connector_worker_meta=both.news())
        )
        asked.append_output_token_ids([7])
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        assert both.prefill.request_finished_all_groups(asked, ([1, 6],))[1]
        assert both.decode.request_finished_all_groups(request("r", None), ([3, 5],))[1]
        until(lambda: both.metaserver.reports, "the report")
        sent: list[str] = []

        def freed() -> bool:
            sent.extend(both.prefill_step(output(), finished=frozenset({"r-p"})).finished_sending)
            return bool(sent)

        until(freed, "P's blocks")
    return walk.files


def test_nothing_runs_in_a_closed_room() -> None:
    passed = passed_in_a_transfer(first_token="off")
    assert {"decode/scheduler/role.py", "prefill/scheduler/role.py", "prefill/worker/writer.py"} <= passed
    assert sorted(passed & files(TOKENS_OF_OTHERS)) == [], "first_token: off"
    assert sorted(passed & files(FOREIGN_ROUTERS)) == [], "no request of another router, and nothing is held for one"


def test_an_open_room_is_passed() -> None:
    """So the files above are those of the rooms."""
    missed = files(TOKENS_OF_OTHERS) - passed_in_a_transfer(first_token="auto")
    assert missed <= files(("vllm_patches.given_tokens", "decode.scheduler.core.given"))
    with Walk() as walk, pair() as both:
        _, _, params = both.prefilled()
        both.load(params)
    assert files(FOREIGN_ROUTERS) - walk.files <= files(("prefill.scheduler.bootstrap",))
