# SPDX-License-Identifier: Apache-2.0
"""Common parts of the engines without vLLM: polling, the stage events, a short quiet time, silent listeners."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from tools.support.processor_time import scheduled
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.observe import trace

LOOPBACK = "127.0.0.1"
Events = list[tuple[str, Mapping[str, Any]]]


def without_processor(pid: int) -> float:
    """Return for how many seconds the threads of a process have waited for a processor."""
    return scheduled([pid]).ready


def until(reached: Callable[[], object], what: str | Callable[[], object] = "", seconds: float = 30.0) -> None:
    """Poll until `reached` holds; after so many seconds of this process's own time fail with what was waited for.

    Time in which one of its threads waited for a processor is left out: it says how busy the machine is.
    """
    began, waited = time.monotonic(), without_processor(os.getpid())
    while not reached():
        if time.monotonic() - began >= seconds:
            spent = time.monotonic() - began - (without_processor(os.getpid()) - waited)
            assert spent < seconds, f"not reached within {seconds:g} s: {what() if callable(what) else what or reached}"
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


class Closes(Protocol):
    def close(self) -> None: ...


@contextmanager
def running(*sites: Closes) -> Iterator[None]:
    """Close every site; fail if a thread of theirs is left."""
    try:
        yield
    finally:
        for site in sites:
            site.close()
    left = own_threads()
    assert not left, f"threads that were not joined: {left}"


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("pd-"))
