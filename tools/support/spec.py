# SPDX-License-Identifier: Apache-2.0
"""Specifications of engines and metaservers, from which command lines and environments follow.

Standard library only: `quickstart.sh --dry-run` prints commands before anything is installed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.support import on_cpu
from tools.support.models import ROOT, recipe_of

CONNECTOR = "AscendPushConnector"
SERVER = "vllm.entrypoints.openai.api_server"
PATIENT = ROOT / "tools" / "support" / "plugins" / "patient"  # on a CPU no process spins while it waits for another
LOGPROBS = 20  # best tokens that an answer may list, as many as vLLM's default
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "plain": "single"}

CPU_ENVIRONMENT = {
    **on_cpu.ENVIRONMENT,
    "OMP_NUM_THREADS": "1",  # the workers of a pair share the machine
    "TOKENIZERS_PARALLELISM": "false",
    "MC_FORCE_TCP": "1",
}
COMMON_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}


def on_npu() -> bool:
    """Return whether scripts/setup.sh found an interpreter in which vllm-ascend imports."""
    return os.environ.get("PD_DEVICE") == "npu"


def own_environment(npu: bool) -> dict[str, str]:
    """Return the variables that every child gets beyond the caller's environment."""
    return dict(COMMON_ENVIRONMENT) if npu else {**COMMON_ENVIRONMENT, **CPU_ENVIRONMENT}


def child_environment(paths: tuple[Path, ...] = (), npu: bool | None = None) -> dict[str, str]:
    """Return a child's environment. `npu` None: as scripts/setup.sh found this host."""
    env = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
    inherited = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    env["PYTHONPATH"] = os.pathsep.join([*(str(p) for p in paths), str(ROOT), *inherited])
    return {**env, **own_environment(on_npu() if npu is None else npu)}


