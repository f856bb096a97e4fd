# SPDX-License-Identifier: Apache-2.0
"""Long bodies on the event loop: who goes first, and what runs between."""

from __future__ import annotations

import asyncio
import json

import pytest

from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.outline import SLICE, Scan
from vllm_ascend_pd.router.turns import Turns


async def test_a_short_text_is_done_before_long_ones_that_came_earlier() -> None:
    turns, steps = Turns(), list[str]()

    def scan(name: str, slices: int) -> Scan[str]:
        for _ in range(slices):
            steps.append(name)
            yield SLICE
        return name

    running = [asyncio.create_task(turns.run(scan(name, 60))) for name in ("long", "longer")]
    while len(steps) < 20:
        await asyncio.sleep(0)
    before = len(steps)
    assert await turns.run(scan("short", 3)) == "short"
    between = steps[before:]
    assert between.count("short") == 3 and len(between) < 8, between
    assert await asyncio.gather(*running) == ["long", "longer"] and len(steps) == 123


async def test_other_work_has_a_turn_after_each_step() -> None:
    turns, log = Turns(), list[str]()

    def scan() -> Scan[None]:
        for _ in range(50):
            log.append("step")
            yield SLICE

    async def other() -> None:
        for _ in range(25):
            log.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(turns.run(scan()), turns.run(scan()), other())
    assert "step step step step" not in " ".join(log[: log.index("other") + 40]).replace("other", "\n")


async def test_a_caller_that_leaves_keeps_no_other_from_its_turn() -> None:
    turns = Turns()

    def scan(slices: int) -> Scan[int]:
        for _ in range(slices):
            yield SLICE
        return slices

    leaving = [asyncio.create_task(turns.run(scan(100))) for _ in range(5)]
    staying = asyncio.create_task(turns.run(scan(30)))
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    assert await staying == 30
    assert await turns.run(scan(2)) == 2 and not turns._waiting


def broken() -> Scan[None]:
    yield SLICE
    raise bodies.BodyError("as set")


async def test_an_error_is_its_own_callers() -> None:
    turns = Turns()
    with pytest.raises(bodies.BodyError, match="as set"):
        await turns.run(broken())
    assert not turns._waiting


def slices_of(body: bytes, route: str = bodies.COMPLETIONS) -> int:
    return sum(1 for _ in bodies.parsing(route, body))


def test_a_prompt_of_usual_length_waits_for_nobody() -> None:
    for prompt in ("x" * 200_000, list(range(10_000, 40_000))):
        assert slices_of(json.dumps({"model": "m", "prompt": prompt}).encode()) == 0
    chat = json.dumps({"messages": [{"role": "user", "content": "hi there, "}] * 5000}).encode()
    assert slices_of(chat, bodies.CHAT) == 0
    assert slices_of(json.dumps({"prompt": "x" * 1_000_000}).encode()) > 0


def test_members_beyond_number_are_not_made_into_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile body of names would take fifty times as long to decode as a prompt of its length."""
    many = b"{" + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}"
    monkeypatch.setattr(bodies, "_FIELDS", None)
    with pytest.raises(bodies.BodyError, match="more than 256 names"):
        bodies.parse(bodies.COMPLETIONS, many)
