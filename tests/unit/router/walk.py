# SPDX-License-Identifier: Apache-2.0
"""The way of one streamed completion through the router: how many functions in how many files it passes.

    PYTHONPATH=.:tests .venv/bin/python -m unit.router.walk [--functions]

One P, one D, a second request: with D's post and its report there are three requests. The functions of the package are
counted that the router's thread calls; of generators, coroutines and comprehensions each function once.
"""

from __future__ import annotations

import asyncio
import sys

from unit.kits.walk import Walk, show
from unit.router.cluster import cluster, streamed, until

BESIDE = ("probe", "all heartbeats", "hub", "canary")  # what a worker does beside its requests, by how its tasks begin


def main() -> None:
    walk = Walk()
    walk.begin()

    async def count(on: bool) -> None:
        for task in asyncio.all_tasks():
            if task.get_name().startswith(BESIDE):
                task.cancel()
        sys.setprofile(walk.called if on else None)

    with cluster() as c:
        last = c.worker.front.journal.last
        for prompt in ("the first one", "the second one"):
            served = len(last)
            c.served.loop.call(count(bool(served)), 10)
            assert streamed(c.complete(prompt, stream=True))
            until(lambda: len(last) > served and "loaded" in [name for name, _, _ in last[-1].stages])  # noqa: B023
        c.served.loop.call(count(False), 10)
    show(str(walk), walk.calls)


if __name__ == "__main__":
    main()
