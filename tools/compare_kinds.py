# SPDX-License-Identifier: Apache-2.0
"""Kinds of caches with this package's connector and vLLM's own two: the same tiny models and prompts. One table.

A pair per cell, one after the other. P alone gives the right answers. An answer that D computed without loading the
prompt from P does not count as right. Cells from earlier runs of the same package are kept (out/compare-kinds.json), so
that an interrupted run continues. A kind of which not all cells are there keeps its line on the page, with its commit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tools.support.checks import drafted, fresh_prompt, fresh_salt, loaded_tokens, reference_answers
from tools.support.client import TimedAnswer, body_of, complete
from tools.support.cluster import STRICT, Cluster, fresh_directory, say
from tools.support.engine import EngineProcess
from tools.support.in_tree import Ask, install_nixl, start_mooncake, start_nixl
from tools.support.models import ROOT, ensure
from tools.support.pages import Marks
from tools.support.process import ProcessDied
from tools.support.spec import EngineSpec

PLUGINS = ROOT / "tests" / "integration" / "plugins"
KINDS = PLUGINS / "kinds"
DELTA = PLUGINS / "delta"  # Gated DeltaNet in float32
FORKED = PLUGINS / "forked"  # engines of all connectors start in a third of the processor's time
FOUND = ROOT / "out" / "compare-kinds.json"
PAGE = ROOT / "docs" / "kinds.md"
MARKS = Marks.of("scripts/compare_kinds.sh")
# 159 and 191: a window of 128 that begins with the last token of a block. 97 and 193: a state that is the last one of
# its block.
LENGTHS = (200, 330, 127, 159, 160, 191, 97, 193)
TOKENS, DRAFTED = 12, 32
ANSWER_S = 60.0  # after that a client gives up


@dataclass(frozen=True)
class KindCase:
    title: str
    model: str
    p_tp: int = 1
    draft: dict[str, Any] = field(default_factory=dict)  # --speculative-config, its model by the recipe's name
    arguments: tuple[str, ...] = ()
    plugins: tuple[Path, ...] = (KINDS,)
    block: int = 32
    chunk: int = 96

    def spec(self, name: str, role: str, **more: Any) -> EngineSpec:
        draft = {**self.draft, **({"model": str(ensure(self.draft["model"]))} if "model" in self.draft else {})}
        shape: dict[str, Any] = {"tp": self.p_tp if role == "kv_producer" else 1, "block_size": self.block}
        return EngineSpec(
            name, ensure(self.model), role=role, policy="fail", chunk=self.chunk, draft=draft, **shape, **more
        )


CASES = {
    "plain": KindCase("GQA 1→1", "gqa"),
    "unequal": KindCase("GQA 2→1", "gqa", p_tp=2),
    "fp8": KindCase("GQA in fp8 1→1", "gqa", arguments=("--kv-cache-dtype", "fp8")),
    "fp8-unequal": KindCase("GQA in fp8 2→1", "gqa", p_tp=2, arguments=("--kv-cache-dtype", "fp8")),
    "latent": KindCase("MLA 1→1", "mla", chunk=2048),
    "indexed": KindCase("MLA with a sparse indexer 1→1 (the tests' model)", "indexed"),
    "window": KindCase("windows and full attention 1→1 (gpt-oss)", "gptoss"),
    "windows": KindCase("six groups 1→1 (Gemma-3)", "gemma3"),
    "state": KindCase("Mamba-2 before attention 1→1 (Nemotron-H)", "nemotronh"),
    "state-unequal": KindCase("Mamba-2 before attention 2→1 (Nemotron-H)", "nemotronh", p_tp=2),
    "delta": KindCase("Gated DeltaNet 1→1 (Qwen3-Next, the tests' operators)", "qwen3next", plugins=(KINDS, DELTA)),
    "mtp": KindCase("MTP 1→1 (DeepSeek-V3)", "mtp", draft={"method": "mtp", "num_speculative_tokens": 1}, chunk=2048),
    "drafts": KindCase(
        "Eagle3 with other heads 1→1",
        "spec",
        draft={"method": "eagle3", "model": "spec-eagle3", "num_speculative_tokens": 1},
    ),
}


def ours(case: KindCase, cluster: Cluster) -> tuple[EngineProcess, EngineProcess, Ask]:
    port = cluster.port()
    config = cluster.push_config(verify="off")
    common = {"plugins": case.plugins, "arguments": case.arguments}
    p, d = cluster.start(
        case.spec("ours-p", "kv_producer", extra=config, **common),
        case.spec("ours-d", "kv_consumer", extra={**config, "metaserver_urls": [f"http://127.0.0.1:{port}"]}, **common),
    )
    front = cluster.metaserver([p], [d], port, STRICT)
    return p, d, lambda prompt: complete(front.url, body_of(prompt, tokens_of(case)))


def in_tree(
    case: KindCase, cluster: Cluster, start: Callable[..., tuple[EngineProcess, EngineProcess, Ask]]
) -> tuple[EngineProcess, EngineProcess, Ask]:
    def make(name: str, role: str, **more: Any) -> EngineSpec:
        return case.spec(name, role, arguments=case.arguments, **more)

    return start(cluster, make, tokens_of(case), case.plugins)


Start = Callable[[KindCase, Cluster], tuple[EngineProcess, EngineProcess, Ask]]
CONNECTORS: dict[str, tuple[str, Start]] = {
    "ours": ("AscendPushConnector", ours),
    "nixl": ("NixlConnector", partial(in_tree, start=start_nixl)),
    "mooncake": ("MooncakeConnector", partial(in_tree, start=start_mooncake)),
}


def tokens_of(case: KindCase) -> int:
    return DRAFTED if case.draft else TOKENS


def within(seconds: float, ask: Callable[[], TimedAnswer]) -> TimedAnswer | str:
    """Return an answer, or the reason for none."""
    got: list[TimedAnswer | str] = []

    def run() -> None:
        try:
            got.append(ask())
        except Exception as error:  # noqa: BLE001 (the table shows it)
            got.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="asked", daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else f"nothing for {seconds:.0f} s"


def verdict(case: KindCase, p: EngineProcess, d: EngineProcess, ask: Ask) -> str:
    right, wrong, apart, failed = 0, list[int](), list[int](), list[str]()
    prompts = {length: fresh_prompt(length) for length in LENGTHS}
    with drafted(d) as alone:
        for prompt in prompts.values() if case.draft else ():
            complete(d.url, body_of(prompt, tokens_of(case), cache_salt=fresh_salt("alone")))
    with drafted(d) as paired:
        for length, prompt in prompts.items():
            (want,) = reference_answers(p, [prompt], tokens_of(case))
            before = loaded_tokens(d)
            got = within(ANSWER_S, lambda prompt=prompt: ask(prompt))  # type: ignore[misc]
            if isinstance(got, str):
                failed.append(got)
                if got.startswith("nothing") or not (p.process.alive and d.process.alive):
                    break
                continue
            loaded = loaded_tokens(d) - before
            if got.tokens != want.tokens:
                wrong.append(length)
            elif loaded < length // 2:
                apart.append(length)
            else:
                right += 1
    words = [f"right, {right} of {len(LENGTHS)}"] if right else []
    words += [f"**wrong** at {', '.join(map(str, wrong))} tokens"] if wrong else []
    words += [f"computed by D itself: {len(apart)}"] if apart else []
    words += [f"failed: {len(failed)} ({one_line(failed[0])})"] if failed else []
    if case.draft and not failed:
        words.append(f"{paired().accepted} drafts accepted, {alone().accepted} by D alone")
    return "; ".join(words)


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "/")[:160]


def refusal(problem: Exception) -> str:
    """Return the first exception with a sentence in the log of an engine that did not start.

    The later exceptions are its consequences.
    """
    text = str(problem)
    ending = re.search(r"the end of (\S+?):\n", text)
    log = Path(ending[1]).read_text(errors="replace") if ending else text
    raised = re.search(
        r"^(?:\(.+?\) )?(?:\w+\.)*(\w*(?:Error|Exception|Refused)): (.+(?:\n.*Assertion failed.+)?)", log, re.M
    )
    if not raised:
        return one_line(text)
    _, failed, sentence = raised[2].partition("Assertion failed, ")  # of a configuration; the head only counts errors
    return one_line(f"{raised[1]}: {sentence.partition(' [type=')[0] if failed else raised[2]}")


def cell(case: KindCase, start: Start) -> str:
    with Cluster(fresh_directory("compare-kinds"), plugins=(FORKED,)) as cluster:
        try:
            p, d, ask = start(case, cluster)
        except (ProcessDied, TimeoutError) as problem:
            return f"refused: {refusal(problem)}"
        return verdict(case, p, d, ask)


def table(cells_now: dict[str, str], page: str, at: str) -> list[str]:
    """Return the table with a line for each kind that ran with all connectors, now or when the page was written."""
    head = ("kind", *(CONNECTORS[name][0] for name in CONNECTORS), "commit")
    before = {line.split(" | ")[0].removeprefix("| "): line for line in MARKS.split(page)[1].splitlines()}
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for key, case in CASES.items():
        cells = [cells_now.get(f"{key} {name}", "") for name in CONNECTORS]
        if all(cells):
            lines.append("| " + " | ".join((case.title, *cells, at)) + " |")
        elif case.title in before:
            lines.append(before[case.title])
    return lines


def git(*words: str) -> str:
    run = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def package() -> str:
    """Return the tree of the package, to which the results belong."""
    return git("rev-parse", "HEAD:vllm_ascend_pd")


def commit() -> str:
    """Return the commit that last changed the package."""
    return git("log", "-1", "--format=%h", "--abbrev=12", "--", "vllm_ascend_pd")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"of {', '.join(CASES)}")
    parser.add_argument("--connector", default="", metavar="NAME,…", help=f"of {', '.join(CONNECTORS)}")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kinds.md")
    parser.add_argument("--again", action="store_true", help="discard the results of earlier runs")
    args = parser.parse_args()
    kept: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() and not args.again else {}
    cells_now: dict[str, str] = kept.get("found", {}) if kept.get("package") == package() else {}
    for key, case in CASES.items():
        for name, (title, start) in CONNECTORS.items():
            wanted = (not args.only or key in args.only.split(",")) and (
                not args.connector or name in args.connector.split(",")
            )
            if not wanted or f"{key} {name}" in cells_now:
                continue
            if name == "nixl" and not install_nixl():
                cells_now[f"{key} {name}"] = "not installed here"
                continue
            say(f"{case.title}, {title}")
            cells_now[f"{key} {name}"] = cell(case, start)
            say(f"    {cells_now[f'{key} {name}']}")
            FOUND.write_text(json.dumps({"package": package(), "found": cells_now}, indent=1, ensure_ascii=False))
    page = PAGE.read_text()
    lines = table(cells_now, page, commit())
    print("\n".join(lines))
    if args.write:
        PAGE.write_text(MARKS.filled(page, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
