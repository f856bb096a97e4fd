# SPDX-License-Identifier: Apache-2.0
"""Pairs with vLLM's own connectors, each with a minimal router, for comparisons with this package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tools.support.client import TimedAnswer, body_of, complete, post
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ROOT
from tools.support.spec import EngineSpec

PLUGIN = ROOT / "tools" / "support" / "plugins" / "baseline"  # MooncakeConnector does not start on a CPU without it
NIXL = ("nixl==1.5.0", "nixl-cu12==1.5.0")
NIXL_PLACE = ROOT / "out" / "nixl"  # not in the environment, whose packages it would change
Ask = Callable[[list[int]], TimedAnswer]
Make = Callable[..., EngineSpec]  # an engine's name, its role, and fields of EngineSpec


def start_mooncake(
    cluster: Cluster, make: Make, tokens: int, plugins: tuple[Path, ...] = ()
) -> tuple[EngineProcess, EngineProcess, Ask]:
    """Start a pair over TCP whose answers have `tokens` tokens."""
    common: dict[str, Any] = {
        "connector": "MooncakeConnector",
        "extra": {"mooncake_protocol": "tcp"},
        "plugins": (*plugins, PLUGIN),
    }
    bootstrap = cluster.port()
    listening = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}
    p, d = cluster.start(
        make("mooncake-p", "kv_producer", environment=listening, **common), make("mooncake-d", "kv_consumer", **common)
    )
    return p, d, mooncake(p, d, bootstrap, tokens)


def start_nixl(
    cluster: Cluster, make: Make, tokens: int, plugins: tuple[Path, ...] = ()
) -> tuple[EngineProcess, EngineProcess, Ask]:
    """Start a pair on the CPU. `install_nixl` must have returned True."""
    common: dict[str, Any] = {
        "connector": "NixlConnector",
        "transfer": {"kv_role": "kv_both", "kv_buffer_device": "cpu"},
        "plugins": (*plugins, NIXL_PLACE),
    }
    ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(cluster.port())} for _ in "pd"]
    p, d = cluster.start(
        make("nixl-p", "kv_producer", environment=ports[0], **common),
        make("nixl-d", "kv_consumer", environment=ports[1], **common),
    )
    return p, d, nixl(p, d, tokens)


def install_nixl() -> bool:
    """Install NIXL if needed. Return False if that fails."""
    if not (NIXL_PLACE / "nixl").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(NIXL_PLACE), *NIXL)
        if subprocess.run(pip, check=False).returncode:
            shutil.rmtree(NIXL_PLACE, ignore_errors=True)
            return False
    return True


def mooncake(prefill: EngineProcess, decode: EngineProcess, bootstrap: int, tokens: int) -> Ask:
    """Return a function that sends a prompt to both at once, matched by a transfer id."""
    address = f"http://127.0.0.1:{bootstrap}"
    workers = httpx.get(f"{address}/query", timeout=10.0, trust_env=False).json()
    engine_id = next(iter(workers.values()))["engine_id"]

    def ask(prompt: list[int]) -> TimedAnswer:
        transfer = uuid.uuid4().hex
        first = body_of(prompt, 1, kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer})
        second = {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": address,
        }
        leg = threading.Thread(target=post, args=(prefill.url, first), name="prefill-leg", daemon=True)
        leg.start()
        answer = complete(decode.url, body_of(prompt, tokens, kv_transfer_params=second))
        leg.join()
        return answer

    return ask


def nixl(prefill: EngineProcess, decode: EngineProcess, tokens: int) -> Ask:
    """Return a function that sends a prompt to P, then with P's answer to D."""

    def ask(prompt: list[int]) -> TimedAnswer:
        wanted: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        began = time.monotonic()
        first = post(prefill.url, body_of(prompt, 1, kv_transfer_params=wanted))
        answer = complete(decode.url, body_of(prompt, tokens, kv_transfer_params=first["kv_transfer_params"]))
        before = answer.started - began  # the time of P's request
        answer.started, answer.ttft = began, answer.ttft + before
        answer.times = [at + before for at in answer.times]
        return answer

    return ask
