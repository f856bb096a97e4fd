# SPDX-License-Identifier: Apache-2.0
"""The way of one streamed completion through the router: how many functions in how many files it passes.

    PYTHONPATH=.:tests .venv/bin/python -m unit.router.walk [--functions]

One P, one D, a second request: with D's post and its report there are three requests. The functions of the package are
counted that the router's thread calls; of generators, coroutines and comprehensions each function once.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import vllm_ascend_pd
from unit.router.cluster import cluster, streamed, until

PACKAGE = str(Path(vllm_ascend_pd.__file__).parent) + "/"
BESIDE = ("probe", "all heartbeats", "hub", "canary")  # what a worker does beside its requests, by how its tasks begin


def main() -> None:
    calls = Counter[tuple[str, int, str]]()

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(PACKAGE), code.co_firstlineno, code.co_name] += 1

    async def count(on: bool) -> None:
        for task in asyncio.all_tasks():
            if task.get_name().startswith(BESIDE):
                task.cancel()
        sys.setprofile(called if on else None)

    with cluster() as c:
        last = c.worker.front.journal.last
        for prompt in ("the first one", "the second one"):
            served = len(last)
            c.served.loop.call(count(bool(served)), 10)
            assert streamed(c.complete(prompt, stream=True))
            until(lambda: len(last) > served and "loaded" in [name for name, _, _ in last[-1].stages])  # noqa: B023
        c.served.loop.call(count(False), 10)
    files = {file for file, _, _ in calls}
    print(f"{len(calls)} functions in {len(files)} files, {calls.total()} calls")
    if "--functions" in sys.argv:
        for (file, line, name), times in sorted(calls.items()):
            print(f"{times:5} {file}:{line} {name}")


if __name__ == "__main__":
    main()
