# SPDX-License-Identifier: Apache-2.0
"""Draft models through real pairs, `verify: full`: the text is the single engine's, and so are D's accepted drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from continued import answers_of_another
from draft_pairs import ENOUGH, LENGTHS, TOKENS, check, check_goes_on, draft_config, drafts_of, mtp, padded, started
from fake_metaserver import Answer as Said
from fake_metaserver import fake_metaserver
from kind_pairs import DELTA, check_failed_load, engines, running, shows, sized, spec
from pairs import Pair, PairMaker, fresh_prompt, reference_answers, transfer_request

from tools.support.checks import drafted
from tools.support.client import body_of, complete, gather, post
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]


def check_left_out(pair: Pair, name: str, progress: Callable[[str], None]) -> None:
    """Check a pair in which only D has the draft model, so that its layers are not pushed: drafts must be worse."""
    (d,) = pair.decode
    prompts = [fresh_prompt(length) for length in (100, 333, 700)]
    alone = drafts_of(d, d.url, prompts)
    with drafted(d) as drafts:
        for prompt in prompts:
            pair.check([prompt], TOKENS, name="no drafts on P")
    pushed = drafts()
    progress(
        f"figure: {name} on D alone: {pushed.accepted} of {pushed.tokens} accepted, {alone.accepted} of {alone.tokens} alone"
    )
    assert pushed.rate < alone.rate / 2, f"with the prompt's KV from P {pushed}, alone {alone}"
    assert "has no such draft model" in d.log.read_text(errors="replace")


def small(role: str, extra: dict[str, Any]) -> EngineSpec:
    """P drafts one token, D three."""
    if role == "kv_producer":
        return mtp("mtp-p", 1, role=role, extra=extra)
    return mtp("mtp-d", 3, role=role, policy="fail", extra=extra)


decode, pair = engines(small)


@shows("mtp", 1, 1)
class TestMtp:
    def test_text_and_accepted_drafts_are_a_single_engines(self, pair: Pair, progress: Callable[[str], None]) -> None:
        check(pair, LENGTHS, "MTP 1→1, 1 token drafted on P and 3 on D", progress)

    def test_what_p_drafts_behind_its_own_first_token_is_not_used(self, pair: Pair, ports: list[int]) -> None:
        """The draft layer's KV at the last prompt position depends on the first token.

        D computes that position again with its own first token, whatever P's was.
        """
        (d,) = pair.decode
        prompts = [fresh_prompt(length) for length in (64, 65, 200)]
        alone = drafts_of(d, d.url, prompts)
        expected = reference_answers(pair.prefill, prompts, TOKENS)
        firsts: list[int] = []

        def wrong_first(body: dict[str, Any]) -> Said:
            if "reservation" not in body:
                return 204, []  # the report of a load's end
            prompt, answer = prompts[int(body["ticket"])], expected[int(body["ticket"])]
            other = (answer.tokens[0] + 7) % 500
            params = {"do_remote_decode": True, "reservation": body["reservation"]}
            given = post(pair.prefill.url, body_of(prompt, 1, kv_transfer_params=params, allowed_token_ids=[other]))
            firsts.extend(given["choices"][0]["token_ids"])
            return 200, [{"event": "accepted", "prefill": "127.0.0.1:1"}, {"event": "prefilled"}]

        loaded = pair.loaded_tokens()
        with fake_metaserver(ports[-1], wrong_first), drafted(d) as drafts:
            for index, prompt in enumerate(prompts):
                url = f"http://127.0.0.1:{ports[-1]}"
                got = complete(d.url, transfer_request(url, str(index), prompt, TOKENS))
                pair.compare([prompt], [got], "another first token on P")
        assert pair.loaded_tokens() - loaded == sum(map(len, prompts))
        assert all(first != answer.tokens[0] for first, answer in zip(firsts, expected, strict=True))
        assert drafts() == padded(alone, prompts)

    def test_an_answer_goes_on_with_drafts_as_good(self, pair: Pair, ports: list[int]) -> None:
        check_goes_on(pair, ports[-1])

    def test_answers_go_on_together_with_drafts(self, pair: Pair, ports: list[int]) -> None:
        (d,) = pair.decode
        prompts = [fresh_prompt(25 + 40 * i) for i in range(8)]
        expected = reference_answers(pair.prefill, prompts, TOKENS)
        with answers_of_another(pair.prefill, ports[-1]) as router:
            bodies = [
                router.body(body_of(prompt, TOKENS), prompt, want.tokens[: 1 + 3 * index])
                for index, (prompt, want) in enumerate(zip(prompts, expected, strict=True))
            ]
            for prompt, want, got in zip(prompts, expected, gather(d.url, bodies), strict=True):
                pair.judge_all("8 that go on at once", prompt, want, got)
            router.check(len(prompts))

    def test_a_load_that_fails_ends_its_request_alone(self, pair: Pair, ports: list[int]) -> None:
        check_failed_load(pair, ports[-1], (33, 250))


@pytest.mark.slow
class TestMtpShapes:
    @shows("mtp", 2, 1)
    def test_from_tp_2(
        self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker, progress: Callable[[str], None]
    ) -> None:
        spec = mtp("mtp-p2", 3, role="kv_producer", tp=2, extra=cluster.push_config())
        with running(cluster, make_pair, spec, beside=[decode]) as pair:
            check(pair, LENGTHS, "MTP 2→1, 3 tokens on both", progress)

    @pytest.mark.parametrize(("model", "p_tp", "d_tp"), [sized("mtp", 1, 2), sized("mtp", 4, 2)])
    def test_other_sizes(
        self,
        model: str,
        p_tp: int,
        d_tp: int,
        cluster: Cluster,
        allowed: list[str],
        make_pair: PairMaker,
        progress: Callable[[str], None],
    ) -> None:
        config = cluster.push_config(*allowed)
        specs = (
            mtp(f"{model}-p{p_tp}", 3, role="kv_producer", tp=p_tp, extra=cluster.push_config()),
            mtp(f"{model}-d{d_tp}", 3, role="kv_consumer", tp=d_tp, policy="fail", extra=config),
        )
        with running(cluster, make_pair, *specs) as pair:
            check(pair, LENGTHS, f"MTP {p_tp}→{d_tp}, 3 tokens on both", progress)

    def test_without_a_draft_model_on_p_the_text_is_right_and_the_drafts_are_not(
        self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker, progress: Callable[[str], None]
    ) -> None:
        spec = EngineSpec("mtp-p0", ensure("mtp"), role="kv_producer", extra=cluster.push_config())
        with running(cluster, make_pair, spec, beside=[decode]) as pair:
            check_left_out(pair, "MTP", progress)

    def test_a_draft_model_on_p_alone_is_not_pushed(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        config = cluster.push_config(*allowed)
        specs = (
            mtp("mtp-p1", 1, role="kv_producer", extra=cluster.push_config()),
            EngineSpec("mtp-d0", ensure("mtp"), role="kv_consumer", tp=2, policy="fail", extra=config),
        )
        with running(cluster, make_pair, *specs) as pair:
            for length in LENGTHS:
                pair.check([fresh_prompt(length)], name="MTP on P alone, 1→2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "p_tp", "d_tp"), [sized("spec-eagle3", p, d) for p, d in ((1, 1), (2, 1), (1, 2), (4, 2))]
)
def test_a_draft_model_of_another_shape(
    model: str,
    p_tp: int,
    d_tp: int,
    cluster: Cluster,
    allowed: list[str],
    ports: list[int],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    """Eagle3 with twice as many KV heads as its target.

    With TP 2→1 the ranks exchange both kinds of layers, and P computes in chunks.
    """
    draft = draft_config("eagle3", model, num_speculative_tokens=1)
    target: Path = ensure("spec")
    more = {"regroup": "always"} if p_tp > 1 else {}
    p_config, d_config = cluster.push_config(**more), cluster.push_config(*allowed)
    common: dict[str, Any] = {"chunk": 96} if p_tp > 1 else {}
    specs = (
        EngineSpec("own-p", target, role="kv_producer", tp=p_tp, draft=draft, extra=p_config, **common),
        EngineSpec("own-d", target, role="kv_consumer", tp=d_tp, policy="fail", draft=draft, extra=d_config, **common),
    )
    with running(cluster, make_pair, *specs) as pair:
        check(pair, LENGTHS, f"Eagle3 {p_tp}→{d_tp}", progress, chunked=p_tp > 1)
        if p_tp == 1:
            check_goes_on(pair, ports[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "draft", "p_tp"),
    [
        pytest.param("eagle", "spec", "spec-eagle", 1, marks=shows("spec-eagle", 1, 1)),
        pytest.param("draft_model", "spec", "spec", 1, marks=shows("spec", 1, 1)),
        pytest.param("dflash", "spec-flash", "spec-flash-dflash", 1, marks=shows("spec-flash-dflash", 1, 1)),
        pytest.param("dflash", "spec-flash", "spec-flash-dflash", 2, marks=shows("spec-flash-dflash", 2, 1)),
    ],
)
def test_other_draft_models(
    method: str,
    model: str,
    draft: str,
    p_tp: int,
    cluster: Cluster,
    allowed: list[str],
    ports: list[int],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    """Eagle, a whole separate model, and DFlash.

    The separate model (here the target itself) has a prefix in its layers' names. DFlash makes its layers' KV from the
    target's hidden states before it runs, and drafts all tokens in one pass.
    """
    target: Path = ensure(model)
    of = draft_config(method, draft, num_speculative_tokens=2)
    common: dict[str, Any] = {"draft": of}
    p_config = cluster.push_config(**({"regroup": "always"} if p_tp > 1 else {}))
    specs = (
        EngineSpec(f"{method}-p", target, role="kv_producer", tp=p_tp, extra=p_config, **common),
        EngineSpec(
            f"{method}-d",
            target,
            role="kv_consumer",
            policy="fail",
            extra=cluster.push_config(*allowed),
            **common,
        ),
    )
    with running(cluster, make_pair, *specs) as pair:
        check(pair, LENGTHS, f"{method} {p_tp}→1", progress)
        check_goes_on(pair, ports[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "draft", "tokens"),
    [("dflash", "spec-flash", "spec-flash-dflash", 2), ("eagle3", "spec", "spec-eagle3", 1), ("eagle", "spec", "spec-eagle", 2)],
)  # fmt: skip
def test_drafts_without_the_prompts_cache_are_worse(
    method: str,
    model: str,
    draft: str,
    tokens: int,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    """A draft layer that is left out changes no token."""
    target, of = ensure(model), draft_config(method, draft, num_speculative_tokens=tokens)
    config = cluster.push_config(*allowed)
    specs = (
        EngineSpec("undrafted-p", target, role="kv_producer", extra=cluster.push_config()),
        EngineSpec("drafting-d", target, role="kv_consumer", policy="fail", draft=of, extra=config),
    )
    with running(cluster, make_pair, *specs) as pair:
        check_left_out(pair, method, progress)


@pytest.mark.slow
@pytest.mark.parametrize("p_drafts", [False, True], ids=["on D alone", "on both"])
def test_drafts_without_a_model_have_no_cache(
    p_drafts: bool, cluster: Cluster, allowed: list[str], make_pair: PairMaker
) -> None:
    """ngram. A prompt has nearly every token of the vocabulary, so lookups use a single token."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    target, config = ensure("spec"), cluster.push_config(*allowed)
    on_p = ngram if p_drafts else {}
    specs = (
        EngineSpec("ngram-p", target, role="kv_producer", draft=on_p, extra=cluster.push_config()),
        EngineSpec("ngram-d", target, role="kv_consumer", policy="fail", draft=ngram, extra=config),
    )
    prompts = [fresh_prompt(length) for length in (333, 700, 1200)]
    with running(cluster, make_pair, *specs) as pair:
        (d,) = pair.decode
        alone = started(d, prompts)
        with drafted(d) as drafts:
            for prompt in prompts:
                pair.check([prompt], TOKENS, name=f"ngram {'on both' if p_drafts else 'on D alone'}")
        assert drafts().tokens > ENOUGH < alone.tokens and drafts().accepted == alone.accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p_drafts", "d_drafts", "p_tp"),
    [
        pytest.param(1, 3, 1, marks=shows("qwen3next-mtp", 1, 1)),
        pytest.param(3, 1, 2, marks=shows("qwen3next-mtp", 2, 1)),
    ],
)
def test_mtp_beside_states(
    p_drafts: int,
    d_drafts: int,
    p_tp: int,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    """Gated DeltaNet in three layers of four, without prefix caches.

    Each drafted token has a row more in the convolution's state, and a block of its own. With prefix caches vLLM moves
    states by a kernel that CPUs lack. In float32: in bfloat16 two single engines of TP 1 and 2 put some tokens up to
    0.7 apart, without any connector.
    """
    more: dict[str, Any] = {"arguments": ("--no-enable-prefix-caching",)}

    def drafting(name: str, role: str, tokens: int, extra: dict[str, Any], **given: Any) -> EngineSpec:
        draft = {"method": "mtp", "num_speculative_tokens": tokens}
        return spec(name, "qwen3next-mtp", role, extra, draft=draft, plugins=(DELTA,), **more, **given)

    config = cluster.push_config(*allowed)
    specs = (
        drafting("next-mtp-p", "kv_producer", p_drafts, cluster.push_config(), tp=p_tp),
        drafting("next-mtp-d", "kv_consumer", d_drafts, config),
    )
    with running(cluster, make_pair, *specs) as pair:
        name = f"Qwen3-Next's MTP {p_tp}→1, {p_drafts} and {d_drafts} tokens"
        check(pair, (1, 2, 95, 96, 97, 333, 700), name, progress, chunked=True)
        progress(f"figure: {name}: {pair.tally.summary()}")
