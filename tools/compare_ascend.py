# SPDX-License-Identifier: Apache-2.0
"""Comparison of this package's connector with vllm-ascend's own two: the same engines, requests and faults. One table.

What a run has found is kept in out/compare-ascend.json, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx

from tools.compare_kinds import one_line, package, refusal, within
from tools.support.checks import counter, fresh_prompt, loaded_tokens, reference_answers, settled_free_blocks
from tools.support.client import TIMEOUT, RequestFailed, TimedAnswer, body_of, complete, stream
from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.contenders import CONTENDERS, Contender, ContenderSite, PairShape
from tools.support.engine import EngineProcess
from tools.support.from_tests import older_host_build
from tools.support.models import ROOT
from tools.support.pages import Marks
from tools.support.process import ProcessDied

if TYPE_CHECKING:
    from host_build import HostBuild

FOUND = ROOT / "out" / "compare-ascend.json"
PAGE = ROOT / "docs" / "migration.md"
MARKS = Marks.of("scripts/compare_ascend.sh")
LENGTHS = (20, 129, 700, 1500)
TOKENS = 12
LONG, STREAMED = 1500, 200  # the request during a fault: its prompt, and its tokens if it is struck while it streams
STREAMING = 8  # chunks of an answer, after which D certainly streams
ANSWER_S = 90.0  # after that a client gives up
RIGHT, NOTHING = "right", f"nothing for {ANSWER_S:.0f} s"
CLEAN_S = 60.0
LOOK_S = 0.01  # between two looks at a request in progress


SHAPES = (PairShape(1, 1, faults=True), PairShape(2, 1), PairShape(1, 2))


class Column:
    """Results of one connector, by the table's rows. Each is kept as soon as it is there."""

    def __init__(self, cells: dict[str, str], keep: Callable[[], None]) -> None:
        self.cells, self._keep = cells, keep

    def tell(self, row: str, words: str) -> None:
        self.cells[row] = words
        say(f"    {row}: {words}")
        self._keep()


def judged(site: ContenderSite, column: Column, rounds: int) -> None:
    """Measure without a fault: right tokens, and the time to the first one."""
    right, wrong, ttft = 0, list[str](), {length: list[float]() for length in LENGTHS}
    for length in LENGTHS * rounds:
        said, got = asked(site, length)
        if said == RIGHT:
            right += 1
        else:
            wrong.append(f"{length} tokens: {said}")
        if got:
            ttft[length].append(got.ttft)
        if said == NOTHING:
            break
    column.tell(f"{site.shape}: answers right", "; ".join([f"{right} of {right + len(wrong)}", *wrong[:1]]))
    for length, times in ttft.items():
        words = f"{statistics.median(times):.2f} s" if times else "–"
        column.tell(f"{site.shape}: median time to the first token, {length} tokens", words)


def asked(site: ContenderSite, length: int) -> tuple[str, TimedAnswer | None]:
    """Return the words for one request, and its answer."""
    (want,) = reference_answers(site.p, [prompt := fresh_prompt(length)], TOKENS)
    before = loaded_tokens(site.d)
    got = within(ANSWER_S, lambda: complete(site.url, body_of(prompt, TOKENS)))
    if isinstance(got, str):
        return one_line(got), None
    if got.tokens != want.tokens:
        return "other tokens", got
    return (RIGHT if loaded_tokens(site.d) > before else "right, but D computed the prompt"), got


