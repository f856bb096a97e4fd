# SPDX-License-Identifier: Apache-2.0
"""Recurrent states through real pairs, `verify: full`: Mamba-2 and Gated DeltaNet.

Mamba-2 before attention (Nemotron-H), beside it (Falcon-H1), and alone. A recurrent layer keeps one state of all tokens
so far. D begins with P's token, so the state after the prompt is transferred: with one token more or less, or with
another request's state, the answer differs, as the last class shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kind_pairs import (
    DELTA,
    KINDS,
    check_choices,
    check_computed_again,
    check_cut,
    check_failed_load,
    check_first_token_lost,
    check_left,
    engines,
    exercise,
    leaving,
    of,
    running,
    shows,
    sized,
    spec,
    wrong_answers,
)
from pairs import Pair, PairMaker, fresh_prompt, reference_answers

from tools.support.client import body_of, complete
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally, TokensDiffer
from tools.support.engine import EngineProcess

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

# With blocks and chunks of 96 (vLLM derives the block size from the state): for 97 and 193 tokens the needed state is
# the last one of a block, and D's own goes into the next block.
LENGTHS = (1, 2, 3, 20, 95, 96, 97, 98, 192, 193, 200, 333, 700)
BLOCK = 96
WHOLE = ("--no-enable-prefix-caching",)  # mamba_cache_mode none: one block per request, as long as the longest request


decode, pair = engines(of("nemotronh"))


@shows("nemotronh", 1, 1)
class TestStatesBesideAttention:
    """Nemotron-H: two layers with Mamba-2, one with attention; B and C have one group. Mode `align`."""

    def test_every_length_in_chunks(self, pair: Pair) -> None:
        exercise(pair, "nemotronh 1→1", LENGTHS)

    def test_prefixes(self, pair: Pair) -> None:
        """D keeps the attention that it has of a prefix, and loads the state with the rest."""
        assert pair.check_prefix_of_states(BLOCK) == [2 * BLOCK] * 3

    def test_an_aborted_request_leaves_nothing(self, pair: Pair) -> None:
        check_left(pair, 193)

    def test_a_load_that_fails_ends_its_request_alone(self, pair: Pair, ports: list[int]) -> None:
        """With several groups vLLM gets the failed request's id; block ids would stop the engine."""
        check_failed_load(pair, ports[-1], (97, 250))

    def test_two_choices(self, pair: Pair) -> None:
        check_choices(pair, 193)

    def test_a_prompt_whose_first_token_is_d_s_own_stops_one_token_short(self, pair: Pair) -> None:
        check_cut(pair, (97, 193, 250))


