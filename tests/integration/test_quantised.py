# SPDX-License-Identifier: Apache-2.0
"""Quantised caches through real pairs, `verify: full`: vLLM's fp8 in two formats, and int8 with scales in the cache.

The reference is an engine with such a cache: values rounded on P must arrive as rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kind_pairs import (
    BLOCK,
    check_choices,
    check_failed_load,
    check_left,
    engines,
    exercise,
    leaving,
    of,
    rounding_limit,
    running,
    shows,
    spec,
    wrong_answers,
)
from pairs import Pair, PairMaker, fresh_prompt, reference_answers
from test_indexers import tuples

from tools.support.client import RequestFailed, attempt, body_of, complete
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.on_cpu import no_fp8

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

LENGTHS = (1, 20, 32, 33, 96, 333, 700)


def stored(as_: str, **more: Any) -> dict[str, Any]:
    return {"arguments": ("--kv-cache-dtype", as_), **more}


def scales(what: str) -> dict[str, Any]:
    """Return the settings of a P with this planted fault in the scales of index keys."""
    return {
        "connector": "ScalesConnector",
        "transfer": {"kv_connector_module_path": "pd_test_scales"},
        "environment": {"PD_TEST_SCALES": what},
    }


decode, pair = engines(of("gqa", **stored("fp8")))


needs_fp8 = pytest.mark.skipif(bool(no_fp8()), reason=no_fp8())


@needs_fp8
@shows("fp8", 1, 1)
class TestFp8:
    def test_every_length_in_chunks(self, pair: Pair) -> None:
        exercise(pair, "fp8 1→1", LENGTHS)

    def test_prefixes(self, pair: Pair) -> None:
        pair.check_prefix_on_decode(BLOCK)
        pair.check_prefix_on_prefill(BLOCK)

    def test_an_aborted_request_leaves_nothing(self, pair: Pair) -> None:
        check_left(pair, 97)

    def test_two_choices(self, pair: Pair) -> None:
        check_choices(pair, 97)

    def test_a_load_that_fails_ends_its_request_alone(self, pair: Pair, ports: list[int]) -> None:
        check_failed_load(pair, ports[-1], (33, 250))


@pytest.mark.slow
@needs_fp8
class TestFp8Shapes:
    @shows("fp8", 2, 1)
    def test_from_tp_2_regrouped(self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker) -> None:
        p = spec("fp8-p2", "gqa", "kv_producer", cluster.push_config(regroup="always"), **stored("fp8_e4m3", tp=2))
        with running(cluster, make_pair, p, beside=[decode]) as pair:
            exercise(pair, "fp8 2→1 regrouped", LENGTHS)

    @pytest.mark.parametrize(
        ("model", "dtype", "p_tp"),
        [
            pytest.param("gqa", "fp8_e5m2", 1, marks=shows("fp8", 1, 2)),
            pytest.param("gqa", "fp8", 4, marks=shows("fp8", 4, 2)),
            pytest.param("gptoss", "fp8", 1, marks=shows("fp8-gptoss", 1, 2)),
            pytest.param("nemotronh", "fp8", 1, marks=shows("fp8-nemotronh", 1, 2)),
        ],
    )
    def test_others_to_tp_2(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, model: str, dtype: str, p_tp: int
    ) -> None:
        specs = (
            spec("other-p", model, "kv_producer", cluster.push_config(), **stored(dtype, tp=p_tp)),
            spec("other-d", model, "kv_consumer", cluster.push_config(*allowed), **stored(dtype, tp=2)),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, f"{model} {dtype} {p_tp}→2", LENGTHS)

    def test_a_layer_that_is_left_out_makes_other_answers(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        """A layer's keys and values are one component here. A checksum cannot detect it: P sums what it pushes."""
        specs = (
            spec("leaving-p", "gqa", "kv_producer", cluster.push_config(verify="off"), **leaving("layer 1", **stored("fp8"))),
            spec("leaving-d", "gqa", "kv_consumer", cluster.push_config(*allowed, verify="off"), **stored("fp8")),
        )  # fmt: skip
        with running(cluster, make_pair, *specs) as pair:
            wrong = wrong_answers(pair, (96, 160, 193, 352))
        assert wrong == 4, f"{4 - wrong} of 4 answers do not depend on that layer"

    def test_another_format_on_p_is_refused_by_its_name_and_d_computes(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        """By dtype both are uint8."""
        specs = (
            spec("e5m2-p", "gqa", "kv_producer", cluster.push_config(), **stored("fp8_e5m2")),
            spec("e4m3-d", "gqa", "kv_consumer", cluster.push_config(*allowed), **stored("fp8", policy="recompute")),
        )
        with running(cluster, make_pair, *specs) as pair:
            (d,) = pair.decode
            prompt = fresh_prompt(200)
            (alone,) = reference_answers(d, [prompt], 12)
            assert complete(pair.front.url, body_of(prompt, 12)).tokens == alone.tokens
            log_text = d.log.read_text(errors="replace")
        assert "PD-GEO-001" in log_text and "dtype" in log_text and "fp8_e5m2" in log_text and "fp8_e4m3" in log_text


@pytest.fixture(scope="class")
def unchecked(cluster: Cluster, allowed: list[str]) -> Iterator[EngineProcess]:
    """A D without checksums, so that a wrong byte gives a wrong token."""
    config = cluster.push_config(*allowed, verify="off")
    (d,) = cluster.start(spec("scales-d", "indexed-int8", "kv_consumer", config, **tuples()))
    yield d
    cluster.stop(d)


@pytest.mark.slow
class TestPlantedFaultsOfScales:
    """int8 with scales: an indexer's scale is a component of its own, the last in the tuple."""

    @pytest.mark.parametrize("what", ["left out", "of the block before"])
    def test_scales_that_are_not_those_of_the_block_make_other_answers(
        self, cluster: Cluster, unchecked: EngineProcess, make_pair: PairMaker, what: str
    ) -> None:
        p = spec("scales-p", "indexed-int8", "kv_producer", cluster.push_config(verify="off"), **scales(what))
        with running(cluster, make_pair, p, beside=[unchecked]) as pair:
            wrong = wrong_answers(pair, (96, 160, 193, 352))
        assert wrong == 4, f"{4 - wrong} of 4 answers do not depend on the scales ({what})"

    def test_such_scales_are_seen_at_unequal_sizes_too(
        self, cluster: Cluster, unchecked: EngineProcess, make_pair: PairMaker, progress: Callable[[str], None]
    ) -> None:
        """There an answer may differ by as much as P and D, each alone, do."""
        config = cluster.push_config(verify="off", regroup="always")
        p = spec("scales-p2", "indexed-int8", "kv_producer", config, tp=2, **scales("of the block before"))
        with running(cluster, make_pair, p, beside=[unchecked]) as pair:
            limit = rounding_limit(pair.prefill, unchecked, (20, 97, 159, 333) * 8)
            wrong = wrong_answers(pair, (96, 160, 193, 352), tie=limit)
            progress(f"figure: int8 2→1: {wrong} of 4 answers are more than {limit:.2e} off with a wrong scale")
        assert wrong == 4, f"{4 - wrong} of 4 answers are within {limit}"

    def test_scales_of_another_block_are_found_by_verify(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        specs = (
            spec("summed-p", "indexed-int8", "kv_producer", cluster.push_config(), **scales("of the block before")),
            spec("summed-d", "indexed-int8", "kv_consumer", cluster.push_config(*allowed), **tuples()),
        )
        with running(cluster, make_pair, *specs) as pair:
            (refused,) = attempt(pair.front.url, [body_of(fresh_prompt(160), 12)])
            assert isinstance(refused, RequestFailed)
            assert re.search(
                r"PD-WIRE-004.*\(kv1: scale of the index key\)", pair.decode[0].log.read_text(errors="replace")
            )
