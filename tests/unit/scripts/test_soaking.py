# SPDX-License-Identifier: Apache-2.0
"""scripts/soak.sh without engines: slopes of memory, kills beside the load, and a run that goes on where it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.support import soaking
from tools.support.client import TimedAnswer
from tools.support.compare import AnswerTally
from tools.support.soaking import ResourceSample, Soak, slope


def test_a_slope_has_the_level_of_each_life_taken_out_and_an_error() -> None:
    lives = [[1.0, 2.0, 3.0], [4.0, 5.0]]
    assert slope(lives, [[10.0, 12.0, 14.0], [70.0, 72.0]]) == (2.0, 0.0)
    fitted = slope(lives, [[10.0, 11.0, 10.0], [70.0, 70.0]])
    assert fitted is not None and fitted[0] == pytest.approx(0.0) and fitted[1] == pytest.approx(0.365, abs=1e-3)


@pytest.mark.parametrize("lives", [[], [[1.0, 2.0]], [[1.0], [2.0], [3.0]]])
def test_too_few_samples_have_no_slope(lives: Sequence[Sequence[float]]) -> None:
    assert slope(lives, lives) is None


class Server:
    name = "front"
    process: Any = None


def soak(kept: Path | None, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Soak:
    """Return a soak whose requests are all answered at once, and whose samples are made up."""

    async def answered(*_: object) -> TimedAnswer:
        return TimedAnswer(tokens=(1, 2), times=[0.1, 0.2])

    monkeypatch.setattr(soaking, "stream", answered)
    monkeypatch.setattr(
        soaking, "sample", lambda server, done: ResourceSample(done, server.name, 7, 30.0, 0.0, 0, 1, 1, None, None)
    )
    reference: Any = Server()
    reference.url = "http://reference"
    servers: Any = [Server()]
    return Soak(
        "http://front", reference, lambda: servers, AnswerTally(), lambda _: None, salted=False, kept=kept, **more
    )


def test_a_run_that_was_ended_goes_on_behind_its_last_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, whole = tmp_path / "kept.json", soak(None, monkeypatch)
    whole.run(100)

    class Ended(Exception):
        pass

    def end(done: int) -> None:
        if done >= 60:
            raise Ended

    with pytest.raises(Ended):
        soak(kept, monkeypatch, kill=end).run(100)
    rest = soak(kept, monkeypatch)
    rest.run(100)
    assert rest.ended == whole.ended and rest.ended.total() == 100
    assert rest.tally == whole.tally and whole.tally.answers > 90
    moments = [one.done for one in rest.samples]
    assert moments[-1] == 100 and moments == sorted(moments) and len(moments) > len(set(moments))  # sampled anew there
    assert not kept.exists()


def test_kills_follow_each_other_beside_the_load_and_none_is_under_way_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way, at_pauses, seen = [0], [], []

    def kill(done: int) -> None:
        under_way[0] += 1
        seen.append(done)
        time.sleep(0.002)
        under_way[0] -= 1

    async def answered(*_: object) -> TimedAnswer:
        while len(seen) < 3:
            await asyncio.sleep(0.001)
        return TimedAnswer(tokens=(1, 2), times=[0.1, 0.2])

    one = soak(None, monkeypatch, kill=kill)
    monkeypatch.setattr(soaking, "stream", answered)
    servers = one.servers

    def looked() -> Any:
        at_pauses.append(under_way[0])
        return servers()

    one.servers = looked
    one.run(200)
    assert len(seen) >= 3 and seen == sorted(seen) and set(at_pauses) == {0}
