# SPDX-License-Identifier: Apache-2.0
"""Groups of the ranks that exchange, in a world of several data-parallel ranks and stages: by number, and over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unit.admission.vllm_configs import vllm_config
from vllm_ascend_pd.regroup.resources import EngineWorld

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
