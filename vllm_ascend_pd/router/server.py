# SPDX-License-Identifier: Apache-2.0
"""One worker as a process: its sockets, its HTTP server, its shutdown.

Shutdown has two steps. First no new request is taken while those in progress finish; the sockets stay open, as D still
posts for these. Then the server stops. A second signal stops it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Sequence

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.observe.trace import TraceFile
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.connection import FrontDoor
from vllm_ascend_pd.router.gate import ConnectionGate, Places, max_connections
from vllm_ascend_pd.router.hub import Hub
from vllm_ascend_pd.router.settings import Settings

log = logging.getLogger(__name__)
_LAST_WORDS_S = 5.0
_BACKLOG = 4096
_YOUNG_OBJECTS = 20_000
_UNREAD_S = 300.0  # a client that reads nothing of what waits for it is cut off after this; accepted sockets inherit it


class HttpServer:
    """The HTTP server of one worker, on sockets that listen."""

    def __init__(self, worker: WorkerProcess, sockets: Sequence[socket.socket]) -> None:
        self._worker, self._sockets = worker, sockets
        self._stopped = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._at_once = False
        self._door: FrontDoor | None = None

    async def serve(self, last_words_s: float = _LAST_WORDS_S) -> None:
        """Serve until `drain` has drained, or `stop` is called."""
        self._door = door = FrontDoor(self._worker.answer, Places(max_connections()))
        gate = ConnectionGate(door.serve, door.places, self._worker.settings.own_tls())
        async with self._worker.standing():
            for each in self._sockets:
                gate.open(each)
            await self._stopped.wait()
            gate.close()
            await gate.handed_over()
            for each in self._sockets:
                each.close()
            if not self._at_once:
                door.pre_shutdown()
                await door.shutdown(last_words_s)

    def stop(self) -> None:
        """Take no new connections, and end when those requests that are being answered have ended."""
        self._stopped.set()

    def signal(self) -> None:
        """Drain at the first signal, stop at once at the second."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(), name="drain")
        elif self._door is not None:
            self._at_once = True
            for connection in self._door.connections:
                connection.force_close()
            self.stop()

    async def _drain(self) -> None:
        log.info("shutting down: waiting for %d requests", len(self._worker.front.journal.exchanges))
        await self._worker.front.drain()
        self.stop()


def run_worker(settings: Settings, sockets: list[socket.socket], hub: Hub | None = None) -> int:
    """Run a worker until a signal. Its requests carry the address of the last socket."""
    _raise_file_limit()
    host = callable_host(settings.advertise_host or settings.host)
    worker = WorkerProcess(settings, f"{settings.scheme}://{host}:{sockets[-1].getsockname()[1]}", hub)
    log.info("worker %d: decode engines call back %s", worker.hub.worker, worker.front.own_url)
    trace = TraceFile(settings.trace_dir, "metaserver") if settings.trace_dir else None
    _spare_the_collector()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_until_signalled(worker, sockets))
    else:
        uvloop.run(_until_signalled(worker, sockets))
    if trace is not None:
        trace.close()
    return 0


async def _until_signalled(worker: WorkerProcess, sockets: list[socket.socket]) -> None:
    server = HttpServer(worker, sockets)
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, server.signal)
    await server.serve()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise ConfigError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only if the protocol is named. Accepted sockets inherit it and the options.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNREAD_S * 1000))
    try:
        listening.bind((host, port))
    except OSError as problem:
        listening.close()
        raise ConfigError("PD-CONF-008", address=f"{host}:{port}", why=problem.strerror or str(problem)) from problem
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


def _spare_the_collector() -> None:
    """Spare the garbage collector work.

    Objects that are there now stay: each full collection would scan them for tens of milliseconds. Objects of requests
    are scanned when most of them are freed already; the usual threshold of 700 is too low for that.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _raise_file_limit() -> None:
    """Raise the limit of open files: a request has up to five connections, so the usual 1,024 would be 200 requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def callable_host(host: str) -> str:
    """Return an address that D can call: this machine's own if `host` stands for all of them."""
    if host in ("0.0.0.0", "::", ""):
        return _outward_address()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _outward_address() -> str:
    """Return the address that packets to other hosts would leave from. To connect a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
