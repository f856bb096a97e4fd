# SPDX-License-Identifier: Apache-2.0
"""Both runtimes against each other: every layout, several ranks on either side, chunks, prefix hits, many requests."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import msgspec
import pytest

from tools.support.process import free_port
from unit.device.caches import CacheModel, HeldDevice
from unit.kits.watching import running, traced, until
from unit.runtime.sites import (
    LOOPBACK,
    UNTOUCHED,
    DecodeSite,
    Hook,
    PrefillSite,
    config,
    heard_ready,
    no_hook,
    without_a_name,
)
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.worker.role import PrefillWorker
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.transport.create import create_target, create_wire

SHAPES = [
    pytest.param("opaque", 2, 1, 1, 1, id="GQA 1 to 1, planes"),
    pytest.param("opaque", 2, 2, 1, 1, id="GQA 2 to 1, planes"),
    pytest.param("opaque", 2, 1, 1, 2, id="GQA 1 to 2, planes"),
    pytest.param("opaque", 1, 2, 1, 1, id="MQA 2 to 1, planes"),
    pytest.param("opaque", 2, 1, 2, 1, id="GQA, two stages to 1"),
    pytest.param("opaque", 2, 2, 2, 2, id="GQA, two stages of 2 to 2"),
    pytest.param("latent", 1, 2, 1, 1, id="MLA 2 to 1"),
    pytest.param("latent", 1, 1, 1, 2, id="MLA 1 to 2"),
    pytest.param("latent", 1, 3, 1, 2, id="MLA 3 to 2"),
    pytest.param("token", 6, 3, 1, 2, id="tuples 3 to 2"),
    pytest.param("token", 4, 2, 1, 1, id="tuples 2 to 1"),
    pytest.param("stacked", 2, 1, 1, 2, id="stacked 1 to 2"),
    pytest.param("uneven", 4, 2, 1, 1, id="V narrower than K, 2 to 1"),
]


@pytest.mark.parametrize(("layout", "heads", "p_tp", "p_pp", "d_tp"), SHAPES)
def test_every_byte_arrives_and_no_other_is_touched(layout: str, heads: int, p_tp: int, p_pp: int, d_tp: int) -> None:
    model = CacheModel(layout, heads)
    p, d = PrefillSite(model, p_tp, pp=p_pp), DecodeSite(model, d_tp)
    with running(p, d):
        requests = [
            d.reserve("short", 3),
            d.reserve("whole", 16),
            d.reserve("long", 45),
            d.reserve("tail", 37, first=24),
        ]
        d.step()
        for request in requests:
            assert p.admit(request) is None
        p.compute((requests[0], 3), (requests[1], 7), (requests[2], 5))
        p.compute((requests[1], 9), (requests[2], 20), (requests[3], 30))
        p.compute((requests[2], 20), (requests[3], 7))
        d.complete(*requests)
        for request in requests:
            assert p.finish(request), "the blocks are held until every push has closed"
        p.released_blocks_of(*requests)
        assert p.released == {request.p_name for request in requests}


def test_one_worker_tells_the_times_of_a_push_for_all() -> None:
    model = CacheModel("opaque", 2)
    p, d = PrefillSite(model, 2, pp=2), DecodeSite(model, 1)
    with running(p, d):
        requests = [d.reserve(f"r{n}", 20) for n in range(2)]
        d.step()
        for request in requests:
            p.prefill(request, 12, 8)
            assert p.finish(request)
        d.received(*requests)
        p.released_blocks_of(*requests)
        by_place = {place: (worker.stats() or {"times": {}})["times"] for place, worker in p.workers.items()}
    first = by_place.pop((0, 0))
    assert not [times for times in by_place.values() if {"xfer_time_seconds", "exposed_time_seconds"} & set(times)]
    spans = list(zip(first["exposed_time_seconds"], first["xfer_time_seconds"], strict=True))
    assert len(spans) == len(requests) and all(0 < exposed < whole for exposed, whole in spans)


def test_a_transfer_that_is_cancelled_before_its_gate_opens_leaves_no_gate() -> None:
    d = DecodeSite(CacheModel("opaque"), 1, device=HeldDevice())
    runtime = d.runtime
    with running(d):
        request = d.bound("r", 16)
        until(lambda: runtime.core.gates)
        d.book.request_finished(request.name)
        (report,) = d.received(request)
        assert not report.ok
        d.step()
        until(lambda: not runtime.core.binds)
        assert not runtime.core.gates


def test_the_trace_tells_which_tokens_are_bound() -> None:
    d = DecodeSite(CacheModel("opaque"), 1)
    with traced() as events, running(d):
        request = d.bound("tail", 37, first=24)
        wanted = {"transfer": str(request.reservation.transfer), "first": 24, "end": 37}
        until(lambda: wanted in [facts for stage, facts in list(events) if stage == "bound"])


STAGES = [
    pytest.param("opaque", 2, (1, ()), (1, (2,)), id="planes, 1 to two stages"),
    pytest.param("opaque", 2, (1, (3,)), (1, (2,)), id="planes, 3+2 to 2+3"),
    pytest.param("token", 4, (2, (1, 4)), (1, (3,)), id="tuples, three stages of 2 to two of 1"),
    pytest.param("token", 4, (1, (2,)), (2, (1, 2)), id="tuples, two stages of 1 to three of 2"),
    pytest.param("latent", 1, (2, ()), (2, (4,)), id="MLA, 2 to two stages of 2"),
    pytest.param("stacked", 2, (2, (2,)), (2, (2,)), id="stacked, two stages of 2, cut alike"),
]


@pytest.mark.parametrize(("layout", "heads", "prefill", "decode"), STAGES)
def test_every_byte_arrives_where_decode_has_stages(
    layout: str, heads: int, prefill: tuple[int, tuple[int, ...]], decode: tuple[int, tuple[int, ...]]
) -> None:
    """Five layers, so that no division into two or three stages is even.

    Neighbouring workers of decode are on separate hosts, those of one stage too.
    """
    model, hosts = CacheModel(layout, heads, layers=5), (LOOPBACK, "127.0.0.2", "127.0.0.3")
    p = PrefillSite(model, prefill[0], cuts=prefill[1])
    d = DecodeSite(model, decode[0], cuts=decode[1], hosts=hosts)
    with running(p, d):
        assert len({endpoint.host for endpoint in d.endpoints}) == min(len(hosts), len(d.workers))
        requests = [d.reserve("short", 3), d.reserve("long", 45), d.reserve("tail", 37, first=24)]
        d.step()
        for request in requests:
            p.prefill(request, 1, request.tokens - 1)
        reports = d.received(*requests)
        assert len(reports) == 3 * len(d.workers) and all(report.ok for report in reports)
        d.check(*requests)
        for request in requests:
            assert p.finish(request)
        p.released_blocks_of(*requests)


def test_a_stage_of_decode_that_gets_other_bytes_says_so() -> None:
    """The layers of a stage are compared with their own sums, wherever the stage begins."""
    model = CacheModel("token", 2, layers=5)
    p, d = PrefillSite(model, 1), DecodeSite(model, 1, cuts=(2, 3))
    with running(p, d):
        request = d.bound("r", 21)
        until(lambda: not any(worker.runtime.core.gates for worker in d.workers), "the gates are open")
        assert p.admit(request) is None
        p.compute((request, 20))
        landed = d.ranks[1].views[0][0][request.d_blocks[0]]
        until(lambda: bool((landed != UNTOUCHED).all()), "the block has landed")
        landed += 1
        p.compute((request, 1))
        ends = {report.why.detail: report.ok for report in d.received(request)}
        assert ends == {"": True, f"{model.names[2]} (kv0: k)": False}


def test_a_worker_whose_stage_the_scheduler_does_not_know_loads_nothing() -> None:
    """As when an engine's handshake does not distinguish the stages."""
    p, d = PrefillSite(CacheModel(), 1), DecodeSite(CacheModel(), 1, cuts=(1,))
    with running(p, d):
        request = d.reserve("r", 9)
        d.geometry = msgspec.structs.replace(d.geometry, stages=d.geometry.stages[1:])
        d.step()
        p.prefill(request)
        assert {(report.ok, report.why.code) for report in d.received(request)} == {(False, "PD-XFER-002")}


