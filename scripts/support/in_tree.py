# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connectors, as the least that a router of each does: for scripts that set them beside this package."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import httpx

from scripts.support.client import Answer, body_of, complete, post
from scripts.support.engine import Engine
from scripts.support.models import ROOT

PLUGIN = ROOT / "scripts" / "support" / "plugins" / "baseline"  # without it MooncakeConnector does not start on a CPU
Ask = Callable[[list[int]], Answer]


def mooncake(prefill: Engine, decode: Engine, bootstrap: int, tokens: int) -> Ask:
    """MooncakeConnector: both requests at once, matched by a transfer id."""
    address = f"http://127.0.0.1:{bootstrap}"
    found = httpx.get(f"{address}/query", timeout=10.0, trust_env=False).json()
    engine_id = next(iter(found.values()))["engine_id"]

    def ask(prompt: list[int]) -> Answer:
        transfer = uuid.uuid4().hex
        first = body_of(prompt, 1, kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer})
        second = {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": address,
        }
        leg = threading.Thread(target=post, args=(prefill.url, first), name="prefill-leg", daemon=True)
        leg.start()
        answer = complete(decode.url, body_of(prompt, tokens, kv_transfer_params=second))
        leg.join()
        return answer

    return ask


def nixl(prefill: Engine, decode: Engine, tokens: int) -> Ask:
    """NixlConnector: P first, and what it answers to D."""

    def ask(prompt: list[int]) -> Answer:
        wanted: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        first = post(prefill.url, body_of(prompt, 1, kv_transfer_params=wanted))
        return complete(decode.url, body_of(prompt, tokens, kv_transfer_params=first["kv_transfer_params"]))

    return ask
