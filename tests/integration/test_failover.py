# SPDX-License-Identifier: Apache-2.0
"""A metaserver with two real P's and a D: vLLM's serve benchmark, unchanged, and a P that is killed under load.

Everything here is slow: this file starts three engines of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pairs import eventually, fresh_prompt, prefilled, reference_answers

from tools.support import browser
from tools.support.client import TimedAnswer, attempt, body_of
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class FailoverEngines:
    url: str
    prefill: EngineProcess
    spare: EngineProcess  # the second P
    decode: EngineProcess
    operator: httpx.Client

    def instances(self) -> dict[str, dict[str, Any]]:
        return {facts["name"]: facts for facts in self.operator.get("/instances").json()["instances"]}


@pytest.fixture(scope="module")
def door(cluster: Cluster) -> Iterator[FailoverEngines]:
    model, port = ensure("gqa"), cluster.port()
    url = f"http://127.0.0.1:{port}"
    prefill, spare, decode = cluster.start(
        EngineSpec("door-p", model, role="kv_producer", extra=cluster.push_config()),
        EngineSpec("door-p2", model, role="kv_producer", extra=cluster.push_config()),
        EngineSpec("door-d", model, role="kv_consumer", kv_bytes=256 << 20, extra=cluster.push_config(url)),
    )
    # Readiness means that the canary has moved a block.
    front = cluster.metaserver([prefill, spare], [decode], port, ("--trace-dir", str(cluster.traces)))
    with httpx.Client(base_url=url, trust_env=False) as operator:
        door = FailoverEngines(url, prefill, spare, decode, operator)
        yield door
    cluster.stop(front, door.prefill, door.spare, door.decode)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_serve_benchmark_runs_unmodified(door: FailoverEngines, tmp_path: Path, backend: str) -> None:
    """Run it as a script: the `vllm` command does not start with the CPU wheel."""
    path = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    words = ["--backend", backend, "--base-url", door.url, "--endpoint", path, "--model", "model"]
    words += ["--tokenizer", str(ensure("gqa")), "--dataset-name", "random", "--num-prompts", "24", "--ignore-eos"]
    words += ["--random-input-len", "200", "--random-output-len", "8", "--max-concurrency", "8"]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    code = "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    code += "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    before = prefilled(door.url)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 24 and result["total_output_tokens"] == 24 * 8
    # The benchmark sends one more request, to test the server.
    eventually(lambda: prefilled(door.url) >= before + 24, "24 loads")


def test_no_request_is_lost_when_one_of_two_ps_is_killed_under_load(
    door: FailoverEngines, cluster: Cluster, tally: AnswerTally, tmp_path: Path
) -> None:
    """50 streams: every answer is whole and right, the page shows what happened, the restarted P is used again."""
    gone = door.spare.url.removeprefix("http://")
    prompts = [fresh_prompt(600) for _ in range(50)]
    bodies = [body_of(p, 32) for p in prompts]
    with ExitStack() as stack:
        page = stack.enter_context(browser.browser(tmp_path / "chromium")) if browser.executable() else None
        if page is not None:
            page.open(door.url)
            page.until(browser.shows(gone, "ready"))
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="clients"))
        asking = pool.submit(attempt, door.url, bodies)
        eventually(lambda: door.instances()[gone]["requests"] >= 5, "the P that is to be killed has work", 60)
        assert not door.spare.process.kill()
        eventually(lambda: door.instances()[gone]["state"] == "down", "it is seen to be down", 60)
        assert door.operator.get("/readiness").status_code == 200, "one P and D are proven, and up"
        if page is not None:
            page.until(browser.shows(gone, "down"))
            page.picture(cluster.directory / "status.png")
        answers = asking.result(240)
        assert [a for a in answers if not isinstance(a, TimedAnswer)] == []
        (door.spare,) = cluster.start(restarted(cluster, door.spare))
        eventually(lambda: door.instances()[gone]["state"] == "ready", "it comes back", 60)
        if page is not None:
            page.until(browser.shows(gone, "ready"))
            assert not page.complaints
    retried = [r for r in door.operator.get("/status").json()["last"] if r["attempts"] > 1]
    assert retried, "no request was hit"
    for prompt, want, got in zip(prompts, reference_answers(door.prefill, prompts, 32), answers, strict=True):
        assert isinstance(got, TimedAnswer)
        tally.check("a stream", prompt, want.tokens, got.tokens, door.prefill.url, body={"cache_salt": "failover"})
    served = door.instances()[gone]["served"]
    answers = attempt(door.url, [body_of(fresh_prompt(180), 4) for _ in range(20)])
    assert all(isinstance(a, TimedAnswer) for a in answers)
    assert door.instances()[gone]["served"] > served, "the P that came back gets no work"


def restarted(cluster: Cluster, killed: EngineProcess) -> EngineSpec:
    """Return the command of the killed engine with its port, and remove the engine from the cluster."""
    cluster.stop(killed)
    return killed.spec
