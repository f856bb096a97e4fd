# SPDX-License-Identifier: Apache-2.0
"""Main part of quickstart.sh, after the installation: reference, pair, requests, comparison, table, timeline.

Exit code 0 only if every token is the single engine's and nothing was left running. 1: a token differs, a request or a
transfer failed. 3: a process did not end by itself.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.support.models import RECIPES, ROOT
from tools.support.spec import EngineSpec, metaserver_command

if TYPE_CHECKING:
    from tools.support.client import TimedAnswer
    from tools.support.cluster import Cluster
    from tools.support.engine import EngineProcess
    from vllm_ascend_pd.viewer.timeline import Trace

OUT = ROOT / "out" / "quickstart"
MODEL = "base16"
LONG = 2048  # tokens of the prompts whose overlap is printed
CHUNK = 2560  # a step holds the whole of the longest prompt
TOKENS = 16


@dataclass
class ShownRequest:
    """One request, and its result."""

    name: str
    path: str
    body: dict[str, Any]
    expected: TimedAnswer | None = None
    answer: TimedAnswer | None = None
    sent: float = 0.0
    ended: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def cases() -> list[ShownRequest]:
    from tools.support.client import body_of, chat_body_of, prompt

    completions, chat = "/v1/completions", "/v1/chat/completions"
    vocab = RECIPES[MODEL].vocab
    requests = [
        ShownRequest(f"completion, {length} tokens", completions, body_of(prompt(length, number, vocab), TOKENS))
        for number, length in enumerate((24, 500, 1200, LONG, LONG, LONG), start=1)
    ]
    poem = "layer by layer the cache goes ahead of the words. "
    requests.append(ShownRequest("chat, short", chat, chat_body_of(poem, TOKENS)))
    requests.append(ShownRequest("chat, long", chat, chat_body_of(poem * 16, TOKENS)))
    return requests


def specs(args: argparse.Namespace, model: Path, front: str, config: dict[str, Any]) -> list[EngineSpec]:
    """Return the specifications of reference, prefill, decode."""
    shape: dict[str, Any] = {"max_len": CHUNK + 64, "chunk": CHUNK, "kv_bytes": 256 << 20, "max_seqs": 16}
    prefill = {k: v for k, v in config.items() if k != "metaserver_urls"}
    return [
        EngineSpec("reference", model, tp=args.p_tp, **shape),
        EngineSpec("prefill", model, role="kv_producer", tp=args.p_tp, extra=prefill, **shape),
        EngineSpec(
            "decode", model, role="kv_consumer", tp=args.d_tp, extra=config | {"metaserver_urls": [front]}, **shape
        ),
    ]


def dry_run(args: argparse.Namespace) -> None:
    model = args.model or ROOT / "models" / MODEL
    base = args.port_base or 8000
    config = {"secret_file": str(OUT / "secret"), "trace_dir": str(OUT / "traces")}
    three = [s.at(base + 1 + i) for i, s in enumerate(specs(args, model, f"http://127.0.0.1:{base}", config))]
    if args.model is None:
        print(f"{shlex.join([sys.executable, '-m', 'tools.support.models', MODEL])}    # once")
    for spec in three:
        print(shlex.join(spec.command()))
    urls = [f"http://127.0.0.1:{spec.port}" for spec in three]
    print(shlex.join(metaserver_command(base, urls[1:2], urls[2:])))
    if args.port_base is None:
        print("# without --port-base the ports are free ones, found when it runs")


def tour(args: argparse.Namespace, cluster: Cluster, tried: list[ShownRequest]) -> tuple[list[str], str]:
    """Start, ask, compare. Return what is wrong, and the metaserver's address."""
    from tools.support.models import ensure

    model = args.model or ensure(MODEL)
    print(f"model {model}")
    port = cluster.port()
    config = cluster.push_config(verify="off")
    print("starting three engines: a single one as reference, and the pair")
    reference, prefill, decode = cluster.start(*specs(args, model, f"http://127.0.0.1:{port}", config))
    print("asking the reference")
    for case in tried:
        case.expected = _ask(reference.url, case)
    cluster.stop(reference)
    front = cluster.metaserver([prefill], [decode], port)
    _warm_up(front.url)
    print("asking the pair, through the metaserver")
    wrong = []
    for case in tried:
        case.sent = time.monotonic()
        case.answer = _ask(front.url, case)
        case.ended = time.monotonic()
        wrong += _compare(case, prefill)
    _close_traces(front.url)
    return wrong, front.url


def _ask(url: str, case: ShownRequest) -> TimedAnswer:
    from tools.support.client import complete

    return complete(url, case.body, case.path)