class OpenRequest:
    """A request in progress. Its client closes the connection after `limit_s`."""

    def __init__(self, url: str, body: dict[str, Any], limit_s: float) -> None:
        self.result: TimedAnswer | BaseException | None = None
        self.answer = TimedAnswer()  # what has come of it
        self.ended = 0.0
        self._url, self._body, self._limit_s = f"{url}/v1/completions", body, limit_s
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), name="client")
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    async def _send(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            try:
                self.result = await asyncio.wait_for(stream(client, self._url, self._body, self.answer), self._limit_s)
            except (RequestFailed, httpx.HTTPError, asyncio.TimeoutError) as problem:
                self.result = problem
        self.ended = time.monotonic()


# When an engine is killed: once this is true of the request in progress. None: before it is sent.
Moment = Callable[[ContenderSite, OpenRequest], bool] | None


def computes(site: ContenderSite, request: OpenRequest) -> bool:
    """Return whether P is in the middle of the prompt: it counts the request with the first of three chunks."""
    return counter(site.p, "vllm:num_requests_running") > 0


def streams(site: ContenderSite, request: OpenRequest) -> bool:
    return len(request.answer.times) >= STREAMING


def struck(site: ContenderSite, victim: EngineProcess, moment: Moment, tokens: int) -> str:
    """Return the client's result of a request during which one engine is killed."""
    prompt = fresh_prompt(LONG)
    (want,) = reference_answers(site.p, [prompt], tokens)
    if moment is None:
        killed(victim)
    request, at = OpenRequest(site.url, body_of(prompt, tokens), ANSWER_S), time.monotonic()
    if moment is not None:
        while request.result is None and not moment(site, request):
            time.sleep(LOOK_S)
        if request.result is not None:
            request.wait()
            if not isinstance(request.result, TimedAnswer):
                return f"ended before the fault: {one_line(str(request.result))[:60] or type(request.result).__name__}"
            return f"does not occur: the answer was whole after {request.ended - at:.1f} s"
        at = time.monotonic()
        killed(victim)
    request.wait()
    got, seconds = request.result, request.ended - at
    if isinstance(got, asyncio.TimeoutError):
        return NOTHING
    if isinstance(got, TimedAnswer):
        same = got.tokens == want.tokens
        short = f"cut at {len(got.tokens)} of {tokens} tokens, as if complete" if len(got.tokens) < tokens else "wrong"
        return f"{'right' if same else short} after {seconds:.0f} s"
    code = re.search(r"PD-[A-Z]+-\d+", str(got))  # in a stream: its last event
    said = f"an error, {code[0]}," if code else one_line(str(got))[:60] or type(got).__name__
    return f"{said} after {seconds:.0f} s"


def killed(victim: EngineProcess) -> None:
    if stuck := victim.process.kill():
        raise RuntimeError(str(stuck))


def cleaned(engine: EngineProcess, before: int) -> str:
    """Return whether the survivor's blocks are free again, and when."""
    began = time.monotonic()
    while time.monotonic() - began < CLEAN_S:
        try:
            left = before - settled_free_blocks(engine)
        except Exception as error:  # noqa: BLE001 (a survivor that does not answer is a result)
            return f"survivor: {type(error).__name__}"
        if left <= 0:
            return f"its blocks free after {time.monotonic() - began:.0f} s"
        time.sleep(1.0)
    return f"{left} blocks held after {CLEAN_S:.0f} s"


def killed_at_each_stage(site: ContenderSite, column: Column) -> None:
    """Kill P at each stage of its request, starting it anew each time, then D."""
    stages: dict[str, tuple[Moment, int]] = {
        "before its prefill": (None, TOKENS),
        "during its prefill": (computes, TOKENS),
        "after its prefill, while D streams": (streams, STREAMED),
    }
    for stage, (moment, tokens) in stages.items():
        free = settled_free_blocks(site.d)
        column.tell(f"P killed {stage}", struck(site, site.p, moment, tokens))
        column.tell(f"P killed {stage}: then D", cleaned(site.d, free))
        site.p = site.restarted(site.p)
        column.tell(f"P killed {stage}: the next request, P is back", asked(site, LONG)[0])
    free = settled_free_blocks(site.p)
    column.tell("D killed while it streams", struck(site, site.d, streams, STREAMED))
    column.tell("D killed while it streams: then P", cleaned(site.p, free))


def compare(contender: Contender, shape: PairShape, column: Column, build: HostBuild, rounds: int) -> None:
    with Cluster(fresh_directory("compare-ascend")) as cluster:
        try:
            site = ContenderSite(contender, shape, cluster, build)
        except (ProcessDied, TimeoutError) as problem:
            column.tell(f"{shape}: answers right", f"refused: {refusal(problem)}")
            return
        try:
            judged(site, column, rounds)
            if shape.faults:
                killed_at_each_stage(site, column)
        finally:
            site.stop_router()


def table(cells: dict[str, dict[str, str]]) -> list[str]:
    names = [contender.connector for contender in CONTENDERS if contender.connector in cells]
    longest = max((cells[name] for name in names), key=len, default={})  # a refused shape lacks its times
    rows = list(dict.fromkeys([*longest, *(row for name in names for row in cells[name])]))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return [*lines, *(f"| {row} | " + " | ".join(cells[name].get(row, "–") for name in names) + " |" for row in rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,…", help="only these connectors")
    parser.add_argument("--shape", default="", metavar="SHAPE,…", help="only these: 1to1, 2to1, 1to2")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each length (default: 3)")
    parser.add_argument("--again", action="store_true", help="discard the results of earlier runs")
    parser.add_argument("--write", action="store_true", help="put the table into docs/migration.md")
    args = parser.parse_args()
    kept: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() and not args.again else {}
    cells: dict[str, dict[str, str]] = kept.get("found", {}) if kept.get("package") == package() else {}
    done: list[str] = kept.get("done", []) if cells else []

    def keep() -> None:
        content = {"package": package(), "done": done, "found": cells}
        FOUND.write_text(json.dumps(content, indent=1, ensure_ascii=False))

    wanted = [c for c in CONTENDERS if not args.only or c.connector in args.only.split(",")]
    shapes = [shape for shape in SHAPES if not args.shape or shape.word in args.shape.split(",")]
    pending = [(c, shape) for shape in shapes for c in wanted if f"{c.connector} {shape}" not in done]
    build = older_host_build() if pending else None  # of the release of sdist.OLDER
    failed = []
    for contender, shape in pending:
        assert build is not None
        say(f"{contender.connector}, {shape}")
        try:
            compare(contender, shape, Column(cells.setdefault(contender.connector, {}), keep), build, args.rounds)
            done.append(f"{contender.connector} {shape}")
            keep()
        except Exception as error:  # noqa: BLE001 (the others are compared nevertheless)
            failed.append(f"{contender.connector}: {error}")
            say(failed[-1])
    lines = table(cells)
    print("\n".join(lines))
    if args.write and not failed:
        PAGE.write_text(MARKS.filled(PAGE.read_text(), lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