@pytest.mark.slow
class TestStateShapes:
    def test_a_failed_load_is_computed_again(
        self, cluster: Cluster, allowed: list[str], ports: list[int], make_pair: PairMaker
    ) -> None:
        specs = (
            spec("again-p", "nemotronh", "kv_producer", cluster.push_config()),
            spec("again-d", "nemotronh", "kv_consumer", cluster.push_config(*allowed), policy="recompute"),
        )
        with running(cluster, make_pair, *specs) as pair:
            pair.check([fresh_prompt(250)], name="before a load that fails")
            check_computed_again(pair, ports[-1], (97, 193, 250))
            check_first_token_lost(pair, ports[-1], 193, fails=False)
            # D has the attention of these prefixes, and no state for it.
            for length in (97, 250):
                pair.check([head := fresh_prompt(length)], name="a prefix")
                check_computed_again(pair, ports[-1], (20,), behind=head)
            exercise(pair, "after loads that failed", (97, 250))

    def test_without_prefix_caching_on_p(self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker) -> None:
        """Mode `none` on P: its one block stands for the whole prompt, each of D's for 96 tokens."""
        p = spec("nemotronh-none", "nemotronh", "kv_producer", cluster.push_config(), arguments=WHOLE)
        with running(cluster, make_pair, p, beside=[decode]) as pair:
            exercise(pair, "nemotronh none→align", LENGTHS)

    @shows("nemotronh", 2, 1)
    def test_from_tp_2(self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker) -> None:
        """Each rank has half of the heads, and all of B and C. Attention is regrouped."""
        p = spec("nemotronh-p2", "nemotronh", "kv_producer", cluster.push_config(regroup="always"), tp=2)
        with running(cluster, make_pair, p, beside=[decode]) as pair:
            exercise(pair, "nemotronh 2→1", LENGTHS)
            pair.check_prefix_of_states(BLOCK)

    @pytest.mark.parametrize(
        ("model", "p_tp", "d_tp"), [sized("falconh1", 1, 1), sized("falconh1", 2, 1), sized("falconh1", 1, 2)]
    )
    def test_in_every_layer_and_each_rank_has_a_group(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, model: str, p_tp: int, d_tp: int
    ) -> None:
        """Falcon-H1: attention and Mamba-2 side by side; B and C have two groups. Mode `none` on D."""
        specs = (
            spec("falconh1-p", model, "kv_producer", cluster.push_config(), tp=p_tp),
            spec("falconh1-d", model, "kv_consumer", cluster.push_config(*allowed), tp=d_tp, arguments=WHOLE),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, f"falconh1 {p_tp}→{d_tp}", LENGTHS)

    @shows("granite", 2, 1)
    def test_before_attention_with_experts(self, cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> None:
        """Granite 4: two layers with Mamba-2, two with attention, experts in all four."""
        specs = (
            spec("granite-p", "granite", "kv_producer", cluster.push_config(regroup="always"), tp=2),
            spec("granite-d", "granite", "kv_consumer", cluster.push_config(*allowed)),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, "granite 2→1", LENGTHS)

    @pytest.mark.parametrize(
        ("model", "p_tp", "d_tp"),
        [
            sized("nemotronh", 1, 2),
            sized("nemotronh", 4, 2),
            sized("mamba2", 1, 1),  # states alone: no layer has a hook
        ],
    )
    def test_other_sizes(
        self, model: str, p_tp: int, d_tp: int, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        specs = (
            spec(f"{model}-p{p_tp}", model, "kv_producer", cluster.push_config(), tp=p_tp),
            spec(f"{model}-d{d_tp}", model, "kv_consumer", cluster.push_config(*allowed), tp=d_tp),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, f"{model} {p_tp}→{d_tp}", LENGTHS)


@pytest.mark.slow
@shows("qwen3next", 1, 1)
class TestGatedDeltaNet:
    """Qwen3-Next in bfloat16, the only dtype that a CPU supports for it.

    On D the last prompt token goes through another kernel than in a single engine, so tokens may differ where the two
    best are nearly equal, and only there.
    """

    LENGTHS = (2, 97, 385, 500)  # blocks of 384

    @pytest.mark.parametrize("what", ["", "section values"], ids=["all", "no values"])
    def test_tokens_are_as_good_as_the_single_engines_and_only_with_the_state(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, progress: Callable[[str], None], what: str
    ) -> None:
        verify = "off" if what else "full"
        more: dict[str, Any] = {"arguments": ("--dtype", "bfloat16")}
        less = leaving(what, **more) if what else more
        specs = (
            spec("qwen3next-p", "qwen3next", "kv_producer", cluster.push_config(verify=verify), **less),
            spec("qwen3next-d", "qwen3next", "kv_consumer", cluster.push_config(*allowed, verify=verify), **more),
        )
        with running(cluster, make_pair, *specs) as pair:
            judge, wrong, others = AnswerTally(tie=0.25, excused_share=1.0), 0, 0
            for length in self.LENGTHS:
                prompt = fresh_prompt(length)
                (expected,) = reference_answers(pair.prefill, [prompt], 8)
                before = pair.loaded_tokens()
                got = complete(pair.front.url, body_of(prompt, 8))
                assert pair.loaded_tokens() - before == length
                others += got.tokens != expected.tokens
                try:
                    judge.check(f"{length} tokens", prompt, expected.tokens, got.tokens, pair.prefill.url)
                except TokensDiffer:
                    wrong += 1
        progress(f"figure: qwen3next{' without ' + what if what else ''}: {judge.summary()}, {wrong} wrong")
        if what:  # by chance the first different token may be nearly as good
            assert others == len(self.LENGTHS) and wrong
        else:
            assert not wrong


@pytest.mark.slow
class TestPlantedFaultsOfStates:
    def test_what_is_left_out_makes_other_answers(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        """A checksum cannot detect it, because P computes it of what it pushes, so D does not compare here.

        B and C alone, of three rows, do not change answers this short; checksums and the unit tests detect them.
        """
        specs = (
            spec(
                "leaving-p", "nemotronh", "kv_producer", cluster.push_config(verify="off"), **leaving("section heads")
            ),
            spec("leaving-d", "nemotronh", "kv_consumer", cluster.push_config(*allowed, verify="off")),
        )
        with running(cluster, make_pair, *specs) as pair:
            wrong = wrong_answers(pair, (96, 160, 193, 352))
        assert wrong == 4, f"{4 - wrong} of 4 answers do not depend on what was left out"

    @pytest.mark.parametrize(("what", "p_tp", "d_tp"), [("values", 1, 2), ("keys", 1, 2), ("values", 2, 1)])
    def test_a_section_of_gated_deltanet_left_out_at_unequal_sizes_makes_other_answers(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, what: str, p_tp: int, d_tp: int
    ) -> None:
        """In float32, in which the order of additions makes no other tokens."""
        more: dict[str, Any] = {"plugins": (KINDS, DELTA)}
        less = leaving(f"section {what}", tp=p_tp, **more)
        specs = (
            spec("leaving-p", "qwen3next", "kv_producer", cluster.push_config(verify="off"), **less),
            spec("leaving-d", "qwen3next", "kv_consumer", cluster.push_config(*allowed, verify="off"), tp=d_tp, **more),
        )
        with running(cluster, make_pair, *specs) as pair:
            wrong = wrong_answers(pair, (97, 160, 385, 500))
        assert wrong == 4, f"{4 - wrong} of 4 answers do not depend on the {what}"