def test_chunks_that_end_inside_blocks_leave_no_gap() -> None:
    p, d = PrefillSite(CacheModel("token"), 1, block=8), DecodeSite(CacheModel("token"), 2, block=16)
    with running(p, d):
        request = d.bound("r", 61)
        p.prefill(request, 1, 1, 13, 1, 16, 5, 23, 1)
        d.complete(request)


def test_blocks_may_be_smaller_on_decode_where_tokens_lie_apart() -> None:
    p, d = PrefillSite(CacheModel("stacked"), 1, block=16), DecodeSite(CacheModel("stacked"), 1, block=4)
    with running(p, d):
        requests = [d.reserve("r", 61), d.reserve("s", 39, first=8)]
        d.step()
        for request in requests:
            p.prefill(request, 20, request.tokens - 20)
        d.complete(*requests)


def test_the_prefix_that_prefill_did_not_compute_is_pushed_too() -> None:
    p, d = PrefillSite(CacheModel(), 1), DecodeSite(CacheModel(), 1)
    with running(p, d):
        request = d.bound("r", 30)
        p.cached_prefix(request, 24)
        assert p.admit(request) is None
        p.compute((request, 6))
        d.complete(request)


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_prefix_that_left_before_it_was_computed_has_another_checksum(tp: int, verify: str) -> None:
    """vLLM calls blocks cached that the same step only computes. Without checksums D has other bytes and no error."""
    model, push = CacheModel(), config(verify=verify, regroup="never")
    p, d = PrefillSite(model, tp, push=push), DecodeSite(model, 1, push=push)
    computed: list[str] = []

    def left() -> list[int]:
        pushes = [push for worker in p.workers.values() for push in list(worker.runtime.core.records.values())]  # type: ignore[union-attr]
        return [len(pair.coverage.covered) for push in pushes for pair in push.pairs.values()]

    def late(worker: PrefillWorker, name: str, tensor: Any) -> None:
        if not computed:  # the step computes the prefix only after all layers of it have left
            until(lambda: left() == [len(model.names)] * tp, "the prefix was pushed")
            p.fill(request, 24)
        computed.append(name)
        worker.save_layer(name)

    with running(p, d):
        request = d.bound("r", 30)
        request.p_blocks, request.computed = p.pool.take(6), 24
        assert p.admit(request) is None
        p.compute((request, 6), hook=late, ready=24)
        (ended,) = d.received(request)
        if verify == "full":
            assert (ended.ok, ended.why.code) == (False, "PD-WIRE-004")
        else:
            assert ended.ok
            with pytest.raises(AssertionError):
                d.check(request)


