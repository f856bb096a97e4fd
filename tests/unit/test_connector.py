# SPDX-License-Identifier: Apache-2.0
"""The connector as vLLM uses it: imported, registered, built in four roles, driven through the hooks of a step."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from unit.admission.vllm_configs import LAYERS, attention, cache_config, vllm_config
from unit.kits.connectors import (
    BLOCK,
    BLOCKS,
    QUIET,
    SIZE,
    TOKENS,
    Blocks,
    ConnectorPair,
    connected_pair,
    connector,
    output,
    request,
    tensors,
)
from unit.kits.watching import until
from vllm_ascend_pd import __version__, admission, plugin
from vllm_ascend_pd.connector import AscendPushConnector, StepMetadata
from vllm_ascend_pd.decode.scheduler.first_tokens import FirstTokenReceiver
from vllm_ascend_pd.decode.scheduler.going_on import GoingOn
from vllm_ascend_pd.engine import merge_geometries
from vllm_ascend_pd.errors import ConfigError, PdError
from vllm_ascend_pd.prefill.scheduler.first_tokens import FirstTokenSource
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.vllm_patches import compat, front_end, given_tokens, older_groups, standstill
from vllm_ascend_pd.vllm_patches.standstill import Standstill
from vllm_ascend_pd.vllm_patches.step_hooks import Drops

ROOT = Path(__file__).parents[2]

BLOCKED_IMPORT = """
import sys
for absent in ("mooncake", "torch_npu", "vllm_ascend"):
    sys.modules[absent] = None
from vllm_ascend_pd import __version__
from vllm_ascend_pd.connector import AscendPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
assert AscendPushConnector.requires_piecewise_for_cudagraph({}) is True
assert supports_hma(AscendPushConnector)
for name in ("vllm_ascend_pd.transport.wire", "vllm_ascend_pd.device.npu", "vllm_ascend_pd.router.app"):
    assert name not in sys.modules, name
print("imported")
"""


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)


# -- before an engine starts


def test_the_class_imports_where_there_is_no_transfer_engine_and_no_npu() -> None:
    command = [sys.executable, "-c", BLOCKED_IMPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip().endswith("imported"), done.stderr[-2000:]


def test_what_it_logs_stands_among_vllms_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the root logger shows errors only, as torch_npu leaves it."""
    theirs, ours, shown = logging.getLogger("vllm"), logging.getLogger("vllm_ascend_pd"), io.StringIO()
    monkeypatch.setattr(theirs, "handlers", [logging.StreamHandler(shown)])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    for level, lines in ((logging.WARNING, ["two"]), (logging.INFO, ["two", "one", "two"])):
        monkeypatch.setattr(ours, "handlers", [])
        monkeypatch.setattr(theirs, "level", level)
        plugin.register()
        plugin.register()
        logging.getLogger("vllm_ascend_pd.decode.scheduler.role").info("one")
        logging.getLogger("vllm_ascend_pd.decode.scheduler.role").warning("two")
        assert shown.getvalue().split() == lines
    ours.setLevel(logging.NOTSET)


def test_registering_twice_is_fine_and_vllm_finds_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop(plugin.CONNECTOR, None)
    plugin.register()
    plugin.register()
    connector_class = KVConnectorFactory.get_connector_class(vllm_config().kv_transfer_config)
    assert connector_class is AscendPushConnector


def test_a_vllm_without_connectors_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.register()


