# SPDX-License-Identifier: Apache-2.0
"""A task for each instance, for as long as it is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_ascend_pd.metaserver.service.fleet import Fleet, Instance

_LOOK_EVERY_S = 0.1


async def attend_each(fleet: Fleet, name: str, attend: Callable[[Instance], Coroutine[Any, Any, None]]) -> None:
    """Run `attend` of every instance, without end. A slow one delays no other; what one raises ends this."""
    tasks: dict[Instance, asyncio.Task[None]] = {}
    try:
        while True:
            members = dict.fromkeys(fleet)  # in their order
            for gone in [instance for instance in tasks if instance not in members]:
                tasks.pop(gone).cancel()
            for new in [instance for instance in members if instance not in tasks]:
                tasks[new] = asyncio.create_task(attend(new), name=f"{name} {new.name}")
            for task in tasks.values():
                if task.done():
                    task.result()
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
