# SPDX-License-Identifier: Apache-2.0
"""Any stream goes on: each kind of stream is cut at each of its first tokens, and its D is killed once.

A P and two D's behind the metaserver, which sees their answers by way of a `Cutter`. A greedy answer must be one
engine's; of a sampled one what came before the break must be its beginning, and its parser, grammar or schema must take
the whole. The table that the last test prints has a line for each kind.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tools.support.checks import fresh_salt
from tools.support.cluster import STRICT, Cluster, Metaserver
from tools.support.cutting import Cutter
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec
from tools.support.speech import (
    CHAT,
    COMPLETIONS,
    KINDS,
    MESSAGES,
    PARSERS,
    PLUGIN,
    RESPONSES,
    Spoken,
    StreamKind,
    read,
    speaking,
    take,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]
CUTS, AT_ONCE = 40, 8


@dataclass
class StreamSite:
    """The engines whose D's have one set of parsers."""

    decodes: list[EngineProcess]
    front: Metaserver
    cutter: Cutter

    def ask(self, kind: StreamKind, name: str = "", url: str = "") -> Spoken:
        """Return the answer to a request, whose name says where it is cut."""
        body = {**kind.body(KINDS.index(kind)), "cache_salt": fresh_salt("any")}
        headers = {"x-request-id": name} if name else {}
        answer = httpx.post((url or self.front.url) + kind.route, json=body, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        return read(answer.content)

    def begun(self, name: str) -> Spoken | None:
        """Return what came before the break; None: there was none."""
        stream = self.cutter.streams[name]
        return None if stream.whole else read(stream.said())


def by_curl(site: StreamSite, kind: StreamKind, name: str) -> Spoken:
    words = ["curl", "-sSN", site.front.url + kind.route, "-H", "content-type: application/json", "--noproxy", "*"]
    words += ["-H", f"x-request-id: {name}", "-d", json.dumps(kind.body(KINDS.index(kind)))]
    return read(subprocess.run(words, capture_output=True, check=True, timeout=300).stdout)


def by_openai(site: StreamSite, kind: StreamKind, name: str) -> Spoken:
    body, answer = kind.body(KINDS.index(kind)), Spoken()
    asked = {
        key: body.pop(key)
        for key in ("model", "messages", "prompt", "input", "stream", "stream_options")
        if key in body
    }
    with openai.OpenAI(base_url=f"{site.front.url}/v1", api_key="-", max_retries=0, timeout=300) as client:
        creates: dict[str, Any] = {
            COMPLETIONS: client.completions.create,
            CHAT: client.chat.completions.create,
            RESPONSES: client.responses.create,
        }
        for event in creates[kind.route](**asked, extra_body=body, extra_headers={"x-request-id": name}):
            take(answer, event.model_dump(exclude_unset=True))
    return answer


def by_anthropic(site: StreamSite, kind: StreamKind, name: str) -> Spoken:
    """Read a message by its client's own accumulation, which must come to the same as its events."""
    body, answer = kind.body(KINDS.index(kind)), Spoken()
    asked = {key: body.pop(key) for key in ("model", "messages", "max_tokens", "tools") if key in body}
    del body["stream"]
    with (
        anthropic.Anthropic(base_url=site.front.url, api_key="-", max_retries=0, timeout=300) as client,
        client.messages.stream(**asked, extra_body=body, extra_headers={"x-request-id": name}) as events,
    ):
        for event in events:
            if event.type.startswith(("message_", "content_block_")):
                take(answer, event.model_dump(exclude_unset=True))
        whole = events.get_final_message()
    texts = "".join(block.text for block in whole.content if block.type == "text")
    assert texts == answer.text and whole.stop_reason == answer.end
    return answer


# Of the D that is killed: a client, and what it asks for.
BY_CLIENTS: dict[str, tuple[Callable[..., Spoken], StreamKind]] = {
    f"{ask.__name__}, {kind.name}": (ask, kind)
    for ask, routes in (
        (by_curl, (COMPLETIONS, CHAT, RESPONSES, MESSAGES)),
        (by_openai, (COMPLETIONS, CHAT, RESPONSES)),
        (by_anthropic, (MESSAGES,)),
    )
    for kind in KINDS
    if kind.parsers == "plain" and kind.route in routes and kind.name in ("greedy", "hermes calls", "stop string")
}


@dataclass
class TableLine:
    cuts: int = 0
    killed_at: int = 0  # tokens after which its D was killed; 0: it was not
    wrong: list[str] = field(default_factory=list)


TABLE: dict[str, TableLine] = {}
_NUMBERS = itertools.count()


def line_of(kind: StreamKind) -> TableLine:
    return TABLE.setdefault(f"{kind.route}, {kind.name}", TableLine())


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return "--tokenizer", str(speaking(tmp_path_factory.mktemp("words")))


@pytest.fixture(scope="module")
def prefill(cluster: Cluster, words: tuple[str, str]) -> Iterator[EngineProcess]:
    extra = cluster.push_config(verify="off", trace_dir="")
    spec = EngineSpec("any-p", ensure("gqa"), "kv_producer", extra=extra, arguments=words, plugins=(PLUGIN,))
    (engine,) = cluster.start(spec)
    yield engine
    cluster.stop(engine)


class StreamSites:
    """The site of one set of parsers at a time."""

    def __init__(self, cluster: Cluster, prefill: EngineProcess, words: tuple[str, str]) -> None:
        self._cluster, self._prefill, self._words = cluster, prefill, words
        self._of, self._open = "", ExitStack()

    def of(self, parsers: str) -> StreamSite:
        if parsers != self._of:
            self.close()
            self._of, self._site = parsers, self._started(parsers)
        return self._site

    def close(self) -> None:
        self._open.close()

    def _started(self, parsers: str) -> StreamSite:
        cluster, port = self._cluster, self._cluster.port()
        extra = cluster.push_config(f"http://127.0.0.1:{port}", verify="off", trace_dir="")
        flags = (*self._words, "--enable-auto-tool-choice", *PARSERS[parsers])
        common: dict[str, Any] = {"role": "kv_consumer", "extra": extra, "arguments": flags, "plugins": (PLUGIN,)}
        decodes = cluster.start(*(EngineSpec(f"any-{parsers}-d{i}", ensure("gqa"), **common) for i in range(2)))
        self._open.callback(cluster.stop, *decodes)
        cutter = Cutter([*decodes])
        self._open.callback(cutter.close)
        front = cluster.metaserver([self._prefill], cutter.addresses, port, STRICT)
        self._open.callback(cluster.stop, front)
        return StreamSite(decodes, front, cutter)


@pytest.fixture(scope="module")
def sites(cluster: Cluster, prefill: EngineProcess, words: tuple[str, str]) -> Iterator[StreamSites]:
    made = StreamSites(cluster, prefill, words)
    yield made
    made.close()


def judged(kind: StreamKind, got: Spoken, one: Spoken, begun: Spoken | None) -> str:
    """Return what is wrong with an answer; empty: nothing."""
    if not kind.goes_on:  # but for one that is cut before its client has anything
        broken = begun is not None and "PD-META-024" in got.problem and one.text.startswith(got.text)
        return "" if broken or (got.end and got.text == one.text) else f"ends in {got} for {one}"
    if got.problem or len(got.names) != 1:
        return f"{got.problem} {got.names}"
    if begun is not None and not begun.begins(got):
        return f"does not begin as {begun}: {got}"
    if not kind.takes(got):
        return f"is not what was asked for: {got}"
    if kind.sampled:
        return ""
    near = all(abs(a[1] - b[1]) < 1e-3 for a, b in zip(got.rows, one.rows, strict=False))
    return "" if got.same() == one.same() and near else f"{got.same()} for {one.same()}"


def cut_at_each_token(kind: StreamKind, site: StreamSite) -> None:
    line = line_of(kind)
    one = site.ask(kind, url=site.decodes[1].url)
    assert not one.problem and (not kind.goes_on or kind.check(one)), one

    def cut(count: int) -> str:
        name = f"cut-{count}-{next(_NUMBERS)}"
        got = site.ask(kind, name)
        begun = site.begun(name)
        line.cuts += begun is not None and (kind.goes_on or bool(got.problem))
        wrong = judged(kind, got, one, begun)
        return wrong and f"behind {count} tokens: {wrong}"

    with ThreadPoolExecutor(AT_ONCE) as clients:
        line.wrong += filter(None, clients.map(cut, range(1, CUTS + 1)))
    assert not line.wrong, f"{len(line.wrong)} of {CUTS}, the first {line.wrong[0]}"
    assert line.cuts > 25 or not kind.goes_on, f"only {line.cuts} were cut"


def outlive_their_d(kinds: Sequence[StreamKind], site: StreamSite) -> None:
    """Check streams on one D, which is killed when each of them has some tokens."""
    asks: list[tuple[Callable[..., Spoken], StreamKind]] = [(StreamSite.ask, kind) for kind in kinds]
    asks += BY_CLIENTS.values() if kinds[0].parsers == "plain" else ()
    ones = [site.ask(kind, url=site.decodes[1].url) for _, kind in asks]
    (victim, other), members = site.decodes, site.decodes[0].process.members()
    drain = f"{site.front.url}/instances/{site.cutter.addresses[1].url.removeprefix('http://')}"
    assert httpx.post(f"{drain}/drain", json={}).is_success
    names = [f"hold-{3 + number % 12}-{next(_NUMBERS)}" for number in range(len(asks))]
    with ThreadPoolExecutor(len(asks)) as clients:
        asked = [clients.submit(ask, site, kind, name) for (ask, kind), name in zip(asks, names, strict=True)]
        assert site.cutter.reached(names, 120), "not all streams begin"
        assert httpx.post(f"{drain}/undrain", json={}).is_success
        for process in members:
            process.kill()
        site.cutter.end()
        answers = [one.result() for one in asked]
    assert not victim.ready() and other.ready()
    for (ask, kind), name, one, got in zip(asks, names, ones, answers, strict=True):
        line, begun = line_of(kind), read(site.cutter.streams[name].said())
        line.killed_at = site.cutter.streams[name].tokens
        if wrong := judged(kind, got, one, begun):
            line.wrong.append(f"{kind.name} {ask.__name__}, killed: {wrong}")
    wrong = [one for kind in kinds for one in line_of(kind).wrong]
    assert not wrong, wrong


CASES = [
    pytest.param(partial(check, what), parsers, id=f"{parsers}, {name}")
    for parsers in PARSERS
    for check, what, name in (
        *((cut_at_each_token, kind, f"{kind.route}, {kind.name}") for kind in KINDS if kind.parsers == parsers),
        (outlive_their_d, [kind for kind in KINDS if kind.parsers == parsers], "killed"),
    )
]


@pytest.mark.parametrize(("check", "parsers"), CASES)
def test_any_stream_goes_on(sites: StreamSites, check: Callable[..., None], parsers: str) -> None:
    check(sites.of(parsers))


def test_the_table(progress: Callable[[str], None]) -> None:
    if not TABLE:
        pytest.skip("this run has none of its lines")
    progress("| stream | cut | its D killed after tokens | wrong |\n|---|---:|---:|---:|")
    for name, line in TABLE.items():
        progress(f"| {name} | {line.cuts} | {line.killed_at or '–'} | {len(line.wrong)} |")
