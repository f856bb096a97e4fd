# SPDX-License-Identifier: Apache-2.0
"""The examples that run on a CPU: check.sh against a real pair, and the ones that start engines, as written.

Those are slow: three to five servers each. test_one_head starts a pair by one of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import EXAMPLES, Script, launched
from pairs import eventually, prefilled

from tools.support.cells import FaultSite
from tools.support.cluster import Cluster
from tools.support.models import ensure

Arrangement = tuple[int, list[Script], dict[str, str]]  # the metaserver's port, the scripts, their settings
pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]


def check(url: str, model: str, tries: int = 60) -> subprocess.CompletedProcess[str]:
    """Run examples/check.sh as an operator would."""
    environment = os.environ | {"CHECK_TRIES": str(tries), "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [EXAMPLES / "check.sh", url, model], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_check_sh_calls_a_pair_good_and_its_prompt_was_prefilled_elsewhere(faulty: FaultSite) -> None:
    before = prefilled(faulty.front.url)
    done = check(faulty.front.url, "model")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] >= 1 and answer["choices"][0]["finish_reason"] in ("length", "stop")
    eventually(lambda: prefilled(faulty.front.url) > before, "a load from P")


def test_check_sh_fails_for_another_model_and_at_an_unused_address(faulty: FaultSite) -> None:
    assert check(faulty.front.url, "another-model").returncode != 0
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = check("http://{}:{}".format(*unused.getsockname()), "model", tries=1)
    assert done.returncode == 1 and "not ready" in done.stderr


def neighbours(script: str, model: Path, cluster: Cluster) -> Arrangement:
    """Return the arrangement of an example with three servers on neighbouring ports."""
    base = cluster.ports(3)
    words = ("--model", model, "--port-base", str(base), "--log-dir", cluster.logs / f"as-written-{base}")
    return base, [(script, *words, "--timeout", "480")], {}


def of_four(script: str, model: Path, cluster: Cluster) -> Arrangement:
    return 8000, [(script, "--model", model)], {}


def two_hosts(folder: str, model: Path, cluster: Cluster) -> Arrangement:
    """Return the arrangement of an example for two hosts, both of which are this one."""
    engines = [(f"{folder}/{role}.sh", "--model", model) for role in ("prefill", "decode")]
    hosts = {"PREFILL_HOST": "127.0.0.1", "DECODE_HOST": "127.0.0.1"}
    return 8000, [*engines, (f"{folder}/metaserver.sh",)], hosts | {"SECRET_FILE": str(cluster.secret_file)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrange", "script", "model"),
    [
        (neighbours, "1p1d/run.sh", "gqa"),
        (neighbours, "unequal-tp/gqa.sh", "gqa"),
        (neighbours, "unequal-tp/mla.sh", "mla"),
        (of_four, "2p2d/run.sh", "gqa"),
        (two_hosts, "two-hosts", "gqa"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_runs_as_it_is_written(
    arrange: Callable[[str, Path, Cluster], Arrangement], script: str, model: str, cluster: Cluster
) -> None:
    path, leaks = str(ensure(model)), len(cluster.leaks)
    port, scripts, settings = arrange(script, ensure(model), cluster)
    url = f"http://127.0.0.1:{port}"
    with launched(cluster, url, *scripts, settings=settings) as children:
        done = check(url, path, tries=120)
        assert done.returncode == 0, done.stderr + "".join(child.tail() for child in children)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] >= 1
        eventually(lambda: prefilled(url) >= 1, "a load from P")
    assert cluster.leaks[leaks:] == []
    if arrange is neighbours:
        said = children[0].log.read_text()
        assert "stopped" in said and "killed" not in said
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is closed
