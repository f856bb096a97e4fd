# SPDX-License-Identifier: Apache-2.0
"""Forms of `kv_transfer_params` that other routers write, each with its source.

They run through both schedulers over real sockets, from the router's first request to the load on D. The routers
themselves do not run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from unit.kits.watching import until
from unit.schedulers.kit import CACHE, SECRETS, engine, output, request
from unit.schedulers.recording_router import loading
from unit.schedulers.rendezvous import BootstrapPair, SchedulerPair, pair
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler

TWO = {"do_remote_decode": True, "do_remote_prefill": False}
SIX = {**TWO, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
Answer = dict[str, Any]


def unchanged(answer: Answer) -> Answer:
    return answer


def with_host(answer: Answer) -> Answer:
    """Overwrite remote_host with that of P's HTTP port, without a port, as these routers do."""
    return {**answer, "remote_host": "10.9.9.9"}


@dataclass(frozen=True)
class Serial:
    """P first. `source`: repository, commit, file."""

    router: str
    source: str
    prefill: dict[str, Any]
    passes: Callable[[Answer], Answer] = unchanged
    ids: tuple[str, str] = ("cmpl-router-1-0-aaaaaaaa", "cmpl-router-1-0-bbbbbbbb")  # of P and of D


OTHER_FRONT_END = "0198c1f2-aaaaaaaa", "0198c1f2-bbbbbbbb"  # gRPC, or a front end of the router's own
SERIAL = (
    Serial(
        "Ray Serve LLM",
        "ray-project/ray c3cc57069059 python/ray/llm/_internal/serve/serving_patterns/prefill_decode/pd_server.py",
        SIX,
    ),
    Serial(
        "production-stack",
        "vllm-project/production-stack a6c01db05f65 src/vllm_router/services/request_service/request.py",
        SIX,
        with_host,
    ),
    Serial("Kthena", "volcano-sh/kthena 067dfb5b483f pkg/kthena-router/connectors/nixl.go", TWO),
    Serial(
        "AIBrix, shfs",
        "vllm-project/aibrix e3e10f9e4aeb pkg/plugins/gateway/algorithms/pd/transfer/shfs.go",
        SIX,
        with_host,
    ),
    Serial(
        "Dynamo",
        "ai-dynamo/dynamo 513174013cd1 components/src/dynamo/vllm/handlers.py",
        SIX,
        ids=OTHER_FRONT_END,
    ),
    Serial(
        "SMG, kv_connector NixlConnector",
        "lightseekorg/smg 73da68ca9472 model_gateway/src/routers/grpc/common/stages/request_execution.rs",
        TWO,
        ids=OTHER_FRONT_END,
    ),
    Serial(
        "llm-d sidecar, nixlv2",
        "llm-d/llm-d-inference-scheduler 05399b3df7c2 pkg/sidecar/proxy/connector_nixlv2.go",
        SIX,
    ),
    Serial(
        "MindIE-Motor, dispatch_profile handoff",
        "Ascend/MindIE-Motor adf854f47cef motor/coordinator/router/adapters/pd_protocol.py",
        SIX,
    ),
)
each_serial = pytest.mark.parametrize("shape", SERIAL, ids=lambda shape: shape.router)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def prefilled(both: SchedulerPair, params: Any, name: str) -> tuple[bool, Answer | None]:
    _, blocks_held, answer = both.prefilled(as_json(params), name)
    return blocks_held, as_json(answer)


@each_serial
def test_a_router_that_goes_to_p_first_has_its_answer_fetched(shape: Serial) -> None:
    of_p, of_d = shape.ids
    with pair(SECRETS) as both:
        blocks_held, answer = prefilled(both, shape.prefill, of_p)
        assert blocks_held and answer is not None and answer["do_remote_prefill"] is True, "Motor asks for it"
        assert "transfer_mode" not in answer, "llm-d's sidecar would then skip P's answer the next time"
        bind = both.load(as_json(shape.passes(answer)), of_d)
        until(lambda: both.news, "the offer at P")
        (start,) = both.p.build_step(output()).starts
        assert start.reservation.transfer == bind.transfer and start.ended
        both.steps.settled(bind.transfer)


@each_serial
def test_what_p_does_not_hold_d_computes(shape: Serial) -> None:
    """D opens no connection for it, whatever the router adds to P's answer."""
    of_p, of_d = shape.ids
    with pair(SECRETS, p={"hold_sources": 1}) as both:
        assert prefilled(both, shape.prefill, "cmpl-other-0-aaaaaaaa")[0]
        blocks_held, answer = prefilled(both, shape.prefill, of_p)
        assert not blocks_held and answer is not None and answer["pd_push"]["code"] == "PD-META-028"
        asked = request(of_d, as_json(shape.passes(answer)))
        assert both.d.wanted(asked, 0) == 0 and both.d.nap_budget() == 0


