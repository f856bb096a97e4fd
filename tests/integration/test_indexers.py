# SPDX-License-Identifier: Apache-2.0
"""Groups of different layers through real pairs, `verify: full`: indexers' keys and a draft model's heads beside MLA.

The model (plugins/kinds) has them in plain torch, with chunks and prefix caching, which vLLM's own MLA lacks on a CPU.
The indexers' caches decide which tokens the attention sees, so without them answers differ: the last class shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from draft_pairs import check as check_drafts
from draft_pairs import draft_config
from kind_pairs import (
    BLOCK,
    CHUNK,
    check_choices,
    check_failed_load,
    engines,
    exercise,
    of,
    running,
    shows,
    spec,
    wrong_answers,
)
from pairs import Pair, PairMaker, close_traces

from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from vllm_ascend_pd.viewer.timeline import Trace

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

LENGTHS = (1, 20, BLOCK, BLOCK + 1, CHUNK, 333, 700)


def tuples(**more: Any) -> dict[str, Any]:
    """Return the settings of a connector with vllm-ascend's interface."""
    return {"connector": "TupleConnector", "transfer": {"kv_connector_module_path": "pd_test_tuples"}, **more}


decode, pair = engines(of("indexed"))


@shows("indexed", 1, 1)
class TestAnIndexerBesideMla:
    """vLLM's form: a layer of its own, beside three of four attentions."""

    def test_every_length_in_chunks(self, pair: Pair) -> None:
        exercise(pair, "indexer 1→1", LENGTHS)

    def test_a_prefix_on_decode(self, pair: Pair) -> None:
        pair.check_prefix_on_decode(BLOCK)

    def test_a_prefix_on_prefill(self, pair: Pair) -> None:
        pair.check_prefix_on_prefill(BLOCK)

    def test_two_choices(self, pair: Pair) -> None:
        check_choices(pair, 97)

    def test_a_load_that_fails_ends_its_request_alone(self, pair: Pair, ports: list[int]) -> None:
        check_failed_load(pair, ports[-1], (33, 250))


@pytest.mark.slow
class TestIndexerShapes:
    @shows("indexed", 2, 1)
    def test_from_tp_2_each_rank_pushes_its_share(
        self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker, progress: Callable[[str], None]
    ) -> None:
        """Both ranks hold all of it: MLA and indexer are replicated."""
        traces = cluster.directory / "traces-indexed"
        traces.mkdir()
        extra = cluster.push_config(trace_dir=str(traces), regroup="always")
        with running(
            cluster, make_pair, spec("indexed-p2", "indexed", "kv_producer", extra, tp=2), beside=[decode]
        ) as pair:
            exercise(pair, "indexer 2→1", LENGTHS)
            close_traces(pair)
        pushed: Counter[str] = Counter()
        layers: dict[str, set[int]] = {}
        for event in Trace(traces).events:
            if event.stage == "layer_pushed":
                pushed[event.source] += event.facts["bytes"]
                layers.setdefault(event.source, set()).update(event.facts["layers"])
        progress(f"indexer 2→1: {sorted(pushed.values())} bytes by rank")
        assert [len(of) for of in layers.values()] == [7, 7], "four attentions and three indexers, from each rank"
        assert max(pushed.values()) < 1.2 * min(pushed.values())

    @shows("indexed-tuple", 1, 2)
    def test_in_one_tuple_with_the_latent_to_tp_2(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        """vllm-ascend's form: a third tensor of each layer with an indexer."""
        specs = (
            spec("tuple-p", "indexed", "kv_producer", cluster.push_config(), **tuples()),
            spec("tuple-d", "indexed", "kv_consumer", cluster.push_config(*allowed), **tuples(tp=2)),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, "tuples 1→2", LENGTHS)
            pair.check_prefix_on_decode(BLOCK)

    @pytest.mark.parametrize(
        ("kind", "p_tp", "d_tp"),
        [
            pytest.param(kind, p_tp, d_tp, marks=shows(kind, p_tp, d_tp))
            for kind, p_tp, d_tp in (
                ("indexed", 1, 2),
                ("indexed", 4, 2),
                ("indexed-tuple", 4, 2),
                ("indexed-int8", 1, 1),
                ("indexed-int8", 2, 1),
                ("indexed-int8", 1, 2),
                ("indexed-int8", 4, 2),
            )
        ],
    )
    def test_other_sizes(
        self, kind: str, p_tp: int, d_tp: int, cluster: Cluster, allowed: list[str], make_pair: PairMaker
    ) -> None:
        """In int8 as C8: latent and rope packed with a scale; the index key's scale is a tensor of its own."""
        model, given = kind.removesuffix("-tuple"), {} if kind == "indexed" else tuples()
        specs = (
            spec(f"{kind}-p{p_tp}", model, "kv_producer", cluster.push_config(), tp=p_tp, **given),
            spec(f"{kind}-d{d_tp}", model, "kv_consumer", cluster.push_config(*allowed), tp=d_tp, **given),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, f"{kind} {p_tp}→{d_tp}", LENGTHS)

    @shows("indexed-eagle3", 2, 1)
    def test_a_draft_model_with_heads_beside_mla_and_indexers(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, progress: Callable[[str], None]
    ) -> None:
        """Three kinds of layers in one group: Eagle3's eight KV heads beside latents and index keys.

        P's ranks exchange the draft's layer, and push the others directly.
        """
        draft = draft_config("eagle3", "spec-indexed-eagle3", num_speculative_tokens=1)
        p_config, d_config = cluster.push_config(regroup="always"), cluster.push_config(*allowed)
        whole: dict[str, Any] = {
            "draft": draft,
            "chunk": 2048,
        }  # P and D draft differently in chunks: see check_drafts
        specs = (
            spec("three-p", "spec-indexed", "kv_producer", p_config, tp=2, **whole),
            spec("three-d", "spec-indexed", "kv_consumer", d_config, **whole),
        )
        with running(cluster, make_pair, *specs) as pair:
            check_drafts(pair, LENGTHS, "Eagle3 beside MLA and indexers 2→1", progress)

    @shows("indexed-drafts", 1, 1)
    def test_a_draft_model_that_has_indexers(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, progress: Callable[[str], None]
    ) -> None:
        """As in DeepSeek-V3.2's MTP layer.

        Here the draft is the model itself, so nearly all its tokens are accepted.
        """
        draft = draft_config("draft_model", "indexed", num_speculative_tokens=2)
        specs = (
            spec("drafting-p", "indexed", "kv_producer", cluster.push_config(), draft=draft),
            spec("drafting-d", "indexed", "kv_consumer", cluster.push_config(*allowed), draft=draft),
        )
        with running(cluster, make_pair, *specs) as pair:
            check_drafts(pair, LENGTHS, "a draft model with indexers 1→1", progress)


@pytest.mark.slow
class TestPlantedFault:
    def test_keys_that_are_written_after_the_hook_make_other_answers(
        self, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker
    ) -> None:
        """P's answers are right, but its indexers' caches are stale when the hooks are called, and so on D.

        The prompts are of one chunk, because the next step writes the keys. A checksum cannot detect it, because P
        computes it of what it pushes.
        """
        p = spec(
            "indexed-late",
            "indexed",
            "kv_producer",
            cluster.push_config(),
            environment={"PD_TEST_INDEXER": "late"},
        )
        with running(cluster, make_pair, p, beside=[decode]) as pair:
            wrong = wrong_answers(pair, (20, 40, 70, 90))
        assert wrong == 4, f"{4 - wrong} of 4 answers do not depend on the indexers' keys"
