# SPDX-License-Identifier: Apache-2.0
"""Both schedulers without workers, vLLM's requests and scheduler outputs for them, and D's steps."""

from __future__ import annotations

import base64
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from unit.geometry.kit import geometry
from unit.kits.watching import until
from unit.protocol import kit as rig
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import Engine, WorkerFacts, request_hash
from vllm_ascend_pd.metadata import Bind, DecodeStep
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.vllm_patches.patience import Patience

TOKENS = list(range(100, 110))
CACHE = geometry("token", heads=2, tp=2, block=4)
SECRETS = Secrets(b"s" * 32)
ENDPOINTS = (Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2))


def engine(secrets: Secrets | None = None, **keys: Any) -> Engine:
    return Engine(PushConfig.parse(keys), "i" * 16, "engine", "m", "127.0.0.1", secrets)


def request(name: str = "r", params: Any = None, tokens: Any = TOKENS, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, tokens, sampling, None, **more)


def reservation(asked: Request, **changes: Any) -> Reservation:
    facts = {
        "transfer": TransferId("d", 1, "u"),
        "model": "m",
        "endpoints": ENDPOINTS,
        "prompt_hash": request_hash(asked),
    }
    return rig.reservation(CACHE, len(TOKENS), **{**facts, **changes})


def remote_decode(sealed: bytes) -> dict[str, Any]:
    return {"do_remote_decode": True, "reservation": base64.b64encode(sealed).decode()}


def prefill(secrets: Secrets | None = None) -> PrefillScheduler:
    scheduler = PrefillScheduler(engine(secrets))
    facts = {(0, rank): WorkerFacts(None, CACHE) for rank in range(2)}
    scheduler.attach_workers(facts)
    return scheduler


def output(
    new: list[tuple[str, int, int, list[int]]] = [],  # noqa: B006 (read only)
    cached: list[tuple[str, int, int, list[int] | None]] = [],  # noqa: B006
    *,
    resumed: set[str] = frozenset(),  # type: ignore[assignment]
    preempted: set[str] | None = None,
) -> SchedulerOutput:
    """One step's output: (request, computed, count, blocks) of new and of known requests."""
    made = SchedulerOutput.make_empty()
    made.preempted_req_ids = preempted
    made.num_scheduled_tokens = {name: count for name, _, count, _ in (*new, *cached)}
    made.scheduled_new_reqs = [
        NewRequestData(name, TOKENS, [], None, None, (blocks,), computed, None) for name, computed, _, blocks in new
    ]
    made.scheduled_cached_reqs = CachedRequestData(
        req_ids=[name for name, *_ in cached],
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if blocks is None else (blocks,) for *_, blocks in cached],
        num_computed_tokens=[computed for _, computed, *_ in cached],
        num_output_tokens=[0 for _ in cached],
    )
    return made


def decode(*urls: str, secrets: Secrets | None = None, attach: bool = True) -> DecodeScheduler:
    scheduler = DecodeScheduler(engine(secrets, metaserver_urls=list(urls)), Patience(lambda: 0))
    if attach:
        facts = {(0, rank): WorkerFacts(endpoint, CACHE) for rank, endpoint in enumerate(ENDPOINTS)}
        scheduler.attach_workers(facts)
    return scheduler


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
        return [cancel.failure.code for step in self.taken for cancel in step.cancels if cancel.transfer == transfer]

    def settled(self, transfer: TransferId) -> None:
        """Step until P's request has ended well."""
        until(lambda: self.take() and any(transfer in step.settles for step in self.taken), "the end of P's request")

    def cancelled(self, transfer: TransferId) -> str:
        """Step until the load is cancelled, and return the code."""
        until(lambda: self.take() and self.codes(transfer), "the end of the load")
        (code,) = self.codes(transfer)
        return code
