# SPDX-License-Identifier: Apache-2.0
"""A vLLM server: its process, if this one starts it, and readings from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx

from tools.support.fork_server import ForkServers
from tools.support.models import ROOT
from tools.support.process import Child
from tools.support.spec import EngineSpec


class RunningServer:
    """A server that is reachable, whichever process started it."""

    def __init__(self, name: str, port: int, log: Path, host: str = "127.0.0.1") -> None:
        self.name = name
        self.url = f"http://{host}:{port}"
        self.log = log
        self.total_blocks = 0
        self.ranks = 1  # data-parallel ranks behind this address

    def metrics(self) -> dict[str, float]:
        """Return all samples of /metrics by name, summed over their labels."""
        sums: dict[str, float] = {}
        for name, _, value in self._samples():
            sums[name] = sums.get(name, 0.0) + value
        return sums

    def by_rank(self, name: str) -> dict[str, float]:
        """Return the samples of one name by data-parallel rank."""
        sums: dict[str, float] = {}
        for sampled, labels, value in self._samples():
            rank = re.search(r'engine="(\d+)"', labels)
            if sampled == name and rank is not None:
                sums[rank[1]] = sums.get(rank[1], 0.0) + value
        return sums

    def _samples(self) -> Iterator[tuple[str, str, float]]:
        for line in self.page().splitlines():
            match = _SAMPLE.match(line)
            if match:
                yield match["name"], match["labels"] or "", float(match["value"])

    def page(self) -> str:
        """Return /metrics as it is."""
        # Without TLS settings: loading the certificates costs 20 ms of processor time at every call.
        return httpx.get(f"{self.url}/metrics", timeout=10.0, trust_env=False, verify=False).text

    def blocks(self) -> int:
        """Return the size of the block pool, without the null block."""
        if not self.total_blocks:
            match = re.search(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', self.page())
            if match is None:
                raise RuntimeError(f"{self.name}: /metrics has no num_gpu_blocks")
            self.total_blocks = int(match[1]) - 1
        return self.total_blocks

    def free_blocks(self) -> int:
        """Return how many blocks the schedulers of all ranks had free after their latest step."""
        used = self.metrics()["vllm:kv_cache_usage_perc"] * self.blocks()
        return self.ranks * self.blocks() - round(used)


class EngineProcess(RunningServer):
    """A server started by this process."""

    def __init__(self, spec: EngineSpec, logs: Path, forks: ForkServers | None = None) -> None:
        super().__init__(spec.name, spec.port, logs / f"{spec.name}.log", spec.host)
        self.spec, self.ranks = spec, spec.ranks
        self.process = Child(spec.name, spec.command(), self.log, spec.environ(), ROOT, forks)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def stage(self) -> str:
        """Return in a few words how far the start is, read from the log."""
        text = self.process.tail(60)
        for mark, word in _STAGES:
            if mark in text:
                return word
        return "importing"


_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})? (?P<value>[-+0-9.eEinfINa]+)$")
_STAGES = (  # the latest first
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
