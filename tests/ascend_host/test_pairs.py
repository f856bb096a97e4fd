# SPDX-License-Identifier: Apache-2.0
"""Pairs of this package under vllm-ascend itself, on a CANN in host memory: tokens equal to one engine's, every byte
checked by `verify: full`.

vllm-ascend, vLLM, torch_npu and Mooncake are the pinned ones, unmodified; `csrc/npu` is built against that torch_npu, its
kernels run on the emulated cores. docs/building.md says how to make the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from host_build import INTERPRETER, HostBuild
from pairs import Pair, fresh_prompt, settled_free_blocks

from scripts.support.cluster import STRICT, Cluster, fresh_directory
from scripts.support.compare import Tally
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

    def __str__(self) -> str:
        return "-".join([self.model, f"{self.p_tp}to{self.d_tp}", *self.keys.values()])

    def tally(self) -> Tally:
        return Tally() if self.dtype == "float32" else Tally(tie=6 * STEP, excused_per=4)


CELLS = [
    Cell("gqa"),
    Cell("mla", dtype="bfloat16"),
    Cell("gqa", p_tp=2, keys={"regroup": "always"}),
]


@pytest.fixture
def cluster(told: Callable[[str], None]) -> Iterator[Cluster]:
    with Cluster(fresh_directory("ascend_host"), progress=told, port_base=25000) as cluster:
        yield cluster
    assert not cluster.leaks, cluster.leaks


def engine(build: HostBuild, cell: Cell, name: str, **more: object) -> EngineSpec:
    arguments = ("--enforce-eager", "--dtype", cell.dtype, "--kv-cache-memory-bytes", str(64 << 20))
    common = {
        "python": str(INTERPRETER),
        "npu": True,
        "plugins": build.plugins,
        "arguments": arguments,
        "environment": {**build.variables(), "MC_FORCE_TCP": "1"},
    }
    return EngineSpec(f"{cell}-{name}", ensure(cell.model), **(common | more))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tokens_are_one_engines(cell: Cell, build: HostBuild, cluster: Cluster, told: Callable[[str], None]) -> None:
    port, wire = cluster.port(), {"mooncake_protocol": "tcp"}
    p, d = cluster.start(
        engine(
            build,
            cell,
            "p",
            role="kv_producer",
            tp=cell.p_tp,
            chunk=CHUNK,
            extra=cluster.push_config(**wire, **cell.keys),
        ),
        engine(
            build,
            cell,
            "d",
            role="kv_consumer",
            tp=cell.d_tp,
            policy="fail",
            extra=cluster.push_config(f"http://127.0.0.1:{port}", **wire),
        ),
    )
    tally = cell.tally()
    pair = Pair(cluster, cluster.metaserver([p], [d], port, STRICT), p, (d,), tally)
    vocab = RECIPES[cell.model].vocab
    for length in LENGTHS:
        pair.tally = Tally() if length % CHUNK == 1 else tally
        pair.check([fresh_prompt(length, vocab)], name=str(cell))
    pair.tally = tally
    pair.check([fresh_prompt(30 + 80 * i, vocab) for i in range(MANY)], name=f"{cell}, {MANY} at once")
    assert {e.name: settled_free_blocks(e) for e in (p, d)} == {e.name: e.blocks() for e in (p, d)}
    told(f"{cell}: {tally.summary()}, all blocks free")
