# SPDX-License-Identifier: Apache-2.0
"""The Mooncake package: import, version check and environment. Only this file imports it, and only on demand.

Mooncake reads its settings from the environment while an engine is constructed, so they are set here, before that.
Values set by the operator are kept, except where the protocol's promises depend on them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
import re
from collections.abc import Mapping, MutableMapping

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.shared.settings import impossible
from vllm_ascend_pd.transport.engine import RawEngine

log = logging.getLogger(__name__)

DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine",
)
# Older versions acknowledge TCP writes before the bytes have arrived, and write to memory that is not registered.
OLDEST_FOR_TCP = "0.3.13.post1"
CONNECT_TIMEOUT_S = 5


def prepare_environment(environ: MutableMapping[str, str], protocol: str, transfer_timeout_s: float) -> None:
    """Set what an engine reads when it is constructed. Raise ConfigError if the operator's settings break a promise."""
    if protocol == "tcp":
        # Unacknowledged framing reports a write as complete before the bytes have arrived.
        _refuse(environ, protocol, "MC_TCP_PROTO", harmless=("2",))
        environ["MC_FORCE_TCP"] = "1"  # the protocol argument alone does not keep RDMA or Ascend from being installed
    else:
        _refuse(environ, protocol, "MC_FORCE_TCP", harmless=("0",))
    timeout = str(math.ceil(transfer_timeout_s))
    set_by_hand = environ.get("MC_TRANSFER_TIMEOUT")
    if set_by_hand not in (None, timeout):
        log.warning("MC_TRANSFER_TIMEOUT=%s is replaced by transfer_timeout_s (%s s)", set_by_hand, timeout)
    environ["MC_TRANSFER_TIMEOUT"] = timeout  # the fence's quiet time relies on it
    if protocol == "ascend":
        connect, transfer = ascend_timeouts(environ, transfer_timeout_s)
        environ.update(ASCEND_CONNECT_TIMEOUT=str(connect), ASCEND_TRANSFER_TIMEOUT=str(transfer))
    for name, value in (
        # The default of 1024 fails every write after a stall of one second.
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
        ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", str(CONNECT_TIMEOUT_S)),
        ("PASS_ALLOC", "1"),  # else Mooncake allocates a 2 GiB buffer that every peer can access
        ("MC_LOG_LEVEL", "WARNING"),
    ):
        environ.setdefault(name, value)


def ascend_timeouts(environ: Mapping[str, str], transfer_timeout_s: float) -> tuple[int, int]:
    """Return the time limits of one connection attempt and of one transfer, in ms.

    They are the operator's values, or else values that fit. The ascend transport tries both twice. If that took longer
    than Mooncake's own limit, Mooncake would report a write as failed that the NPU still makes. Mooncake's defaults of
    10 s each are too long.
    """
    values = []
    for name, fits in (("CONNECT", transfer_timeout_s * 100), ("TRANSFER", transfer_timeout_s * 1000 / 3)):
        key = f"ASCEND_{name}_TIMEOUT"
        value = environ.get(key) or str(int(fits))
        if not (value.isascii() and value.isdecimal() and int(value)):
            why = "it is no whole number of milliseconds"
            impossible(key, value, why, f"Correct {key} in the environment.")
        values.append(int(value))
    needed = 2 * sum(values) / 1000
    if needed >= transfer_timeout_s:
        why = f"2 × (connect + transfer) = {needed:g} s in the environment, not below it"
        remedy = "Lower ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT, or leave them unset."
        impossible("transfer_timeout_s", transfer_timeout_s, why, remedy)
    return values[0], values[1]


def _refuse(environ: MutableMapping[str, str], protocol: str, name: str, harmless: tuple[str, ...]) -> None:
    value = environ.get(name, "")
    if value and value not in harmless:
        why = f"{name}={value} is set in the environment"
        remedy = f"Unset {name}."
        impossible("mooncake_protocol", protocol, why, remedy)


def load(protocol: str) -> type[RawEngine]:
    """Return the engine's class. Raise PD-WIRE-001, with what is missing, if it cannot be imported or is too old."""
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:  # it, or a shared library that it needs, is not installed
        raise PdError("PD-WIRE-001", why=str(error)) from error
    package = installed_version()
    if protocol == "tcp" and package is not None and version_key(package[1]) < version_key(OLDEST_FOR_TCP):
        raise PdError("PD-WIRE-001", why=f"{package[0]} {package[1]} is too old for tcp, {OLDEST_FOR_TCP} is needed")
    engine: type[RawEngine] = module.TransferEngine
    return engine


def installed_version() -> tuple[str, str] | None:
    """Return the distribution that provides the engine, and its version."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_key(version: str) -> tuple[int, ...]:
    """Return all numbers of a version in order, as 0.3.13.post1 → (0, 3, 13, 1): enough to compare releases."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))
