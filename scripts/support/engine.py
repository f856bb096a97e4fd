# SPDX-License-Identifier: Apache-2.0
"""One vLLM server: how it is started, and what can be read from it while it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts.support.models import ROOT, recipe_of
from scripts.support.process import Child

CONNECTOR = "AscendPushConnector"

# vLLM on CPU: `nobind` because the default binding fails with two workers on one NUMA node; one thread per worker
# because every worker of a pair shares the machine with the others.
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class EngineSpec:
    """What to start. `role`: plain (no connector), kv_producer or kv_consumer."""

    name: str
    model: Path
    role: str = "plain"
    tp: int = 1
    pp: int = 1
    port: int = 0  # 0: the cluster finds one
    kv_bytes: int = 64 << 20
    max_len: int = 2048
    chunk: int = 2048  # --max-num-batched-tokens
    max_seqs: int = 64
    block_size: int = 32
    policy: str = "recompute"
    extra: Mapping[str, Any] = field(default_factory=dict)  # kv_connector_extra_config
    connector: str = CONNECTOR
    connector_module: str = ""  # for a connector that no plug-in registers
    plugins: tuple[Path, ...] = ()  # folders with an entry point of their own, put in front of PYTHONPATH
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    served_name: str = "model"

    def command(self) -> list[str]:
        """The server's command line; `python -m`, because the vllm command does not start with the CPU wheel."""
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--model", str(self.model), "--served-model-name", self.served_name]
        words += ["--dtype", "float32", "--max-model-len", str(self.max_len), "--seed", "0"]
        words += ["--max-num-batched-tokens", str(self.chunk), "--max-num-seqs", str(self.max_seqs)]
        words += ["--kv-cache-memory-bytes", str(self.kv_bytes), "--uvicorn-log-level", "warning"]
        words += ["--max-logprobs", "5"]
        words += self._shape()
        if self.role != "plain":
            words += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return [*words, *self.arguments]

    def _shape(self) -> list[str]:
        words = []
        recipe = recipe_of(self.model)
        mla = recipe is not None and recipe.mla
        compilation: dict[str, Any] = {}
        if mla:
            compilation["custom_ops"] = ["-rotary_embedding"]  # vLLM's CPU kernel for it is wrong with MLA's strides
        else:
            words += ["--block-size", str(self.block_size)]  # MLA on CPU has 16, whatever one asks for
        if self.tp > 1:
            words += ["--tensor-parallel-size", str(self.tp)]
        if self.pp > 1:
            words += ["--pipeline-parallel-size", str(self.pp)]
            compilation |= {"mode": 2, "backend": "eager"}  # a pipeline on CPU does not start with --enforce-eager
        else:
            words += ["--enforce-eager"]
        if compilation:
            words += ["--compilation-config", json.dumps(compilation)]
        return words

    def transfer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"kv_connector": self.connector, "kv_role": self.role}
        if self.connector_module:
            config["kv_connector_module_path"] = self.connector_module
        if self.role == "kv_consumer":
            config["kv_load_failure_policy"] = self.policy
        config["kv_connector_extra_config"] = dict(self.extra)
        return config

    def environ(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
        paths = [*(str(p) for p in self.plugins), str(ROOT)]
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH", "")])])
        return {**env, **CPU_ENVIRONMENT, **self.environment}

    def on_port(self, port: int) -> EngineSpec:
        return dataclasses.replace(self, port=port)


class Engine:
    """A started server."""

    def __init__(self, spec: EngineSpec, logs: Path) -> None:
        self.spec = spec
        self.url = f"http://127.0.0.1:{spec.port}"
        self.process = Child(spec.name, spec.command(), logs / f"{spec.name}.log", spec.environ(), ROOT)
        self.total_blocks = 0

    @property
    def name(self) -> str:
        return self.spec.name

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stage(self) -> str:
        """What the start is doing, in a word or two, read off the log."""
        text = self.process.tail(60)
        for mark, word in _STAGES:
            if mark in text:
                return word
        return "importing"

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by name; samples of several labels are summed."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10.0).text.splitlines():
            match = _SAMPLE.match(line)
            if match:
                found[match["name"]] = found.get(match["name"], 0.0) + float(match["value"])
        return found

    def blocks(self) -> int:
        """Size of the block pool, without the null block."""
        if not self.total_blocks:
            text = httpx.get(f"{self.url}/metrics", timeout=10.0).text
            match = re.search(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', text)
            if match is None:
                raise RuntimeError(f"{self.name}: /metrics does not tell num_gpu_blocks")
            self.total_blocks = int(match[1]) - 1
        return self.total_blocks

    def free_blocks(self) -> int:
        """Blocks the scheduler could hand out after its latest step."""
        used = self.metrics()["vllm:kv_cache_usage_perc"] * self.blocks()
        return self.blocks() - round(used)


_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(\{.*\})? (?P<value>[-+0-9.eEinfNa]+)$")
_STAGES = (
    ("Application startup complete", "serving"),
    ("Starting vLLM", "opening its port"),
    ("init engine", "engine ready"),
    ("Using kv connector", "registering the cache"),
    ("GPU KV cache size", "cache allocated"),
    ("Loading weights took", "weights loaded"),
    ("Starting to load model", "loading weights"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("non-default args", "reading the model"),
)
