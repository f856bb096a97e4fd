# SPDX-License-Identifier: Apache-2.0
"""Who can reach an address that we are about to bind. Asked once, at start, before any socket exists."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from vllm_ascend_pd.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is a loopback address. What cannot be resolved is not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


SECLUDED = "prefill engines of other hosts cannot reach {host}, and requests come from {url}."
COME_OUT = "Set VLLM_HOST_IP (or side_channel_host) to this host's address."


def secluded(host: str, metaservers: Iterable[str]) -> str:
    """The sentence for a D that listens for its own host only, although one of its metaservers may be elsewhere; or none."""
    afar = [url for url in metaservers if not names_loopback(urlsplit(url).hostname or "")]
    return SECLUDED.format(url=afar[0], host=host) if afar and is_loopback(host) else ""


def names_loopback(host: str) -> bool:
    """As `is_loopback`, without asking a name server: a name other than localhost is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, *, secured: bool, allow_unauthenticated: bool) -> None:
    """PD-SEC-002 when strangers could reach an unauthenticated side channel on `host`."""
    if not secured and not allow_unauthenticated and not is_loopback(host):
        raise ConfigError("PD-SEC-002", address=host or "(all addresses)")
