# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines, P and D with one tiny model for each kind of cache: starts, common checks, planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_metaserver import Answer, fake_metaserver, says_failed
from pairs import (
    Pair,
    PairMaker,
    counter,
    fresh_prompt,
    reference_answers,
    transfer_request,
    wait_for_free_blocks,
)

from tools.support.checks import eventually, first_tokens, fresh_salt
from tools.support.client import RequestFailed, attempt, body_of, complete, gather, leave_after, post
from tools.support.cluster import Cluster
from tools.support.compare import TIE, AnswerTally, TokensDiffer, apart
from tools.support.engine import EngineProcess
from tools.support.models import ensure, recipe_of
from tools.support.spec import EngineSpec

KINDS = Path(__file__).parent / "plugins" / "kinds"
DELTA = Path(__file__).parent / "plugins" / "delta"  # Gated DeltaNet in float32
BLOCK, CHUNK = 32, 96
Make = Callable[[str, dict[str, Any]], EngineSpec]  # (role, kv_connector_extra_config)
DECLARED: list[tuple[int, int]] = []  # TP of P and D, as the running test says them by its mark


def spec(name: str, model: str, role: str, extra: dict[str, Any], **more: Any) -> EngineSpec:
    policy = {} if role == "kv_producer" else {"policy": "fail"}
    given = {"block_size": BLOCK, "chunk": CHUNK, "plugins": (KINDS,), **policy, **more}
    return EngineSpec(name, ensure(model), role=role, extra=extra, **given)


def shows(kind: str, p_tp: int, d_tp: int) -> pytest.MarkDecorator:
    """Return the mark that puts a test into the table of docs/kinds.md: `kind` is a name in tools/kind_sizes.py."""
    return pytest.mark.sizes(kind, p_tp, d_tp)


def sized(model: str, p_tp: int, d_tp: int) -> Any:
    """Return a parameter set of a model's pair, with its mark."""
    return pytest.param(model, p_tp, d_tp, marks=shows(model, p_tp, d_tp))


def check_declared(p: EngineProcess, d: EngineProcess) -> None:
    """Check that the running test has the sizes that its mark says."""
    assert not DECLARED or (p.spec.tp, d.spec.tp) == DECLARED[0], f"the mark says {DECLARED[0]}"


def of(model: str, **more: Any) -> Make:
    return lambda role, extra: spec(f"{model}-{'p' if role == 'kv_producer' else 'd'}", model, role, extra, **more)


