# SPDX-License-Identifier: Apache-2.0
"""Checks whether an address can be reached from other hosts, mostly made before a socket is bound to it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from vllm_ascend_pd.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether every address that `host` stands for is a loopback address; False if it cannot be resolved."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(infos) and all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in infos)


SECLUDED = "prefill engines of other hosts cannot reach {host}, and requests come from {url}."
UNREACHABLE_REMEDY = "Set VLLM_HOST_IP (or side_channel_host) to this host's address."


def unreachable_warning(host: str, metaservers: Iterable[str]) -> str:
    """Return a sentence if D listens for its own host only although a metaserver may be elsewhere; else empty."""
    afar = [url for url in metaservers if not names_loopback(urlsplit(url).hostname or "")]
    return SECLUDED.format(url=afar[0], host=host) if afar and is_loopback(host) else ""


def names_loopback(host: str) -> bool:
    """Return what `is_loopback` does, without asking a name server: of names only localhost is loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, *, secured: bool, allow_unauthenticated: bool) -> None:
    """Raise PD-SEC-002 if other hosts could reach an unauthenticated side channel on `host`."""
    if not secured and not allow_unauthenticated and not is_loopback(host):
        raise ConfigError("PD-SEC-002", address=host or "(all addresses)")
