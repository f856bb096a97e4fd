# SPDX-License-Identifier: Apache-2.0
"""Mooncake's TransferEngine: found, checked and opened. The only file that imports it, and only when asked to.

Mooncake reads its settings from the environment while an engine is constructed, so they are set here, before that.
What the operator has set himself is kept, except where our own promises depend on the value.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
import os
import re
from collections.abc import MutableMapping
from typing import Protocol

from vllm_ascend_pd.errors import ConfigError, PdError

log = logging.getLogger(__name__)

DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine",
)
# Older ones acknowledge TCP writes before the bytes are there, and write to memory that is not registered.
OLDEST_FOR_TCP = "0.3.13.post1"
CONNECT_TIMEOUT_S = 5

NO_TRANSFER = frozenset((0, -1, 2**32 - 1, 2**64 - 1))  # what a refused submission returns, as any integer type


class Engine(Protocol):
    """What we use of mooncake.engine.TransferEngine. Most of it segfaults before `initialize`."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], lengths: list[int], /) -> int: ...
    def send_probe(self, session: str, /) -> int: ...
    def transfer_submit_write(self, session: str, src: int, dst: int, size: int, /) -> int: ...
    def transfer_check_status(self, transfer: int, /) -> int: ...
    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], size: list[int], /) -> int: ...


def prepare_environment(environ: MutableMapping[str, str], protocol: str, transfer_timeout_s: float) -> None:
    """Set what the engine reads when it is constructed."""
    forced = environ.get("MC_FORCE_TCP", "")
    if protocol == "tcp":
        environ["MC_FORCE_TCP"] = "1"  # the protocol argument alone does not keep RDMA or Ascend from being installed
    elif forced not in ("", "0"):
        raise ConfigError(
            "PD-CONF-003",
            key="mooncake_protocol",
            value=protocol,
            why=f"MC_FORCE_TCP={forced} is set in the environment",
            remedy="Unset MC_FORCE_TCP or use mooncake_protocol tcp.",
        )
    timeout = str(math.ceil(transfer_timeout_s))
    set_by_hand = environ.get("MC_TRANSFER_TIMEOUT")
    if set_by_hand not in (None, timeout):
        log.warning("MC_TRANSFER_TIMEOUT=%s is replaced by transfer_timeout_s (%s s)", set_by_hand, timeout)
    environ["MC_TRANSFER_TIMEOUT"] = timeout  # the fence counts on it
    for name, value in (
        # The default of 1024 fails every write after a stall of one second.
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
        ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", str(CONNECT_TIMEOUT_S)),
        ("PASS_ALLOC", "1"),  # no 2 GiB buffer of Mooncake's own, open to every peer
        ("MC_LOG_LEVEL", "WARNING"),
    ):
        environ.setdefault(name, value)


def load(protocol: str) -> type[Engine]:
    """The engine's class, or PD-WIRE-001 saying what is missing."""
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:  # not installed, or a shared library that it needs is not
        raise PdError("PD-WIRE-001", why=str(error)) from error
    engine: type[Engine] = module.TransferEngine
    lacking = [name for name in ("transfer_submit_write", "send_probe") if not hasattr(engine, name)]
    found = installed_version()
    if lacking or (protocol == "tcp" and found is not None and _key(found[1]) < _key(OLDEST_FOR_TCP)):
        name, version = found or ("mooncake.engine", "of an unknown version")
        raise PdError("PD-WIRE-001", why=f"{name} {version} is too old, {OLDEST_FOR_TCP} is needed")
    return engine


def installed_version() -> tuple[str, str] | None:
    """Which distribution provides the engine, and its version."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def open_engine(kind: type[Engine], host: str, protocol: str) -> Engine:
    """A fresh engine that listens on a port of its own choice."""
    engine = kind()
    rc = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if rc != 0:
        raise PdError("PD-WIRE-001", why=f"the engine's initialize({host!r}, {protocol!r}) returned {rc}")
    return engine


def process_environment() -> MutableMapping[str, str]:
    return os.environ


def _key(version: str) -> tuple[int, ...]:
    """0.3.13.post1 → (0, 3, 13, 1): all numbers in order; enough to compare releases of one project."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))