def test_full_graphs_would_skip_the_hooks_so_p_gets_piecewise_ones_and_d_keeps_its_own() -> None:
    """vLLM calls the class method with the extra configuration alone; behind a MultiConnector for each child."""
    plugin.register()
    asked = AscendPushConnector.requires_piecewise_for_cudagraph
    p, d = {"secret_file": "/s"}, {"secret_file": "/s", "metaserver_urls": ["http://127.0.0.1:8000"]}
    assert asked(p) is True and asked(d) is False
    for extra, wanted in ((p, True), (d, False)):
        child = {"kv_connector": "AscendPushConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
        assert MultiConnector.requires_piecewise_for_cudagraph({"connectors": [child]}) is wanted
    assert issubclass(AscendPushConnector, SupportsHMA)


# -- roles


def sockets() -> set[str]:
    links = (os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())
    return {link for link in links if "socket:" in link}


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_the_scheduler_role_opens_nothing_until_the_workers_are_known(role: str) -> None:
    config = vllm_config(role, {**QUIET, "metaserver_urls": ["http://127.0.0.1:1"]})
    before = set(threading.enumerate()), sockets()
    made = AscendPushConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    assert made.get_num_new_matched_tokens(request("r", {"do_remote_prefill": True}), 0) == (0, False)
    assert set(threading.enumerate()) <= before[0] and sockets() <= before[1]
    with socket.socket():
        assert sockets() - before[1], "this test would see a socket"
    made.shutdown()


def test_a_model_that_is_not_proven_stops_the_start() -> None:
    with pytest.raises(ValueError, match="PD-CONF-005"):
        AscendPushConnector(vllm_config(), KVConnectorRole.SCHEDULER, cache_config(attention(dtype=torch.int8)))


@pytest.mark.parametrize(("role", "word"), [("kv_producer", "prefill"), ("kv_consumer", "decode")])
def test_an_engine_says_at_its_start_what_it_is(role: str, word: str, caplog: pytest.LogCaptureFixture) -> None:
    workers = [connector(role, KVConnectorRole.WORKER, tensor_parallel_size=2, rank=rank) for rank in range(2)]
    for worker in workers:
        worker.register_kv_caches(tensors(1))
    scheduler = connector(role, KVConnectorRole.SCHEDULER, tensor_parallel_size=2)
    shakes = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(workers)}
    with caplog.at_level(logging.INFO, "vllm_ascend_pd.connector"):
        scheduler.set_xfer_handshake_metadata(shakes)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm_ascend_pd.connector"]
    assert line.startswith(f"vllm_ascend_pd {__version__}, {word} engine ")
    listening = ", ".join(str(s.facts.endpoint) for s in shakes.values() if s.facts.endpoint)
    assert f"side channel {listening or 'dials only'}, secret NO, " in line and bool(listening) == (word == "decode")
    assert f"TP 2 x PP 1, {len(LAYERS)} layers, " in line and f"blocks of {BLOCK} tokens" in line
    for one in (*workers, scheduler):
        one.shutdown()


def test_a_prefill_engine_that_is_taken_for_a_decode_engine_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = connector("kv_producer", KVConnectorRole.SCHEDULER)
    made.on_new_request(request("own", {"do_remote_decode": True}))
    assert "is to load its KV" not in caplog.text
    made.on_new_request(request("swapped", {"do_remote_prefill": True, "metaserver": "http://h:1", "ticket": "t"}))
    assert "request swapped is to load its KV, but this is a prefill engine (kv_role kv_producer)" in caplog.text
    made.shutdown()


def test_stages_and_ranks_tell_their_layers_by_pp_and_tp() -> None:
    workers = {}
    for rank in range(4):
        stage, tp = divmod(rank, 2)
        worker = connector(
            "kv_producer", KVConnectorRole.WORKER, tensor_parallel_size=2, pipeline_parallel_size=2, rank=rank
        )
        worker.register_kv_caches(tensors(1, LAYERS[stage : stage + 1]))
        workers[stage, tp] = worker
    scheduler = connector("kv_producer", KVConnectorRole.SCHEDULER, tensor_parallel_size=2, pipeline_parallel_size=2)
    shakes = {key: pickle.loads(pickle.dumps(worker.get_handshake_metadata())) for key, worker in workers.items()}
    scheduler.set_xfer_handshake_metadata_pp_aware(shakes)
    geometry = scheduler.scheduler_role.book.geometry  # type: ignore[union-attr]
    assert geometry is not None and geometry.stages == ((LAYERS[0],), (LAYERS[1],)) and geometry.tp_size == 2
    for made in (*workers.values(), scheduler):
        made.shutdown()
        made.shutdown()


