# SPDX-License-Identifier: Apache-2.0
"""Both scheduler adapters with vLLM's own requests and scheduler outputs: what they pass on, and which errors they
survive."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from unit.geometry.kit import geometry
from unit.kits.watching import until
from unit.schedulers.kit import (
    CACHE,
    ENDPOINTS,
    SECRETS,
    TOKENS,
    WatchedSteps,
    decode,
    engine,
    output,
    prefill,
    remote_decode,
    request,
    reservation,
)
from unit.schedulers.recording_metaserver import PREFILLED, RecordingMetaserver
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import WorkerFacts, request_hash
from vllm_ascend_pd.metadata import Bind, LoadEnd
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import Secrets, seal, unseal
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId, push_id, pushed_by
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.reports import MAX_DETAIL, said_in
from vllm_ascend_pd.vllm_patches.patience import Patience
from vllm_ascend_pd.vllm_patches.step_hooks import Drops

# -- prefill


def admitted(secrets: Secrets | None = None) -> tuple[PrefillScheduler, Request]:
    scheduler, asked = prefill(secrets), request()
    asked.kv_transfer_params = remote_decode(seal(reservation(asked), secrets))
    scheduler.allocated(asked)
    return scheduler, asked


def test_chunks_of_a_request_become_slices() -> None:
    scheduler, asked = admitted()
    first = scheduler.build_step(output([("r", 0, 4, [7]), ("unknown", 0, 5, [1, 2])]))
    second = scheduler.build_step(output(cached=[("r", 4, 3, [8]), ("unknown", 5, 1, None)]))
    third = scheduler.build_step(output(cached=[("r", 7, 3, None)]))
    assert len(first.starts) == 1 and first.geometry is not None and first.geometry.tp_size == 2
    slices = [step.slices for step in (first, second, third)]
    assert [(p.before, p.after, p.new_blocks[0].tolist(), p.final) for (p,) in slices] == [
        (0, 4, [7], False),
        (4, 7, [8], False),
        (7, 10, [], True),
    ]
    blocks_held, answer = scheduler.request_finished(asked, True)
    assert blocks_held and answer == {
        "pd_push": {"prefill": scheduler.engine.incarnation, "fingerprint": scheduler.engine.fingerprint}
    }
    (start,) = first.starts
    assert pushed_by(start.push) == scheduler.engine.incarnation, "D can say whose push it was"
    assert scheduler.released("r") and not scheduler.released("r")


HALVES = {(0, rank): WorkerFacts(where, CACHE, kernel_blocks=(2,)) for rank, where in enumerate(ENDPOINTS)}


def test_p_s_workers_hear_of_the_kernels_blocks() -> None:
    scheduler, asked = PrefillScheduler(engine()), request()
    scheduler.attach_workers(HALVES)
    asked.kv_transfer_params = remote_decode(seal(reservation(asked), None))
    scheduler.allocated(asked)
    outputs = (
        output([("r", 0, 4, [7])]),
        output(cached=[("r", 4, 3, None)]),
        output(cached=[("r", 7, 2, [3])]),
        output(cached=[("r", 9, 1, [])]),
    )
    slices = [scheduler.build_step(one).slices for one in outputs]
    assert [slice_.new_blocks[0].tolist() for (slice_,) in slices] == [[14, 15], [], [6, 7], []]


def test_d_reserves_the_kernels_blocks() -> None:
    with closing(decode("http://127.0.0.1:1", attach=False)) as scheduler:
        scheduler.attach_workers(HALVES)
        asked = request(params=ticket("http://127.0.0.1:1"))
        assert scheduler.wanted(asked, 0) == 10
        scheduler.allocated(asked, [[7, 3]], 10)
        (bind,) = scheduler.build_step().binds
        assert bind.blocks[0].tolist() == [14, 15, 6] and bind.kernel_blocks == (2,)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_both_runners_ways_to_resume_a_request(runner: str) -> None:
    scheduler, _ = admitted()
    scheduler.build_step(output([("r", 0, 8, [1, 2])]))
    assert scheduler.build_step(output(preempted={"r"})).preempted
    back = ("r", 0, 10, [5, 6, 7])
    resumed = output(cached=[back], resumed={"r"}) if runner == "V1" else output([back])
    (slice_,) = scheduler.build_step(resumed).slices
    assert slice_.restart and slice_.new_blocks[0].tolist() == [5, 6, 7] and (slice_.before, slice_.after) == (0, 10)


def test_a_signed_reservation_is_taken_with_the_right_secret_only() -> None:
    scheduler, asked = admitted(SECRETS)
    assert scheduler.build_step(output([("r", 0, 10, [1, 2, 3])])).starts
    for secrets, sealed_with in ((SECRETS, None), (None, SECRETS), (SECRETS, Secrets(b"x" * 32))):
        other = prefill(secrets)
        asked.kv_transfer_params = remote_decode(seal(reservation(asked), sealed_with))
        other.allocated(asked)
        assert other.build_step(output([("r", 0, 10, [1, 2, 3])])).empty
        blocks_held, answer = other.request_finished(asked, True)
        assert not blocks_held and answer is not None and answer["pd_push"]["code"] == "PD-SEC-003"


GARBAGE: list[Any] = [
    None,
    7,
    [],
    {},
    "",
    "not base64!",
    "ümlaut",
    "\ud800",
    "AAAA",
    base64.b64encode(b"PDR\x00").decode(),
    base64.b64encode(b"PDR\x00" + b"\xff" * 100).decode(),
    base64.b64encode(b"PDR\x00" + b"\x9f" * 5000).decode(),
    "A" * (9 << 20),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda g: repr(g)[:16])
def test_a_forged_reservation_is_a_plain_prefill_that_says_why(garbage: Any) -> None:
    scheduler = prefill()
    asked = request(params={"do_remote_decode": True, "reservation": garbage})
    scheduler.allocated(asked)
    scheduler.allocated(asked)
    assert scheduler.build_step(output([("r", 0, 10, [1, 2, 3])])).empty
    blocks_held, answer = scheduler.request_finished(asked, True)
    assert not blocks_held and answer is not None
    assert answer["pd_push"]["code"] in ("PD-META-005", "PD-CTRL-002", "PD-SEC-003")
    assert scheduler.request_finished(asked, True) == (False, None)


@pytest.mark.parametrize(
    "params",
    [
        *(
            None,
            {},
            {"do_remote_decode": False},
            {"do_remote_decode": 1},
            {"remote_block_ids": [1], "remote_host": "x"},
        ),
        {"do_remote_decode": True, "do_virtual": True},  # a warm-up without a decode engine
    ],
    ids=str,
)
def test_other_parameters_are_a_plain_prefill(params: Any) -> None:
    scheduler, asked = prefill(), request(params=params)
    scheduler.allocated(asked)
    assert scheduler.build_step(output([("r", 0, 10, [1, 2, 3])])).empty
    assert scheduler.request_finished(asked, True) == (False, None)


# The whole prompt came as embeddings, or a part of it, whose tokens are placeholders.
EMBEDDED = pytest.mark.parametrize("tokens", [None, TOKENS], ids=["all of it", "a part"])


@EMBEDDED
def test_a_prompt_of_embeddings_is_not_pushed(tokens: list[int] | None) -> None:
    scheduler = prefill()
    sealed = seal(reservation(request()), None)
    asked = request(tokens=tokens, params=remote_decode(sealed), prompt_embeds=torch.zeros(10, 4))
    scheduler.allocated(asked)
    assert scheduler.build_step(output([("r", 0, 10, [1, 2, 3])])).empty
    assert scheduler.request_finished(asked, True)[1] is not None


@EMBEDDED
@pytest.mark.parametrize("order", ["by a metaserver", "with a P that is named", "P first"])
def test_a_prompt_of_embeddings_is_not_loaded(order: str, tokens: list[int] | None) -> None:
    """vLLM reports the allocation of every request, also of one for which nothing is loaded."""
    params = {
        "by a metaserver": ticket("http://127.0.0.1:1"),
        "with a P that is named": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1},
        "P first": {"do_remote_prefill": True, "source": "c291cmNl"},
    }[order]
    with closing(decode("http://127.0.0.1:1")) as scheduler:
        asked = request(tokens=tokens, params=params, prompt_embeds=torch.zeros(10, 4))
        assert scheduler.wanted(asked, 0) == 0
        scheduler.allocated(asked, [[1, 2, 3]], 0)
        assert scheduler.build_step().empty
        assert scheduler.request_finished(asked, True) == (False, None)


def test_a_cache_that_does_not_fit_is_named_with_both_values_before_anything_is_pushed() -> None:
    scheduler, asked = prefill(), request()
    theirs = geometry("token", heads=4, tp=2, block=4)
    asked.kv_transfer_params = remote_decode(seal(reservation(asked, geometry=theirs), None))
    scheduler.allocated(asked)
    assert scheduler.build_step(output([("r", 0, 10, [1, 2, 3])])).empty
    _, answer = scheduler.request_finished(asked, True)
    assert answer is not None and answer["pd_push"]["code"] == "PD-GEO-001"
    assert "2" in answer["pd_push"]["detail"] and "4" in answer["pd_push"]["detail"]


def test_what_makes_prompts_different_makes_their_hashes_different() -> None:
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("tune", 1, "/nowhere")
    prompts = [
        request(),
        request(tokens=TOKENS[::-1]),
        request(cache_salt="salt"),
        request(cache_salt=""),
        request(lora_request=lora),
    ]
    assert len({request_hash(each) for each in prompts}) == len(prompts)
    assert request_hash(request("a")) == request_hash(request("b"))


# -- decode


def ticket(url: str, **more: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "metaserver": url, "ticket": "t", **more}


def test_a_client_that_does_not_close_in_time_does_not_keep_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_ascend_pd.decode.scheduler.role.CLOSE_GRACE_S", 0.2)
    monkeypatch.setattr(MetaserverClient, "close", lambda _: asyncio.Event().wait())
    with loading() as (server, scheduler, _, _):
        until(lambda: server.bodies, "the POST")
        scheduler.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "pd-reserve"], "its calls end with it"
        assert "the metaserver client did not close within" in caplog.text


@pytest.mark.parametrize(
    ("asks", "picture"), [(True, False), (True, True), (False, False)], ids=["text", "with a picture", "unasked"]
)
def test_the_router_gets_token_ids_if_it_asks_and_they_are_all_of_the_prompt(asks: bool, picture: bool) -> None:
    seen = [MultiModalFeatureSpec(None, "image", "h", PlaceholderRange(2, 3))] if picture else None
    with RecordingMetaserver(PREFILLED) as server, closing(decode(server.url)) as scheduler:
        asked = request(params=ticket(server.url, **({"send_tokens": True} if asks else {})), mm_features=seen)
        assert scheduler.wanted(asked, 0) == 10
        scheduler.allocated(asked, [[40, 41, 42]], 10)
        until(lambda: server.bodies, "the POST")
        assert server.bodies[0].get("prompt_token_ids") == (TOKENS if asks and not picture else None)


@pytest.mark.parametrize("answer", ["before the step with the bind", "after it"])
def test_a_reservation_reaches_the_metaserver_and_its_word_the_workers(answer: str) -> None:
    with (
        RecordingMetaserver(PREFILLED if answer != "after it" else b"") as server,
        closing(decode(server.url, secrets=SECRETS)) as scheduler,
    ):
        steps = WatchedSteps(scheduler)
        asked = request(params=ticket(server.url, send_tokens=True))
        assert scheduler.wanted(asked, 4) == 6
        scheduler.allocated(asked, [[40, 41, 42, 43]], 6)
        if server.end:
            until(lambda: scheduler._outcomes, "the answer")
        bind, step = steps.bound(), steps.taken[0]
        assert bind.blocks[0].tolist() == [41, 42] and step.wake is not None and scheduler.nap_budget() == 1
        assert step.settles == ((bind.transfer,) if server.end else ())
        until(lambda: server.bodies, "the POST")
        (body,) = server.bodies
        unsealed = unseal(base64.b64decode(body["reservation"]), SECRETS)
        assert (unsealed.transfer, unsealed.first, unsealed.end) == (bind.transfer, 4, 10)
        assert unsealed.endpoints == ENDPOINTS and unsealed.prompt_hash == request_hash(asked)
        assert body["ticket"] == "t" and body["prompt_token_ids"] == TOKENS
        assert body["decode"] == scheduler.engine.incarnation
        assert body["fingerprint"] == scheduler.engine.fingerprint != ""
        server.end = PREFILLED
        steps.settled(bind.transfer)
        assert scheduler.wanted(asked, 0) == 0
        assert scheduler.received("r") and not scheduler.received("r") and scheduler.nap_budget() == 0


def test_placeholders_for_drafts_go_where_nothing_is_loaded() -> None:
    with closing(decode("http://127.0.0.1:1")) as scheduler:
        loads, computes = request(params=ticket("http://127.0.0.1:1")), request("here")
        for asked, wanted in ((loads, 6), (computes, 0)):
            asked.spec_token_ids = [-1, -1]  # as vllm-ascend's recompute scheduler begins
            assert scheduler.wanted(asked, 4) == wanted
            assert asked.num_tokens_with_spec == len(TOKENS) + (2 if wanted else 0)


@contextmanager
def loading(end: bytes = b"") -> Iterator[tuple[RecordingMetaserver, DecodeScheduler, Request, Bind]]:
    """A metaserver, and a D scheduler that has asked it for the tokens [4, 10) of request `r`."""
    with RecordingMetaserver(end) as server, closing(decode(server.url)) as scheduler:
        asked = request(params=ticket(server.url))
        assert scheduler.wanted(asked, 4) == 6
        scheduler.allocated(asked, [[40, 41, 42, 43]], 6)
        (bind,) = scheduler.build_step().binds
        yield server, scheduler, asked, bind


PUSH = push_id("p" * 16, "u" * 32)


@pytest.mark.parametrize(
    ("codes", "counts"),
    [
        (("", ""), {"received": 6, "prefill": "p" * 16, "cached": 3}),
        (("", "PD-XFER-004"), {"recomputed": 6, "code": "PD-XFER-004", "prefill": "p" * 16}),
        (("PD-XFER-001", "PD-XFER-004"), {"recomputed": 6, "code": "PD-XFER-001", "prefill": "p" * 16}),
    ],
    ids=["received", "one rank failed", "both ranks failed, in two steps"],
)
def test_d_reports_how_the_kv_came_in_its_answer_and_to_the_metaserver(
    codes: tuple[str, str], counts: dict[str, Any]
) -> None:
    with loading() as (server, scheduler, asked, bind):  # the test does not wait for P's HTTP answer
        for code in codes:  # one step per rank
            end = LoadEnd("r", Failure(code) if code else None, PUSH, cached=3)
            scheduler.ended(frozenset({end, LoadEnd("unknown", Failure("PD-XFER-001"), "")}))
        assert asked.prefill_stats is not None
        asked.prefill_stats.set(len(TOKENS), 4, 6)
        assert scheduler.received("r") and not scheduler.received("r")
        cached = 4 if "code" in counts else 3
        assert asked.prefill_stats.num_cached_tokens == cached, "what came from P was computed there, or in its cache"
        engine = scheduler.engine
        identity = {"decode": engine.incarnation, "fingerprint": engine.fingerprint}
        report = {"transfer": str(bind.transfer), "ticket": "t", **identity, **counts}
        assert scheduler.finished(asked.request_id) == {"pd_load": report}
        assert scheduler.finished(asked.request_id) is None
        until(lambda: server.reports, "the report")
        assert server.reports == [report]
        assert scheduler.book.find("r") is None


def test_why_kv_did_not_come_is_in_d_s_log_and_in_its_report(caplog: pytest.LogCaptureFixture) -> None:
    with loading() as (server, scheduler, asked, bind):
        long = "a write\nfailed " * 60
        scheduler.ended([LoadEnd("r", Failure("PD-XFER-003", long), PUSH), LoadEnd("r", None, PUSH)])
        assert scheduler.received("r")
        (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert said.startswith(f"request r: its KV did not come, transfer {bind.transfer} failed: PD-XFER-003 a write")
        assert "\n" not in said, "a line of the log is one line"
        answer = scheduler.finished(asked.request_id)
        assert answer is not None
        told = answer["pd_load"]["detail"]
        assert told.startswith("a write") and "\n" not in told and len(told) == MAX_DETAIL
        until(lambda: server.reports, "the report")
        assert server.reports[0]["detail"] == told


def test_a_load_that_was_not_pushed_names_no_prefill() -> None:
    with loading(PREFILLED) as (_, scheduler, asked, _):
        scheduler.ended([LoadEnd("r", Failure("PD-XFER-001"), "")])
        assert scheduler.received("r")
        answer = scheduler.finished(asked.request_id)
        assert answer is not None and "prefill" not in answer["pd_load"] and answer["pd_load"]["recomputed"] == 6


def test_a_request_that_ends_before_its_load_reports_nothing_and_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with loading(PREFILLED) as (server, scheduler, asked, _):
        assert scheduler.finished(asked.request_id) is None
        scheduler.ended([LoadEnd("r", Failure("PD-XFER-002"), PUSH)])
        assert scheduler.received("r")
        assert scheduler.book.find("r") is None and not server.reports
        assert "did not come" not in caplog.text, "nobody waits for it"


def test_a_request_that_vllm_ascend_drops_in_a_step_leaves_nothing() -> None:
    """vllm-ascend's recompute scheduler does not report that such a request has finished."""
    with loading(PREFILLED) as (_, scheduler, asked, _):
        assert scheduler.received("r") and scheduler.wanted(asked, 4) == 0
        scheduler.metadata(SimpleNamespace(recomputed_reqs=None))
        assert scheduler.book.find("r") is not None
        scheduler.metadata(SimpleNamespace(recomputed_reqs=[SimpleNamespace(request_id="r")]))
        assert scheduler.book.find("r") is None and scheduler.wanted(asked, 4) == 6, "nothing of it is left"
        (drops,) = (hooks for hooks in scheduler.step_hooks() if isinstance(hooks, Drops))
        tokens, other = EngineCoreOutput("r", [7]), EngineCoreOutput("other", [], finish_reason=FinishReason.STOP)
        drops.after(None, {0: EngineCoreOutputs(outputs=[tokens, other])})  # of the step before
        last = EngineCoreOutput("r", [], finish_reason=FinishReason.STOP, stop_reason="recomputed")
        drops.after(None, {0: EngineCoreOutputs(outputs=[other]), 1: EngineCoreOutputs(outputs=[last])})
        assert not drops.said and tokens.kv_transfer_params is None is other.kv_transfer_params
        said = said_in(json.dumps({"kv_transfer_params": last.kv_transfer_params}).encode())
        assert said.pd_dropped and said.pd_load is not None and said.pd_load.received == 6
        for number in range(10_000):
            drops.note(str(number), {})
        assert len(drops.said) <= 4096, "where no outputs are seen"


