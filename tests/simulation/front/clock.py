# SPDX-License-Identifier: Apache-2.0
"""An asyncio loop whose clock jumps to the next timer, with time and randomness from a seed for the whole process."""

from __future__ import annotations

import asyncio
import random
import selectors
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

TURN_S = 1e-6  # duration of a turn of the loop, so that time advances
WALL = 1_700_000_000.0  # the wall clock at the start


class Deadlock(Exception):
    """Every task waits, and no event is left."""


class _NoFiles(selectors.BaseSelector):
    """A selector in which only time passes."""

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
    """The loop. `connect` replaces the network."""

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
        """Run it at once: there are no threads."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as problem:  # noqa: BLE001 - any exception goes to the awaiting task
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
    """Yield a new loop, while the process's clock and randomness are the loop's and the seed's."""
    loop, rng = VirtualLoop(), random.Random(f"names/{seed}")
    random.seed(f"service/{seed}")
    names = {
        "secrets.token_hex": lambda count=16: rng.getrandbits(8 * count).to_bytes(count, "big").hex(),
        "uuid.uuid4": lambda: uuid.UUID(int=rng.getrandbits(128)),
        "time.monotonic": loop.time,
        "aiohttp.connector.monotonic": loop.time,
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
