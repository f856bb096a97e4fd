# SPDX-License-Identifier: Apache-2.0
"""Everything an operator can set about the metaserver, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_pd.metaserver.decisions import CircuitPolicy, RetryPolicy


@dataclass(frozen=True, slots=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    advertise: str = ""  # base URL that D calls back; empty: made from host and port
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    without_prefill: str = "local"  # no usable P: "local" (D prefills) or "refuse" (503)
    affinity: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    circuit: CircuitPolicy = field(default_factory=CircuitPolicy)
    connect_timeout_s: float = 3.0
    prefill_timeout_s: float = 600.0
    first_byte_timeout_s: float = 900.0
    idle_timeout_s: float = 300.0  # silence of a stream after its first byte
    probe_every_s: float = 1.0
    probe_timeout_s: float = 2.0
    max_body_bytes: int = 64 << 20
    max_running: int = 4096
    max_waiting: int = 4096
    heartbeat_s: float = 2.0
