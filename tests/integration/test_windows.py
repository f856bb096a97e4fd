# SPDX-License-Identifier: Apache-2.0
"""Sliding windows through real pairs, `verify: full`: in every other layer, in five of six, in all.

The models are gpt-oss, Gemma-3 and Mistral. vLLM keeps a block table for each group of layers, all with blocks of one
pool at the same addresses, and frees blocks behind a window. Missing or wrong blocks of a window change the tokens: the
last class leaves one out.
"""

from __future__ import annotations

from typing import Any

import pytest
from kind_pairs import (
    BLOCK,
    check_choices,
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
from pairs import Pair, PairMaker, counter, fresh_prompt

from tools.support.checks import eventually
from tools.support.client import body_of, complete
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import RECIPES

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

# 127, 159 and 191: when the last token is computed again, its window of 128 begins with the last token of a block.
LENGTHS = (1, 2, 20, 127, 128, 129, 159, 160, 161, 191, 200, 330, 700)


def check_prefixes(pair: Pair, window: int) -> None:
    """Check prefixes on P and on D.

    Layers with a window only have the blocks that the last token of the earlier prompt saw, so only prompts that
    continue it have a prefix.
    """
    head = fresh_prompt(6 * BLOCK + 9)
    pair.check([head], name="cold")
    longer = [*head, *fresh_prompt(3 * BLOCK)]
    before = pair.loaded_tokens()
    answer = complete(pair.front.url, body_of(longer, 12))
    loaded = pair.loaded_tokens() - before
    assert loaded == len(longer) - 6 * BLOCK, f"D loaded {loaded} of {len(longer)} tokens"
    pair.compare([longer], [answer], f"a prefix on D, window {window}")
    head = fresh_prompt(6 * BLOCK + 5)
    complete(pair.prefill.url, body_of(head, 1))  # to P only: D does not have it
    pair.check([[*head, *fresh_prompt(50)]], name=f"a prefix on P, window {window}")


decode, pair = engines(of("gptoss"))


@shows("gptoss", 1, 1)
class TestTwoGroups:
    """gpt-oss: layers 0 and 2 see 128 tokens, layers 1 and 3 all; layers 0 and 1 share an address."""

    def test_every_length_in_chunks(self, pair: Pair) -> None:
        exercise(pair, "gptoss 1→1", LENGTHS)

    def test_prefixes(self, pair: Pair) -> None:
        check_prefixes(pair, RECIPES["gptoss"].window)

    def test_an_aborted_request_leaves_nothing(self, pair: Pair) -> None:
        check_left(pair, 159)

    def test_two_choices(self, pair: Pair) -> None:
        check_choices(pair, 159)

    def test_a_load_that_fails_ends_its_request_alone(self, pair: Pair, ports: list[int]) -> None:
        check_failed_load(pair, ports[-1], (127, 250))

    def test_all_of_a_prompt_without_its_first_token_is_a_load_that_failed(self, pair: Pair, ports: list[int]) -> None:
        check_first_token_lost(pair, ports[-1], 159, fails=True)

    def test_a_prompt_whose_first_token_is_d_s_own_stops_one_token_short(self, pair: Pair) -> None:
        check_cut(pair, (127, 159, 191))


@pytest.mark.slow
class TestWindowShapes:
    @shows("gptoss", 2, 1)
    def test_from_tp_2_regrouped(self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker) -> None:
        p = spec("gptoss-p2", "gptoss", "kv_producer", cluster.push_config(regroup="always"), tp=2)
        with running(cluster, make_pair, p, beside=[decode]) as pair:
            exercise(pair, "gptoss 2→1 regrouped", LENGTHS)
            check_prefixes(pair, RECIPES["gptoss"].window)

    @pytest.mark.parametrize(
        ("model", "p_tp", "d_tp"),
        [
            sized("gptoss", 1, 2),
            sized("gptoss", 4, 2),
            sized("gemma3", 1, 1),  # each of six layers is a group, and all share an address
            sized("gemma3", 2, 1),
            sized("gemma3", 1, 2),
            sized("gemma3", 4, 2),
            sized("windowed", 1, 1),  # Mistral: one group, whose blocks never hold the whole prompt
            sized("windowed", 1, 2),
            sized("windowed", 2, 1),
            sized("windowed", 4, 2),
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
            check_prefixes(pair, RECIPES[model].window)


@pytest.mark.slow
class TestLayersThatShareACache:
    """Gemma-3n: the last two of six layers read the cache of the two before them. Each byte is pushed once."""

    @pytest.mark.parametrize(
        ("windows", "p_tp", "d_tp"),
        [
            pytest.param(windows, p_tp, d_tp, marks=shows("gemma3n", p_tp, d_tp))
            for windows, p_tp, d_tp in ((True, 1, 1), (False, 2, 1), (True, 1, 2), (True, 4, 2))
        ],
    )
    def test_nothing_is_pushed_twice(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, windows: bool, p_tp: int, d_tp: int
    ) -> None:
        """Without windows in the cache's manager there is one group, and P at TP 2 regroups its layers."""
        recipe = RECIPES["gemma3n"]
        p_extra: dict[str, Any] = {} if windows else {"regroup": "always"}
        more: dict[str, Any] = {} if windows else {"arguments": ("--disable-hybrid-kv-cache-manager",)}
        specs = (
            spec("shared-p", "gemma3n", "kv_producer", cluster.push_config(**p_extra), tp=p_tp, **more),
            spec("shared-d", "gemma3n", "kv_consumer", cluster.push_config(*allowed), tp=d_tp, **more),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, f"gemma3n, {'several groups' if windows else 'one group'}", LENGTHS)
            before = counter(pair.prefill, "vllm:ascend_pd_bytes_transferred_total")
            pair.check([fresh_prompt(10 * BLOCK)], name="counted")
            # Two of the four layers with a cache have a window of two blocks, which begins with a block here.
            tokens = 2 * 10 * BLOCK + 2 * (recipe.window if windows else 10 * BLOCK)
            wanted = before + tokens * 2 * recipe.kv_heads * recipe.head_dim * 4
            eventually(lambda: counter(pair.prefill, "vllm:ascend_pd_bytes_transferred_total") >= wanted, "all bytes")
            assert counter(pair.prefill, "vllm:ascend_pd_bytes_transferred_total") == wanted


@pytest.mark.slow
class TestPlantedFaultsOfWindows:
    @pytest.mark.parametrize(
        ("model", "what"), [("gptoss", "group 0"), ("gptoss", "group 1"), ("gptoss", "block"), ("gemma3", "group 3")]
    )
    def test_what_is_left_out_makes_other_answers(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, model: str, what: str
    ) -> None:
        """A checksum cannot detect it, because P computes it of what it pushes, so D does not compare here.

        At these lengths all of the first block lies in the window: an answer need not depend on one token of 128.
        """
        specs = (
            spec("leaving-p", model, "kv_producer", cluster.push_config(verify="off"), **leaving(what)),
            spec("leaving-d", model, "kv_consumer", cluster.push_config(*allowed, verify="off")),
        )
        with running(cluster, make_pair, *specs) as pair:
            wrong = wrong_answers(pair, (160, 192, 320, 352))
        assert wrong == 4, f"{4 - wrong} of 4 answers do not depend on what was left out ({what})"
