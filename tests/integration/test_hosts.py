# SPDX-License-Identifier: Apache-2.0
"""A D whose ranks are on two hosts: two network namespaces of this machine, joined by a wire.

P, the metaserver, D's first rank and this test are in one, D's second rank is in the other. Each host has its own
loopback, so nothing arrives that is sent to a wrong host. The addresses exist in these namespaces only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, fresh_prompt

from tools.support.checks import eventually, loaded_tokens
from tools.support.cluster import STRICT, Cluster
from tools.support.compare import AnswerTally
from tools.support.models import ensure
from tools.support.spec import EngineSpec
from vllm_ascend_pd.viewer.timeline import Trace

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

EXPERTS = Path(__file__).parent / "plugins" / "experts"
WIRE = "pd0"
HERE, THERE = "10.213.0.1", "10.213.0.2"
CLONE_NEWNET = 0x40000000


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def _entered(holder: subprocess.Popen[bytes]) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder.pid}/ns/net")


def _join(path: str) -> None:
    """Move this thread, and what it starts from now on, into a network namespace."""
    with Path(path).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")


@contextmanager
def _holding() -> Iterator[subprocess.Popen[bytes]]:
    """Hold a new network namespace by a process that only sleeps."""
    own = Path("/proc/self/ns/net").readlink()
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        eventually(lambda: holder.poll() is not None or Path(f"/proc/{holder.pid}/ns/net").readlink() != own, "unshare")
        yield holder
    finally:
        holder.kill()
        holder.wait(10.0)


@pytest.fixture
def second_host() -> Iterator[tuple[str, ...]]:
    """Words before a command that run it on the second host. The test itself is on the first."""
    for needed in ("unshare", "nsenter", "ip"):
        if shutil.which(needed) is None:
            pytest.skip(f"this machine has no {needed}")
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False, timeout=20
    )
    if tried.returncode:
        pytest.skip(f"this machine allows no network namespaces: {tried.stderr.strip()}")
    with ExitStack() as stack:
        first, second = (stack.enter_context(_holding()) for _ in range(2))
        _run(
            *_entered(first), "ip", "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", str(second.pid)
        )
        for holder, address in ((first, HERE), (second, THERE)):
            for words in (f"addr add {address}/24 dev {WIRE}", f"link set {WIRE} up", "link set lo up"):
                _run(*_entered(holder), "ip", *words.split())
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, before)
        stack.callback(_join, f"/proc/self/fd/{before}")
        _join(f"/proc/{first.pid}/ns/net")
        yield _entered(second)


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
