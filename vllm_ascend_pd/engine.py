# SPDX-License-Identifier: Apache-2.0
"""Facts of one engine that every role object needs: configuration, incarnation, model, address, secrets."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_ascend_pd import __version__, admission
from vllm_ascend_pd.config import MAX_VERSION, PushConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import CacheGeometry, LayerKind
from vllm_ascend_pd.protocol.auth import Secrets, prompt_hash
from vllm_ascend_pd.protocol.identity import Endpoint, dp_rank_of, incarnation
from vllm_ascend_pd.protocol.versions import OURS, fingerprint
from vllm_ascend_pd.secret_files import load_secrets
from vllm_ascend_pd.shared.adapters import adapter_identity
from vllm_ascend_pd.shared.exposure import check_exposure
from vllm_ascend_pd.shared.settings import impossible
from vllm_ascend_pd.transport.base import Target, Wire

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts that a worker sends to its scheduler in vLLM's handshake: its endpoint (D), its cache, and its limits."""

    endpoint: Endpoint | None
    geometry: CacheGeometry
    why_no_first_token: str = ""  # why it cannot go on behind a token that it has not sampled
    kernel_blocks: tuple[int, ...] = ()  # by group: blocks of the geometry in one of vLLM's; empty: they are the same


@dataclass(slots=True)
class Weights:
    """Weights of an engine, as vLLM's caller names them: their version can change while the engine runs."""

    version: str = "default"


@dataclass(frozen=True, slots=True)
class Engine:
    """Facts of one process. `incarnation` is this process's own; D's workers serve that of their scheduler."""

    config: PushConfig
    incarnation: str
    engine_id: str
    model: str
    host: str
    secrets: Secrets | None
    listeners_before: int = 0  # of the data-parallel ranks before this one
    ranks_here: int = 1  # data-parallel ranks that this one's address stands for
    weights: Weights = field(default_factory=Weights)  # known to the scheduler's process only

    @classmethod
    def of(cls, vllm_config: Any) -> Engine:
        """Parse and check the configuration. Raise ConfigError with the remedy."""
        transfer = vllm_config.kv_transfer_config
        push = PushConfig.parse(transfer.kv_connector_extra_config or {})
        if push.ignored:
            log.warning(
                "kv_connector_extra_config: %s mean nothing to this connector: ignored", ", ".join(push.ignored)
            )
        admission.check_engine(vllm_config, push)
        host = own_address(push, os.environ)
        parallel = vllm_config.parallel_config
        return cls(
            config=push,
            incarnation=incarnation(os.urandom(8).hex(), admission.dp_rank(parallel)),
            engine_id=str(transfer.engine_id),
            model=admission.model_fingerprint(vllm_config, push.wire.model_version),
            host=host,
            secrets=load_secrets(push.channel),
            listeners_before=admission.listening_offsets(parallel)[0],
            ranks_here=admission.ranks_here(parallel),
        )

    def summary(self, role: str, workers: Mapping[tuple[int, int], WorkerFacts]) -> str:
        """Return, for the log at the start, what this engine is to its peers."""
        cache = merge_geometries(workers)
        listening = ", ".join(str(facts.endpoint) for _, facts in sorted(workers.items()) if facts.endpoint is not None)
        layers = sum(len(stage) for stage in cache.stages)
        return (
            f"vllm_ascend_pd {__version__}, {role} engine {self.incarnation}, protocol {OURS}, known as {self.known_as}, "
            f"side channel {listening or 'dials only'}, secret {'yes' if self.secrets else 'NO'}, "
            f"{self.config.wire.transport} transport, TP {cache.tp_size} x PP {len(cache.stages)}, {layers} layers, "
            f"{cache.kv_heads} KV heads, blocks of {cache.covers} tokens, {cache.dtype}"
        )

    def port_of(self, worker: int) -> int:
        """Return the port of a worker's side channel; 0: the kernel chooses."""
        port = self.config.channel.side_channel_port
        return port and port + self.listeners_before + worker

    @property
    def listening_port(self) -> int:
        """Port on which P's scheduler listens; 0: the kernel chooses."""
        port = self.config.channel.side_channel_port
        return port and port + int(dp_rank_of(self.incarnation) or 0)

    def listeners(self, port: int) -> tuple[Endpoint, ...]:
        """Return the endpoints at which the schedulers of P's ranks take offers. The first rank listens on `port`."""
        ranks = (
            self.ranks_here if self.config.channel.side_channel_port else 1
        )  # else only a rank itself knows its port
        return tuple(Endpoint(self.known_as, port + rank) for rank in range(ranks))

    def create_target(self, attach_thread: Callable[[], None]) -> Target:
        """Create the transfer engine that receives; its threads call `attach_thread` before they touch device memory.

        It is imported only here: the API server has none.
        """
        from vllm_ascend_pd.transport.create import create_target

        return create_target(self.config.wire, self.known_as, attach_thread)

    def create_wire(self, attach_thread: Callable[[], None]) -> Wire:
        """Create the transfer engine that writes; else as `create_target`."""
        from vllm_ascend_pd.transport.create import create_wire

        return create_wire(self.config.wire, self.known_as, quiet_s=self.config.quiet_s, attach_thread=attach_thread)

    @property
    def model_now(self) -> str:
        """Model, with the version of its weights if vLLM's caller has set one."""
        version = self.weights.version
        if len(version) > MAX_VERSION:
            version = hashlib.sha256(version.encode()).hexdigest()
        return self.model if version == Weights().version else f"{self.model} weights={version}"

    @property
    def fingerprint(self) -> str:
        """Model and protocol versions in short: routers see from it which engines can be a pair."""
        return fingerprint(self.model_now)

    @property
    def known_as(self) -> str:
        """Host under which peers know this engine; they must reach its transfer engine's session under it."""
        return self.config.channel.advertise_host or self.host


