# SPDX-License-Identifier: Apache-2.0
"""All settings of the metaserver with their defaults. The flags of `cli/metaserver.py` say what each means."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.metaserver.decisions import CircuitPolicy, RetryPolicy
from vllm_ascend_pd.secret_files import read_private


@dataclass(frozen=True, slots=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_host: str = ""  # host that D calls back; empty: made from `host`
    workers: int = 1
    worker_port: int = 0  # worker i also listens on this + i; 0: on port + 1 + i, but a single worker on none
    grace_s: float = 30.0

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    instances_file: str = ""
    members: bytes = b""  # of a worker: the supervisor's instances, in place of these three

    sidecar: bool = False  # of one D: requests name their P's themselves
    prefill_allowed: tuple[str, ...] = ()  # addresses that those P's may have
    without_prefill: str = "local"  # no usable P: "local" (D prefills) or "refuse" (503)
    prefix_tokens: int = 500_000  # that each engine's prefix cache is thought to hold; 0: choose by load alone
    kv_events: tuple[str, ...] = ()  # where engines publish what it holds
    decode_alone: int = 0  # D computes a prompt of which it lacks at most so many tokens; 0: P prefills each
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    circuit: CircuitPolicy = field(default_factory=CircuitPolicy)
    canary: bool = True

    connect_timeout_s: float = 3.0
    prefill_timeout_s: float = 600.0
    first_byte_timeout_s: float = 900.0
    idle_timeout_s: float = 300.0  # silence of a stream after its first byte
    probe_every_s: float = 1.0
    probe_timeout_s: float = 2.0
    forsaken_s: float = 5.0  # silence of a request whose engine refuses connections
    vanished_s: float = 20.0  # and of one whose engine is unreachable
    heartbeat_s: float = 2.0

    resume_tokens: int = 131_072  # of prompt and answer of a stream that another D can continue; 0: none can
    resume_bytes: int = 256 << 20  # kept of all such streams
    resume_ceiling: int = 0  # most tokens of an answer that the engines allow; 0: as many as are asked for

    max_body_bytes: int = 64 << 20
    max_running: int = 4096
    max_waiting: int = 1024
    max_wait_s: float = 30.0

    admin_token: str = ""
    engine_token: str = ""  # for canaries, and for clients that bring no authorization
    tls_cert: str = ""
    tls_key: str = ""
    engine_ca: str = ""
    trace_dir: str = ""
    otlp_traces_endpoint: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    def engine_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for https engines; None: the system's certificates."""
        return ssl.create_default_context(cafile=self.engine_ca) if self.engine_ca else None


def read_token(path: str) -> str:
    """Return the secret in a token file, which must not be readable by other users."""
    if not path:
        return ""
    token = read_private(path, "PD-SEC-004")
    if len(token) < 16 or not token.isascii() or any(chr(c).isspace() for c in token):
        raise ConfigError("PD-SEC-004", path=path, why="it must hold one word of at least 16 ASCII characters")
    return token.decode("ascii")
