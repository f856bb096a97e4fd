# SPDX-License-Identifier: Apache-2.0
"""A D whose ranks are on two hosts: P, the metaserver and D's first rank on one, D's second rank on the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, fresh_prompt
from two_hosts import HERE, THERE, WIRE, two_hosts

from tools.support.checks import loaded_tokens
from tools.support.cluster import STRICT, Cluster
from tools.support.compare import AnswerTally
from tools.support.models import ensure
from tools.support.spec import EngineSpec
from vllm_ascend_pd.viewer.timeline import Trace

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

EXPERTS = Path(__file__).parent / "plugins" / "experts"


@pytest.fixture
def second_host() -> Iterator[tuple[str, ...]]:
    with two_hosts() as words:
        yield words


def test_ranks_of_one_d_on_two_hosts(cluster: Cluster, tally: AnswerTally, second_host: tuple[str, ...]) -> None:
    model, port = ensure("moe"), cluster.port()
    moe: dict[str, Any] = {"plugins": (EXPERTS,), "max_seqs": 16, "environment": {"GLOO_SOCKET_IFNAME": WIRE}}
    ranks = {"dp": 2, "dp_rpc_port": cluster.port(), "dp_address": HERE, "role": "kv_consumer", "policy": "fail", **moe}
    config = cluster.push_config(f"http://{HERE}:{port}")
    p, *ds = cluster.start(
        EngineSpec("hosts-p", model, role="kv_producer", host=HERE, extra=cluster.push_config(), **moe),
        EngineSpec("hosts-d0", model, dp_rank=0, host=HERE, extra=config, **ranks),
        EngineSpec("hosts-d1", model, dp_rank=1, host=THERE, prefix=second_host, extra=config, **ranks),
    )
    since = time.monotonic()
    front = cluster.metaserver([p], ds, port, (*STRICT, "--host", "0.0.0.0", "--advertise-host", HERE))
    pair = Pair(cluster, front, p, tuple(ds), tally)
    try:
        free = pair.free_counts()
        for length in (1, 20, 32, 33, 300, 700):
            pair.check([fresh_prompt(length)], name="two hosts")
        pair.check([fresh_prompt(10 + 17 * i) for i in range(25)], name="two hosts, 25 at once")
        assert all(loaded_tokens(d) for d in ds), "a rank has loaded nothing"
        assert pair.free_counts() == free
        events = [event for event in Trace(cluster.traces).events if event.t >= since]
        peers = {event.facts["peer"].rpartition(":")[0] for event in events if event.stage == "layer_submitted"}
        assert peers == {HERE, THERE}
    finally:
        cluster.stop(front, *ds, p)
