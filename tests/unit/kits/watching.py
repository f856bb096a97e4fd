# SPDX-License-Identifier: Apache-2.0
"""Common parts of the engines without vLLM: polling, the stage events, a short quiet time, silent listeners."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.observe import trace

LOOPBACK = "127.0.0.1"
Events = list[tuple[str, Mapping[str, Any]]]


def until(reached: Callable[[], object], what: str | Callable[[], object] = "", seconds: float = 30.0) -> None:
    """Poll until `reached` holds; at the deadline fail with what was waited for."""
    deadline = time.monotonic() + seconds
    while not reached():
        late = time.monotonic() >= deadline
        assert not late, f"not reached within {seconds:g} s: {what() if callable(what) else what or reached}"
        time.sleep(0.002)


@contextmanager
def traced() -> Iterator[Events]:
    """Record the stage events of this process."""
    events: Events = []
    unsubscribe = trace.subscribe(lambda stage, facts: events.append((stage, dict(facts))))
    try:
        yield events
    finally:
        unsubscribe()


def parsed(keys: Mapping[str, Any], quiet_s: float | None) -> PushConfig:
    """Parse a configuration; `quiet_s` may be below 5 s, which no real transfer engine has and no key can set."""
    config = PushConfig.parse(keys)
    if quiet_s is None:
        return config
    return dataclasses.replace(config, wire=dataclasses.replace(config.wire, transfer_timeout_s=quiet_s))


def listening() -> socket.socket:
    """A port that accepts connections and never answers."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


def address_of(listener: socket.socket) -> str:
    return f"{LOOPBACK}:{listener.getsockname()[1]}"