def test_ranks_of_prefills_context_parallelism_are_counted_before_those_of_tensor_parallelism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-ascend has their rank between stage and tensor-parallel rank."""
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: True)

    def made(role: KVConnectorRole, rank: int = 0) -> AscendPushConnector:
        config = vllm_config("kv_producer", QUIET, tensor_parallel_size=2)
        config.parallel_config.rank = rank
        config.parallel_config.prefill_context_parallel_size = 3
        config.parallel_config.cp_kv_cache_interleave_size = BLOCK
        return AscendPushConnector(config, role, cache_config(attention(BLOCK, 1, SIZE), blocks=BLOCKS))

    shakes, workers = {}, []
    for rank in range(6):
        worker = made(KVConnectorRole.WORKER, rank)
        worker.register_kv_caches(tensors(1))
        assert worker.worker_role._contributor == Contributor(0, rank)  # type: ignore[union-attr]
        shakes[0, rank // 2, rank % 2] = worker.get_handshake_metadata()
        workers.append(worker)
    scheduler, calls = made(KVConnectorRole.SCHEDULER), []
    monkeypatch.setattr(scheduler.scheduler_role, "attach_workers", calls.append)
    scheduler.set_xfer_handshake_metadata_pp_aware(shakes)
    (attached,) = calls
    assert list(attached) == [(0, rank) for rank in range(6)]
    geometry = merge_geometries(attached)
    assert len(geometry.ranks) == 6 and geometry.covers == 3 * BLOCK
    for one in (*workers, scheduler):
        one.shutdown()


def test_a_worker_without_caches_shakes_no_hands_and_does_nothing() -> None:
    for role in ("kv_producer", "kv_consumer"):
        worker = connector(role, KVConnectorRole.WORKER)
        assert worker.get_handshake_metadata() is None
        worker.bind_connector_metadata(StepMetadata())
        worker.save_kv_layer(LAYERS[0], torch.zeros(1), None)
        worker.wait_for_save()
        assert worker.get_finished({"r"}) == (None, None)
        assert worker.build_connector_worker_meta() is None
        worker.clear_connector_metadata()
        worker.shutdown()


def test_each_role_has_its_part_in_first_tokens() -> None:
    for role, parts in (
        ("kv_producer", [FirstTokenSource]),
        ("kv_consumer", [FirstTokenReceiver, GoingOn, Drops, Standstill]),
    ):
        made = connector(role, KVConnectorRole.SCHEDULER)
        assert [type(each) for each in made.step_hooks] == parts
        made.shutdown()


def test_where_no_way_out_of_a_standstill_was_tried_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standstill, "install", lambda _: "vLLM 0.99.0 was not tried")
    made = connector("kv_consumer", KVConnectorRole.SCHEDULER)
    assert [type(each) for each in made.step_hooks] == [FirstTokenReceiver, GoingOn, Drops]
    assert made.get_kv_connector_stats().data["levels"]["hooks_off"].popitem()[1] == 1  # type: ignore[union-attr]
    assert "standstill: off, because vLLM 0.99.0 was not tried: if loaded requests hold all blocks" in caplog.text
    made.shutdown()


@pytest.mark.parametrize("missing", ["unproven", "unfit"])
def test_where_no_answer_goes_on_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """Neither where it was not tried, nor where vLLM's front end is another one."""
    where = {"unproven": given_tokens, "unfit": front_end}[missing]
    monkeypatch.setattr(where, missing, lambda *_: "it is another one")
    made = connector("kv_consumer", KVConnectorRole.SCHEDULER)
    assert made.get_kv_connector_stats().data["levels"]["hooks_off"].popitem()[1] == 1  # type: ignore[union-attr]
    assert "answers that go on: off, because it is another one: answers that" in caplog.text
    assert not made.scheduler_role.beginnings.going_on.vocabulary  # type: ignore[attr-defined]
    made.shutdown()


def test_vllm_hears_that_tokens_come_from_another_engine_and_that_this_one_does_not_sleep() -> None:
    made = connector("kv_consumer", KVConnectorRole.SCHEDULER)
    request: Any = None
    assert made.get_external_cache_hit_sources(request, 5) == {CacheHitSource.P2P: 5}
    assert not AscendPushConnector.supports_sleep_mode(request)
    made.shutdown()


@pytest.mark.parametrize(("role", "loads"), [("kv_consumer", True), ("kv_producer", False)])
def test_a_decode_engine_alone_needs_no_state_for_a_prefix_that_it_has(role: str, loads: bool) -> None:
    made = connector(role, KVConnectorRole.SCHEDULER)
    assert made.supports_divergent_local_hybrid_hits is loads
    made.shutdown()


# -- behind another connector


