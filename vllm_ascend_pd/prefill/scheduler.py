# SPDX-License-Identifier: Apache-2.0
"""P's scheduler as vLLM sees it: reservations in, each step's slices out to the workers."""

from __future__ import annotations

import base64
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_ascend_pd.engine import Engine, WorkerFacts, merge_geometries, request_hash
from vllm_ascend_pd.errors import PdError, RemoteProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metaserver.reports import PushReport, params_of
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.decisions import PrefillStep, PushBook
from vllm_ascend_pd.prefill.telling import Telling
from vllm_ascend_pd.protocol.auth import unseal
from vllm_ascend_pd.protocol.identity import push_id
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews

log = logging.getLogger(__name__)

EXPIRED = "PD-XFER-001"  # the code of every missed deadline
REMEMBERED = 4096


class PrefillScheduler(SchedulerRole):
    """No thread and no socket: reservations come with the requests."""

    def __init__(self, engine: Engine, *, tells: bool = False) -> None:
        self._engine = engine
        self._book = PushBook(model=engine.model)
        self._geometry: CacheGeometry | None = None
        self._counted: dict[str, None] = {}  # failed transfers, oldest first
        self.tally = Tally()
        self.first_tokens = Telling(engine.secrets) if tells else None

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        self._geometry = merge_geometries(workers)

    def arrived(self, request: Any) -> None:
        """Of a cache that lets go of tokens D must find what it needs to run the last one of the prompt: what is there before it. So
        the prompt that is computed here ends before that token."""
        if self._geometry is None or not self._geometry.leaves_last:
            return
        self.allocated(request)
        if self._book.tracks(request.request_id):
            for tokens in (request.prompt_token_ids, request._all_token_ids):
                tokens.pop()
            request.num_prompt_tokens -= 1

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]] = (), count: int = 0) -> None:
        """vLLM schedules the request: take its reservation, once."""
        request_id = request.request_id
        params = request.kv_transfer_params
        if not isinstance(params, Mapping):
            return  # a client can reach this engine without a router: it may be anything that JSON can say
        if params.get("do_remote_decode") is not True or params.get("do_virtual") is True:
            return  # virtual: a warm-up without a decode engine behind it; there is nothing to push
        if self._book.knows(request_id):
            return
        error = self._admit(request, params)
        if error is not None:
            self._book.refuse(request_id, error)
            log.warning("request %s is prefilled but not pushed: %s", request_id, error)

    def metadata(self, output: Any) -> StepMetadata:
        return StepMetadata(prefill=self.build_step(output))

    def build_step(self, output: Any) -> PrefillStep:
        """Translate one SchedulerOutput."""
        for request_id in output.preempted_req_ids or ():
            self._book.preempted(request_id)
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._book.scheduled(new.req_id, new.num_computed_tokens, counts[new.req_id], *new.block_ids, replaces=True)
        cached = output.scheduled_cached_reqs
        nothing: Sequence[Sequence[int]] = ((),) * (len(self._geometry.tables) if self._geometry is not None else 1)
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if self._book.tracks(request_id):
                self._book.scheduled(
                    request_id,
                    computed,
                    counts[request_id],
                    *(blocks or nothing),
                    replaces=request_id in cached.resumed_req_ids,
                )
        return self._book.take_step(self._geometry)

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        return self.finished(request, holds_blocks)

    def finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: whether its blocks are held, and what its HTTP answer says of the push."""
        request_id = request.request_id
        error, pushed = self._book.refusal(request_id), self._book.tracks(request_id)
        first = self.first_tokens.told(request, self._book) if self.first_tokens is not None else ""
        held = self._book.finished(request_id, holds_blocks=holds_blocks, why="the request ended on prefill")
        if error is not None:
            return held, params_of(self._report(error.code, error.sentence))
        return held, params_of(self._report(first=first)) if pushed else None

    def _report(self, code: str = "", detail: str = "", first: str = "") -> PushReport:
        return PushReport(self._engine.incarnation, code, detail, self._engine.fingerprint, first)

    def around(self) -> Telling | None:
        return self.first_tokens

    def released(self, request_id: str) -> bool:
        """All workers have reported this request. If it was a push of ours, its blocks are free now."""
        free = self._book.released(request_id)
        if free:
            trace.emit("released", request=request_id)
        return free

    def heard(self, news: WorkerNews) -> None:
        self._book.missed(news.missed)
        self.failed(news.failures)

    def failed(self, failures: Iterable[tuple[str, str]]) -> None:
        """Workers tell which pushes failed; each transfer counts once, whichever rank says so first."""
        for transfer, code in sorted(failures):
            if transfer in self._counted:
                continue
            self._counted[transfer] = None
            if len(self._counted) > REMEMBERED:
                del self._counted[next(iter(self._counted))]
            self.tally.count("num_failed_transfers", code)
            if code == EXPIRED:
                self.tally.count("num_kv_expired_reqs", code)

    def stats(self) -> dict[str, Any] | None:
        return self.tally.take()

    def must_step(self) -> bool:
        return self._book.must_step()

    def open_loads(self) -> int:
        return -1 if self.must_step() else 0

    def _admit(self, request: Any, params: Mapping[str, Any]) -> PdError | None:
        encoded = params.get("reservation")
        if not isinstance(encoded, str) or len(encoded) > 2 * MAX_MESSAGE_BYTES:
            return PdError("PD-META-005", why="the request carries no reservation")
        if request.prompt_token_ids is None:
            return PdError("PD-META-005", why="the prompt came as embeddings")
        try:
            reservation = unseal(base64.b64decode(encoded, validate=True), self._engine.secrets)
        except ValueError:
            return PdError("PD-META-005", why="it is not base64")
        except RemoteProtocolError as refused:
            return refused
        push, prompt = (
            push_id(self._engine.incarnation, uuid.uuid4().hex),
            (request.num_prompt_tokens, request_hash(request)),
        )
        error = self._book.admit(request.request_id, reservation, *prompt, push, self._geometry)
        if error is None and self.first_tokens is not None:
            self.first_tokens.attached(request.request_id, reservation.seed)
        if error is None:
            trace.emit("attached", transfer=str(reservation.transfer), request=request.request_id, push=push)
        return error
