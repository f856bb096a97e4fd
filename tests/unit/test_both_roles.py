# SPDX-License-Identifier: Apache-2.0
"""Engines with both roles (`kv_both`), driven like vLLM drives them: two over real sockets, each P for one request
and D for another."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from unit.admission.vllm_configs import LAYERS, cache_config, vllm_config
from unit.kits.connectors import TOKENS, Blocks, connector, output, request, tensors
from unit.kits.watching import until
from vllm_ascend_pd import admission, compat, first_token, older_groups, standstill
from vllm_ascend_pd.both import BothScheduler, BothWorker
from vllm_ascend_pd.connector import AscendPushConnector, Handshake
from vllm_ascend_pd.decode.first_tokens import FirstTokenReceiver
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd, PrefillStep
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.first_tokens import FirstTokenSource
from vllm_ascend_pd.protocol.dialects import is_prefill
from vllm_ascend_pd.roles import EndedRequests, SchedulerRole, StepMetadata, WorkerNews, WorkerRole
from vllm_ascend_pd.standstill import Standstill

KEYS = {"hold_sources": 4, "hold_s": 60.0, "prefill_listeners": ["127.0.0.1"]}
TOY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)


class Node:
    """One engine's connectors, scheduler and worker, without the engine around them."""

    def __init__(self, seed: int) -> None:
        self.scheduler = connector("kv_both", KVConnectorRole.SCHEDULER, KEYS)
        self.worker = connector("kv_both", KVConnectorRole.WORKER, KEYS)
        self.cache = tensors()
        for tensor in self.cache.values():
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        self.worker.register_kv_caches(self.cache)
        shake = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))
        self.scheduler.set_xfer_handshake_metadata({0: shake})
        self.results: list[Any] = []
        self.reported: dict[str, set[str]] = {"sent": set(), "received": set(), "failed": set()}

    def step(self, step: SchedulerOutput | None = None, finished: frozenset[str] = frozenset()) -> None:
        """Run a step in vLLM's order; the scheduler gets the reports at its end."""
        step = step or output()
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(step)))
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        if step.total_num_scheduled_tokens:
            for name, tensor in self.cache.items():
                self.worker.wait_for_layer_load(name)
                self.worker.save_kv_layer(name, tensor, None)
        self.worker.wait_for_save()
        found = self.worker.get_transfer_results(set(finished))
        self.worker.clear_connector_metadata()
        news = self.worker.build_connector_worker_meta()
        sent, received = set(found.finished_sending), set(found.finished_recving)
        connector_output = KVConnectorOutput(sent, received, kv_connector_worker_meta=news)
        self.scheduler.update_connector_output(connector_output)
        assert connector_output.finished_recving == received, "nothing is kept from vLLM: P's first token is not used"
        self.reported["sent"] |= sent
        self.reported["received"] |= received
        self.reported["failed"] |= set(found.failed_recving)

    def computes(self, name: str, blocks: list[int], params: Any = TOY) -> dict[str, Any]:
        """Run a request of P's from its first step to its answer."""
        asked = request(name, params)
        assert self.scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
        self.scheduler.update_state_after_alloc(asked, Blocks(blocks), 0)
        self.step(output(name, len(TOKENS), blocks))
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, answer = self.scheduler.request_finished_all_groups(asked, (blocks,))
        assert held and answer is not None
        self.step(finished=frozenset({name}))
        return answer

    def loads(self, name: str, blocks: list[int], params: Any) -> Request:
        asked = request(name, params)
        assert self.scheduler.get_num_new_matched_tokens(asked, 0) == (len(TOKENS), True)
        self.scheduler.update_state_after_alloc(asked, Blocks(blocks), len(TOKENS))
        return asked

    def close(self) -> None:
        for each in (self.scheduler, self.worker, self.scheduler, self.worker):
            each.shutdown()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    made = Node(1), Node(2)
    yield made
    for node in made:
        node.close()