# AIBrix's agents for `nixl` and `mooncake` put nothing into P's request (vllm-project/aibrix e3e10f9e4aeb,
# transfer/nixl.go and mooncake.go beside shfs.go); that for `nixl` hands P's whole answer to D in a field of its own,
# which vLLM does not give to a connector.
@pytest.mark.parametrize("params", [None, {}], ids=["none", "empty"])
def test_a_router_that_asks_p_for_nothing_gets_two_plain_engines(params: Any) -> None:
    with pair(SECRETS) as both:
        blocks_held, answer = prefilled(both, params, "cmpl-router-1-0-aaaaaaaa")
        assert not blocks_held and answer is None and not both.p.book.counts()["held"]
        assert both.d.wanted(request("cmpl-router-1-0-bbbbbbbb", params), 0) == 0


# -- both at once, in Mooncake's dialect: llm-d/llm-d-router 8b00c51f4135
# pkg/sidecar/proxy/connector_mooncake.go, and SMG's (above)


def legs(site: BootstrapPair, engine_id: str) -> tuple[Answer, Answer]:
    transfer = {"transfer_id": "xfer-0198c1f2-7e1c"}
    to_d = {"do_remote_decode": False, "do_remote_prefill": True, **transfer, "remote_engine_id": engine_id}
    return {**TWO, **transfer}, {**to_d, "remote_bootstrap_addr": f"http://127.0.0.1:{site.port}"}


@pytest.fixture
def site() -> Any:
    made = BootstrapPair()
    yield made
    made.p.close()
    made.d.close()


@pytest.mark.parametrize("first", ["P", "D"])
def test_llm_d_s_sidecar_sends_both_at_once_under_a_name_of_its_own(site: BootstrapPair, first: str) -> None:
    """It takes every rank of the bootstrap's answer that has an id; a client's X-Request-Id is not its transfer id."""
    answer = site.ask().json()
    ids = {rank: entry["engine_id"] for rank, entry in answer.items() if isinstance(entry.get("engine_id"), str)}
    assert list(ids) == ["0"], "the rank that it asks for by X-data-parallel-rank"
    to_p, to_d = legs(site, ids["0"])
    of_p, of_d = "chatcmpl-b7f2-aaaaaaaa", "chatcmpl-19ce-bbbbbbbb"
    bind = site.load(to_d, of_d) if first == "D" else None
    if first == "D":
        until(lambda: site.p.book.counts()["waiting"], "the offer")
    site.p.allocated(request(of_p, to_p))
    bind = bind or site.load(to_d, of_d)
    until(lambda: site.p.book.tracks(of_p), "the binding")


def test_smg_is_mooncake_s_words_in_the_order_p_first(site: BootstrapPair) -> None:
    """It waits for P, and then sends D the id that it gave P: D finds P's blocks by it."""
    to_p, to_d = legs(site, site.ask().json()["0"]["engine_id"])
    blocks_held, _ = prefilled(site, to_p, OTHER_FRONT_END[0])
    assert blocks_held
    site.steps.settled(site.load(to_d, OTHER_FRONT_END[1]).transfer)


def test_smg_with_vllm_s_own_id_of_p_is_refused_with_a_code(
    site: BootstrapPair, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker's `kv_engine_id` is vLLM's and no address: P's blocks are released after `hold_s`."""
    _, to_d = legs(site, "5f2c8d1e-0b1c-4e0c-9d59-6a7f1f0e7a51")
    assert site.d.wanted(request(OTHER_FRONT_END[1], to_d), 0) == 0
    assert "PD-META-029" in caplog.text and "bootstrap_port" in caplog.text


# -- D first: Ascend/MindIE-Motor adf854f47cef
# motor/coordinator/router/adapters/pd_protocol.py, strategies/unified_pd.py


def test_motor_s_trigger_passes_on_what_d_posts() -> None:
    """`dispatch_profile: trigger`. Its address has the attempt as a query; it looks for its own id inside ours; P's
    request has D's fields, with the direction written again and without a metaserver."""
    with loading(query="?attempt=3") as (router, steps, bind):
        ((path, body),) = router.posts
        assert path == "/v1/metaserver?attempt=3"
        assert body["request_id"].removeprefix("cmpl-").removesuffix("-0") == "router-1"
        params = {key: value for key, value in as_json(body).items() if key != "metaserver"}
        p = PrefillScheduler(engine(SECRETS))
        p.attach_workers({(0, rank): WorkerFacts(None, CACHE) for rank in range(2)})
        asked = request("cmpl-router-1-0-aaaaaaaa", {**params, **TWO})
        p.allocated(asked)
        assert p.book.tracks(asked.request_id)
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        assert p.request_finished(asked, True)[1] is not None
        router.ended = True
        steps.settled(bind.transfer)


def test_motor_that_knows_the_attempt_no_more_fails_the_load_at_once() -> None:
    with loading(status=409, query="?attempt=1") as (router, steps, bind):
        router.ended = True
        assert steps.cancelled(bind.transfer) == "PD-META-003"
