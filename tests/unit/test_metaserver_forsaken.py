# SPDX-License-Identifier: Apache-2.0
"""An engine that shuts down and never answers what it still has: seen on a real one whose request came in the moment in
which its scheduler ended. Its HTTP server then waits for that request for ever, and so would the client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fake_engine import words
from metaserver_cluster import cluster, events, streamed, texts, until

PROMPT = "a prompt"


def test_a_prefill_that_will_never_come_is_given_up() -> None:
    with cluster(forsaken_s=0.3) as c, ThreadPoolExecutor(1) as client:
        p, d = c.prefill[0], c.decode[0]
        p.manner.hang = True
        asking = client.submit(c.complete, PROMPT)
        until(p.generations)
        p.served.shut()
        answer = asking.result(20)
        assert answer.status_code == 200 and texts(answer) == ["".join(words(PROMPT, 3))]
        assert d.local_prefills == 1 and d.outcomes[-1].kind == "failed"


def test_a_stream_that_will_never_go_on_ends_with_an_error() -> None:
    with cluster(forsaken_s=0.3) as c, ThreadPoolExecutor(1) as client:
        d = c.decode[0]
        d.manner.gap_s = 600.0
        asking = client.submit(c.complete, PROMPT, stream=True)
        until(lambda: any(e.committed for e in c.worker.front.journal.exchanges))
        d.served.shut()
        said = events(asking.result(20))
        assert "error" in said[-2] and said[-1] == "[DONE]"


def test_a_stream_that_goes_on_meanwhile_is_whole() -> None:
    with cluster(forsaken_s=1.5) as c, ThreadPoolExecutor(1) as client:
        d = c.decode[0]
        d.manner.gap_s = 0.25
        asking = client.submit(c.complete, PROMPT, stream=True, max_tokens=16)
        until(lambda: any(e.committed for e in c.worker.front.journal.exchanges))
        d.served.shut()
        assert streamed(asking.result(20)) == "".join(words(PROMPT, 16))