def test_a_signed_pair_works_as_an_open_one() -> None:
    secrets = Secrets(b"s" * 32)
    p, d = PrefillSite(CacheModel(), 1, secrets=secrets), DecodeSite(CacheModel(), 1, secrets=secrets)
    with running(p, d):
        request = d.bound("r", 9)
        p.prefill(request)
        d.complete(request)


def all_but_one(worker: PrefillWorker, name: str, tensor: Any) -> None:
    if name != CacheModel().names[1]:
        worker.save_layer(name)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "hook", [without_a_name, no_hook, all_but_one], ids=["without a name", "not at all", "all but one"]
)
def test_what_no_hook_said_was_computed_is_not_pushed(hook: Hook, tp: int) -> None:
    """A layer is known by its name, never by its address: a hook without one marks none."""
    p, d = PrefillSite(CacheModel(), tp), DecodeSite(CacheModel(), 1)
    with running(p, d):
        request = d.bound("r", 23)
        p.prefill(request, 10, 13, hook=hook)
        (ended,) = d.received(request)
        layer = CacheModel().names[1 if hook is all_but_one else 0]
        assert (ended.ok, ended.why.code, ended.why.detail) == (False, "PD-GEO-004", layer)


def test_a_step_without_a_layer_spoils_what_a_later_one_would_push() -> None:
    """Tokens of a block that is not full yet leave with a later step, which has no error of its own."""
    p, d = PrefillSite(CacheModel(), 1), DecodeSite(CacheModel(), 1)
    with running(p, d):
        request = d.bound("r", 9)
        assert p.admit(request) is None
        p.compute((request, 1), hook=all_but_one)
        p.compute((request, 8))
        assert not d.received(request)[0].ok