def test_groups_behind_another_connector_need_a_vllm_that_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for grouped, needed in itertools.product((False, True), repeat=2):
        monkeypatch.setattr(older_groups, "needed", lambda needed=needed: needed)
        refused = grouped and needed
        with pytest.raises(ConfigError, match="behind a MultiConnector") if refused else nullcontext():
            admission.check_contained(grouped=grouped, heads_in_int8=False)


# -- a pair


@pytest.fixture
def pair() -> Iterator[ConnectorPair]:
    with connected_pair() as made:
        yield made


@pytest.mark.parametrize("order", ["after", "before", "before and after"])
def test_a_request_crosses_whenever_start_load_kv_is_called(pair: ConnectorPair, order: str) -> None:
    asked = pair.load()
    pair.prefilled(asked, order)
    until(pair.results, "the load")
    (results,) = pair.reported
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    for name in LAYERS:
        mine, theirs = (cache[name] for cache in pair.caches)
        assert torch.equal(theirs[[3, 5]], mine[[1, 6]])
        assert not theirs[[0, 1, 2, 4, 6, 7]].any()
    connector_output = KVConnectorOutput(finished_recving={"r"}, kv_connector_worker_meta=pair.news())
    pair.decode.update_connector_output(connector_output)
    assert connector_output.finished_recving == {"r"}
    assert pair.decode.get_num_new_matched_tokens(request("r", None), 0) == (0, False)
    blocks_held, answer = pair.prefill.request_finished_all_groups(asked, ([1, 6],))
    assert blocks_held and answer is not None
    pushed, loaded = answer["pd_push"], pair.decode.request_finished_all_groups(request("r", None), ([3, 5],))
    assert loaded[0] is False and loaded[1] is not None
    report = loaded[1]["pd_load"]
    assert (report["ticket"], report["received"], report["prefill"]) == ("r", len(TOKENS), pushed["prefill"])
    assert report["decode"] == pair.metaserver.bodies[0]["decode"] != pushed["prefill"]
    until(lambda: pair.metaserver.reports, "the report")
    assert pair.metaserver.reports == [report]
    sent = []
    until(lambda: sent.extend(pair.prefill_step(output(), finished=frozenset({"r-p"})).finished_sending) or sent)
    assert sent == ["r-p"]


def test_a_prefill_engine_that_cannot_push_any_more_ends_at_its_next_step(pair: ConnectorPair) -> None:
    """An error out of a worker's hook ends the engine: vLLM has no other way to make /health fail."""
    worker = pair.prefill_worker.worker_role
    assert worker is not None and worker.runtime is not None
    worker.runtime.writer.died(OSError("the engine broke"))
    with pytest.raises(PdError, match="PD-XFER-007"):
        pair.prefill_step(output())


def test_reports_of_other_connectors_are_left_to_them(pair: ConnectorPair) -> None:
    """Behind a MultiConnector each connector gets the reports of all."""
    asked = pair.load()
    pair.prefilled(asked)
    until(pair.results, "the load")
    all_of_them = KVConnectorOutput(finished_recving={"r", "another's"}, finished_sending={"r-p", "another's"})
    for each in (pair.decode, pair.prefill):
        each.update_connector_output(all_of_them)
        assert all_of_them.finished_recving == {"r", "another's"}
        assert all_of_them.finished_sending == {"r-p", "another's"}
    assert pair.decode.scheduler_role.nap_budget() == 0, "its own it has heard"
    for empty in (KVConnectorOutput(), KVConnectorOutput(finished_recving=set())):
        pair.prefill.update_connector_output(empty)
        pair.decode.update_connector_output(empty)


def test_a_failed_load_is_named_by_request(pair: ConnectorPair) -> None:
    pair.load()
    pair.metaserver.end = b'{"event":"failed","code":"PD-META-006","detail":"no"}\n'
    until(pair.results, "the failed load")
    (results,) = pair.reported
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert pair.decode_worker.get_block_ids_with_load_errors() == set()
    pair.decode.update_connector_output(KVConnectorOutput(finished_recving={"r"}, kv_connector_worker_meta=pair.news()))
    until(lambda: pair.metaserver.reports, "the report")
    (report,) = pair.metaserver.reports
    assert (report["recomputed"], report["code"]) == (len(TOKENS), "PD-META-006")
    assert "prefill" not in report and "received" not in report


