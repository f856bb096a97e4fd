# SPDX-License-Identifier: Apache-2.0
"""GQA through real pairs, `verify: full`: TP 1→1, 1→2, 2→1, 2→2 and pipelines of two, every answer the single engine's.

Two decode engines stay for the whole module; prefill engines are started for one class each. The first D fails a
request whose KV does not arrive, the second computes it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fake_metaserver import fake_metaserver, is_overloaded, says_failed
from pairs import (
    Pair,
    PairMaker,
    close_traces,
    counter,
    eventually,
    failures,
    fresh_prompt,
    reference_answers,
    settled_free_blocks,
    transfer_request,
    wait_for_free_blocks,
)

from tools.support.cells import FaultSite
from tools.support.checks import front_counter
from tools.support.client import RequestFailed, attempt, body_of, complete, gather, leave_after, leave_when, post
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.faults import DROP_WRITES
from tools.support.models import ensure, recipe_of
from tools.support.soaking import Soak
from tools.support.spec import EngineSpec
from vllm_ascend_pd.viewer.timeline import Trace, TraceEvent

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BLOCK = 32
SMALL = 72  # blocks
# One token (nothing to push), part of a block, exactly one, one and a bit, several exactly, many.
LENGTHS = (1, 2, 20, BLOCK, BLOCK + 1, 4 * BLOCK, 333, 1500)


@pytest.fixture(scope="module")
def decodes(cluster: Cluster, allowed: list[str]) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    model, config = ensure("gqa"), cluster.push_config(*allowed)
    details = ("--enable-prompt-tokens-details",)
    one, two = cluster.start(
        EngineSpec("gqa-d1", model, role="kv_consumer", tp=1, policy="fail", extra=config, arguments=details),
        EngineSpec("gqa-d2", model, role="kv_consumer", tp=2, policy="recompute", extra=config),
    )
    yield one, two
    cluster.stop(one, two)


@pytest.fixture(scope="class")
def one(
    cluster: Cluster, decodes: tuple[EngineProcess, EngineProcess], make_pair: PairMaker
) -> Iterator[tuple[Pair, Pair, Pair]]:
    """P with TP 1, in pairs with a D with TP 1, a D with TP 2, and both."""
    share = ("--long-prefill-token-threshold", "256")  # several long prompts share a step
    (p,) = cluster.start(
        EngineSpec("gqa-p1", ensure("gqa"), role="kv_producer", extra=cluster.push_config(), arguments=share)
    )
    pairs = make_pair(p, decodes[0]), make_pair(p, decodes[1]), make_pair(p, *decodes)
    yield pairs
    cluster.stop(*(pair.front for pair in pairs), p)


@pytest.fixture(scope="class")
def two(
    cluster: Cluster, decodes: tuple[EngineProcess, EngineProcess], make_pair: PairMaker
) -> Iterator[tuple[Pair, Pair]]:
    """P with TP 2, small chunks, and a cache for little more than one longest prompt.

    It publishes its cache's events.
    """
    port = cluster.port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    (p,) = cluster.start(
        EngineSpec(
            "gqa-p2",
            ensure("gqa"),
            role="kv_producer",
            tp=2,
            chunk=96,
            kv_bytes=SMALL * BLOCK * 2048,
            extra=cluster.push_config(),
            # A prompt takes half a step, so others run beside it; requests with higher priority may take its blocks.
            arguments=(
                *("--long-prefill-token-threshold", "48", "--scheduling-policy", "priority"),
                "--no-scheduler-reserve-full-isl",  # a prompt may begin before there are blocks for all of it
                *("--kv-events-config", json.dumps(events)),
            ),
        )
    )
    options = ("--kv-events", f"{p.url}={port}")
    pairs = make_pair(p, decodes[0], options=options), make_pair(p, decodes[1])
    yield pairs
    cluster.stop(*(pair.front for pair in pairs), p)


@pytest.fixture(scope="class")
def pipeline(
    cluster: Cluster, allowed: list[str], decodes: tuple[EngineProcess, EngineProcess], make_pair: PairMaker
) -> Iterator[tuple[Pair, Pair, Pair]]:
    """P with two stages of two layers, in pairs with D's: TP 1, TP 2, and stages of one and three layers."""
    model, config = ensure("gqa"), cluster.push_config(*allowed)
    cut = {"VLLM_PP_LAYER_PARTITION": "1,3"}
    p, d = cluster.start(
        EngineSpec("gqa-pp2", model, role="kv_producer", pp=2, chunk=512, extra=cluster.push_config()),
        EngineSpec("gqa-d-pp2", model, role="kv_consumer", pp=2, policy="fail", extra=config, environment=cut),
    )
    pairs = make_pair(p, decodes[0]), make_pair(p, decodes[1]), make_pair(p, d)
    yield pairs
    cluster.stop(*(pair.front for pair in pairs), d, p)


