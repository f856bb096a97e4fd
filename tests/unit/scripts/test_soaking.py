# SPDX-License-Identifier: Apache-2.0
"""scripts/soak.sh without engines: slopes of memory, kills beside the load, and a run that goes on where it was."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tools.support import soaking
from tools.support.client import TimedAnswer
from tools.support.compare import AnswerTally
from tools.support.soaking import OtherSoak, ResourceSample, Soak, slope


def test_a_slope_has_the_level_of_each_life_taken_out_and_an_error() -> None:
    assert slope([[(1, 10), (2, 12), (3, 14), (4, 16)], [(4, 70), (5, 72)]]) == pytest.approx((2.0, 0.0))
    fitted = slope([[(1, 10), (2, 11), (3, 11), (4, 10)], [(4, 70), (5, 70)]])
    assert fitted == pytest.approx((0.0, np.sqrt(1 / 3 / 5.5)))


@pytest.mark.parametrize("lives", [[], [[(1, 1), (2, 2), (3, 3), (4, 4)]], [[(1, 1)]] * 9, [[(1, 1), (2, 2)]] * 3])
def test_too_few_samples_have_no_slope(lives: Sequence[Sequence[tuple[float, float]]]) -> None:
    assert slope(lives) is None


def at(done: int, server: str, pid: int, workers_mib: float, session: int = 0) -> ResourceSample:
    return ResourceSample(done, server, pid, session, 30.0, workers_mib, 1, 1, 1, None, None)


@pytest.mark.parametrize(("more", "grows"), [(0.0, False), (400.0, True)])
def test_a_worker_of_a_run_that_went_on_is_compared_with_the_reference_of_that_session(
    monkeypatch: pytest.MonkeyPatch, more: float, grows: bool
) -> None:
    """The reference is as cold then; its pids may be those of before."""
    run = soak_of(None, monkeypatch)
    for session, moments in enumerate(((0, 1, 2, 3, 4), (4, 5, 6, 7))):
        for age, done in enumerate(moments):
            warm = 100.0 * min(age, 3)
            run.samples.append(at(done, "front", 7, 400.0 + warm, session))
            run.samples.append(at(done, "decode", 8, 400.0 + warm + more * session * age, session))
    assert bool(run.growth()) is grows
    said = "+0.00 ± 0.00 MiB in 1,000 prompts of the run (5 samples of 2 processes)"
    assert f"decode, front end and scheduler: {said}" not in run.slopes(), "two degrees of freedom are too few"
    for done in (8, 9):
        run.samples.append(at(done, "decode", 8, 700.0, 1))
    assert f"decode, front end and scheduler: {said.replace('5 samples', '7 samples')}" in run.slopes()


def test_an_old_process_has_the_slope_of_its_second_half_and_a_worker_stands_beside_one_as_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = soak_of(None, monkeypatch)
    for age in range(21):
        run.samples.append(at(1000 * age, "front", 7, 400.0 + 40.0 * age))  # the reference
        run.samples.append(at(1000 * age, "metaserver", 5, 0.0 if age < 10 else 9.0))
        if age > 13:  # it was killed
            run.samples.append(at(1000 * age, "decode", 8, 300.0 + 30.0 * age))
    said = {line.split(": ")[0]: line.split(": ")[1] for line in run.slopes()}
    assert said["metaserver, each worker"].startswith("+0.00 ± 0.00 MiB in 1,000 prompts of the run (11 samples of 1")
    assert said["decode, each worker"].startswith("+30.00 ± 0.00")
    assert said["front, each worker, as old as those of decode"].startswith("+40.00 ± 0.00")


def test_sockets_of_engines_that_have_ended_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = soak_of(None, monkeypatch)
    for age, half_closed in enumerate((0, 40, 144)):
        one = replace(at(age, "prefill", 8, 400.0), workers=2, half_closed=half_closed)
        run.samples += [at(age, "front", 7, 400.0), one]
    assert run.growth() == []
    run.samples.append(replace(one, half_closed=145))
    assert run.growth() == ["prefill: half-closed sockets [0, 40, 144, 145]"]


def test_a_canary_at_the_moment_of_a_sample_is_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    run = soak_of(None, monkeypatch)
    server: Any = Server()
    quiet = replace(at(0, "front", 7, 400.0), free_blocks=191, open_transfers=0)
    looks = [quiet, replace(quiet, free_blocks=185, open_transfers=1), replace(quiet, free_blocks=185), quiet]
    monkeypatch.setattr(soaking, "sample", lambda *_: looks.pop(0))
    monkeypatch.setattr(soaking, "LOOK_S", 0.0)
    run.samples.append(run.quiet_sample(server, 0, time.monotonic() + 60.0))
    assert run.quiet_sample(server, 500, time.monotonic() + 60.0) == quiet and not looks
    lost = replace(quiet, free_blocks=185)
    monkeypatch.setattr(soaking, "sample", lambda *_: lost)
    assert run.quiet_sample(server, 1000, time.monotonic()) == lost, "what stays is found"


class Server:
    name = "front"
    process: Any = SimpleNamespace(pid=7)


def soak_of(kept: Path | None, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Soak:
    """Return a soak whose requests are all answered at once, and whose samples are made up."""

    async def answered(*_: object) -> TimedAnswer:
        return TimedAnswer(tokens=(1, 2), times=[0.1, 0.2])

    monkeypatch.setattr(soaking, "stream", answered)
    monkeypatch.setattr(
        soaking,
        "sample",
        lambda server, done, session: ResourceSample(done, server.name, 7, session, 30.0, 0.0, 0, 1, 1, None, None),
    )
    reference: Any = Server()
    reference.url = "http://reference"
    servers: Any = [Server()]
    return Soak(
        "http://front", reference, lambda: servers, AnswerTally(), lambda _: None, salted=False, kept=kept, **more
    )


def test_a_run_that_was_ended_goes_on_behind_its_last_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, whole = tmp_path / "kept.json", soak_of(None, monkeypatch)
    whole.run(100)

    class Ended(Exception):
        pass

    ended, calls = soak_of(kept, monkeypatch), itertools.count()

    async def answered_for_a_while(*_: object) -> TimedAnswer:
        if next(calls) == 130:  # two for each prompt
            raise Ended
        return TimedAnswer(tokens=(1, 2), times=[0.1, 0.2])

    monkeypatch.setattr(soaking, "stream", answered_for_a_while)
    with pytest.raises(Ended):
        ended.run(100)
    with pytest.raises(OtherSoak, match="is of another run"):
        soak_of(kept, monkeypatch, made_by="other flags").run(100)
    rest = soak_of(kept, monkeypatch)
    rest.run(100)
    assert rest.ended == whole.ended and rest.ended.total() == 100
    assert rest.tally == whole.tally and whole.tally.answers > 90
    moments = [one.done for one in rest.samples]
    assert moments[-1] == 100 and moments == sorted(moments) and len(moments) > len(set(moments))  # sampled anew there
    assert {one.session for one in rest.samples} == {0, 1} and kept.exists(), "until it is reported"
    rest.forget_kept()
    assert not kept.exists()


def test_kills_follow_each_other_beside_the_load_and_none_is_under_way_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way, at_pauses, seen = [0], [], []

    def kill(done: int) -> tuple[str, float]:
        under_way[0] += 1
        seen.append(done)
        time.sleep(0.002)
        under_way[0] -= 1
        return "decode", 0.002

    async def answered(*_: object) -> TimedAnswer:
        while len(seen) < 3:
            await asyncio.sleep(0.001)
        return TimedAnswer(tokens=(1, 2), times=[0.1, 0.2])

    monkeypatch.setattr(soaking, "SERVED", 0)
    one = soak_of(None, monkeypatch, kill=kill)
    monkeypatch.setattr(soaking, "stream", answered)
    servers = one.servers

    def looked() -> Any:
        at_pauses.append(under_way[0])
        return servers()

    one.servers = looked
    one.run(200)
    assert one.back == {"decode": [0.002] * len(seen)}
    assert len(seen) >= 3 and seen == sorted(seen) and set(at_pauses) == {0}
