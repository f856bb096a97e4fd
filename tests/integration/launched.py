# SPDX-License-Identifier: Apache-2.0
"""Pairs started by the scripts of examples/, as an operator would: until ctrl-C, which must leave nothing running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from pairs import Pair

from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import RunningServer
from tools.support.models import ROOT
from tools.support.process import Child, ProcessDied
from tools.support.spec import PATIENT, child_environment

EXAMPLES = ROOT / "examples"
READY_S, STOP_S = 500.0, 90.0
PROGRESS_S = 8.0
Script = tuple[str | Path, ...]  # a file, by its path from examples/, and its arguments


@contextmanager
def launched(
    cluster: Cluster, url: str, *scripts: Script, settings: Mapping[str, str] | None = None
) -> Iterator[list[Child]]:
    """Run scripts with default signal handlers; `url` is ready inside the block.

    What SIGINT does not end counts as a leak.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PD_")} | dict(settings or {})
    children: list[Child] = []
    try:
        for script, *words in scripts:
            name = f"{str(script).removeprefix('../').replace('/', '-')}-{len(children)}"
            command = ["env", "--default-signal=INT", str(EXAMPLES / script), *map(str, words)]
            children.append(Child(name, command, cluster.logs / f"{name}.log", environment, ROOT))
            cluster.progress(f"  starting {script}, log {children[-1].log}")
        _wait_ready(cluster, url, children)
        yield children
    finally:
        for child in reversed(children):
            cluster.leaks += child.stop(STOP_S, signal.SIGINT)


def _wait_ready(cluster: Cluster, url: str, children: Sequence[Child]) -> None:
    begun = shown = time.monotonic()
    while True:
        for child in children:
            if not child.alive:
                raise ProcessDied(
                    f"{child.name} ended with code {child.returncode}; the end of its log:\n{child.tail()}"
                )
        try:
            if httpx.get(f"{url}/readiness", timeout=2.0, trust_env=False, verify=False).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        now = time.monotonic()
        assert now - begun < READY_S, "\n".join(child.tail() for child in children)
        if now - shown > PROGRESS_S:
            shown = now
            cluster.progress(f"  [{now - begun:4.0f} s] {url} is not ready yet")
        time.sleep(0.3)
    cluster.progress(f"  [{time.monotonic() - begun:4.0f} s] {url} is ready")


@contextmanager
def launched_pair(
    cluster: Cluster, tally: AnswerTally, script: str, model: Path, p_tp: int, d_tp: int
) -> Iterator[Pair]:
    """Start a pair of these sizes by an example. Every pushed block is checked, and a failed load fails its request."""
    base, logs = cluster.ports(3), cluster.logs / f"launched-{p_tp}-{d_tp}"
    settings = {
        "PD_SERVED_NAME": "model",
        "PD_VERIFY": "full",
        "PD_POLICY": "fail",
        "PD_BLOCK_SIZE": "32",
        "PD_MAX_MODEL_LEN": "2048",
        "PD_P_CHUNK": "256",
        "PD_P_KV_BYTES": str(64 << 20),
        "PD_D_KV_BYTES": str(64 << 20),
        "PYTHONPATH": child_environment((PATIENT,))["PYTHONPATH"],
    }
    words = ("--model", model, "--p-tp", p_tp, "--d-tp", d_tp, "--port-base", base, "--log-dir", logs, "--timeout", 400)
    url = f"http://127.0.0.1:{base}"
    with launched(cluster, url, (script, *map(str, words)), settings=settings) as (child,):
        cluster.starts += 2
        prefill, decode = (
            RunningServer(f"{child.name}-{role}", base + 1 + i, logs / f"{role}.log")
            for i, role in enumerate(("prefill", "decode"))
        )
        yield Pair(cluster, RunningServer("metaserver", base, logs / "metaserver.log"), prefill, (decode,), tally)