def test_the_worker_of_an_older_vllm_has_always_something_to_tell(
    pair: ConnectorPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.31 vLLM reads its scheduler connector's statistics only in steps in which a worker has some."""
    stats = pair.decode_worker.get_kv_connector_stats()
    assert stats is None or not stats.is_empty()
    monkeypatch.setattr(compat, "HAS_TRANSFER_RESULTS", False)
    pair.decode_worker.get_kv_connector_stats()
    stats = pair.decode_worker.get_kv_connector_stats()
    assert stats is not None and stats.is_empty() and stats.aggregate(stats).is_empty() and not stats.reduce()
    pair.decode.get_kv_connector_stats()
    assert pair.decode.get_kv_connector_stats() is None


def test_a_failed_load_is_named_by_blocks_for_an_older_vllm(
    pair: ConnectorPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.31 vLLM calls get_finished and get_block_ids_with_load_errors, in this order, in one step."""
    monkeypatch.setattr(compat, "HAS_TRANSFER_RESULTS", False)
    pair.load(blocks=(3, 5))
    pair.metaserver.end = b'{"event":"failed","code":"PD-META-006","detail":"no"}\n'
    got: list[tuple[Any, set[int]]] = []

    def stepped() -> bool:
        pair.decode_step()
        sent, received = pair.decode_worker.get_finished(set())
        blocks = pair.decode_worker.get_block_ids_with_load_errors()
        assert sent is None and (received is None) == (not blocks), "both in one step"
        if received:
            got.append((received, blocks))
        return bool(received)

    until(stepped, "the failed load")
    assert got == [({"r"}, {3, 5})]
    assert pair.decode_worker.get_finished(set()) == (None, None)
    assert pair.decode_worker.get_block_ids_with_load_errors() == set()


def test_the_older_way_to_report_a_prefill_is_the_same(pair: ConnectorPair) -> None:
    asked = pair.load()
    pair.prefilled(asked)
    until(pair.results, "the load")
    assert pair.prefill.request_finished(asked, [1, 6])[0]
    reported: list[str] = []

    def stepped() -> list[str]:
        meta = pair.prefill.build_connector_meta(output())
        pair.prefill_worker.bind_connector_metadata(meta)
        sent, received = pair.prefill_worker.get_finished({"r-p"})
        assert received is None
        reported.extend(sent or ())
        return reported

    until(stepped)
    assert reported == ["r-p"]


def test_metadata_that_is_not_ours_is_ignored(pair: ConnectorPair) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

    for worker in (pair.prefill_worker, pair.decode_worker):
        worker.bind_connector_metadata(KVConnectorMetadata())
        worker.handle_preemptions(KVConnectorMetadata())
        worker.clear_connector_metadata()


def test_the_hooks_of_a_layer_do_no_more_than_note_it(pair: ConnectorPair) -> None:
    """No handshake, no transfer, no waiting: no call of a hook blocks, whatever D does."""
    asked = pair.load()
    pair.prefill.update_state_after_alloc(asked, Blocks([1, 6]), 0)
    worker, (mine, _) = pair.prefill_worker, pair.caches
    worker.bind_connector_metadata(pair.prefill.build_connector_meta(output("r-p", len(TOKENS), [1, 6])))
    runtime = worker.worker_role.runtime  # type: ignore[union-attr]
    assert runtime is not None

    def forward() -> None:
        for name, tensor in mine.items():
            worker.save_kv_layer(name, tensor, None)
        worker.wait_for_save()

    with runtime.lock:  # another thread holds the lock for long
        hooks = threading.Thread(target=forward, name="forward", daemon=True)
        hooks.start()
        hooks.join(10.0)
        assert not hooks.is_alive()
    until(pair.results)
    assert torch.equal(pair.caches[1][LAYERS[1]][[3, 5]], mine[LAYERS[1]][[1, 6]])


def test_patient_waiting_can_be_switched_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ascend_pd.vllm_patches import patience

    called: list[str] = []
    monkeypatch.setattr(patience, "install_nap", lambda: called.append("nap"))
    ways = ((False, 1, []), (True, 1, ["nap"]), (True, 2, []))  # two in lock step: a nap of one would stop them all
    for patient, ranks, expected in ways:
        called.clear()
        keys = {"patient": patient}
        connector("kv_consumer", KVConnectorRole.SCHEDULER, keys, data_parallel_size=ranks).shutdown()
        assert called == expected