@pytest.mark.parametrize(
    ("host", "url", "heard"),
    [
        ("127.0.0.1", "http://10.0.0.9:8000", True),
        ("127.0.0.1", "http://pd-metaserver:8001", True),
        ("127.0.0.1", "http://localhost:8000", False),
        ("127.0.0.1", "http://127.0.0.2:8000", False),
        ("10.0.0.2", "http://10.0.0.9:8000", False),
    ],
)
def test_a_d_on_loopback_whose_metaserver_is_elsewhere_says_so(
    host: str, url: str, heard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(decode(url, attach=False)) as scheduler:
        with caplog.at_level("WARNING", logger="vllm_ascend_pd"):
            scheduler.attach_workers({(0, 0): WorkerFacts(Endpoint(host, 1), CACHE)})
        assert [f"cannot reach {host}" in r.getMessage() and url in r.getMessage() for r in caplog.records] == [
            True
        ] * heard


def test_a_metaserver_that_is_down_cancels_the_load() -> None:
    from tools.support.process import free_port

    url = f"http://127.0.0.1:{free_port()}"
    scheduler = DecodeScheduler(
        engine(metaserver_urls=[url], recv_deadline_s=0.7, ready_timeout_s=2), Patience(lambda: 0)
    )
    scheduler.attach_workers({(0, 0): WorkerFacts(ENDPOINTS[0], CACHE)})
    with closing(scheduler):
        asked = request(params=ticket(url))
        scheduler.wanted(asked, 0)
        scheduler.allocated(asked, [[1, 2, 3]], 10)
        steps = WatchedSteps(scheduler)
        assert steps.cancelled(steps.bound().transfer).startswith("PD-")


def test_hundreds_of_loads_in_flight_take_no_thread_each() -> None:
    """The predecessor had 32 threads, each blocked for a whole prefill."""
    with RecordingMetaserver() as server, closing(decode(server.url)) as scheduler:
        threads = {thread.name for thread in threading.enumerate()}
        count = 300
        for i in range(count):
            asked = request(f"r{i}", ticket(server.url))
            assert scheduler.wanted(asked, 0) == len(TOKENS)
            scheduler.allocated(asked, [[1, 2, 3]], len(TOKENS))
        until(lambda: len(server.bodies) == count, "all of them posted while none is answered")
        assert {thread.name for thread in threading.enumerate()} <= threads
        steps = WatchedSteps(scheduler)
        assert len(steps.take().binds) == count
        server.end = PREFILLED
        until(lambda: steps.take() and sum(len(step.settles) for step in steps.taken) == count, "all outcomes")


def test_forged_tickets_are_prefilled_locally_and_call_no_address(caplog: pytest.LogCaptureFixture) -> None:
    with RecordingMetaserver(PREFILLED) as server, closing(decode("http://10.1.2.3:4")) as scheduler:
        with caplog.at_level(logging.WARNING):
            asked = request(params=ticket(server.url))
            for _ in range(50):
                assert scheduler.wanted(asked, 0) == 0
        heard = [r for r in caplog.records if "prefilled locally" in r.getMessage()]
        assert len(heard) == 1, "said once, not in every step that the request waits"
        scheduler.allocated(asked, [[1, 2, 3]], 10)
        assert scheduler.build_step().empty and not server.bodies


def test_before_the_handshake_nothing_is_loaded_and_no_thread_runs() -> None:
    before = set(threading.enumerate())
    scheduler = decode("http://127.0.0.1:1", attach=False)
    assert set(threading.enumerate()) <= before
    assert scheduler.wanted(request(params=ticket("http://127.0.0.1:1")), 0) == 0
    assert scheduler.build_step().empty
    scheduler.close()


def test_children_of_one_request_share_parameters_that_do_not_change() -> None:
    """n > 1: several requests have the same dictionary; each is a load of its own under the one ticket."""
    with RecordingMetaserver(PREFILLED) as server, closing(decode(server.url)) as scheduler:
        params = ticket(server.url)
        copy = dict(params)
        children = [request(f"r{i}", params) for i in range(3)]
        for i, child in enumerate(children):
            child.kv_transfer_params = params
            assert scheduler.wanted(child, 0) == 10
            scheduler.allocated(child, [[3 * i, 3 * i + 1, 3 * i + 2]], 10)
        binds = scheduler.build_step().binds
        assert len({bind.transfer for bind in binds}) == 3
        assert params == copy


def test_engines_of_different_workers_are_one_geometry() -> None:
    from vllm_ascend_pd.engine import merge_geometries
    from vllm_ascend_pd.errors import ConfigError

    def facts(*names: str, **changes: Any) -> WorkerFacts:
        return WorkerFacts(None, msgspec.structs.replace(CACHE, stages=(names,), **changes))

    merged = merge_geometries(
        {(1, 0): facts("c"), (0, 1): facts("a", "b"), (0, 0): facts("a", "b"), (1, 1): facts("c")}
    )
    assert merged.stages == (("a", "b"), ("c",)) and merged.layers == ("a", "b", "c")
    unlike = merge_geometries({(0, 0): facts("a"), (1, 0): facts("b", dtype="int8"), (2, 0): facts("c")})
    assert unlike.layers == ("a", "b", "c") and [kind.layers for kind in unlike.kinds] == [("a", "c"), ("b",)]
    for wrong in (
        {},
        {(0, 0): facts("a"), (0, 1): facts("b")},
        {(0, 0): facts("a"), (0, 1): facts("a", dtype="int8")},
        {(0, 0): facts("a"), (1, 0): facts("b", block_size=128)},
    ):
        with pytest.raises(ConfigError):
            merge_geometries(wrong)
    assert dataclasses.is_dataclass(facts("a"))


# -- the first token


def taking_first_tokens(url: str, vocabulary: int = 128, whys: tuple[str, str] = ("", "")) -> DecodeScheduler:
    """A D scheduler that asks for first tokens, unless one of its workers has a reason against it."""
    made = DecodeScheduler(engine(SECRETS, metaserver_urls=[url]), Patience(lambda: 0), vocabulary=vocabulary)
    known = enumerate(zip(ENDPOINTS, whys, strict=True))
    made.attach_workers({(0, rank): WorkerFacts(endpoint, CACHE, why) for rank, (endpoint, why) in known})
    return made


def posted(vocabulary: int, name: str = "r", **changes: Any) -> tuple[dict[str, Any], Reservation]:
    """Return D's post for a request with these sampling parameters."""
    with RecordingMetaserver(PREFILLED) as server, closing(taking_first_tokens(server.url, vocabulary)) as scheduler:
        asked = request(name, params=ticket(server.url))
        for field, value in changes.items():
            setattr(asked, field, value)
        assert scheduler.wanted(asked, 4) == 6
        scheduler.allocated(asked, [[40, 41, 42, 43]], 6)
        scheduler.build_step()
        until(lambda: server.bodies, "the POST")
        (body,) = server.bodies
        return body, unseal(base64.b64decode(body["reservation"]), SECRETS)


def test_a_d_of_which_one_worker_cannot_go_on_behind_p_s_token_asks_for_none(caplog: pytest.LogCaptureFixture) -> None:
    with (
        RecordingMetaserver(PREFILLED) as server,
        closing(taking_first_tokens(server.url, whys=("", "too old"))) as made,
    ):
        asked = request("r", params=ticket(server.url))
        assert made.wanted(asked, 4) == 6
        made.allocated(asked, [[40, 41, 42, 43]], 6)
        until(lambda: server.bodies, "the POST")
        assert "first_token" not in server.bodies[0] and "a worker says too old" in caplog.text


def test_a_request_whose_first_token_d_computes_is_posted_as_it_always_was() -> None:
    for vocabulary, changes in ((0, {}), (128, {"prompt_is_token_ids": [True]})):
        body, unsealed = posted(vocabulary, **changes)
        assert set(body) == {"ticket", "transfer", "decode", "fingerprint", "reservation"} and unsealed.seed is None
    asks, unsealed = posted(128)
    assert set(asks) - set(body) == {"first_token"} and unsealed.seed is not None and unsealed.seed.logprobs is None
    assert asks["first_token"] == {
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }


def answered(
    *, digest: str = "", sends_first: bool = True, chunks: int = 1, sampled: tuple[int, ...] = (7,), **sampling: Any
) -> str:
    """Return P's report of its first token."""
    from vllm.v1.request import RequestStatus

    from vllm_ascend_pd.protocol import sampling as rules
    from vllm_ascend_pd.protocol.first import FirstTokenRequest
    from vllm_ascend_pd.vllm_patches import first_token

    scheduler = PrefillScheduler(engine(SECRETS), sends_first=sends_first)
    scheduler.attach_workers({(0, rank): WorkerFacts(None, CACHE) for rank in range(2)})
    asked = request()
    asked.sampling_params = SamplingParams(max_tokens=1, **sampling)
    digest = digest or rules.digest(first_token.given(SamplingParams(max_tokens=9)))
    seed = FirstTokenRequest(digest, sampling.get("logprobs"))
    asked.kv_transfer_params = remote_decode(seal(reservation(asked, seed=seed), SECRETS))
    scheduler.allocated(asked)
    scheduler.build_step(output([("r", 0, 10 // chunks, [1, 2, 3])]))
    if scheduler.first_tokens is not None:
        rows = first_token.logprob_rows([[(7, -0.5, 1), (8, -1.0, 2)]])
        step = SimpleNamespace(req_id_to_index={"r": 0}, sampled_token_ids=[[7]], logprobs=rows)
        scheduler.first_tokens.before(step)
    asked.append_output_token_ids(list(sampled))
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED if sampled else RequestStatus.FINISHED_ABORTED
    _, answer = scheduler.request_finished(asked, True)
    assert answer is not None
    return str(answer["pd_push"].get("first", ""))


def test_prefill_sends_its_token_only_to_a_d_that_asks_for_it() -> None:
    from vllm_ascend_pd.protocol.auth import unseal_first

    first = unseal_first(base64.b64decode(answered()), SECRETS)
    assert (first.transfer, first.position, first.token) == (TransferId("d", 1, "u"), len(TOKENS), 7)
    assert pushed_by(first.push) == "i" * 16
    assert not first.logprobs
    with_them = unseal_first(base64.b64decode(answered(logprobs=1)), SECRETS)
    assert with_them.logprobs == ((7, -0.5, 1), (8, -1.0, 1)), (
        "D asked for them: the ranks of the likeliest are counted"
    )
    assert answered(sends_first=False) == ""
    assert answered(digest="another") == ""
    assert answered(temperature=0.5) == "", "it sampled in another way"
    assert answered(presence_penalty=0.5), "there is no token yet that it would count"
    assert answered(thinking_token_budget=5) == ""
    assert answered(chunks=2) == "", "the prompt is not computed whole"
    assert answered(sampled=()) == answered(sampled=(7, 8)) == ""