def leaving(what: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a P that does not push `what` (plugins/kinds/pd_test_leaves_out.py)."""
    return {
        "connector": "LeavingConnector",
        "transfer": {"kv_connector_module_path": "pd_test_leaves_out"},
        "environment": {"PD_TEST_LEAVES_OUT": what},
        **more,
    }


def learn_of_first_tokens(pair: Pair) -> None:
    """Wait until D knows that P sends first tokens, which P's first answer says. From then on D loads whole prompts."""
    (d,) = pair.decode
    before, url = first_tokens(d), pair.front.url
    eventually(lambda: complete(url, body_of(fresh_prompt(40), 2)) and first_tokens(d) > before, "a first token of P's")


@contextmanager
def running(
    cluster: Cluster, make_pair: PairMaker, *specs: EngineSpec, beside: Sequence[EngineProcess] = ()
) -> Iterator[Pair]:
    """Start these engines, the first one P, and pair them with engines that run already.

    The started ones are stopped also when a test fails.
    """
    started = cluster.start(*specs)
    p, d, *_ = (*started, *beside)
    check_declared(p, d)
    pair = make_pair(*started, *beside)
    recipe = recipe_of(specs[0].model)
    try:
        if recipe is not None and recipe.recomputes_last:
            learn_of_first_tokens(pair)
        yield pair
    finally:
        cluster.stop(pair.front, *started)


def engines(make: Make) -> tuple[Any, Any]:
    """Return the fixtures `decode`, one engine for a module, and `pair`, which adds a P for each class."""

    @pytest.fixture(scope="module", name="decode")
    def decode(cluster: Cluster, allowed: list[str]) -> Iterator[EngineProcess]:
        (d,) = cluster.start(make("kv_consumer", cluster.push_config(*allowed)))
        yield d
        cluster.stop(d)

    @pytest.fixture(scope="class", name="pair")
    def pair(cluster: Cluster, decode: EngineProcess, make_pair: PairMaker) -> Iterator[Pair]:
        with running(cluster, make_pair, make("kv_producer", cluster.push_config()), beside=[decode]) as made:
            yield made

    return decode, pair


def exercise(pair: Pair, name: str, lengths: Sequence[int]) -> None:
    for length in lengths:
        pair.check([fresh_prompt(length)], name=name)
    pair.check([fresh_prompt(25 + 40 * i) for i in range(8)], name=f"{name}, 8 at once")


def rounding_limit(p: EngineProcess, d: EngineProcess, lengths: Sequence[int]) -> float:
    """Return the difference of logits up to which two tokens count as tied, with a cache that rounds and unequal TP.

    Another TP adds in another order, and rounding makes a whole step of the last bit. How far that moves a logit is
    measured: P and D compute the same prompts alone. It counts twice, as one logit may rise while the other falls.
    """
    moved = apart(p.url, d.url, [fresh_prompt(length) for length in lengths], {"cache_salt": fresh_salt("apart")})
    return max(TIE, 2 * moved)


def wrong_answers(pair: Pair, lengths: Sequence[int], tie: float = TIE) -> int:
    """Count the wrong answers, one for each length, although D has loaded all, with a planted fault.

    A first difference within `tie` shows nothing, neither that the answer is wrong nor that it is right: another prompt
    of that length is asked then, once.
    """
    judged = replace(pair, tally=AnswerTally(tie=tie, excused_share=1.0))

    def is_wrong(length: int) -> bool | None:
        prompt, excused = fresh_prompt(length), len(judged.tally.excused)
        (expected,) = reference_answers(pair.prefill, [prompt], 12)
        before = pair.loaded_tokens()
        got = complete(pair.front.url, body_of(prompt, 12))
        assert pair.loaded_tokens() - before in (length - 1, length)
        try:
            judged.judge("planted fault", prompt, expected.tokens, got.tokens)
        except TokensDiffer:
            return True
        return None if len(judged.tally.excused) > excused else False

    verdicts = (is_wrong(length) for length in lengths)
    return sum(bool(is_wrong(length) if one is None else one) for length, one in zip(lengths, verdicts, strict=True))


def check_left(pair: Pair, length: int, longest: int = 2048) -> None:
    """Check that clients that disconnect at several moments leave nothing behind. `longest` is the engines' max_len."""
    free = pair.free_counts()
    for seconds in (0.02, 0.2, 0.4):
        leave_after(pair.front.url, body_of(fresh_prompt(longest * 3 // 4), longest // 5), seconds)
    wait_for_free_blocks((pair.prefill, *pair.decode), free)
    pair.check([fresh_prompt(length)], name="after clients that have left")


def check_failed_load(pair: Pair, port: int, lengths: Sequence[int]) -> None:
    """Check that with the policy `fail` a failed load ends only its own request."""
    free = pair.free_counts()
    with fake_metaserver(port, says_failed) as seen:
        url = f"http://127.0.0.1:{port}"
        (refused,) = attempt(pair.decode[0].url, [transfer_request(url, "f", fresh_prompt(max(lengths)))])
        assert isinstance(refused, RequestFailed) and seen, refused
    wait_for_free_blocks((pair.prefill, *pair.decode), free)
    pair.check([fresh_prompt(n) for n in lengths], name="after a load that failed")


def check_computed_again(pair: Pair, port: int, lengths: Sequence[int], behind: Sequence[int] = ()) -> None:
    """Check that with the policy `recompute` D computes the prompts of failed loads, which begin with `behind`."""
    free = pair.free_counts()
    with fake_metaserver(port, says_failed) as seen:
        for length in lengths:
            prompt, url = [*behind, *fresh_prompt(length)], f"http://127.0.0.1:{port}"
            answer = complete(pair.decode[0].url, transfer_request(url, str(length), prompt, 12))
            pair.compare([prompt], [answer], "computed again")
        assert sum("reservation" in body for body in seen) == len(lengths)  # the other bodies report how loads ended
    wait_for_free_blocks((pair.prefill, *pair.decode), free)


def check_first_token_lost(pair: Pair, port: int, length: int, *, fails: bool) -> None:
    """Check that a load fails if all of the prompt arrives but not P's first token, without which D cannot begin."""
    free, url, prompt = pair.free_counts(), f"http://127.0.0.1:{port}", fresh_prompt(length)
    ours = "vllm:ascend_pd_num_failed_recvs_total"
    before = counter(pair.decode[0], ours), first_tokens(pair.decode[0])

    def loses(body: dict[str, Any]) -> Answer:
        if "reservation" not in body:
            return 204, []
        params = {"do_remote_decode": True, "reservation": body["reservation"]}
        said = post(pair.prefill.url, body_of(prompt, 1, **body["first_token"], kv_transfer_params=params))
        assert said["kv_transfer_params"]["pd_push"]["first"], "P tells its token"
        return 200, [{"event": "accepted", "prefill": pair.prefill.url.removeprefix("http://")}, {"event": "prefilled"}]

    with fake_metaserver(port, loses) as seen:
        (answer,) = attempt(pair.decode[0].url, [transfer_request(url, "l", prompt, 12, first_token=True)])
        eventually(lambda: any("recomputed" in body for body in seen), "the metaserver hears that it was of no use")
    (report,) = [body for body in seen if "reservation" not in body]
    assert report["code"] == "PD-XFER-008" and report["recomputed"] == length and "received" not in report
    eventually(lambda: counter(pair.decode[0], ours) == before[0] + 1, "it is counted")
    assert first_tokens(pair.decode[0]) == before[1]
    if fails:
        assert isinstance(answer, RequestFailed), answer
    else:
        assert not isinstance(answer, BaseException)
        pair.compare([prompt], [answer], "computed again")
    wait_for_free_blocks((pair.prefill, *pair.decode), free)


def check_cut(pair: Pair, lengths: Sequence[int]) -> None:
    """Check that the last prompt token is not loaded if D computes the first token.

    With a grammar P cannot promise its first token in time: it learns too late which tokens may come first.
    """
    shaped = {"structured_outputs": {"regex": "[a-z]{2,40}"}, "ignore_eos": False}
    for length in lengths:
        prompt, before = fresh_prompt(length), (pair.loaded_tokens(), first_tokens(pair.decode[0]))
        alone, pair_s = (complete(url, body_of(prompt, 12, **shaped)) for url in (pair.prefill.url, pair.front.url))
        assert alone.tokens == pair_s.tokens
        assert pair.loaded_tokens() == before[0] + length - 1 and first_tokens(pair.decode[0]) == before[1]


def check_choices(pair: Pair, length: int) -> None:
    """Check two choices for one prompt, each with a load of its own.

    vLLM makes one choice of a greedy request, so this samples from a single candidate, which is as good as greedy.
    """
    prompt = fresh_prompt(length)
    (expected,) = reference_answers(pair.prefill, [prompt], 12)
    choices = post(pair.front.url, body_of(prompt, 12, n=2, temperature=1.0, top_k=1))["choices"]
    assert len(choices) == 2
    for choice in choices:
        if pair.tally.tie > TIE:  # of a kind whose kernels differ
            pair.judge("one of two choices", prompt, expected.tokens, choice["token_ids"])
        else:
            assert tuple(choice["token_ids"]) == expected.tokens


def check_preempted(pair: Pair, lengths: Sequence[int], tokens: int) -> None:
    """Check the answers to more requests at once than D has blocks for: it preempts some and computes them again."""
    (d,) = pair.decode
    free, before = pair.free_counts(), counter(d, "vllm:num_preemptions_total")
    prompts = [fresh_prompt(length) for length in lengths]
    answers = gather(pair.front.url, [body_of(prompt, tokens) for prompt in prompts])
    assert counter(d, "vllm:num_preemptions_total") > before, "nothing was preempted: the test shows nothing"
    pair.compare(prompts, answers, "beside requests that were preempted")
    wait_for_free_blocks((pair.prefill, d), free)
