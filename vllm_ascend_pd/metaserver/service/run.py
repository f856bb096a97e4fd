# SPDX-License-Identifier: Apache-2.0
"""Starts the service: one process, one socket."""

from __future__ import annotations

import socket

import uvicorn

from vllm_ascend_pd.metaserver.service.app import Front
from vllm_ascend_pd.metaserver.service.settings import Settings

_KEEPALIVE_S = 75  # longer than a client keeps a connection idle, so that it is the client that closes


def serve(settings: Settings) -> int:
    listening = listen(settings.host, settings.port)
    port = listening.getsockname()[1]
    front = Front(settings, settings.advertise or f"http://{_callable_host(settings.host)}:{port}")
    config = uvicorn.Config(
        front.app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEPALIVE_S,
        timeout_graceful_shutdown=30,
        lifespan="on",
        interface="asgi3",
    )
    print(f"metaserver on {settings.host}:{port}, D calls back {front.exchanges.own_url}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(4096)
    listening.setblocking(False)
    return listening


def _callable_host(host: str) -> str:
    """An address that D can call: the host's own name where it listens on all of them."""
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostbyname(socket.gethostname())
    return f"[{host}]" if ":" in host else host
