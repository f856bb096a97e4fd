# SPDX-License-Identifier: Apache-2.0
"""A task for each instance, as long as the fleet has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_ascend_pd.router.fleet import Fleet, Instance

Attend = Callable[[Instance], Coroutine[Any, Any, None]]
log = logging.getLogger(__name__)
_LOOK_EVERY_S, _AGAIN_S = 0.1, 10.0


async def attend_each(fleet: Fleet, name: str, attend: Attend) -> None:
    """Run `attend` of every instance, without end. A slow one delays no other; one that fails is restarted later."""
    tasks: dict[Instance, asyncio.Task[None]] = {}
    try:
        while True:
            members = dict.fromkeys(fleet)  # in their order
            for gone in [instance for instance in tasks if instance not in members]:
                tasks.pop(gone).cancel()
            for new in [instance for instance in members if instance not in tasks]:
                tasks[new] = asyncio.create_task(attend(new), name=f"{name} {new.name}")
            for instance, task in list(tasks.items()):
                if task.done() and not task.cancelled() and (problem := task.exception()) is not None:
                    log.error("%s failed, and is begun again in %g s", task.get_name(), _AGAIN_S, exc_info=problem)
                    tasks[instance] = asyncio.create_task(_attend_again(attend, instance), name=task.get_name())
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _attend_again(attend: Attend, instance: Instance) -> None:
    await asyncio.sleep(_AGAIN_S)
    await attend(instance)
