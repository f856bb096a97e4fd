# SPDX-License-Identifier: Apache-2.0
"""within(): timeout, cancellation and result are never mistaken for one another."""

from __future__ import annotations

import asyncio

import pytest

from vllm_ascend_pd.shared.within import ended, within


async def test_a_result_in_time_is_given() -> None:
    assert await within(5.0, asyncio.sleep(0, "result")) == "result"


async def test_an_error_in_time_is_raised() -> None:
    async def fails() -> None:
        raise OSError("why")

    with pytest.raises(OSError, match="why"):
        await within(5.0, fails())


async def test_work_that_takes_too_long_is_cancelled() -> None:
    ended = asyncio.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, long())
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_result_that_comes_in_spite_of_the_cancellation_goes_to_abandoned() -> None:
    abandoned: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    late = asyncio.Event()

    async def goes_on() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await late.wait()
        return "made"

    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, goes_on(), abandoned.set_result)
    assert not abandoned.done()
    late.set()
    assert await asyncio.wait_for(abandoned, 5) == "made"


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancellation_is_never_lost_whenever_it_comes(steps: int) -> None:
    """At each step of the loop around the moment in which the work ends."""
    abandoned: list[str] = []
    work: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def waits() -> str:
        return await work

    waiting = asyncio.create_task(within(60.0, waits(), abandoned.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    work.set_result("made")
    for _ in range(steps):
        await asyncio.sleep(0)
    if not waiting.cancel():
        assert waiting.result() == "made"
        return
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(3):
        await asyncio.sleep(0)
    assert abandoned in ([], ["made"])


async def test_a_task_has_ended_in_whatever_way_and_a_cancelled_wait_ends_no_task() -> None:
    async def fails() -> None:
        raise OSError("why")

    for work, failed in ((asyncio.sleep(0.01), False), (fails(), True)):
        task = asyncio.ensure_future(work)
        for _ in range(2):
            await ended(task)
            assert task.done() and (task.exception() is not None) is failed
    task = asyncio.ensure_future(asyncio.sleep(60))
    waiting = [asyncio.create_task(ended(task)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    assert waiting[0].cancelled() and not task.done()
    task.cancel()
    await waiting[1]
    assert task.cancelled()
