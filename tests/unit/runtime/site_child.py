# SPDX-License-Identifier: Apache-2.0
"""One side of a pair in a process of its own, with the real Mooncake, so that it can be stopped and killed.

    python -m unit.runtime.site_child decode      executes: reserve NAME TOKENS · step · check NAME · halt-at STAGE
    python -m unit.runtime.site_child prefill     executes: prefill NAME TOKENS SEED RESERVATION · blocks ·
    halt-in-write COUNT

The process stops itself (SIGSTOP): `halt-at` at that stage event, `halt-in-write` with so many of a write's
descriptors in the transfer engine, before the others. Each command is answered by a line.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.support.fork_server import ForkServers
from unit.device.caches import CacheModel
from unit.kits.child import AnsweringChild, take_connection
from unit.runtime.sites import LOOPBACK, DecodeSite, PrefillSite, SitePrompt, config
from vllm_ascend_pd.config import PushConfig, WireConfig
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.auth import seal, unseal
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.transport.base import Target, Wire
from vllm_ascend_pd.transport.create import create_target, create_wire
from vllm_ascend_pd.transport.engine import OpenEngine

MODULE = "unit.runtime.site_child"
MODEL = CacheModel("token", layers=4, dim=64)
BLOCK, BLOCKS = 16, 256
WIRE = WireConfig(transfer_timeout_s=5, mooncake_protocol="tcp")
LEASE_S = 5.0
ROOT = Path(__file__).parents[3]


def push_config() -> PushConfig:
    # The lease is longer than the machine stands still: a test that measures delays then sees a delay, not a failure.
    return config(transport="mooncake", quiet_extra_s=2.0, lease_s=LEASE_S, margin_s=0.3, ready_timeout_s=5.0)


def target() -> Target:
    return create_target(WIRE, LOOPBACK)


def wire() -> Wire:
    return create_wire(WIRE, LOOPBACK, quiet_s=7.0)


def decode_site(seed: int = 2) -> DecodeSite:
    return DecodeSite(MODEL, 1, block=BLOCK, blocks=BLOCKS, push=push_config(), make_transport=target, seed=seed)


def prefill_site(seed: int = 1) -> PrefillSite:
    return PrefillSite(MODEL, 1, block=BLOCK, blocks=BLOCKS, push=push_config(), make_transport=wire, seed=seed)


def packed(reservation: Reservation) -> str:
    return base64.b64encode(seal(reservation, None)).decode()


def unpacked(name: str, tokens: int, seed: int, text: str) -> SitePrompt:
    """The request as P knows it: its content follows from the seed."""
    reservation = unseal(base64.b64decode(text), None)
    return SitePrompt(name, tokens, 0, MODEL.content(tokens, seed), reservation, [])


class SiteChild(AnsweringChild):
    """Handle of the child process for the test. A context manager, which ends the process."""

    def __init__(self, side: str, forks: ForkServers) -> None:
        super().__init__(MODULE, side, forks=forks)
        assert self.line() == "ready"

    def halted(self) -> None:
        """Wait until the process has stopped itself."""
        stat = Path(f"/proc/{self.process.pid}/stat")

        def stopped() -> bool:
            time.sleep(0.002)
            return stat.read_text().rpartition(")")[2].split()[0] == "T"

        self.wait(stopped, "it never reached the stage")


class Halt:
    """Stop this process at a stage, once."""

    def __init__(self) -> None:
        self.stage = ""
        trace.subscribe(self)

    def __call__(self, stage: str, facts: Mapping[str, Any]) -> None:
        if stage == self.stage:
            self.stage = ""
            os.kill(os.getpid(), signal.SIGSTOP)


class HaltInWrite:
    """Stop this process between two descriptors of one write, the case that the fence exists for."""

    def __init__(self) -> None:
        self.left = 0
        submitted = OpenEngine.submit
        halt = self

        def submit(self: OpenEngine, *where: Any) -> int | None:
            if halt.left:
                halt.left -= 1
                if not halt.left:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return submitted(self, *where)

        OpenEngine.submit = submit  # type: ignore[assignment, method-assign]


def serve_decode(halt: Halt) -> None:
    site = decode_site(seed=4)
    requests: dict[str, SitePrompt] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer = "ok"
        if command == "reserve":
            requests[words[0]] = site.reserve(words[0], int(words[1]))
            answer = packed(requests[words[0]].reservation)
        elif command == "step":
            site.step()
            answer = " ".join(f"{name}={reports[0].ok}" for name, reports in site.done.items()) or "nothing"
        elif command == "check":
            site.check(requests[words[0]])
        elif command == "halt-at":
            halt.stage = words[0]
        print(answer, flush=True)


def serve_prefill(_: Halt) -> None:
    halt = HaltInWrite()
    site = prefill_site(seed=5)
    open_requests: list[SitePrompt] = []
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer = "ok"
        if command == "prefill":
            name, tokens, seed, reservation = words
            request = unpacked(name, int(tokens), int(seed), reservation)
            open_requests.append(request)
            site.prefill(request)
            site.finish(request)
        elif command == "blocks":  # step until no request's blocks are read any more
            with contextlib.suppress(AssertionError):
                site.released_blocks_of(*open_requests)
            answer = " ".join(sorted(site.released)) or "nothing"
        elif command == "halt-in-write":
            halt.left = int(words[0])
        print(answer, flush=True)


if __name__ == "__main__":
    take_connection()
    {"decode": serve_decode, "prefill": serve_prefill}[sys.argv[1]](Halt())
    os._exit(0)
