# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner in real pairs, on either side. It needs Triton, whose interpreter runs its kernels here.

vLLM 0.33 takes this runner wherever Triton is there. A new request comes to its workers with all tokens that it has, so
P's first token does, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pairs import Pair, PairMaker, fresh_prompt, wait_for_free_blocks
from test_any_stream import StreamSite, cut_at_each_token
from test_first_token import CASES, FirstTokenCase
from test_first_token import test_a_request_is_answered_as_by_one_engine as check_answer

from tools.support.checks import counter, eventually, first_tokens
from tools.support.cluster import STRICT, Cluster
from tools.support.cutting import Cutter
from tools.support.engine import EngineProcess
from tools.support.environments import RELEASES, beside, second_runner
from tools.support.models import ensure
from tools.support.spec import EngineSpec
from tools.support.speech import CHAT, COMPLETIONS, KINDS, PARSERS, StreamKind, speaking

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

RELEASE, TAKEN = "0.33.0", "Using V2 Model Runner"
ASKED_FOR = {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # which releases before 0.33 take for a few models alone
SMALL = 40  # blocks of D


def spec(
    name: str,
    role: str,
    extra: dict[str, Any],
    model: str = "gqa",
    *,
    second: bool,
    release: str = RELEASE,
    **more: Any,
) -> EngineSpec:
    plugins = second_runner() if second else ()
    policy = {"policy": "fail"} if role == "kv_consumer" else {}
    python = beside(release) if release in RELEASES else sys.executable
    environment = ASKED_FOR if second and release != RELEASE else {}
    shape = {"python": python, "environment": environment, "plugins": plugins, "block_size": 32, "chunk": 256}
    return EngineSpec(
        f"{name}-{'second' if second else 'first'}", ensure(model), role=role, extra=extra, **shape, **policy, **more
    )


def check_runner(engine: EngineProcess, *, second: bool) -> None:
    assert (TAKEN in engine.log.read_text(errors="replace")) is second


@pytest.fixture(scope="module")
def decode(cluster: Cluster, allowed: list[str]) -> Iterator[EngineProcess]:
    kv_bytes = SMALL * 32 * 4096
    (d,) = cluster.start(
        spec("runner-d", "kv_consumer", cluster.push_config(*allowed), second=True, kv_bytes=kv_bytes, max_len=1024)
    )
    check_runner(d, second=True)
    yield d
    cluster.stop(d)


@pytest.fixture(scope="module", params=["first", "second"])
def pair(
    request: pytest.FixtureRequest, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker
) -> Iterator[Pair]:
    second = request.param == "second"
    (p,) = cluster.start(spec("runner-p", "kv_producer", cluster.push_config(), second=second, max_len=1024))
    check_runner(p, second=second)
    made = make_pair(p, decode)
    free = made.free_counts()
    yield made
    wait_for_free_blocks((p, decode), free)
    cluster.stop(made.front, p)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_is_answered_as_by_one_engine(pair: Pair, case: FirstTokenCase) -> None:
    """Each runner draws its own way from a seed, so P's answer is no reference where it has the other one."""
    if case.reason == "seed" and TAKEN not in pair.prefill.log.read_text(errors="replace"):
        case = replace(case, same=False)
    check_answer(pair, case)


def test_prompts_in_chunks_and_together(pair: Pair) -> None:
    (d,) = pair.decode
    before = first_tokens(d)
    for length in (1, 31, 32, 33, 300, 480):
        pair.check([fresh_prompt(length)], name="second runner")
    pair.check([fresh_prompt(30 + 40 * i) for i in range(6)], name="second runner, 6 at once")
    eventually(lambda: first_tokens(d) - before == 11, "all but the prompt of one token begin with P's token")
    pair.check_prefix_on_decode(32)
    pair.check_prefix_on_prefill(32)


def test_a_request_that_d_preempts_comes_to_its_workers_again(pair: Pair) -> None:
    (d,) = pair.decode
    before = counter(d, "vllm:num_preemptions_total")
    pair.check([fresh_prompt(200 + i) for i in range(4)], 200, name="preempted")
    assert counter(d, "vllm:num_preemptions_total") > before, "D had blocks for all: the test shows nothing"


# Of the streams that go on, those without a script, as this runner takes no processor of logits but vLLM's own, and
# without the one of min_tokens: vLLM 0.33's engine ends by itself at a request with more than 128 stop tokens.
SPOKEN = [
    kind
    for kind in KINDS
    if kind.parsers == "plain" and kind.goes_on and not kind.script and kind.route in (COMPLETIONS, CHAT)
    if kind.name != "min_tokens"
]


@pytest.fixture(scope="module", params=["0.33.0", "0.32.0", "0.30.0"])
def site(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StreamSite]:
    """A P and two D's of a release of vLLM, all with this runner."""
    runner: dict[str, Any] = {"second": True, "release": request.param}
    port, words = cluster.port(), ("--tokenizer", str(speaking(tmp_path_factory.mktemp("words"))))
    extra = cluster.push_config(f"http://127.0.0.1:{port}", verify="off", trace_dir="")
    flags = (*words, "--enable-auto-tool-choice", *PARSERS["plain"])
    p, *ds = cluster.start(
        spec("spoken-p", "kv_producer", cluster.push_config(), arguments=words, **runner),
        *(spec(f"spoken-d{i}", "kv_consumer", extra, arguments=flags, **runner) for i in range(2)),
    )
    for engine in (p, *ds):
        check_runner(engine, second=True)
    cutter = Cutter(ds)
    front = cluster.metaserver([p], cutter.addresses, port, STRICT)
    yield StreamSite(ds, front, cutter)
    cutter.close()
    cluster.stop(front, p, *ds)


@pytest.mark.parametrize("kind", SPOKEN, ids=lambda kind: f"{kind.route}, {kind.name}")
def test_a_stream_goes_on(site: StreamSite, kind: StreamKind) -> None:
    cut_at_each_token(kind, site)
