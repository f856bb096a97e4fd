# SPDX-License-Identifier: Apache-2.0
"""Pairs under vllm-ascend on a CANN in host memory: with this package's connector, and with vllm-ascend's own two.

Each connector has its own router: our metaserver, or the examples in vllm-ascend's source distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.support import routers
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.process import ProcessDied
from tools.support.routers import Router
from tools.support.spec import PATIENT, EngineSpec

if TYPE_CHECKING:
    from host_build import HostBuild


@dataclass(frozen=True)
class PairShape:
    """Ranks of P and of D, and whether engines are killed."""

    p: int
    d: int
    faults: bool = False

    def __str__(self) -> str:
        return f"TP {self.p} → {self.d}"

    @property
    def word(self) -> str:
        return f"{self.p}to{self.d}"


@dataclass(frozen=True)
class Contender:
    connector: str
    router: Callable[[EngineProcess, EngineProcess, int, Path], Router] | None  # None: our metaserver
    p: dict[str, Any] = field(default_factory=dict)  # further fields of --kv-transfer-config
    d: dict[str, Any] = field(default_factory=dict)


def _theirs(port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"kv_port": port, "engine_id": "p"}, {"kv_port": port + 100, "engine_id": "d"}


# Ports of their own: two of them may run at once.
CONTENDERS = (
    Contender("AscendPushConnector", None),
    Contender("MooncakeLayerwiseConnector", routers.layerwise, *_theirs(26700)),
    Contender("MooncakeConnectorV1", routers.pulling, *_theirs(26900)),
)


@dataclass(frozen=True)
class SiteSettings:
    """Sizes and cores of the engines."""

    model: str = "gqa"
    kv_bytes: int = 32 << 20
    sizes: Mapping[str, Any] = field(default_factory=lambda: {"chunk": 512})  # fields of EngineSpec
    cores: Sequence[int] = ()  # one for P and one for D; none: all cores are theirs


class ContenderSite:
    """A connector's engines and its router."""

    def __init__(
        self,
        contender: Contender,
        shape: PairShape,
        cluster: Cluster,
        build: HostBuild,
        settings: SiteSettings = SiteSettings(),
    ) -> None:
        self.contender, self.shape, self.cluster, self.build = contender, shape, cluster, build
        self._settings = settings
        port = cluster.port()
        self.url = f"http://127.0.0.1:{port}"
        self.p, self.d = cluster.start(self._spec("p", "kv_producer"), self._spec("d", "kv_consumer"))
        self._router: Router | None = None
        if contender.router is None:
            cluster.metaserver([self.p], [self.d], port, ("--no-canary",))
            return
        try:
            self._router = contender.router(self.p, self.d, port, cluster.logs)
        except ProcessDied as died:  # only an engine's end is a refusal
            raise RuntimeError(str(died)) from died

    def _spec(self, name: str, role: str) -> EngineSpec:
        contender, shape, settings = self.contender, self.shape, self._settings
        metaservers = [self.url] if role == "kv_consumer" else []
        ours = self.cluster.push_config(*metaservers, verify="off", mooncake_protocol="tcp")
        del ours["trace_dir"]  # the others write none
        theirs = {side: {"dp_size": 1, "tp_size": tp} for side, tp in (("prefill", shape.p), ("decode", shape.d))}
        return EngineSpec(
            f"{contender.connector}-{name}",
            ensure(settings.model),
            role=role,
            tp=shape.p if role == "kv_producer" else shape.d,
            prefix=("taskset", "-c", str(settings.cores["pd".index(name)])) if settings.cores else (),
            connector=contender.connector,
            extra=theirs if contender.router else ours,
            transfer=contender.p if role == "kv_producer" else contender.d,
            python=str(self.build.python),
            npu=True,
            plugins=(*self.build.plugins, PATIENT),
            arguments=("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(settings.kv_bytes)),
            environment={**self.build.variables(), "ASCEND_HOST_WIRE": "tcp", "STAND_IN_DEVICES": "8"},
            **settings.sizes,
        )

    def stop_router(self) -> None:
        if self._router is not None:
            self._router.stop()

    def restarted(self, engine: EngineProcess) -> EngineProcess:
        """Start the killed engine anew with the same command."""
        self.cluster.stop(engine)
        (started,) = self.cluster.start(engine.spec)
        return started