def _warm_up(url: str) -> None:
    """Send a first request outside the table: connections, lazily started threads and pages are slow once."""
    from tools.support.client import body_of, complete, prompt

    begun = time.monotonic()
    for seed, length in enumerate((40, 200, LONG)):
        complete(url, body_of(prompt(length, 100 + seed), 4))
    print(f"  [{time.monotonic() - begun:4.0f} s] warmed up")


def _close_traces(url: str) -> None:
    """Make each process write its trace, which happens with the first event after a second.

    A process may be killed at its end, before it has written.
    """
    from tools.support.client import body_of, complete, prompt

    time.sleep(1.1)
    complete(url, body_of(prompt(40, 200), 1))


def _compare(case: ShownRequest, prefill: EngineProcess) -> list[str]:
    """Compare with the prefill engine, which, asked directly, is a single engine of P's TP and gives the logit gap."""
    from tools.support.compare import AnswerTally, TokensDiffer

    expected, answer = case.expected, case.answer
    if expected is None or answer is None:
        return [f"{case.name}: no answer"]
    try:
        tally = AnswerTally()
        tally.check(case.name, expected.prompt, expected.tokens, answer.tokens, prefill.url, body={"cache_salt": "gap"})
        case.facts["tokens"] = "equal" if not tally.excused else "tie"
    except TokensDiffer as difference:
        case.facts["tokens"] = "DIFFER"
        return [str(difference)]
    return []


def _stay(url: str) -> None:
    import json

    body = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 8})
    print(
        f"\nrunning until ctrl-C; for example:\n  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    )
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("stopping")


def report(tried: list[ShownRequest], trace: Trace, layers: int) -> list[str]:
    """Print the table, the overlap, and the timeline of the last long request. Return the transfers that failed."""
    from vllm_ascend_pd.viewer.timeline import picture

    print(f"\n{'request':24} {'prompt':>6} {'TTFT ms':>8} {'KV bytes':>12} {'descriptors':>11} {'hidden':>7}  tokens")
    overlaps, shown, failed = [], None, []
    for case in tried:
        if case.answer is None:
            print(f"{case.name:24} no answer")
            continue
        transfers = trace.transfers(case.sent, case.ended)
        columns = f"{'-':>12} {'-':>11} {'-':>7}"
        if transfers:
            way = trace.timeline_of(transfers[-1])
            columns = f"{way.nbytes:12,} {way.descriptors:11,} {way.hidden():7.1%}"
            if way.failure:
                case.facts["tokens"] = f"{case.facts.get('tokens')}, but computed by D: {way.failure}"
                failed.append(f"{case.name}: {way.failure}")
            elif len(case.answer.prompt) == LONG:
                overlaps.append(way.hidden())
                shown = way
        facts = case.facts.get("tokens", "?")
        print(f"{case.name:24} {len(case.answer.prompt):6} {case.answer.ttft * 1e3:8.0f} {columns}  {facts}")
    if overlaps:
        each = ", ".join(f"{o:.1%}" for o in overlaps)
        ceiling = f"; with {layers} layers at most {1 - 1 / layers:.1%}" if layers else ""
        print(
            f"\noverlap, {LONG:,} tokens in one chunk: {each}: median {statistics.median(overlaps):.1%} of the bytes "
            f"had landed before the last layer's hook fired (wanted: 80 %{ceiling})"
        )
    if shown is not None:
        print()
        print("\n".join(picture(shown)))
    return failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p-tp", type=int, default=2)
    parser.add_argument("--d-tp", type=int, default=1)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--port-base", type=int, default=None)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.dry_run:
        dry_run(args)
        return 0
    from tools.support.client import RequestFailed
    from tools.support.cluster import Cluster, fresh_directory
    from tools.support.process import ProcessDied
    from vllm_ascend_pd.viewer.timeline import Trace

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    out = fresh_directory("quickstart")
    tried = cases()
    wrong: list[str] = []
    with Cluster(out, port_base=args.port_base) as cluster:
        front = ""
        try:
            wrong, front = tour(args, cluster, tried)
        except (RequestFailed, ProcessDied, TimeoutError) as error:
            wrong = [str(error)]
        wrong += report(tried, Trace(cluster.traces), RECIPES[MODEL].layers if args.model is None else 0)
        if args.keep and front:
            _stay(front)
        print("\nstopping everything")
    for line in wrong:
        print(f"wrong: {line}")
    for line in cluster.leaks:
        print(f"left behind: {line}")
    equal = sum(str(case.facts.get("tokens")).startswith(("equal", "tie")) for case in tried)
    print(
        f"\n{equal} of {len(tried)} answers are the single engine's, {len(cluster.leaks)} processes left behind, "
        f"{time.monotonic() - begun:.0f} s; logs and traces in {out.relative_to(ROOT)}"
    )
    if wrong:
        return 1
    return 3 if cluster.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