def counted(engine: EngineProcess) -> dict[str, float]:
    """Return our metrics of an engine, after a step that has collected everything."""
    settled_free_blocks(engine)
    prefix = "vllm:ascend_pd_"
    return {name.removeprefix(prefix): value for name, value in engine.metrics().items() if name.startswith(prefix)}


def fusion(events: list[TraceEvent]) -> tuple[dict[tuple[str, int, int], set[float]], set[tuple[str, int]]]:
    """Return from P's trace the batches by (destination, step, layer), and their (transfer, step) pairs.

    Left out are transfers in a step whose first layer was computed before their READY came: they follow later, and a
    batch in which one catches up mixes layers that others have sent already with layers of all transfers.
    """
    ready: dict[str, float] = {}
    first: dict[int, float] = {}
    for event in events:
        if event.stage == "ready":
            ready[event.facts["transfer"]] = event.t  # the last of the transfer's ranks
        elif event.stage == "layer_computed":
            first.setdefault(event.facts["step"], event.t)
    batches: dict[tuple[str, int, int], set[float]] = {}
    carried: set[tuple[str, int]] = set()
    for event in (e for e in events if e.stage == "layer_submitted" and len(e.facts["steps"]) == 1):
        step = event.facts["steps"][0]
        in_time = {(t, step) for t in event.facts["transfers"] if ready.get(t, float("inf")) <= first.get(step, 0.0)}
        carried |= in_time
        caught_up = len(in_time) < len(event.facts["transfers"])
        for layer in event.facts["layers"] if in_time else ():
            key = (event.facts["peer"], step, layer)
            if not (caught_up and key in batches):
                batches.setdefault(key, set()).add(event.t)
    return batches, carried


@contextmanager
def beside(prefill: EngineProcess, bodies: list[dict[str, Any]], tokens: int) -> Iterator[None]:
    """Run the block while P answers these requests, once it has generated `tokens` tokens for them."""
    before = counter(prefill, "vllm:generation_tokens_total")
    load = threading.Thread(target=gather, args=(prefill.url, bodies), name="load")
    load.start()
    while counter(prefill, "vllm:generation_tokens_total") < before + tokens and load.is_alive():
        time.sleep(0.005)
    yield
    load.join()


def restarted(events: list[TraceEvent]) -> set[str]:
    """Return the transfers whose push a worker restarted at token 0."""
    begun: set[tuple[str, str]] = set()
    restarts: set[str] = set()
    for event in events:
        if event.stage == "step" and event.facts["before"] == 0:
            transfer = str(event.facts["transfer"])
            if (event.source, transfer) in begun:
                restarts.add(transfer)
            begun.add((event.source, transfer))
    return restarts


