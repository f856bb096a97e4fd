# SPDX-License-Identifier: Apache-2.0
"""What the engines-without-vLLM of the tests share: looking until something is so, D's steps, the stage events, a short quiet
time, silent listeners."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.metadata import Bind, DecodeStep
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.identity import TransferId

LOOPBACK = "127.0.0.1"
Events = list[tuple[str, Mapping[str, Any]]]


def until(reached: Callable[[], object], what: str | Callable[[], object] = "", seconds: float = 30.0) -> None:
    """Look until it is reached; fails when the deadline passes and says what was waited for."""
    deadline = time.monotonic() + seconds
    while not reached():
        late = time.monotonic() >= deadline
        assert not late, f"not reached within {seconds:g} s: {what() if callable(what) else what or reached}"
        time.sleep(0.002)


def heard_ready(events: Events) -> set[tuple[str, int]]:
    """Transfers and D ranks whose first READY has come to P. D may say READY more than once: BEGINs are repeated."""
    return {
        (facts["transfer"], facts["d_rank"]) for stage, facts in list(events) if stage == "ready" and "waited" in facts
    }


class Steps:
    """The steps of D's scheduler, all kept: an answer may be in any of them, in the one with its bind too."""

    def __init__(self, scheduler: DecodeScheduler) -> None:
        self.scheduler = scheduler
        self.taken: list[DecodeStep] = []

    def take(self) -> DecodeStep:
        self.taken.append(self.scheduler.build_step())
        return self.taken[-1]

    def bound(self) -> Bind:
        """The one load that this step begins."""
        (bind,) = self.take().binds
        return bind

    def codes(self, transfer: TransferId) -> list[str]:
        """Why it was cancelled, as far as the steps taken say so."""
        return [cancel.code for step in self.taken for cancel in step.cancels if cancel.transfer == transfer]

    def settled(self, transfer: TransferId) -> None:
        """Until P's request has ended well."""
        until(lambda: self.take() and any(transfer in step.settles for step in self.taken), "the end of P's request")

    def cancelled(self, transfer: TransferId) -> str:
        """Until the load is cancelled: the code."""
        until(lambda: self.take() and self.codes(transfer), "the end of the load")
        (code,) = self.codes(transfer)
        return code


@contextmanager
def traced() -> Iterator[Events]:
    """The stage events of everything in this process."""
    events: Events = []
    unsubscribe = trace.subscribe(lambda stage, facts: events.append((stage, dict(facts))))
    try:
        yield events
    finally:
        unsubscribe()


def parsed(keys: Mapping[str, Any], quiet_s: float | None) -> PushConfig:
    """A quiet time below 5 s is what no real transfer engine has, so no key can set it."""
    config = PushConfig.parse(keys)
    if quiet_s is None:
        return config
    return dataclasses.replace(config, wire=dataclasses.replace(config.wire, transfer_timeout_s=quiet_s))


def listening() -> socket.socket:
    """A port that takes connections and says nothing."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


def address_of(listener: socket.socket) -> str:
    return f"{LOOPBACK}:{listener.getsockname()[1]}"
