# SPDX-License-Identifier: Apache-2.0
"""Recurrent states through real pairs, `verify: full`: Mamba-2 before attention (Nemotron-H), beside it (Falcon-H1), alone; Gated DeltaNet.

A recurrent layer keeps one state of all tokens so far. D runs the last token of a prompt itself, so what crosses is the state before
it: one token more or less, or another request's, and the answer is another one. The last class shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pairs import Pair, PairMaker
from test_kinds import exercise, spec
from test_windows import windowed

from scripts.support.cluster import Cluster
from scripts.support.engine import Engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

# Blocks of 128, chunks of 96: at 129 tokens the state that is wanted is the last one of a block, and D's goes into the next.
LENGTHS = (1, 2, 3, 20, 97, 127, 128, 129, 130, 200, 257, 333, 700)


@pytest.fixture(scope="module")
def decode(cluster: Cluster, allowed: list[str]) -> Iterator[Engine]:
    (d,) = cluster.start(spec("nemotronh-d", "nemotronh", "kv_consumer", cluster.push_config(*allowed)))
    yield d
    cluster.stop(d)


@pytest.fixture(scope="class")
def pair(cluster: Cluster, decode: Engine, make_pair: PairMaker) -> Iterator[Pair]:
    p = spec("nemotronh-p", "nemotronh", "kv_producer", cluster.push_config())
    with windowed(cluster, make_pair, p, beside=[decode]) as made:
        yield made


class TestStatesBesideAttention:
    def test_every_length_in_chunks(self, pair: Pair) -> None:
        exercise(pair, "nemotronh 1→1", LENGTHS)