class TestFromTp1:
    def test_the_prefill_engine_answers_as_a_stock_engine_does(
        self, cluster: Cluster, one: tuple[Pair, Pair, Pair], tally: AnswerTally
    ) -> None:
        """P is the reference of this module, so its own answers are compared with vLLM without a connector once."""
        (stock,) = cluster.start(EngineSpec("gqa-stock", ensure("gqa")))
        prompts = [fresh_prompt(n) for n in LENGTHS]
        expected, actual = (reference_answers(engine, prompts, 24) for engine in (stock, one[0].prefill))
        for p, want, got in zip(prompts, expected, actual, strict=True):
            tally.check("P against a stock engine", p, want.tokens, got.tokens, stock.url)
        cluster.stop(stock)

    def test_every_length_to_tp_1(self, one: tuple[Pair, Pair, Pair]) -> None:
        for length in LENGTHS:
            one[0].check([fresh_prompt(length)], name="1→1")

    def test_every_length_to_tp_2(self, one: tuple[Pair, Pair, Pair]) -> None:
        for length in LENGTHS:
            one[1].check([fresh_prompt(length)], name="1→2")

    def test_decode_skips_the_prefix_that_it_has(self, one: tuple[Pair, Pair, Pair]) -> None:
        one[0].check_prefix_on_decode(BLOCK)

    def test_prefill_pushes_the_prefix_that_it_did_not_compute(self, one: tuple[Pair, Pair, Pair]) -> None:
        one[0].check_prefix_on_prefill(BLOCK)

    def test_usage_counts_as_cached_what_was_not_computed(self, one: tuple[Pair, Pair, Pair]) -> None:
        """Tokens that P computed for D do not count as cached."""
        pair, head = one[0], fresh_prompt(6 * BLOCK)
        longer = [*head, *fresh_prompt(50)]
        # new to both; its beginning cached on both; all its full blocks cached on both
        cases = ((head, 0), (longer, len(head)), (longer, 7 * BLOCK))
        for tokens, cached in cases:
            usage = post(pair.front.url, body_of(tokens, 4))["usage"]
            assert (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) == cached, usage

    def test_32_requests_at_once_to_two_decode_engines_of_different_tp(self, one: tuple[Pair, Pair, Pair]) -> None:
        both = one[2]
        before = [counter(d, "vllm:external_prefix_cache_hits_total") for d in both.decode]
        both.check([fresh_prompt(20 + 13 * i) for i in range(32)], name="32 at once")
        after = [counter(d, "vllm:external_prefix_cache_hits_total") for d in both.decode]
        assert all(b > a for a, b in zip(before, after, strict=True)), "one of the two D's got nothing"

    def test_one_batch_per_destination_and_layer(self, one: tuple[Pair, Pair, Pair], cluster: Cluster) -> None:
        """Session fusion, from the trace: all writes of a step to one D rank for one layer leave together."""
        both = one[2]
        since = time.monotonic()
        gather(both.front.url, [body_of(fresh_prompt(600 + i), 4) for i in range(32)])
        close_traces(both)
        events = [e for e in Trace(cluster.traces).events if e.t >= since and e.source.startswith("prefill-worker")]
        batches, carried = fusion(events)
        assert len({peer for peer, _, _ in batches}) == 3, "TP 1 and TP 2 are three destinations"
        shared = max(sum(1 for _, step in carried if step == s) for s in {step for _, step in carried})
        assert shared >= 4, f"at most {shared} requests with READY shared a step"
        split = {key: len(times) for key, times in batches.items() if len(times) > 1}
        assert not split, f"more than one batch for {split}"

    def test_a_failed_load_is_recomputed_or_fails_as_configured(
        self, one: tuple[Pair, Pair, Pair], decodes: tuple[EngineProcess, EngineProcess], ports: list[int]
    ) -> None:
        fails, recomputes = decodes
        pair = one[1]
        free = {engine.name: settled_free_blocks(engine) for engine in decodes}
        url = f"http://127.0.0.1:{ports[-1]}"
        for script in (says_failed, is_overloaded):
            with fake_metaserver(ports[-1], script) as seen:
                tokens = fresh_prompt(150)
                answer = complete(recomputes.url, transfer_request(url, "r", tokens))
                pair.compare([tokens], [answer], "recomputed")
                refused = attempt(fails.url, [transfer_request(url, "f", fresh_prompt(150))])[0]
                assert isinstance(refused, RequestFailed), refused
                assert len(seen) >= 2, "a D did not ask the metaserver"
        wait_for_free_blocks(decodes, free)
        one[2].check([fresh_prompt(100) for _ in range(4)], name="after failed loads")


