# SPDX-License-Identifier: Apache-2.0
"""The copies of one exchange, without the other ranks."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from unit.geometry.kit import PlannedCluster, geometry
from unit.regroup.memory_views import views
from vllm_ascend_pd.geometry.images import BUFFER_ROW
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlanner
from vllm_ascend_pd.regroup.exchange import GroupExchange, tags_of

RANKS = 4


def test_every_byte_of_a_slot_and_of_its_tags_is_written_once() -> None:
    """The order of copies is the device's, so no two may write the same byte."""
    p, d = (geometry("token", heads=8, tp=tp, block=16) for tp in (RANKS, 1))
    cluster = PlannedCluster(p, [d], [(0, 0, 100)], seed=3)
    request = cluster.requests[0]
    job = Job(d, request.first, 0, 100, request.p_blocks, request.d_blocks, request.instance)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for rank in range(RANKS):
        plan = RegroupPlanner(p, rank).plan([job])
        exchange = GroupExchange(group, rank, [views(cluster.ranks[rank])], sum(plan.receive_splits), "cpu")
        (slot,), nbytes = plan.slots, plan.slots[0].nbytes
        rows = exchange.prepare(plan, torch.empty(nbytes + tags_of(RANKS), dtype=torch.uint8), 0).slots[0]
        assert len(rows.sources) == RANKS - 1
        assert rows.received is not None and rows.gather is not None
        written: Counter[int] = Counter()
        for values in rows.received.rows.tolist():
            row = dict(zip(BUFFER_ROW, values, strict=True))
            for head in range(row["heads"]):
                for token in range(row["tokens"]):
                    at = row["destination"] + head * row["destination_head_stride"]
                    at += token * row["destination_token_stride"]
                    written.update(range(at, at + row["cell"]))
        assert set(written.values()) == {1}
        # Both regions have such cells.
        own_bytes = sum(int(row[4] * row[5]) for row in slot.own_rows) * p.regions[0].cell_bytes
        assert len(written) == nbytes - own_bytes + tags_of(RANKS - 1)
        assert max(written) == rows.tags + tags_of(RANKS - 1) - 1
