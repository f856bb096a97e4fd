# SPDX-License-Identifier: Apache-2.0
"""An asyncio loop whose clock jumps to the next timer, and on which all that asks for the time or for chance gets it by seed."""

from __future__ import annotations

import asyncio
import random
import selectors
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

TURN_S = 1e-6  # what a turn of the loop takes: time never stands still
WALL = 1_700_000_000.0  # what the wall clock shows at the start


class Deadlock(Exception):
    """Everything waits, and nothing is to happen."""


class _NoFiles(selectors.BaseSelector):
    """Nothing but time ever becomes ready."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock
        if self.loop is not None:
            self.loop.now += timeout + TURN_S
        return []

    def close(self) -> None:
        self._keys.clear()


Connect = Callable[[Callable[[], asyncio.Protocol], str, int], Awaitable[tuple[Any, Any]]]


class VirtualLoop(asyncio.SelectorEventLoop):
    """`connect` stands for the network."""

    def __init__(self) -> None:
        selector = _NoFiles()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0
        self.connect: Connect | None = None

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """At once: there are no threads."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as problem:  # noqa: BLE001 - whatever it is, who awaits gets it
            done.set_exception(problem)
        return done

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        if self.connect is None:
            raise OSError("no network")
        return await self.connect(factory, host, port)


@contextmanager
def simulated(seed: int) -> Iterator[VirtualLoop]:
    """A loop of its own, and in the whole process its clock and the seed's chance."""
    loop, rng = VirtualLoop(), random.Random(f"names/{seed}")
    random.seed(f"service/{seed}")
    names = {
        "secrets.token_hex": lambda count=16: rng.getrandbits(8 * count).to_bytes(count, "big").hex(),
        "uuid.uuid4": lambda: uuid.UUID(int=rng.getrandbits(128)),
        "time.monotonic": loop.time,
        "time.time": lambda: WALL + loop.now,
    }
    asyncio.set_event_loop(loop)
    patches = [mock.patch(name, new) for name, new in names.items()]
    try:
        for patch in patches:
            patch.start()
        yield loop
    finally:
        for patch in reversed(patches):
            patch.stop()
        _end(loop)
        asyncio.set_event_loop(None)


def _end(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
