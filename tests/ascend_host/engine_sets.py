# SPDX-License-Identifier: Apache-2.0
"""Pairs of this package under vllm-ascend itself, on a CANN in host memory: which engines are started.

vllm-ascend, vLLM, torch_npu and Mooncake are the pinned ones, unmodified; `csrc/npu` is built against that torch_npu, its
kernels run on the emulated cores. Where a P's caches are late, they get what an operator writes only after a time, so that
who reads them without waiting for the event pushes old bytes. docs/building.md says how to make the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from host_build import INTERPRETER, HostBuild
from pairs import Pair

from scripts.support.cluster import STRICT, Cluster
from scripts.support.compare import Tally
from scripts.support.models import ensure
from scripts.support.spec import EngineSpec

CHUNK = 512
BLOCK = 128  # vllm-ascend's, whatever one asks for
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Side:
    """One engine of a set."""

    tp: int = 1
    pp: int = 1
    flags: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)  # more of kv_connector_extra_config
    late_us: int = 0  # how late, at most, its cache gets what an operator wrote into it
    delay_us: int = 0  # how long, at most, a task of one of its streams waits before it runs
    forgets: str = ""  # a wait for an event that it leaves out: plugin/ascend_host/faults.py

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STAND_IN_DEVICES": "8",
            "STAND_IN_LATE_US": str(self.late_us),
            "STAND_IN_DELAY_US": str(self.delay_us),
            "ASCEND_HOST_FORGETS": self.forgets,
        }


@dataclass(frozen=True)
class Engines:
    """A P, a D and what stands in front of them."""

    title: str
    model: str = "gqa"
    p: Side = Side()
    d: Side = Side()
    dtype: str = "float32"
    flags: tuple[str, ...] = ()  # of both
    verify: str = "full"

    def __str__(self) -> str:
        return self.title

    @property
    def one_way(self) -> bool:
        """Whether a token is computed alike as a part of a prefill and as a decode. vllm-ascend's MLA has two ways, which round
        differently."""
        return self.model != "mla"

    @property
    def seeded(self) -> bool:
        """Whether D's scheduler is vLLM's own, so that its requests start with P's token."""
        return "recompute" not in self.title

    def start(self, build: HostBuild, cluster: Cluster) -> Pair:
        port = cluster.port()
        url = f"http://127.0.0.1:{port}"
        p, d = cluster.start(
            self._engine(build, "p", "kv_producer", self.p, cluster.push_config(**self._keys(self.p))),
            self._engine(build, "d", "kv_consumer", self.d, cluster.push_config(url, **self._keys(self.d))),
        )
        # vllm-ascend's P with a pipeline keeps the sampled token on its last stage: alone it is right for one token only.
        alone = d if self.p.pp > 1 else None
        return Pair(cluster, cluster.metaserver([p], [d], port, STRICT), p, (d,), Tally(), alone=alone)

    def _keys(self, side: Side) -> dict[str, Any]:
        # The cores are the device: ranks that wait for each other by spinning would take them from the models.
        return {
            "mooncake_protocol": "tcp",
            "verify": self.verify,
            "patient_shm": "on",
            "first_token_wait_s": 10.0,
            **side.keys,
        }

    def _engine(self, build: HostBuild, name: str, role: str, side: Side, extra: dict[str, Any]) -> EngineSpec:
        common = ("--enforce-eager", "--dtype", self.dtype, "--kv-cache-memory-bytes", str(32 << 20))
        return EngineSpec(
            f"{self.title}-{name}".replace(" ", "-"),
            ensure(self.model),
            role=role,
            tp=side.tp,
            pp=side.pp,
            chunk=CHUNK,
            policy="fail",
            extra=extra,
            python=str(INTERPRETER),
            npu=True,
            plugins=build.plugins,
            arguments=(*common, *self.flags, *side.flags),
            environment={**build.variables(), "MC_FORCE_TCP": "1", **side.environment},
        )


def few_blocks(count: int) -> tuple[str, ...]:
    return ("--num-gpu-blocks-override", str(count))