class TestFromTp2:
    def test_every_length_in_small_chunks_to_tp_1(self, two: tuple[Pair, Pair]) -> None:
        for length in LENGTHS:
            two[0].check([fresh_prompt(length)], name="2→1")

    def test_every_length_in_small_chunks_to_tp_2(self, two: tuple[Pair, Pair]) -> None:
        for length in LENGTHS:
            two[1].check([fresh_prompt(length)], name="2→2")

    def test_16_at_once_share_the_chunks(self, two: tuple[Pair, Pair]) -> None:
        two[0].check([fresh_prompt(30 + 17 * i) for i in range(16)], name="2→1, 16 at once")

    def test_the_metaserver_knows_what_the_prefill_cache_has_lost(self, two: tuple[Pair, Pair]) -> None:
        pair = two[0]
        prompts = [fresh_prompt(1000) for _ in range(4)]  # two of them fit
        for prompt in prompts:
            pair.check([prompt], name="2→1, one after another")
        for prompt, there in (
            (prompts[3], True),
            (prompts[0], False),
        ):  # the metaserver compares prompts in pieces of about 300 tokens
            before = (
                counter(pair.prefill, "vllm:prefix_cache_hits_total"),
                front_counter(pair.front.url, "prompt_tokens_there"),
            )
            complete(pair.front.url, body_of([*prompt, 7], 1))
            hits = counter(pair.prefill, "vllm:prefix_cache_hits_total") - before[0]
            thought = front_counter(pair.front.url, "prompt_tokens_there") - before[1]
            assert (hits > 900) == there and hits - 300 <= thought <= hits, (
                f"{thought} thought to be there, {hits} were"
            )
        status = httpx.get(f"{pair.front.url}/status", timeout=30).json()
        (cached,) = (one["prompt_tokens_cached"] for one in status["instances"] if one["role"] == "prefill")
        assert 0 < cached <= SMALL * BLOCK

    def test_metrics_tell_each_push_once_whatever_the_tp_sizes(self, two: tuple[Pair, Pair]) -> None:
        lengths = (4 * BLOCK, 10 * BLOCK, 3 * BLOCK)
        posts = "metaserver_time_seconds_count"  # counted at the end of D's POST, which is independent of its answer
        for pair in two:
            engines = (pair.prefill, *pair.decode)
            before = {engine.name: counted(engine) for engine in engines}
            pair.check([fresh_prompt(length) for length in lengths], name="counted")
            (decode,) = pair.decode
            wanted = before[decode.name].get(posts, 0.0) + len(lengths)
            eventually(lambda decode=decode, wanted=wanted: counted(decode)[posts] >= wanted, "the ends of the POSTs")
            p, d = ({k: v - before[e.name].get(k, 0.0) for k, v in counted(e).items()} for e in engines)
            assert p["xfer_time_seconds_count"] == p["exposed_time_seconds_count"] == len(lengths)
            assert p["bytes_transferred_total"] == sum(lengths) * recipe_of(ensure("gqa")).kv_bytes_per_token()  # type: ignore[union-attr]
            assert p["num_descriptors_total"] > 0
            assert d[posts] == len(lengths)
            assert not p.get("num_failed_transfers_total") and not d.get("num_failed_recvs_total")

    def test_preemption_on_prefill_starts_the_push_over(self, two: tuple[Pair, Pair], cluster: Cluster) -> None:
        """Two requests of higher priority decode on P itself, for more than 1,000 steps, until they have all 72 blocks.

        They have 16 when a prompt comes that needs 38 steps and 57 blocks. So it is preempted while it is being pushed,
        and its blocks are overwritten before it gets others.
        """
        pair = two[0]
        for number in range(6):
            tokens = fresh_prompt(1800)
            (want,) = reference_answers(pair.prefill, [tokens], 12)
            since, failed = time.monotonic(), pair.failed_transfers()
            with beside(pair.prefill, [body_of(fresh_prompt(24), 1200, priority=-1) for _ in range(2)], 480):
                got = complete(pair.front.url, body_of(tokens, 12))
            pair.tally.check(f"preempted, round {number}", tokens, want.tokens, got.tokens, pair.prefill.url)
            assert pair.failed_transfers() == failed, "the push did not survive, and the metaserver tried again"
            close_traces(pair)
            if restarted([e for e in Trace(cluster.traces).events if e.t >= since]):
                return
        pytest.fail("no push was preempted on P: the test shows nothing")

    def test_a_client_that_leaves_gives_all_blocks_back(self, two: tuple[Pair, Pair]) -> None:
        for pair in two:
            free = pair.free_counts()
            d = pair.decode[0]
            leave_when(
                pair.front.url, body_of(fresh_prompt(1900), 16), lambda d=d, had=free[d.name]: d.free_blocks() < had
            )
            for seconds in (0.15, 0.3, 0.45, 0.6):
                leave_after(pair.front.url, body_of(fresh_prompt(1900), 16), seconds)
            wait_for_free_blocks((pair.prefill, *pair.decode), free)
            pair.check([fresh_prompt(700)], name="after clients left")

    @pytest.mark.ci
    def test_a_mixed_load_of_300_prompts_is_right_and_leaves_nothing(
        self, two: tuple[Pair, Pair], progress: Callable[[str], None]
    ) -> None:
        """A short version of scripts/soak.sh: lengths, prefixes, repetitions, clients that disconnect."""
        pair = two[0]
        servers = (pair.prefill, *pair.decode, pair.front)
        soak = Soak(
            pair.front.url,
            pair.prefill,
            lambda: servers,
            pair.tally,
            progress,
            salted=True,
            at_once=8,
            longest=900,
            rests=3,
        )
        soak.run(300)
        progress(soak.report()[-1])
        assert not soak.errors, soak.errors[:5]
        assert not soak.growth(memory=False)


