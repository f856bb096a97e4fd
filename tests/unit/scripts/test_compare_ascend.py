# SPDX-License-Identifier: Apache-2.0
"""tools/compare_ascend.py: the table has a column for each connector that ran, and a line for what one of them gave."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tools import compare_ascend
from tools.compare_ascend import CONTENDERS, MARKS, PAGE, STREAMING, Column, OpenRequest, streams, struck, table
from tools.support.client import TimedAnswer

OURS, LAYERWISE, PULL = (contender.connector for contender in CONTENDERS)


def test_a_line_for_each_result_in_the_order_of_the_run() -> None:
    results = {
        PULL: {
            "TP 1 → 1: answers right": "8 of 8",
            "P killed": "an error",
            "TP 2 → 1: answers right": "refused: ranks",
        },
        OURS: {
            "TP 1 → 1: answers right": "8 of 8",
            "P killed": "right after 61 s",
            "TP 2 → 1: answers right": "8 of 8",
            "TP 2 → 1: median": "0.20 s",
        },
    }
    assert table(results) == [
        f"| | {OURS} | {PULL} |",
        "|---|---|---|",
        "| TP 1 → 1: answers right | 8 of 8 | 8 of 8 |",
        "| P killed | right after 61 s | an error |",
        "| TP 2 → 1: answers right | 8 of 8 | refused: ranks |",
        "| TP 2 → 1: median | 0.20 s | – |",
    ]


def test_each_result_is_kept_at_once() -> None:
    cells, kept = dict[str, str](), list[dict[str, str]]()
    column = Column(cells, lambda: kept.append(dict(cells)))
    column.tell("P killed", "right")
    column.tell("then D", "free")
    assert kept == [{"P killed": "right"}, {"P killed": "right", "then D": "free"}]


def test_the_page_gets_the_table_between_its_marks() -> None:
    page = f"before\n{MARKS.begin}\n| an older one |\n{MARKS.end}\nafter\n"
    made = MARKS.filled(page, ["| a |", "|---|"])
    assert made == f"before\n{MARKS.begin}\n| a |\n|---|\n{MARKS.end}\nafter\n"
    assert MARKS.filled(made, ["| a |", "|---|"]) == made
    for lost in MARKS:
        with pytest.raises(ValueError, match="lacks a line"):
            MARKS.filled(page.replace(lost, ""), [])


def test_the_page_has_a_column_for_each_connector() -> None:
    between = PAGE.read_text().split(f"{MARKS.begin}\n")[1].split(MARKS.end)[0].splitlines()
    assert between[:2] == table({name: {} for name in (OURS, LAYERWISE, PULL)})
    assert {line.count("|") for line in between} == {len(compare_ascend.CONTENDERS) + 2}


def test_a_client_that_gives_up_closes_its_connection() -> None:
    """An engine that holds blocks afterwards does not hold them for this client."""
    closed = threading.Event()

    def silent(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
            closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=silent, args=(listening,))
        server.start()
        request = OpenRequest(f"http://127.0.0.1:{listening.getsockname()[1]}", {}, limit_s=0.2)
        request.wait()
        server.join(20.0)
    assert isinstance(request.result, asyncio.TimeoutError) and closed.is_set()


CHUNK = b'data: {"choices": [{"token_ids": [7], "text": ""}]}\n\n'


@contextmanager
def server(chunks: int, hold: threading.Event) -> Iterator[str]:
    """A server that streams some chunks, and ends the answer once `hold` is set."""

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            asked = b""
            while not asked.endswith(b"}"):  # bytes that are left unread would reset the connection
                asked += connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            for _ in range(chunks):
                connection.sendall(CHUNK)
            hold.wait(30.0)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        hold.set()
        thread.join(30.0)


def strike(monkeypatch: pytest.MonkeyPatch, chunks: int, *, whole: bool) -> tuple[str, list[int]]:
    """Return the words of a request whose server is struck while it streams, and the chunks that had come by then."""
    hold, seen = threading.Event(), list[int]()
    if whole:
        hold.set()

    def kill(victim: Any) -> None:
        seen.append(victim.chunks())
        hold.set()

    monkeypatch.setattr(compare_ascend, "reference_answers", lambda *_: [TimedAnswer(tokens=(7,) * chunks)])
    monkeypatch.setattr(compare_ascend, "killed", kill)
    with server(chunks, hold) as url:
        looked: list[OpenRequest] = []

        def moment(site: Any, request: OpenRequest) -> bool:
            looked[:] = [request]
            return not whole and streams(site, request)

        victim: Any = SimpleNamespace(chunks=lambda: len(looked[0].answer.times))
        site: Any = SimpleNamespace(url=url, p=victim)
        return struck(site, victim, moment, chunks), seen


def test_an_engine_is_killed_while_its_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    said, seen = strike(monkeypatch, STREAMING + 2, whole=False)
    assert said == "right after 0 s" and STREAMING <= seen[0] <= STREAMING + 2, (said, seen)


def test_a_moment_that_does_not_come_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    said, seen = strike(monkeypatch, 2, whole=True)
    assert said.startswith("does not occur: the answer was whole after 0.") and not seen, said
