# SPDX-License-Identifier: Apache-2.0
"""Groups of the ranks that exchange, in a world of several data-parallel ranks and stages: by number, and over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from unit.admission.vllm_configs import vllm_config
from unit.geometry.kit import geometry
from vllm_ascend_pd.geometry.layout import LayerKind
from vllm_ascend_pd.regroup.core.world import EngineWorld, slot_bytes

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from vllm_ascend_pd.regroup.exchange import new_group
rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
group = new_group(2, size // 2, rank, "gloo", 60.0)
found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
dist.all_gather(found, torch.tensor([rank]), group=group)
print(json.dumps([int(one) for one in found]))
dist.barrier()
"""


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 4)])
def test_each_worker_of_the_world_has_a_rank_and_ranks_of_one_stage_are_neighbours(tp: int, pp: int, dp: int) -> None:
    parallel = vllm_config(tensor_parallel_size=tp, pipeline_parallel_size=pp).parallel_config
    worlds = []
    parallel.data_parallel_size = dp
    for of_ranks in range(dp):
        for worker in range(tp * pp):
            parallel.data_parallel_rank, parallel.rank = of_ranks, worker
            worlds.append(EngineWorld.of(parallel, 1, 256))
    assert [world.rank for world in worlds] == list(range(dp * pp * tp))
    assert {(world.tp_size, world.groups, world.step_tokens) for world in worlds} == {(tp, dp * pp, 256)}


def test_a_slot_fits_a_full_step_of_whichever_kind_is_larger() -> None:
    small, large = (geometry("token", heads=4, tp=2, block=16, cells=cells) for cells in ((2,), (512, 512)))
    world = EngineWorld(0, 2, 1, 256)
    sizes = [slot_bytes(one, world) for one in (small, large)]
    assert sizes == [4096, 10 * 16 * 4 * 1024], "8 blocks of the rank's half of the tokens, and 2"
    for first, second in ((small, large), (large, small)):
        other = LayerKind(4, "float16", "plain", second.regions)
        both = msgspec.structs.replace(first, stages=(("one", "other"),), others=(other,), kind_of=(0, 1))
        assert slot_bytes(both, world) == sizes[1]


def test_ranks_of_each_data_parallel_rank_exchange_among_themselves(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), "4", str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [json.loads(one.communicate(timeout=200)[0]) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert said == [[0, 1], [0, 1], [2, 3], [2, 3]]
