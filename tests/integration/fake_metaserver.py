# SPDX-License-Identifier: Apache-2.0
"""A scripted metaserver: it takes D's reservation and answers as a test says. Real HTTP on 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, list[dict[str, Any]]]  # HTTP status, lines of the answer
Script = Callable[[dict[str, Any]], Answer]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # for a connection without data
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        status, lines = self.server.script(body)
        payload = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Content-Length", str(len(payload)))
        # One answer per connection: a kept connection would still use this script after the next one has begun.
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # D may have hung up
            self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        return


class FakeServer(ThreadingHTTPServer):
    daemon_threads = False  # closing the server waits for answers in progress
    allow_reuse_address = True

    def __init__(self, port: int, script: Script) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.script = script
        self.seen: list[dict[str, Any]] = []


@contextmanager
def fake_metaserver(port: int, script: Script) -> Iterator[list[dict[str, Any]]]:
    """Serve inside the block, and finish open answers at its end. Yields the bodies received."""
    server = FakeServer(port, script)
    thread = threading.Thread(target=server.serve_forever, name="fake-metaserver", kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


def says_failed(body: dict[str, Any]) -> Answer:
    """Answer that P was chosen and then failed."""
    return 200, [
        {"event": "accepted", "prefill": "127.0.0.1:1"},
        {"event": "failed", "code": "PD-META-004", "detail": "the prefill engine is gone"},
    ]


def is_overloaded(body: dict[str, Any]) -> Answer:
    return 500, [{"error": {"message": "no", "type": "server_error", "code": 500}}]