def same(mine: Node, my_blocks: list[int], theirs: Node, their_blocks: list[int]) -> bool:
    return all(torch.equal(mine.cache[name][my_blocks], theirs.cache[name][their_blocks]) for name in LAYERS)


def test_each_engine_is_p_for_one_request_and_d_for_another_in_the_same_steps(nodes: tuple[Node, Node]) -> None:
    """Both directions run at once: a step of either engine has a push of its own and a load."""
    one, two = nodes
    before = {name: tensor.clone() for name, tensor in two.cache.items()}
    there, back = one.computes("p1", [1, 6]), two.computes("p2", [0, 7])
    loads = two.loads("d1", [3, 5], there), one.loads("d2", [2, 4], back)

    def over() -> bool:
        one.step()
        two.step()
        return all(node.reported["sent"] and node.reported["received"] for node in nodes)

    until(over, "both transfers")
    assert (one.reported["sent"], one.reported["received"]) == ({"p1"}, {"d2"})
    assert (two.reported["sent"], two.reported["received"]) == ({"p2"}, {"d1"})
    assert not one.reported["failed"] and not two.reported["failed"]
    assert same(one, [1, 6], two, [3, 5]) and same(two, [0, 7], one, [2, 4])
    assert all(torch.equal(two.cache[name][[0, 1, 2, 4, 6, 7]], before[name][[0, 1, 2, 4, 6, 7]]) for name in LAYERS)
    for node, asked, of in ((two, loads[0], there), (one, loads[1], back)):
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, answer = node.scheduler.request_finished_all_groups(asked, ([3, 5],))
        assert not held and answer is not None
        assert answer["pd_load"]["prefill"] == of["pd_push"]["prefill"] and answer["pd_load"]["received"] == len(TOKENS)
        assert node.scheduler._open_loads() == 0 and not node.scheduler.has_pending_push_work()


