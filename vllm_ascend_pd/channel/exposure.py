# SPDX-License-Identifier: Apache-2.0
"""Who can reach an address that we are about to bind. Asked once, at start, before any socket exists."""

from __future__ import annotations

import ipaddress
import socket

from vllm_ascend_pd.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is a loopback address. What cannot be resolved is not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


def check_exposure(host: str, *, secured: bool, allow_unauthenticated: bool) -> None:
    """PD-SEC-002 when strangers could reach an unauthenticated side channel on `host`."""
    if not secured and not allow_unauthenticated and not is_loopback(host):
        raise ConfigError("PD-SEC-002", address=host or "(all addresses)")