def test_decode_does_not_wait_for_what_prefill_computes_after_the_last_layers_hook() -> None:
    model = CacheModel()
    p, d = PrefillSite(model, 1), DecodeSite(model, 1)
    with running(p, d):
        request = d.bound("r", 23)
        received = []

        def last_one_waits(worker: PrefillWorker, name: str, tensor: Any) -> None:
            worker.save_layer(name)
            if name == model.names[-1]:
                received.extend(d.received(request))

        p.prefill(request, hook=last_one_waits)
        assert received[0].ok
        d.check(request)


DRAFTED = CacheModel(layers=2, drafts=1)


def drafting(tokens: int) -> Hook:
    """The draft model runs after the target, once for each token that it drafts, and fires its hook each time."""

    def hook(worker: PrefillWorker, name: str, tensor: Any) -> None:
        for _ in range(tokens if name in DRAFTED.own_drafts else 1):
            worker.save_layer(name)

    return hook


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_models_layers_are_pushed_when_the_step_is_over(tokens: int, tp: int) -> None:
    p, d = PrefillSite(DRAFTED, tp), DecodeSite(DRAFTED, 1)
    with traced() as events, running(p, d):
        request = d.bound("r", 23)
        ended: list[int] = []

        def hook(worker: PrefillWorker, name: str, tensor: Any) -> None:
            drafting(tokens)(worker, name, tensor)
            ended.append(sum(stage == "layer_computed" and facts["layer"] == 2 for stage, facts in events))

        p.prefill(request, 10, 13, hook=hook)
        d.complete(request)
        computed = [facts["layer"] for stage, facts in events if stage == "layer_computed"]
        assert computed == [0, 1, 2] * 2 * tp
        titles = [facts["title"] for stage, facts in events if stage == "layer_computed"]
        assert titles == list(p.geometry.layer_labels) * 2 * tp and titles[2].endswith(", of the draft model")
        assert ended == [step * tp + rank for step in range(2) for rank in range(tp) for _ in range(3)], (
            "while the draft model runs its layer is not announced"
        )


