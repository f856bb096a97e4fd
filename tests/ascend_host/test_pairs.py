# SPDX-License-Identifier: Apache-2.0
"""Pairs of this package under vllm-ascend itself, on a CANN in host memory: tokens equal to one engine's, every byte
checked by `verify: full`.

vllm-ascend, vLLM, torch_npu and Mooncake are the pinned ones, unmodified; `csrc/npu` is built against that torch_npu, its
kernels run on the emulated cores. Where P's caches are late, they get what an operator writes only after a time, so that
who reads them without waiting for the event pushes old bytes. docs/building.md says how to make the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from host_build import INTERPRETER, HostBuild
from pairs import Pair, fresh_prompt

from scripts.support.cluster import STRICT, Cluster, fresh_directory
from scripts.support.compare import Tally, TokensDiffer
from scripts.support.models import RECIPES, ensure
from scripts.support.spec import EngineSpec

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

CHUNK = 512
LENGTHS = (1, 20, 127, 128, 129, 513, 700, 1025, 1500)  # a block has 128 tokens
MANY = 12

# With MLA the prompt's last token is a decode on D and a part of the prefill on P, two operators that round differently:
# in bfloat16 two neighbouring logits may change places. Where P's last chunk is that one token, both decode it.
STEP = 2.0**-6  # between neighbouring bfloat16 of the size of the best logits


@dataclass(frozen=True)
class Cell:
    model: str
    p_tp: int = 1
    d_tp: int = 1
    dtype: str = "float32"
    keys: dict[str, str] = field(default_factory=dict)  # more of kv_connector_extra_config, on P
    late_us: int = 0  # how late, at most, P's cache gets what an operator wrote into it
    flags: tuple[str, ...] = ()  # of both engines
    forgets: str = ""  # a wait for an event that P leaves out: plugin/ascend_host/faults.py

    def __str__(self) -> str:
        words = [self.model, f"{self.p_tp}to{self.d_tp}", *self.keys.values(), *(f.strip("-") for f in self.flags)]
        return "-".join([*words, *["late"] * bool(self.late_us), *[f"without {self.forgets}"] * bool(self.forgets)])

    def tally(self) -> Tally:
        return Tally() if self.dtype == "float32" else Tally(tie=6 * STEP, excused_per=4)

    def pair(self, build: HostBuild, cluster: Cluster) -> Pair:
        port = cluster.port()
        wire: dict[str, Any] = {"mooncake_protocol": "tcp", "verify": "off" if self.forgets else "full"}
        p, d = cluster.start(
            self._engine(build, "p", "kv_producer", self.p_tp, cluster.push_config(**wire, **self.keys)),
            self._engine(build, "d", "kv_consumer", self.d_tp, cluster.push_config(f"http://127.0.0.1:{port}", **wire)),
        )
        return Pair(cluster, cluster.metaserver([p], [d], port, STRICT), p, (d,), self.tally())

    def _engine(self, build: HostBuild, name: str, role: str, tp: int, extra: dict[str, Any]) -> EngineSpec:
        environment = {**build.variables(), "MC_FORCE_TCP": "1"}
        if name == "p":
            environment |= {"STAND_IN_LATE_US": str(self.late_us), "ASCEND_HOST_FORGETS": self.forgets}
        return EngineSpec(
            f"{self}-{name}".replace(" ", "-"),
            ensure(self.model),
            role=role,
            tp=tp,
            chunk=CHUNK,
            policy="fail",
            extra=extra,
            python=str(INTERPRETER),
            npu=True,
            plugins=build.plugins,
            arguments=("--enforce-eager", "--dtype", self.dtype, "--kv-cache-memory-bytes", str(64 << 20), *self.flags),
            environment=environment,
        )


REGROUPED = {"regroup": "always"}
CELLS = [
    Cell("gqa", late_us=3000),
    Cell("mla", dtype="bfloat16", late_us=3000),
    Cell("gqa", p_tp=2, keys=REGROUPED, late_us=3000),
    Cell("gqa", p_tp=2, keys=REGROUPED | {"regroup_kernels": "own"}),
    Cell("mqa"),
    Cell("moe", p_tp=2, flags=("--enable-expert-parallel",)),
]
FAULTS = [
    Cell("gqa", late_us=200_000, forgets="done"),
    Cell("gqa", p_tp=2, keys=REGROUPED, late_us=200_000, forgets="hold"),
]


@pytest.fixture
def cluster(told: Callable[[str], None]) -> Iterator[Cluster]:
    with Cluster(fresh_directory("ascend_host"), progress=told, port_base=25000) as cluster:
        yield cluster
    assert not cluster.leaks, cluster.leaks


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tokens_are_one_engines(cell: Cell, build: HostBuild, cluster: Cluster, told: Callable[[str], None]) -> None:
    pair, vocab = cell.pair(build, cluster), RECIPES[cell.model].vocab
    tally, exact = pair.tally, Tally()
    for length in LENGTHS:
        pair.tally = exact if length % CHUNK == 1 else tally
        pair.check([fresh_prompt(length, vocab)], name=str(cell))
    pair.tally = tally
    pair.check([fresh_prompt(30 + 80 * i, vocab) for i in range(MANY)], name=f"{cell}, {MANY} at once")
    engines = (pair.prefill, *pair.decode)
    assert pair.free_counts() == {engine.name: engine.blocks() for engine in engines}
    told(f"{cell}: {exact.summary()}; {tally.summary()}; all blocks free")


@pytest.mark.parametrize("cell", FAULTS, ids=str)
def test_a_wait_that_is_forgotten_is_seen(cell: Cell, build: HostBuild, cluster: Cluster) -> None:
    pair = cell.pair(build, cluster)
    with pytest.raises(TokensDiffer):
        pair.check([fresh_prompt(700, RECIPES[cell.model].vocab)], name=str(cell))
