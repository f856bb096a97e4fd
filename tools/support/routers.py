# SPDX-License-Identifier: Apache-2.0
"""Routers of vLLM and vllm-ascend, unchanged: extracted from pinned source distributions at run time, not kept here."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx

from tools.support import sdist
from tools.support.engine import EngineProcess
from tools.support.models import ROOT
from tools.support.process import Child, ProcessDied
from tools.support.spec import child_environment

VLLM = sdist.Pin("vllm", "0.32.0", "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad")
TOY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
PUSH_DEMO = "examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py"
MOONCAKE = "examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py"
LAYERWISE = "examples/disaggregated_prefill_v1/load_balance_proxy_layerwise_server_example.py"
PULLING = "examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py"
START_S = 60.0


class Router:
    """One router as a process in front of a pair.

    It is up once `health` answers with 200 and its log contains `ready`. `where` is the directory for its script and
    its log.
    """

    def __init__(
        self,
        path: str,
        port: int,
        arguments: list[str],
        health: str,
        where: Path,
        ready: str = "",
        of: sdist.Pin = VLLM,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        folder, _, name = path.rpartition("/")
        script = where / f"{port}-{name}"
        script.write_text(sdist.read(sdist.ensure(of), folder, name)[name])
        environment = {**child_environment(), "OPENAI_API_KEY": "unused", "PYTHONUNBUFFERED": "1"}
        self.process = Child(
            script.stem, [sys.executable, str(script), *arguments], where / f"{script.stem}.log", environment, ROOT
        )
        self._wait(health, ready)

    def _wait(self, health: str, ready: str) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.alive:
            try:
                up = httpx.get(self.url + health, timeout=2.0, trust_env=False, verify=False).status_code == 200
                if up and ready in self.process.log.read_text():
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.stop()
        raise ProcessDied(f"{self.process.name} did not start:\n{self.process.tail()}")

    def stop(self) -> None:
        self.process.stop()


def toy(prefill: EngineProcess, decode: EngineProcess, port: int, where: Path) -> Router:
    """Start vLLM's toy proxy: P first, then D with P's answer."""
    return Router(TOY, port, _hosts(prefill, decode, port), "/healthcheck", where)


def layerwise(prefill: EngineProcess, decode: EngineProcess, port: int, where: Path) -> Router:
    """Start vllm-ascend's proxy for its layerwise connector: D first, then P with D's message."""
    return Router(LAYERWISE, port, _hosts(prefill, decode, port), "/healthcheck", where, of=sdist.OLDER)


def pulling(prefill: EngineProcess, decode: EngineProcess, port: int, where: Path) -> Router:
    """Start vllm-ascend's proxy for its connector that pulls: P first, then D with P's answer."""
    return Router(PULLING, port, _hosts(prefill, decode, port), "/healthcheck", where, of=sdist.OLDER)


def _hosts(prefill: EngineProcess, decode: EngineProcess, port: int) -> list[str]:
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--prefiller-hosts", "127.0.0.1"]
    arguments += ["--prefiller-ports", str(prefill.spec.port), "--decoder-hosts", "127.0.0.1"]
    return [*arguments, "--decoder-ports", str(decode.spec.port)]


def push_demo(prefill: EngineProcess, decode: EngineProcess, listener: int, port: int, where: Path) -> Router:
    """Start vLLM's demo of NIXL's push: both at once, D with P's address.

    `listener` is the port of P's side channel.
    """
    arguments = ["--model", "model", "--prefill", f"127.0.0.1:{prefill.spec.port}", "--port", str(port)]
    arguments += ["--decode", f"127.0.0.1:{decode.spec.port}", "--prefill-engine-id", "unused"]
    arguments += ["--prefill-kv-host", "127.0.0.1", "--prefill-side-channel-port", str(listener)]
    return Router(PUSH_DEMO, port, arguments, "/status", where)


def mooncake(prefill: EngineProcess, decode: EngineProcess, bootstrap: int, port: int, where: Path) -> Router:
    """Start vLLM's proxy for its Mooncake connector: both at once, D with P's engine id.

    `bootstrap` is the port on which P publishes that id.
    """
    arguments = ["--port", str(port), "--prefill", prefill.url, str(bootstrap), "--decode", decode.url]
    return Router(MOONCAKE, port, arguments, "/docs", where, "All prefiller instances are ready")
