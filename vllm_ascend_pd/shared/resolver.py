# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts by name, looked up apart from requests: a name that resolves slowly delays no other.

The system's look-up holds its thread, for half a minute and more if no name server answers, and cannot be cancelled.
So each name has one look-up at a time, in a thread of its own, for all who ask. The last good answer serves while the
next one is awaited, and for a while if there is none.

`Resolver` has the form of an `aiohttp.abc.AbstractResolver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypedDict, TypeVar

T = TypeVar("T")

FRESH_S = 5.0  # an answer that is older is looked up again, beside the request that uses it
KEPT_S = 600.0  # how long an answer serves if there is no newer one
MAX_NAMES = 4096  # whose answers are kept
_AT_ONCE = 256  # look-ups, each with its thread
_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class Address(TypedDict):
    """An address of a host, in the form of an `aiohttp.abc.ResolveResult`."""

    hostname: str
    host: str
    port: int
    family: int
    proto: int
    flags: int


Hosts = list[tuple[int, str]]  # families and addresses


class _Good(NamedTuple):
    at: float
    hosts: Hosts


class Resolver:
    """The names of one event loop."""

    def __init__(self) -> None:
        self._good: OrderedDict[str, _Good] = OrderedDict()  # the oldest first
        self._looking: dict[str, asyncio.Task[Hosts]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[Address]:
        """Return the addresses of a host. Raise OSError if its look-up fails and no earlier answer serves."""
        hosts = self.known(host)
        if hosts is None:
            hosts = await asyncio.shield(self._look_up(host))  # who leaves stops the look-up of no other
        return [
            Address(hostname=host, host=address, port=port, family=kind, proto=0, flags=_NUMERIC)
            for kind, address in hosts
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def newest(self, host: str, patience_s: float) -> Hosts:
        """Look a host up; what is known of it serves if that fails or takes longer. Raise OSError if nothing is."""
        if numeric := literal(host):
            return numeric
        looking = self._look_up(host)
        kept = self._kept(host)
        if kept is None:
            return await asyncio.shield(looking)
        await asyncio.wait({looking}, timeout=patience_s)
        answered = looking.done() and not looking.cancelled() and looking.exception() is None
        return looking.result() if answered else kept

    def known(self, host: str) -> Hosts | None:
        """Return what is known of a host without waiting; None if nothing that still serves. Begin the next look-up."""
        if numeric := literal(host):
            return numeric
        good = self._good.get(host)
        if good is not None and asyncio.get_running_loop().time() - good.at >= FRESH_S:
            self._look_up(host)
        return self._kept(host)

    def _kept(self, host: str) -> Hosts | None:
        good = self._good.get(host)
        if good is None or asyncio.get_running_loop().time() - good.at >= KEPT_S:
            return None
        return good.hosts

    def met(self, host: str) -> bool:
        """Return whether a look-up of this host was ever good."""
        return host in self._good

    async def close(self) -> None:
        """End without waiting for look-ups: their threads end by themselves, and keep no process alive."""
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    def _look_up(self, host: str) -> asyncio.Task[Hosts]:
        task = self._looking.get(host)
        if task is None:
            task = self._looking[host] = asyncio.get_running_loop().create_task(self._ask(host), name=f"name {host}")
            task.add_done_callback(lambda done: self._looked_up(host, done))
        return task

    def _looked_up(self, host: str, done: asyncio.Task[Hosts]) -> None:
        del self._looking[host]
        if not done.cancelled():
            done.exception()  # seen: nobody may be waiting for this look-up

    async def _ask(self, host: str) -> Hosts:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Hosts] = loop.create_future()
        async with self._slots:
            try:
                threading.Thread(
                    target=_ask_system, args=(host, loop, answer), name=f"name {host}", daemon=True
                ).start()
            except RuntimeError as problem:
                raise OSError(errno.ENOMEM, "no thread to look a name up") from problem
            hosts = await answer
        self._good[host] = _Good(loop.time(), hosts)
        self._good.move_to_end(host)
        if len(self._good) > MAX_NAMES:
            self._good.popitem(last=False)
        return hosts


def literal(host: str) -> Hosts | None:
    """Return an address as its own answer; None for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return [(socket.AF_INET if version == 4 else socket.AF_INET6, host)]


async def reach(hosts: Hosts, connect: Callable[[str], Awaitable[T]]) -> T:
    """Connect to the first address that takes it. Raise one OSError for all: a refusal, if one of them refused."""
    problems = list[OSError]()
    for _, host in hosts:
        try:
            return await connect(host)
        except OSError as problem:
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    refused = any(isinstance(problem, ConnectionRefusedError) for problem in problems)
    raise OSError(errno.ECONNREFUSED if refused else problems[-1].errno, "; ".join(map(str, problems)))


def _ask_system(host: str, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Hosts]) -> None:
    hosts: Hosts | OSError
    try:
        if "\0" in host:  # some releases of Python look up what is before it
            raise ValueError("embedded null character")
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        hosts = list(dict.fromkeys((int(kind), str(address[0])) for kind, _, _, _, address in entries))
    except OSError as problem:
        hosts = problem
    except ValueError as problem:  # an encoding's too
        hosts = OSError(errno.EINVAL, f"it is no name ({problem})")
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(_deliver, answer, hosts)


def _deliver(answer: asyncio.Future[Hosts], hosts: Hosts | OSError) -> None:
    if answer.done():  # cancelled
        return
    if isinstance(hosts, OSError):
        answer.set_exception(hosts)
    else:
        answer.set_result(hosts)
