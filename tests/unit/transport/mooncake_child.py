# SPDX-License-Identifier: Apache-2.0
"""Receiving process for the Mooncake tests, and its handle for the tests.

    python -m unit.transport.mooncake_child SIZE [PORT]

listens (on PORT, if it is free), registers SIZE bytes of zeros, prints its session and address, and executes one
command per line on stdin: `sum`, `clear`, `revoke`, `starve COUNT` (leave so many descriptors free), `feed`, `shorten`
(accept's wait, and say whether the listener was found), `push SESSION BASE COUNT SPAN` (start to write ones there, in
spans that cannot be merged) and `settle` (wait for that write).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tools.support.fork_server import ForkServers
from unit.kits.child import ANSWER_S, AnsweringChild, take_connection
from vllm_ascend_pd.config import WireConfig
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.transport.base import Wire, WriteState
from vllm_ascend_pd.transport.create import create_target, create_wire
from vllm_ascend_pd.transport.engine import ACCEPT_S, OpenEngine
from vllm_ascend_pd.transport.mooncake_sockets import shorten_accept
from vllm_ascend_pd.transport.target import MooncakeTarget
from vllm_ascend_pd.transport.wire import MooncakeWire

MODULE = "unit.transport.mooncake_child"
LOOPBACK = "127.0.0.1"
WIRE = WireConfig(transfer_timeout_s=5, mooncake_protocol="tcp", max_descriptors=100)
QUIET_S = 7.0
ROOT = Path(__file__).parents[3]
PORT_WAIT_S = 120.0
ROOM = 128  # descriptors, more than this process ever needs


class ReceivingChild(AnsweringChild):
    """The child process that Mooncake writes into."""

    def __init__(self, size: int, forks: ForkServers, port: int | None = None) -> None:
        # Mooncake chooses a port at random: restrict its range
        ports = {"MC_MIN_RPC_PORT": str(port - 2), "MC_MAX_RPC_PORT": str(port + 2)} if port is not None else {}
        words = (MODULE, str(size), str(port or 0))
        super().__init__(*words, forks=forks, environment=ports, answer_s=PORT_WAIT_S + ANSWER_S)
        self.session, base = self.line().split()
        self.base = int(base)

    @property
    def port(self) -> int:
        return int(self.session.partition("/")[0].rpartition(":")[2])

    def sum(self) -> int:
        return int(self.ask("sum"))


def target_of(memory: np.ndarray) -> MooncakeTarget:
    target = create_target(WIRE, LOOPBACK)
    assert isinstance(target, MooncakeTarget)
    target.register([(memory.ctypes.data, len(memory))])
    return target


def wire_from(memory: np.ndarray, protocol: str = "tcp", **more: Any) -> MooncakeWire:
    """Create a wire by its protocol's name, as a worker of P does."""
    wire = create_wire(replace(WIRE, mooncake_protocol=protocol), LOOPBACK, quiet_s=QUIET_S, **more)
    assert isinstance(wire, MooncakeWire)
    wire.register([(memory.ctypes.data, len(memory))])
    return wire


def settle(wire: Wire, handle: int, limit_s: float = 40.0) -> WriteState:
    """Poll like the writer until the write has ended."""
    deadline = time.monotonic() + limit_s
    while (state := wire.poll(handle)) is WriteState.PENDING:
        assert time.monotonic() < deadline, "the write did not end"
        time.sleep(0.0005)
    return state


def _listen_on(port: int, size: int) -> tuple[MooncakeTarget, np.ndarray]:
    """Listen on this port. The kernel reserves a port for a minute after its last connection, and Mooncake cannot
    reuse it sooner: until then no engine is opened, which would take the ports beside it."""
    memory = np.zeros(size, dtype=np.uint8)
    deadline, taken = time.monotonic() + (PORT_WAIT_S if port else 0.0), list[str]()
    while port and (taken := _sockets_of(port)) and time.monotonic() < deadline:
        time.sleep(0.1)
    while True:
        target = target_of(memory)
        with contextlib.suppress(PdError):
            if port in (0, int(target.session.partition("/")[0].rpartition(":")[2])):
                return target, memory
        target.close()
        if time.monotonic() > deadline:
            raise SystemExit(f"port {port} was not to be had; sockets there: {taken}, now {_sockets_of(port)}")


def _sockets_of(port: int) -> list[str]:
    """Return the lines of the kernel's tables about TCP sockets of this host with this local port."""
    tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
    lines = (line for table in tables for line in table.read_text().splitlines()[1:])
    return [line for line in lines if int(line.split()[1].rpartition(":")[2], 16) == port]


def _push(wire: MooncakeWire, memory: np.ndarray, session: str, *numbers: str) -> int:
    """Start a write, and return while it is in progress: first contact is made, and nothing polls."""
    base, count, span = map(int, numbers)
    memory[:] = 1
    n = np.arange(count) * 2 * span
    handle = wire.submit(session, (memory.ctypes.data + n).tolist(), (base + n).tolist(), [span] * count)
    while wire.engines.current is None:
        wire.poll(handle)
    return handle


def _taken(free: int) -> list[int]:
    """Take all descriptors of this process but so many. Mooncake raises the soft limit, so the hard one is lowered."""
    limit = min(ROOM, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for _ in range(min(free, len(taken))):
        os.close(taken.pop())
    return taken


@contextlib.contextmanager
def starving(free: int) -> Iterator[None]:
    """Leave so many descriptors free, also whenever an engine is closed, which gives back what the next one needs."""
    taken, close = _taken(free), OpenEngine.close

    def close_and_take(self: OpenEngine) -> None:
        close(self)
        taken.extend(_taken(free))

    with mock.patch.object(OpenEngine, "close", close_and_take):
        yield
    while taken:
        os.close(taken.pop())


def main() -> None:
    size, port = int(sys.argv[1]), int(sys.argv[2])
    target, memory = _listen_on(port, size)
    wire = wire_from(memory)
    print(target.session, memory.ctypes.data, flush=True)
    handle, starved = 0, contextlib.ExitStack()
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "sum":
            answer: object = int(memory.sum(dtype=np.int64))
        elif command == "clear":
            memory[:] = 0
            answer = "ok"
        elif command == "revoke":
            try:
                answer = target.revoke()
            except (OSError, PdError) as error:
                answer = f"failed: {error}"
        elif command == "starve":
            starved.enter_context(starving(int(arguments[0])))
            answer = "ok"
        elif command == "feed":
            starved.close()
            answer = "ok"
        elif command == "shorten":
            try:
                answer = shorten_accept(int(target.session.partition("/")[0].rpartition(":")[2]), ACCEPT_S)
            except OSError as error:
                answer = f"failed: {error}"
        elif command == "push":
            handle = _push(wire, memory, *arguments)
            answer = "ok"
        else:
            answer = settle(wire, handle).value
        print(answer, flush=True)
    os._exit(0)


if __name__ == "__main__":
    take_connection()
    main()