@pytest.mark.ci
class TestFromPipeline:
    def test_every_length_to_tp_1(self, pipeline: tuple[Pair, Pair, Pair]) -> None:
        for length in LENGTHS:
            pipeline[0].check([fresh_prompt(length)], name="PP 2→1")

    def test_many_at_once_to_tp_2(self, pipeline: tuple[Pair, Pair, Pair]) -> None:
        pipeline[1].check([fresh_prompt(40 + 61 * i) for i in range(8)], name="PP 2→TP 2")

    def test_to_a_pipeline_that_is_cut_elsewhere(self, pipeline: tuple[Pair, Pair, Pair]) -> None:
        pair = pipeline[2]
        free = pair.free_counts()
        for length in LENGTHS:
            pair.check([fresh_prompt(length)], name="PP 2+2→1+3")
        pair.check([fresh_prompt(40 + 61 * i) for i in range(8)], name="PP 2+2→1+3, 8 at once")
        pair.check_prefix_on_decode(BLOCK)
        wait_for_free_blocks((pair.prefill, *pair.decode), free)


@pytest.fixture(scope="class")
def dropped(
    cluster: Cluster, decodes: tuple[EngineProcess, EngineProcess], faulty: FaultSite, make_pair: PairMaker
) -> Iterator[tuple[Pair, Pair, Pair]]:
    """A P that drops its writes, in pairs with a D that checks nothing and two that do: one fails, one recomputes."""
    pairs = (
        make_pair(faulty.prefill, faulty.decode),
        make_pair(faulty.prefill, decodes[0]),
        make_pair(faulty.prefill, decodes[1]),
    )
    faulty.orders["P"].clear()
    faulty.orders["P"].refuse(DROP_WRITES)
    yield pairs
    faulty.orders["P"].comply()
    assert faulty.orders["P"].refused
    cluster.stop(*(pair.front for pair in pairs))


class TestWithoutThePush:
    def test_tokens_are_wrong(self, dropped: tuple[Pair, Pair, Pair]) -> None:
        """Without the writes no answer is right, so the other tests cannot pass on stale KV."""
        pair = dropped[0]
        prompts = [fresh_prompt(n) for n in (64, 100, 333, 1000)]
        expected = reference_answers(pair.prefill, prompts, 12)
        answers = gather(pair.front.url, [body_of(p, 12) for p in prompts])
        right = [len(p) for p, want, got in zip(prompts, expected, answers, strict=True) if want.tokens == got.tokens]
        assert not right, f"prompts of {right} tokens were answered right without their KV"

    def test_verify_full_notices_and_decode_fails_the_request(self, dropped: tuple[Pair, Pair, Pair]) -> None:
        pair = dropped[1]
        free = pair.free_counts()
        refused = attempt(pair.front.url, [body_of(fresh_prompt(n), 12) for n in (64, 333)])
        assert all(isinstance(r, RequestFailed) and r.status >= 500 for r in refused), refused
        wait_for_free_blocks((pair.prefill, *pair.decode), free)

    def test_verify_full_notices_and_decode_recomputes(self, dropped: tuple[Pair, Pair, Pair]) -> None:
        pair = dropped[2]
        noticed = len(failures(pair.decode[0]))
        prompts = [fresh_prompt(n) for n in (64, 333)]
        answers = gather(pair.front.url, [body_of(p, 12) for p in prompts])
        pair.compare(prompts, answers, "recomputed after a checksum did not fit")
        assert len(failures(pair.decode[0])) > noticed