def own_address(push: PushConfig, environ: Mapping[str, str]) -> str:
    """Return the address to bind. Raise ConfigError if peers cannot use it, or if it is exposed without a secret."""
    host = push.channel.side_channel_host or environ.get("VLLM_HOST_IP", "") or LOOPBACK
    if host in WILDCARDS and not push.channel.advertise_host:
        why = "it is every address of this host, and peers need one"
        remedy = "Set side_channel_host to one address, or advertise_host beside it."
        impossible("side_channel_host", host, why, remedy)
    check_exposure(
        host, secured=bool(push.channel.secret_file), allow_unauthenticated=push.channel.allow_unauthenticated
    )
    return host


_NO_WORKER_FACTS = (
    "no worker reported its cache layout; behind a MultiConnector, name this connector first: vLLM asks the first alone"
)


def merge_geometries(workers: Mapping[tuple[int, int], WorkerFacts]) -> CacheGeometry:
    """Merge the workers' geometries into the engine's: one set of layers per pipeline stage, the same for its ranks."""
    stages: dict[int, CacheGeometry] = {}
    for (stage, _), facts in sorted(workers.items()):
        geometry = facts.geometry
        if stages.setdefault(stage, geometry).layers != geometry.layers:
            why = f"ranks of pipeline stage {stage} hold different layers"
            raise ConfigError("PD-GEO-003", layer=geometry.layers[0], why=why)
        if stages[stage] != geometry or _common(geometry) != _common(next(iter(stages.values()))):
            raise ConfigError(
                "PD-GEO-003", layer=geometry.layers[0], why="this engine's workers have different cache layouts"
            )
    if not stages:
        raise ConfigError("PD-GEO-003", layer="(none)", why=_NO_WORKER_FACTS)
    kinds: dict[CacheGeometry, int] = {}  # without their layers
    kind_of: list[int] = []
    for geometry in stages.values():
        bare = [msgspec.structs.replace(kind, stages=(), drafts=()) for kind in geometry.kinds]
        numbers = [kinds.setdefault(kind, len(kinds)) for kind in bare]
        kind_of.extend(numbers[index] for index in geometry.kind_indices)
    first, *others = kinds
    drafts = tuple(name for geometry in stages.values() for name in geometry.drafts)
    if first.drafter and not drafts:
        why = f"no layer is known to be of the draft model ({first.drafter})"
        raise ConfigError("PD-GEO-003", layer="(none)", why=why)
    return msgspec.structs.replace(
        first,
        stages=tuple(geometry.layers for geometry in stages.values()),
        drafts=drafts,
        others=tuple(
            LayerKind(k.kv_heads, k.dtype, k.packing, k.regions, k.group_index, k.ranks.world < first.ranks.world)
            for k in others
        ),
        kind_of=tuple(kind_of) if others else (),
    )


def _common(geometry: CacheGeometry) -> tuple[object, ...]:
    return geometry.tables, geometry.tp_size, geometry.drafter


def has_embeddings(request: Any) -> bool:
    """Return whether a part of the prompt came as embeddings, of which token ids and `request_hash` say nothing."""
    return request.prompt_token_ids is None or request.prompt_embeds is not None


def request_hash(request: Any, tokens: Sequence[int] | None = None) -> str:
    """Return a hash of all that a prompt's KV depends on: tokens, LoRA, multimodal input, cache salt.

    `tokens`: those that are computed before the next one is sampled, if they are more than the prompt.
    """
    return prompt_hash(
        request.prompt_token_ids if tokens is None else tokens,
        adapter_identity(request.lora_request),
        request.cache_salt,
        tuple(feature.identifier for feature in request.mm_features or ()),
    )