def test_what_came_as_a_load_goes_on_as_a_push(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.loads("d1", [3, 5], one.computes("p1", [1, 6]))
    until(lambda: (one.step(), two.step(), two.reported["received"])[-1], "the load")  # type: ignore[func-returns-value]
    one.loads("d2", [0, 2], two.computes("p2", [3, 5]))
    until(lambda: (one.step(), two.step(), one.reported["received"])[-1], "the way back")  # type: ignore[func-returns-value]
    assert same(one, [1, 6], one, [0, 2])


@pytest.mark.parametrize("results", [True, False], ids=["by request", "by blocks"])
def test_a_failed_load_of_an_engine_that_pushes_is_named(
    nodes: tuple[Node, Node], results: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    source = one.computes("p1", [1, 6])
    one.close()
    two.computes("p2", [0, 7])
    two.loads("d1", [3, 5], source)
    monkeypatch.setattr(compat, "HAS_TRANSFER_RESULTS", results)
    until(lambda: (two.step(), two.reported["received"])[-1], "the end of the load")  # type: ignore[func-returns-value]
    assert two.reported["failed"] == {"d1"} and not two.reported["sent"]
    assert two.worker.get_block_ids_with_load_errors() == (set() if results else {3, 5})


def test_its_own_source_may_come_back_to_it(nodes: tuple[Node, Node]) -> None:
    """A router with a single engine sends both requests to it."""
    one, _ = nodes
    one.loads("d1", [3, 5], one.computes("p1", [1, 6]))
    until(lambda: (one.step(), one.reported["sent"] and one.reported["received"])[-1], "the load")  # type: ignore[func-returns-value]
    assert same(one, [1, 6], one, [3, 5]) and not one.reported["failed"]


# -- the composition


class Fake(SchedulerRole, WorkerRole):
    """A role with given answers, which records its calls."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.tally, self.asked = answers, Tally(), []  # type: ignore[var-annotated]

    def must_step(self) -> bool:
        return bool(self.answers.get("must_step"))

    def open_loads(self) -> int:
        return int(self.answers.get("open_loads", 0))

    def due_s(self) -> float:
        return float(self.answers.get("due_s", math.inf))

    def metadata(self, output: Any) -> StepMetadata:
        return StepMetadata(**self.answers.get("metadata", {}))

    def stats(self) -> dict[str, Any] | None:
        return self.tally.take()

    def attach_workers(self, workers: Any) -> None:
        self.asked.append(("attach_workers", workers))

    def take_news(self, news: WorkerNews) -> None:
        self.asked.append(("news", news))

    def register_kv_caches(self, tensors: Any) -> None:
        self.asked.append(("register_kv_caches", tensors))

    def preempt(self, step: StepMetadata) -> None:
        self.asked.append(("preempt", step))

    def bind(self, step: StepMetadata) -> None:
        self.asked.append(("bind", step))

    def save_layer(self, name: str) -> None:
        self.asked.append(("save_layer", name))

    def end_step(self) -> None:
        self.asked.append(("end_step",))

    def ended(self, requests: Any) -> EndedRequests:
        self.asked.append(("ended", set(requests)))
        return self.answers.get("ended", EndedRequests())  # type: ignore[no-any-return]

    def news(self) -> WorkerNews:
        return self.answers.get("news", WorkerNews())  # type: ignore[no-any-return]

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        return bool(self.answers.get("holds")), {"of": self.answers["name"]}

    def close(self) -> None:
        self.asked.append("closed")
        if self.answers.get("breaks"):
            raise OSError("it broke")


def test_what_concerns_the_engine_reaches_both() -> None:
    roles = Fake(), Fake()
    worker, scheduler, step = BothWorker(*roles), BothScheduler(*roles), StepMetadata()
    scheduler.attach_workers({})
    scheduler.take_news(WorkerNews())
    worker.register_kv_caches({})
    worker.preempt(step)
    worker.bind(step)
    worker.save_layer("a layer")
    worker.end_step()
    wanted = [("attach_workers", {}), ("news", WorkerNews()), ("register_kv_caches", {})]
    wanted += [("preempt", step), ("bind", step), ("save_layer", "a layer"), ("end_step",)]
    assert roles[0].asked == roles[1].asked == wanted


@pytest.mark.parametrize(("prefill", "decode", "wanted"), [(0, 0, 0), (0, 3, 3), (-1, 3, -1), (-1, 0, -1)], ids=str)
def test_an_engine_with_a_push_to_report_does_not_sleep(prefill: int, decode: int, wanted: int) -> None:
    assert BothScheduler(Fake(open_loads=prefill), Fake(open_loads=decode)).open_loads() == wanted


def test_it_looks_when_either_has_to() -> None:
    assert BothScheduler(Fake(due_s=0.05), Fake()).due_s() == BothScheduler(Fake(), Fake(due_s=0.05)).due_s() == 0.05


def test_a_step_brings_both_and_either_may_ask_for_one() -> None:
    parts = {"prefill": PrefillStep(1)}, {"decode": DecodeStep()}
    both = BothScheduler(Fake(metadata=parts[0]), Fake(metadata=parts[1]))
    assert both.metadata(None) == StepMetadata(**parts[0], **parts[1]) and not both.must_step()
    assert BothScheduler(Fake(must_step=True), Fake()).must_step()
    assert BothScheduler(Fake(), Fake(must_step=True)).must_step()


def test_what_the_workers_tell_is_of_both() -> None:
    missed, failures = frozenset({(1, 2, 3)}), frozenset({("t", "PD-XFER-001")})
    end = LoadEnd("d", "", "push")
    asked = Fake(ended=EndedRequests(frozenset({"p"})), news=WorkerNews(missed, failures))  # type: ignore[arg-type]
    other = Fake(
        ended=EndedRequests(frozenset(), frozenset({"d"}), frozenset({"d"}), frozenset({3})),
        news=WorkerNews(ends=frozenset({end})),
    )
    both = BothWorker(asked, other)
    assert both.ended(iter(["p", "d"])) == EndedRequests(
        frozenset({"p"}), frozenset({"d"}), frozenset({"d"}), frozenset({3})
    )
    assert asked.asked == other.asked == [("ended", {"p", "d"})]
    assert both.news() == WorkerNews(missed, failures, frozenset({end}))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [BothScheduler, BothWorker])
def test_numbers_of_both_are_added_and_one_may_have_none(kind: Any) -> None:
    prefill, decode = Fake(), Fake()
    both = kind(prefill, decode)
    assert both.stats() is None
    prefill.tally.level("blocks_held", 3)
    assert both.stats()["levels"]["blocks_held"].popitem()[1] == 3
    prefill.tally.level("blocks_held", 0)
    both.stats()
    decode.tally.count("num_failed_recvs", "x")
    assert both.stats()["counts"] == {"num_failed_recvs": {"x": 1}}
    for each in (prefill, decode):
        each.tally.count("num_kv_expired_reqs", "x")
    assert both.stats()["counts"] == {"num_kv_expired_reqs": {"x": 2}}


@pytest.mark.parametrize("kind", [BothScheduler, BothWorker])
def test_both_are_closed_even_if_one_breaks(kind: Any) -> None:
    decode = Fake()
    with pytest.raises(OSError, match="it broke"):
        kind(Fake(breaks=True), decode).close()
    assert decode.asked == ["closed"]


PARAMS: list[tuple[Any, str]] = [
    (TOY, "P"),
    ({"do_remote_decode": True, "do_remote_prefill": True}, "P"),
    ({"do_remote_prefill": True, "do_remote_decode": False}, "D"),
    ({"do_remote_decode": "true"}, "D"),
    ({"do_remote_decode": 1}, "D"),
    (None, "D"),
    (["do_remote_decode"], "D"),
    ("do_remote_decode", "D"),
]


@pytest.mark.parametrize(("params", "role"), PARAMS, ids=lambda value: str(value)[:50])
def test_a_request_has_one_role_whatever_its_parameters_are(params: Any, role: str) -> None:
    both = BothScheduler(Fake(name="P", holds=True), Fake(name="D"))
    assert is_prefill(params) is (role == "P")
    assert both.request_finished(request("r", params), True) == (role == "P", {"of": role})


# -- combinations that start


def refused(config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Engine.of(config)
    assert caught.value.code == "PD-CONF-005" and caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("keys", "arguments", "feature"),
    [
        ({"hold_sources": 0}, {}, "kv_both without hold_sources"),
        ({"metaserver_urls": ["http://127.0.0.1:8000"]}, {}, "kv_both behind the metaserver"),
        ({"mooncake_protocol": "ascend"}, {}, "kv_both over ascend"),
        ({"mooncake_protocol": "rdma"}, {}, "kv_both over rdma"),
        ({}, {"pipeline_parallel_size": 2}, "kv_both with pipeline parallelism"),
        ({}, {"data_parallel_size": 2}, "kv_both with data parallelism"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "kv_both with speculative decoding",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_where_it_was_not_tried_it_does_not_start(
    keys: dict[str, Any], arguments: dict[str, Any], feature: str
) -> None:
    Engine.of(vllm_config("kv_both", KEYS))
    assert feature in refused(vllm_config("kv_both", {**KEYS, **keys}, **arguments)).sentence


def test_a_dense_rank_is_one_of_several() -> None:
    config = vllm_config("kv_both", KEYS)
    config.kv_transfer_config.engine_id += "_dp0"
    assert "kv_both with data parallelism" in refused(config).sentence


def test_full_graphs_are_refused_and_vllm_is_asked_for_others() -> None:
    from vllm.config import CUDAGraphMode

    config = vllm_config("kv_both", KEYS)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert "cudagraph_mode" in refused(config).sentence
    assert AscendPushConnector.requires_piecewise_for_cudagraph(KEYS) is True


def test_what_only_the_engine_knows_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> AscendPushConnector:
        return connector("kv_both", KVConnectorRole.SCHEDULER, KEYS)

    start().shutdown()
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=64)
    with pytest.raises(ConfigError, match="sliding windows, states or several groups"):
        AscendPushConnector(vllm_config("kv_both", KEYS), KVConnectorRole.SCHEDULER, cache_config(window))
    monkeypatch.setattr(older_groups, "needed", lambda: True)
    with pytest.raises(ConfigError, match="this vLLM"):
        start()
    monkeypatch.undo()
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: True)
    with pytest.raises(ConfigError, match="under vllm-ascend"):
        start()


def test_behind_another_connector_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has one connector in a worker: another one there contains ours."""
    for role in ("kv_both", "kv_producer"):
        worker = connector(role, KVConnectorRole.WORKER, KEYS if role == "kv_both" else None)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
        if role == "kv_both":
            with pytest.raises(ConfigError, match="behind a MultiConnector"):
                worker.register_kv_caches(tensors())
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
        worker.register_kv_caches(tensors())
        worker.shutdown()


@pytest.mark.parametrize("contained", [True, False])
def test_behind_another_connector_d_takes_no_first_tokens(monkeypatch: pytest.MonkeyPatch, contained: bool) -> None:
    """vLLM's scheduler then has another connector, in which the wrappers do not find ours."""
    worker = connector("kv_consumer", KVConnectorRole.WORKER, {"metaserver_urls": ["http://127.0.0.1:8000"]})
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object() if contained else worker)
    worker.register_kv_caches(tensors())
    handshake = worker.get_handshake_metadata()
    assert isinstance(handshake, Handshake)
    assert handshake.facts.why_no_first_token == (first_token.CONTAINED if contained else "")
    worker.shutdown()


def test_groups_behind_another_connector_need_a_vllm_that_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for grouped, needed, refused in itertools.product((False, True), repeat=3):
        if refused != (grouped and needed):
            continue
        monkeypatch.setattr(older_groups, "needed", lambda needed=needed: needed)
        with pytest.raises(ConfigError, match="behind a MultiConnector") if refused else nullcontext():
            admission.check_contained(False, grouped)


def test_p_listens_before_d_s_workers() -> None:
    keys = {**KEYS, "side_channel_port": 65533}
    engine = Engine.of(vllm_config("kv_both", keys, tensor_parallel_size=2))
    assert (engine.listening_port, engine.port_of(0), engine.port_of(1)) == (65533, 65534, 65535)
    alone = Engine.of(vllm_config("kv_consumer", {"side_channel_port": 65533}, tensor_parallel_size=2))
    assert alone.port_of(0) == 65533
    kernel = Engine.of(vllm_config("kv_both", KEYS, tensor_parallel_size=2))
    assert (kernel.listening_port, kernel.port_of(0), kernel.port_of(1)) == (0, 0, 0)
    config = vllm_config("kv_both", {**keys, "side_channel_port": 65534}, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="would listen on 65536"):
        Engine.of(config)


def test_each_role_has_its_part_in_first_tokens() -> None:
    made = connector("kv_both", KVConnectorRole.SCHEDULER, KEYS)
    assert [type(role) for role in made.step_hooks] == [FirstTokenSource, FirstTokenReceiver, Standstill]
    made.shutdown()


def test_where_no_way_out_of_a_standstill_was_tried_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standstill, "install", lambda _: "vLLM 0.99.0 was not tried")
    made = connector("kv_consumer", KVConnectorRole.SCHEDULER, KEYS)
    assert [type(role) for role in made.step_hooks] == [FirstTokenReceiver]
    assert "they wait for good: vLLM 0.99.0 was not tried" in caplog.text
    made.shutdown()