def test_a_draft_model_that_did_not_run_spoils_its_step() -> None:
    """Its layer would carry its old contents."""
    p, d = PrefillSite(DRAFTED, 1), DecodeSite(DRAFTED, 1)
    with traced() as events, running(p, d):
        request = d.bound("r", 23)
        p.prefill(request, 10, 13, hook=drafting(0))
        assert not d.received(request)[0].ok
        (failed,) = [facts for stage, facts in events if stage == "push_closed"]
        assert (failed["code"], failed["detail"]) == ("PD-GEO-004", DRAFTED.own_drafts[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_model_on_prefill_alone_is_not_pushed(tp: int) -> None:
    p, d = PrefillSite(DRAFTED, tp), DecodeSite(CacheModel(layers=2), 1)
    with running(p, d):
        request = d.bound("r", 23)
        p.prefill(request, 10, 13, hook=drafting(2))
        d.complete(request)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_model_on_decode_alone_begins_without_the_prompts_kv(tp: int) -> None:
    p, d = PrefillSite(CacheModel(layers=2), tp), DecodeSite(DRAFTED, 1)
    with traced() as events, running(p, d):
        request = d.bound("r", 23)
        p.prefill(request, 10, 13)
        assert d.received(request)[0].ok
        d.check(request, layers=2)
        assert [facts["layers"] for stage, facts in events if stage == "undrafted"] == [1]
        for view in d.ranks[0].views[2]:
            assert (view == UNTOUCHED).all(), "nothing is written there"


UNLIKE = {
    "fewer heads": CacheModel("token", heads=4, layers=2, drafts=1, draft_heads=2),
    "more heads": CacheModel("token", heads=2, layers=2, drafts=1, draft_heads=8, draft_dim=8),
    "planes, another size": CacheModel("opaque", heads=2, layers=2, drafts=1, draft_dim=32),
    "a latent cache, a draft model of one head": CacheModel("token", heads=1, layers=2, drafts=1, draft_heads=4),
    "an indexer": CacheModel("token", heads=2, layers=2, indexers=True),
    "tuples, an indexer's key in some": CacheModel("indexed", heads=1),
    "tuples, an indexer's key in the draft model too": CacheModel("indexed", heads=1, layers=2, drafts=1),
    "an indexer, and a draft model": CacheModel("token", heads=4, layers=2, drafts=1, draft_heads=2, indexers=True),
}


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("model", UNLIKE.values(), ids=list(UNLIKE))
def test_layers_need_not_be_alike(model: CacheModel, p_tp: int, d_tp: int) -> None:
    """Each layer has its own heads, so different ranks hold and share them. Hooks have names, except an indexer's."""
    p, d = PrefillSite(model, p_tp), DecodeSite(model, d_tp)
    with running(p, d):
        requests = [d.reserve("short", 3), d.reserve("long", 45), d.reserve("tail", 37, first=24)]
        d.step()
        for request in requests:
            assert p.admit(request) is None

        def hook(worker: PrefillWorker, name: str, tensor: Any) -> None:
            if ".indexer." not in name:
                worker.save_layer(name)

        p.compute((requests[0], 3), (requests[1], 20), (requests[2], 30), hook=hook)
        p.compute((requests[1], 25), (requests[2], 7), hook=hook)
        d.complete(*requests)


def test_a_layer_that_differs_is_named_with_both_values() -> None:
    ours, theirs = UNLIKE["fewer heads"], CacheModel("token", heads=4, layers=2, drafts=1, draft_heads=4)
    p, d = PrefillSite(ours, 1), DecodeSite(theirs, 1)
    with running(p, d):
        differences = mismatches(p.geometry, d.geometry)
        assert list(map(str, differences)) == [f"kv_heads of {ours.names[2]}: prefill 2, decode 4"]


def test_another_draft_model_is_refused_with_both_names() -> None:
    other = CacheModel(layers=2, drafts=1, drafter="another draft model")
    p, d = PrefillSite(DRAFTED, 1), DecodeSite(other, 1)
    with running(p, d):
        request = d.bound("r", 23)
        refusal = p.book.take(0.0, NewRequest("r", (23, request.reservation.prompt_hash), "push", request.reservation))
        assert refusal is not None and refusal.code == "PD-GEO-001"
        assert (
            "draft model" in refusal.sentence
            and DRAFTED.drafter in refusal.sentence
            and other.drafter in refusal.sentence
        )


def test_hooks_outside_a_step_and_of_unknown_layers_change_nothing() -> None:
    p, d = PrefillSite(CacheModel(), 1), DecodeSite(CacheModel(), 1)
    with running(p, d):
        (worker,), (cache,) = p.workers.values(), p.caches.values()

        def strays() -> None:
            for name in ("", "no such layer", *cache.tensors):
                worker.save_layer(name)

        strays()
        worker.end_step()
        request = d.bound("r", 9)
        assert p.admit(request) is None

        def with_strays(worker: PrefillWorker, name: str, tensor: Any) -> None:
            worker.save_layer("no such layer")
            worker.save_layer(name)
            worker.save_layer(name)  # vLLM calls it once per attention call

        p.compute((request, 9), hook=with_strays)
        strays()
        d.complete(request)


def test_32_requests_to_two_decode_engines_make_one_batch_per_destination_and_layer() -> None:
    model, device = CacheModel("token"), HeldDevice()
    p = PrefillSite(model, 1, blocks=256, device=device)
    one, two = DecodeSite(model, 1, blocks=256), DecodeSite(model, 2, blocks=256, seed=3)
    with traced() as events, running(p, one, two):
        requests = [site.reserve(f"r{i}", 5 + i) for i in range(16) for site in (one, two)]
        one.step()
        two.step()
        for i, request in enumerate(requests):
            request.name = f"{request.name}.{i}"
            assert p.admit(request) is None
        p.compute(*((request, request.tokens) for request in requests))
        until(lambda: len(heard_ready(events)) == 3 * 16, "P has heard READY of three ranks for each request")
        device.open.set()
        for site in (one, two):
            wanted = list(site.requests)
            until(lambda site=site, wanted=wanted: site.step() and all(name in site.done for name in wanted))
            assert all(report.ok for reports in site.done.values() for report in reports)
            site.check(*site.requests.values())
        batches: Counter[tuple[str, int]] = Counter()
        for stage, facts in events:
            if stage == "layer_submitted":
                assert len(facts["transfers"]) == 16, "all requests of the step that go there"
                batches.update((facts["peer"], layer) for layer in facts["layers"])
        destinations = {str(endpoint) for site in (one, two) for endpoint in site.endpoints}
        assert {peer for peer, _ in batches} == destinations
        assert set(batches.values()) == {1} and len(batches) == 3 * model.layers


def test_a_pair_over_the_real_transfer_engine() -> None:
    push = config(transport="mooncake", quiet_extra_s=2.0, mooncake_protocol="tcp")

    model = CacheModel("token", heads=4)
    p = PrefillSite(model, 2, push=push, make_transport=lambda: create_wire(push.wire, LOOPBACK, quiet_s=7.0))
    d = DecodeSite(model, 1, push=push, make_transport=lambda: create_target(push.wire, LOOPBACK))
    with running(p, d):
        requests = [d.reserve("r", 45), d.reserve("s", 18, first=8)]
        d.step()
        for request in requests:
            p.prefill(request, 10, request.tokens - 10)
        d.complete(*requests)
        for request in requests:
            p.finish(request)
        p.released_blocks_of(*requests)


def test_an_open_reservation_costs_its_loop_nothing_between_two_timers() -> None:
    """Distant timers must not make the loop spin: it once used half a core, and every test passed."""
    d = DecodeSite(CacheModel("opaque"), 1)
    with running(d):
        d.reserve("r", 30)
        d.step()
        runtime = d.runtime
        until(lambda: runtime.core.record_count() and not runtime.core.gates and runtime.timer is not None, "the gate")
        ticks, turns = [0], threading.Event()
        tick = runtime.core.tick

        def counted(now: float) -> Any:
            ticks[0] += 1
            return tick(now)

        runtime.core.tick = counted  # type: ignore[method-assign]

        def turn(left: int) -> None:
            runtime.loop.post(turn, left - 1) if left else turns.set()

        runtime.loop.post(turn, 500)
        assert turns.wait(30)
        assert ticks[0] <= 5, f"{ticks[0]} ticks while the loop turned 500 times"


def test_each_rank_listens_on_its_own_of_the_configured_ports() -> None:
    base = free_port(count=3)
    d = DecodeSite(CacheModel("opaque"), 3, push=config(side_channel_port=base))
    with running(d):
        assert [endpoint.port for endpoint in d.endpoints] == [base, base + 1, base + 2]