@dataclass(frozen=True)
class EngineSpec:
    """Specification of an engine. `role`: plain (no connector), kv_producer or kv_consumer."""

    name: str
    model: Path
    role: str = "plain"
    tp: int = 1
    pp: int = 1
    pcp: int = 1  # ranks that divide a prompt
    dp: int = 1  # with expert parallelism
    dp_rank: int | None = None  # the first rank of this server; None: one server for all ranks
    dp_local: int = 1  # with dp_rank: how many ranks this server has
    dp_rpc_port: int = 0  # port for the coordination of ranks with servers of their own
    dp_address: str = "127.0.0.1"  # host of the first of them
    host: str = "127.0.0.1"  # address of the server and of its workers
    prefix: tuple[str, ...] = ()  # a command that runs the server elsewhere on this machine
    port: int = 0  # 0: assigned by the cluster
    kv_bytes: int = 64 << 20  # per worker
    max_len: int = 2048
    chunk: int = 2048  # --max-num-batched-tokens
    max_seqs: int = 64
    block_size: int = 32
    policy: str = "recompute"
    extra: Mapping[str, Any] = field(default_factory=dict)  # kv_connector_extra_config
    connector: str = CONNECTOR
    transfer: Mapping[str, Any] = field(default_factory=dict)  # further fields of --kv-transfer-config
    plugins: tuple[Path, ...] = ()  # folders with an entry point, put in front of PYTHONPATH
    spins: bool = False  # on a CPU: whether vLLM's own queues between processes spin
    devices: str = ""  # NPU: ASCEND_RT_VISIBLE_DEVICES
    draft: Mapping[str, Any] = field(default_factory=dict)  # --speculative-config
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    served_name: str = "model"
    python: str = sys.executable
    npu: bool = field(default_factory=on_npu)

    def command(self) -> list[str]:
        """Return the server's command line. `python -m`, because the vllm command does not start with the CPU wheel."""
        words = [*self.prefix, self.python, "-m", SERVER]
        words += ["--host", self.host, "--port", str(self.port)]
        words += ["--model", str(self.model), "--served-model-name", self.served_name]
        words += ["--max-model-len", str(self.max_len), "--seed", "0"]
        words += ["--max-num-batched-tokens", str(self.chunk), "--max-num-seqs", str(self.max_seqs)]
        words += ["--max-logprobs", str(LOGPROBS), "--uvicorn-log-level", "warning"]
        words += ["--dtype", "float16"] if self.npu else self._cpu_shape()
        if self.tp > 1:
            words += ["--tensor-parallel-size", str(self.tp)]
        if self.pp > 1:
            words += ["--pipeline-parallel-size", str(self.pp)]
        if self.pcp > 1:
            words += ["--prefill-context-parallel-size", str(self.pcp)]
        if self.dp > 1:
            words += ["--data-parallel-size", str(self.dp), "--enable-expert-parallel"]
        if self.dp_rank is not None:
            words += ["--data-parallel-address", self.dp_address, "--data-parallel-rpc-port", str(self.dp_rpc_port)]
            if self.dp_local == 1:
                words += ["--data-parallel-rank", str(self.dp_rank)]
            else:
                words += ["--data-parallel-start-rank", str(self.dp_rank), "--data-parallel-hybrid-lb"]
                words += ["--data-parallel-size-local", str(self.dp_local)]
        if self.draft:
            words += ["--speculative-config", json.dumps(self._draft())]
        if self.role != "plain":
            words += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return [*words, *self.arguments]

    def _cpu_shape(self) -> list[str]:
        words = ["--dtype", "float32", "--kv-cache-memory-bytes", str(self.kv_bytes)]
        if not self._mla:
            words += ["--block-size", str(self.block_size)]  # with MLA on a CPU it is always 16
        return [*words, *on_cpu.arguments(mla=self._mla, pp=self.pp, eager=True)]

    @property
    def _mla(self) -> bool:
        recipe = recipe_of(self.model)
        return recipe.mla if recipe is not None else on_cpu.is_mla(self.model)

    def _draft(self) -> dict[str, Any]:
        return {**self.draft, **({} if self.npu or not self._mla else on_cpu.MLA_DRAFT)}

    def transfer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"kv_connector": self.connector, "kv_role": self.role}
        if self.role != "kv_producer":
            config["kv_load_failure_policy"] = self.policy
        return {**config, **self.transfer, "kv_connector_extra_config": dict(self.extra)}

    @property
    def ranks(self) -> int:
        """Return how many data-parallel ranks are behind this server's address."""
        return self.dp if self.dp_rank is None else self.dp_local

    def environ(self) -> dict[str, str]:
        devices = {"ASCEND_RT_VISIBLE_DEVICES": self.devices} if self.devices else {}
        here = {"VLLM_HOST_IP": self.host}
        plugins = self.plugins if self.npu or self.spins else (*self.plugins, PATIENT)
        return {**child_environment(plugins, self.npu), **here, **devices, **self.environment}

    def at(self, port: int, devices: str = "") -> EngineSpec:
        return dataclasses.replace(self, port=port, devices=devices or self.devices)

    def describe(self) -> str:
        shape = f"TP {self.tp}" + (f", PP {self.pp}" if self.pp > 1 else "")
        shape += f", DP {self.dp}" if self.dp > 1 else ""
        if self.dp_rank is not None:
            last = self.dp_rank + self.dp_local - 1
            shape += f", rank {self.dp_rank}" + (f" to {last}" if last > self.dp_rank else "")
        connector = "" if self.role == "plain" or self.connector == CONNECTOR else f", {self.connector}"
        return f"{self.name} ({ROLES[self.role]}, {shape}{connector})"


@dataclass(frozen=True)
class MetaserverSpec:
    """Specification of a metaserver, without its port and its engines."""

    options: tuple[str, ...] = ()
    module: str = "vllm_ascend_pd.cli"
    plugins: tuple[Path, ...] = ()  # put in front of PYTHONPATH
    environment: Mapping[str, str] = field(default_factory=dict)
    sidecar: bool = False  # sidecar of its one D; it gets no P


def metaserver_command(
    port: int,
    prefill: list[str],
    decode: list[str],
    options: tuple[str, ...] = (),
    module: str = MetaserverSpec.module,
    *,
    sidecar: bool = False,
) -> list[str]:
    words = [sys.executable, "-m", module, "sidecar" if sidecar else "metaserver", "--host", "127.0.0.1"]
    words += ["--port", str(port), *(["--prefill", *prefill] if prefill and not sidecar else [])]
    return [*words, "--decode", *decode, *options]
