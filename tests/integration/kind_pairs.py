# SPDX-License-Identifier: Apache-2.0
"""Pairs of tiny models, one for each kind of cache: how they are started, exercised, and made to leave something out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_metaserver import fake_metaserver, says_failed
from pairs import Pair, PairMaker, counter, fresh_prompt, reference_answers, transfer_request, wait_for_free_blocks

from scripts.support.client import RequestFailed, attempt, body_of, complete, gather, leave_after, post
from scripts.support.cluster import Cluster
from scripts.support.engine import Engine
from scripts.support.models import ensure, recipe_of
from scripts.support.spec import EngineSpec

KINDS = Path(__file__).parent / "plugins" / "kinds"
BLOCK, CHUNK = 32, 96
Make = Callable[[str, dict[str, Any]], EngineSpec]  # (role, kv_connector_extra_config)


def spec(name: str, model: str, role: str, extra: dict[str, Any], **more: Any) -> EngineSpec:
    policy = {} if role == "kv_producer" else {"policy": "fail"}
    given = {"block_size": BLOCK, "chunk": CHUNK, "plugins": (KINDS,), **policy, **more}
    return EngineSpec(name, ensure(model), role=role, extra=extra, **given)


def of(model: str, **more: Any) -> Make:
    return lambda role, extra: spec(f"{model}-{'p' if role == 'kv_producer' else 'd'}", model, role, extra, **more)


def leaving(what: str, **more: Any) -> dict[str, Any]:
    """Of a P that pushes everything else (plugins/kinds/pd_test_groups.py)."""
    return {
        "connector": "LeavingConnector",
        "transfer": {"kv_connector_module_path": "pd_test_groups"},
        "environment": {"PD_TEST_LEAVES_OUT": what},
        **more,
    }


@contextmanager
def running(
    cluster: Cluster, make_pair: PairMaker, *specs: EngineSpec, beside: Sequence[Engine] = ()
) -> Iterator[Pair]:
    """A pair of these, the first one P, and of engines that are there already; stopped also where a test fails."""
    started = cluster.start(*specs)
    pair = make_pair(*started, *beside)
    recipe = recipe_of(specs[0].model)
    pair.leaves_last = recipe is not None and recipe.leaves_last
    try:
        yield pair
    finally:
        cluster.stop(pair.front, *started)


def engines(make: Make) -> tuple[Any, Any]:
    """The fixtures `decode`, one engine for the tests of a module, and `pair`, with a P for those of a class."""

    @pytest.fixture(scope="module", name="decode")
    def decode(cluster: Cluster, allowed: list[str]) -> Iterator[Engine]:
        (d,) = cluster.start(make("kv_consumer", cluster.push_config(*allowed)))
        yield d
        cluster.stop(d)

    @pytest.fixture(scope="class", name="pair")
    def pair(cluster: Cluster, decode: Engine, make_pair: PairMaker) -> Iterator[Pair]:
        with running(cluster, make_pair, make("kv_producer", cluster.push_config()), beside=[decode]) as made:
            yield made

    return decode, pair


def exercise(pair: Pair, name: str, lengths: Sequence[int]) -> None:
    for length in lengths:
        pair.check([fresh_prompt(length)], name=name)
    pair.check([fresh_prompt(25 + 40 * i) for i in range(8)], name=f"{name}, 8 at once")


def wrong_answers(pair: Pair, lengths: Sequence[int]) -> int:
    """How many are not a single engine's, though all was loaded as far as D knows: of a pair that does something wrong on purpose."""
    wrong = 0
    for length in lengths:
        prompt = fresh_prompt(length)
        (expected,) = reference_answers(pair.prefill, [prompt], 12)
        before = pair.loaded_tokens()
        got = complete(pair.front.url, body_of(prompt, 12))
        assert pair.loaded_tokens() - before == length - pair.leaves_last
        wrong += got.tokens != expected.tokens
    return wrong


def check_left(pair: Pair, length: int, longest: int = 2048) -> None:
    """Clients that leave at several moments take nothing with them. `longest`: what the engines take."""
    free = pair.free_counts()
    for seconds in (0.02, 0.2, 0.4):
        leave_after(pair.front.url, body_of(fresh_prompt(longest * 3 // 4), longest // 5), seconds)
    wait_for_free_blocks((pair.prefill, *pair.decode), free)
    pair.check([fresh_prompt(length)], name="after clients that have left")


def check_failed_load(pair: Pair, port: int, lengths: Sequence[int]) -> None:
    """A load that fails ends its request alone, with the policy `fail`."""
    free = pair.free_counts()
    with fake_metaserver(port, says_failed) as seen:
        url = f"http://127.0.0.1:{port}"
        (refused,) = attempt(pair.decode[0].url, [transfer_request(url, "f", fresh_prompt(max(lengths)))])
        assert isinstance(refused, RequestFailed) and seen, refused
    wait_for_free_blocks((pair.prefill, *pair.decode), free)
    pair.check([fresh_prompt(n) for n in lengths], name="after a load that failed")


def check_computed_again(pair: Pair, port: int, lengths: Sequence[int]) -> None:
    """A load that fails is computed by D, with the policy `recompute`."""
    free = pair.free_counts()
    with fake_metaserver(port, says_failed) as seen:
        for length in lengths:
            prompt, url = fresh_prompt(length), f"http://127.0.0.1:{port}"
            answer = complete(pair.decode[0].url, transfer_request(url, str(length), prompt, 12))
            pair.compare([prompt], [answer], "computed again")
        assert sum("reservation" in body for body in seen) == len(lengths)  # the others tell how the loads ended
    wait_for_free_blocks((pair.prefill, *pair.decode), free)


def check_choices(pair: Pair, length: int) -> None:
    """Two answers to one prompt, each from a load of its own. Greedy sampling takes one; of one candidate any sampling is greedy."""
    prompt = fresh_prompt(length)
    (expected,) = reference_answers(pair.prefill, [prompt], 12)
    found = post(pair.front.url, body_of(prompt, 12, n=2, temperature=1.0, top_k=1))["choices"]
    assert [tuple(choice["token_ids"]) for choice in found] == [expected.tokens] * 2


def check_preempted(pair: Pair, lengths: Sequence[int], tokens: int) -> None:
    """More at once than D has blocks for: it takes some back and computes them again."""
    (d,) = pair.decode
    free, before = pair.free_counts(), counter(d, "vllm:num_preemptions_total")
    prompts = [fresh_prompt(length) for length in lengths]
    answers = gather(pair.front.url, [body_of(prompt, tokens) for prompt in prompts])
    assert counter(d, "vllm:num_preemptions_total") > before, "nothing was preempted: the test shows nothing"
    pair.compare(prompts, answers, "beside requests that were preempted")
    wait_for_free_blocks((pair.prefill, d), free)
