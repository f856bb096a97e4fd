# SPDX-License-Identifier: Apache-2.0
"""A name server in a test's hands, in place of the system's look-up."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import Any

import pytest

WAIT_S = 20.0  # only where a promise is broken


class NameServer:
    """Answers by name. Names in `slow` wait for the gate; those in `wrong` fail with this error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[str] = Counter()
        self.slow: set[str] = set()
        self.wrong: dict[str, int] = {}
        self.addresses = ["127.0.0.1"]
        self.gate = threading.Event()
        self._system = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if not str(host).endswith(".test"):
            return self._system(host, port, *args, **more)
        self.asked[host] += 1
        if host in self.slow:
            self.gate.wait(WAIT_S)
        if host in self.wrong:
            raise socket.gaierror(self.wrong[host], "as set")
        return [entry for one in self.addresses for entry in self._system(one, port, type=socket.SOCK_STREAM)]
