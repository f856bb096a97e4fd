# SPDX-License-Identifier: Apache-2.0
"""Common parts of the engines without vLLM: polling, D's steps, the stage events, a short quiet time, silent
listeners."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.metadata import Bind, DecodeStep
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.identity import TransferId

if TYPE_CHECKING:  # it imports vLLM, which takes longer than what processes without engines do here
    from vllm_ascend_pd.decode.scheduler import DecodeScheduler

LOOPBACK = "127.0.0.1"
Events = list[tuple[str, Mapping[str, Any]]]


def until(reached: Callable[[], object], what: str | Callable[[], object] = "", seconds: float = 30.0) -> None:
    """Poll until `reached` holds; at the deadline fail with what was waited for."""
    deadline = time.monotonic() + seconds
    while not reached():
        late = time.monotonic() >= deadline
        assert not late, f"not reached within {seconds:g} s: {what() if callable(what) else what or reached}"
        time.sleep(0.002)


def heard_ready(events: Events) -> set[tuple[str, int]]:
    """Return transfers and D ranks whose first READY has come to P. D may repeat READY, as BEGINs are repeated."""
    return {
        (facts["transfer"], facts["d_rank"]) for stage, facts in list(events) if stage == "ready" and "waited" in facts
    }


class WatchedSteps:
    """Steps of D's scheduler, all kept: an outcome may be in any of them, even in the one with its bind."""

    def __init__(self, scheduler: DecodeScheduler) -> None:
        self.scheduler = scheduler
        self.taken: list[DecodeStep] = []

    def take(self) -> DecodeStep:
        self.taken.append(self.scheduler.build_step())
        return self.taken[-1]

    def bound(self) -> Bind:
        """Take a step, and return the one load that it begins."""
        (bind,) = self.take().binds
        return bind

    def codes(self, transfer: TransferId) -> list[str]:
        """Codes of its cancellations in the steps taken."""
        return [cancel.code for step in self.taken for cancel in step.cancels if cancel.transfer == transfer]

    def settled(self, transfer: TransferId) -> None:
        """Step until P's request has ended well."""
        until(lambda: self.take() and any(transfer in step.settles for step in self.taken), "the end of P's request")

    def cancelled(self, transfer: TransferId) -> str:
        """Step until the load is cancelled, and return the code."""
        until(lambda: self.take() and self.codes(transfer), "the end of the load")
        (code,) = self.codes(transfer)
        return code


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
