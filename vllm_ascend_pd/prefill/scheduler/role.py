# SPDX-License-Identifier: Apache-2.0
"""P's scheduler as vLLM sees it: reservations in, each step's slices out to the workers."""

from __future__ import annotations

import base64
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_ascend_pd.engine import Engine, WorkerFacts, has_embeddings, merge_geometries, request_hash
from vllm_ascend_pd.errors import LocalProtocolError, PdError, RemoteProtocolError
from vllm_ascend_pd.geometry.layout import in_kernel_blocks
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.fitting import is_prefill
from vllm_ascend_pd.prefill.scheduler.core.in_flight import Chunk
from vllm_ascend_pd.prefill.scheduler.core.request import Holding, NewRequest, PushRequest
from vllm_ascend_pd.prefill.scheduler.first_tokens import FirstTokenSource
from vllm_ascend_pd.prefill.scheduler.reception import Reception
from vllm_ascend_pd.protocol.auth import seal_source, unseal
from vllm_ascend_pd.protocol.dialects import meets_under
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, push_id
from vllm_ascend_pd.protocol.meeting import Source
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.protocol.reports import PushReport, params_of
from vllm_ascend_pd.protocol.versions import WHOLE
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews
from vllm_ascend_pd.vllm_patches import requests

log = logging.getLogger(__name__)

EXPIRED = "PD-XFER-001"  # the code of every missed deadline
REMEMBERED = 4096
NOT_DECODE = "this is a prefill engine (kv_role kv_producer): does the router take it for a decode engine?"
POLL_S = 0.05  # workers do not announce that held blocks are free
_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class PrefillScheduler(SchedulerRole):
    """P's role in the scheduler's process.

    If reservations come with the requests there is no thread and no socket. With `hold_sources` they may also come
    before or after the requests, to a `Reception` that starts with the handshake. `blocks` counts the cache's blocks.
    """

    def __init__(
        self, engine: Engine, news: Callable[[], None] = lambda: None, blocks: int = 0, *, sends_first: bool = False
    ) -> None:
        """`sends_first`: P's first tokens are sent to D."""
        self.engine, self._news = engine, news
        meet, timers = engine.config.meet, engine.config.timers
        holding = Holding(meet.hold_sources, int(meet.hold_share * blocks), timers.hold_s, timers.meet_s)
        self.book = PushBook(engine.incarnation, holding, model=engine.model)
        self._kernel_blocks: tuple[int, ...] = ()
        self.reception: Reception | None = None
        self._failed_transfers: dict[str, None] = {}  # failed transfers, oldest first
        self.tally = Tally()
        self.first_tokens = FirstTokenSource(engine.secrets) if sends_first else None

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        self.book.geometry = merge_geometries(workers)
        self._kernel_blocks = next(iter(workers.values())).kernel_blocks
        if self.engine.config.meet.hold_sources:
            self.reception = Reception(
                self.engine, self.book, self._news, lambda reason: self.tally.count("num_side_channel_faults", reason)
            )

    def _deciding(self) -> AbstractContextManager[float]:
        """Hold the lock that is shared with the reception, and yield the time. Without one: no lock, and 0.0."""
        return self.reception.deciding() if self.reception is not None else nullcontext(0.0)

    def arrived(self, request: Any) -> None:
        """Take the last token off the prompt, if the cache does not keep all tokens.

        D runs that token and needs the cache as it was before it. So the prompt that is computed here ends before that
        token, unless D begins with P's first token. In either case nothing may be computed behind the prompt.
        """
        params = request.kv_transfer_params
        if isinstance(params, Mapping) and params.get("do_remote_prefill") is True and not is_prefill(params):
            log.warning("request %s is to load its KV, but %s", request.request_id, NOT_DECODE)
        geometry = self.book.geometry
        if geometry is None or not geometry.recomputes_last:
            return
        self.allocated(request)
        if self.book.ends(request.request_id):
            requests.end_after_prompt(request)
        if self.book.cuts(request.request_id):
            last = requests.cut_prompt(request)
            if geometry.drafter:
                requests.force(request, last)

    def wanted(self, request: Any, computed: int) -> int:
        """Load nothing, but note what is in the prefix cache: vLLM calls computed what another connector loads, too."""
        with self._deciding():
            self.book.note_cached(request.request_id, computed)
        return 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]] = (), count: int = 0) -> None:
        """Take the reservation of a request that vLLM schedules, once."""
        params = request.kv_transfer_params
        if not is_prefill(params) or params.get("do_virtual") is True:
            return  # virtual: a warm-up without a decode engine behind it; there is nothing to push
        with self._deciding() as now:
            if self.book.knows(request.request_id):
                return
            asked = self._asked(request, params)
            if isinstance(asked, PdError):
                error: PdError | None = self.book.refuse(request.request_id, asked)
            else:
                error = self.book.take(now, asked)
                if error is None:
                    self._taken(request, asked)
            if error is not None:
                log.warning("request %s is prefilled but not pushed: %s", request.request_id, error)

    def _taken(self, request: Any, asked: NewRequest) -> None:
        facts = {"request": asked.request_id, "push": asked.push}
        if asked.reservation is None:
            trace.emit("collecting", **facts)
        else:
            trace.emit("attached", transfer=str(asked.reservation.transfer), **facts)
        if self.first_tokens is not None and (asked.reservation is None or asked.reservation.seed is not None):
            self.first_tokens.taken(request)

    def preempted(self, request_id: str) -> None:
        with self._deciding():
            self.book.preempted(request_id)

    def pauses(self, paused: bool) -> None:
        """Hold nothing longer than a lease while the engine pauses or ends: it waits until nothing is held."""
        timers = self.engine.config.timers
        with self._deciding() as now:
            self.book.limit(now, min(timers.lease_s, timers.hold_s) if paused else timers.hold_s)

    def reset(self) -> None:
        with self._deciding():
            self.book.reset()
            self.book.model = self.engine.model_now

    def metadata(self, output: Any) -> StepMetadata:
        return StepMetadata(prefill=self.build_step(output))

    def build_step(self, output: Any) -> PrefillStep:
        """Translate one SchedulerOutput."""
        with self._deciding():
            for request_id in output.preempted_req_ids or ():
                self.book.preempted(request_id)
            # Behind a cached prefix vLLM adds drafts to a prompt's only token: they are not the prompt's.
            drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
            counts = {one: count - len(drafts.get(one, ())) for one, count in output.num_scheduled_tokens.items()}
            chunks = []
            for new in output.scheduled_new_reqs:
                blocks = in_kernel_blocks(new.block_ids, self._kernel_blocks)
                chunks.append(Chunk(new.req_id, new.num_computed_tokens, counts[new.req_id], blocks, replaces=True))
            running = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
            for request_id, more, computed in running:
                blocks = more and in_kernel_blocks(more, self._kernel_blocks)
                resumed = request_id in cached.resumed_req_ids
                chunks.append(Chunk(request_id, computed, counts[request_id], blocks, replaces=resumed))

            def tables(request_id: str) -> Sequence[Sequence[int]]:
                lent: Sequence[Sequence[int]] = output.kv_connector_block_state.get_block_ids(request_id)
                return lent  # called for states only; older_groups.py lends it where vLLM does not have it

            self.book.step(chunks, tables)
            return self.book.take_step()

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request. Return whether its blocks are held, and the push's part of its HTTP answer."""
        with self._deciding() as now:
            return self._finished(now, request, holds_blocks)

    def _finished(self, now: float, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        tokens = self.first_tokens
        ending = self.book.finished(
            now,
            request.request_id,
            holds_blocks=holds_blocks,
            well=request.status in _WELL,
            why="the request ended on prefill",
            sampled=lambda: tokens.sampled(request) if tokens is not None else None,
        )
        first = tokens.answered(request.request_id, ending.first) if tokens is not None else ""
        if ending.source is not None:
            return ending.blocks_held, self._source(request, ending.source)
        if (error := ending.refusal) is not None:
            if error.code == "PD-META-028":
                log.warning("request %s is prefilled but not held: %s", request.request_id, error)
            return ending.blocks_held, params_of(self._report(error.code, error.sentence))
        return ending.blocks_held, params_of(self._report(first=first)) if ending.pushed else None

    def _source(self, request: Any, record: PushRequest) -> dict[str, Any]:
        """Return the part of P's answer that names held blocks: routers hand it to D as it is."""
        if record.source is None or self.reception is None:
            raise LocalProtocolError(f"{request.request_id} is held, and has no source")
        source = Source(PROTOCOL_VERSION, record.source, self.reception.endpoint, *record.prompt, self.book.hold_s)
        sealed = base64.b64encode(seal_source(source, self.engine.secrets)).decode()
        trace.emit("held", request=request.request_id, source=str(record.source))
        params = {"do_remote_prefill": True, "do_remote_decode": False, "source": sealed}
        return {**params, **params_of(self._report())}

    def _report(self, code: str = "", detail: str = "", first: str = "") -> PushReport:
        sends_first = self.first_tokens is not None
        return PushReport(self.engine.incarnation, code, detail, self.engine.fingerprint, first, sends_first)

    def step_hooks(self) -> tuple[FirstTokenSource, ...]:
        return (self.first_tokens,) if self.first_tokens is not None else ()

    def released(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it held blocks here: they are free now."""
        with self._deciding():
            free = self.book.released(request_id)
        if free:
            trace.emit("released", request=request_id)
        return free

    def take_news(self, news: WorkerNews) -> None:
        with self._deciding():
            self.book.missed(news.missed)
        self.failed(news.failures)

    def failed(self, failures: Iterable[tuple[str, Failure]]) -> None:
        """Count failed pushes that workers report; each transfer counts once, whichever rank reports it first."""
        for transfer, code in sorted((transfer, failure.code) for transfer, failure in failures):
            if transfer in self._failed_transfers:
                continue
            self._failed_transfers[transfer] = None
            if len(self._failed_transfers) > REMEMBERED:
                del self._failed_transfers[next(iter(self._failed_transfers))]
            self.tally.count("num_failed_transfers", code)
            if code == EXPIRED:
                self.tally.count("num_kv_expired_reqs", code)

    def stats(self) -> dict[str, Any] | None:
        with self._deciding():
            self.tally.level("blocks_held", self.book.counts()["held_blocks"])
        self.tally.totals("num_protocol_events", self.book.counters)
        return self.tally.take()

    def must_step(self) -> bool:
        return self.book.must_step()

    def nap_budget(self) -> int | None:
        return None if self.must_step() else 0

    def due_s(self) -> float:
        return POLL_S

    def close(self) -> None:
        """Close the reception. D engines that wait here learn of it from the end of their connections. Idempotent."""
        if self.reception is not None:
            self.reception.close()

    def _asked(self, request: Any, params: Mapping[str, Any]) -> NewRequest | PdError:
        encoded, reservation = params.get("reservation"), None
        if encoded is not None or self.reception is None:
            if not isinstance(encoded, str) or len(encoded) > 2 * MAX_MESSAGE_BYTES:
                return PdError("PD-META-005", why="the request carries no reservation")
            try:
                reservation = unseal(base64.b64decode(encoded, validate=True), self.engine.secrets)
            except ValueError:
                return PdError("PD-META-005", why="it is not base64")
            except RemoteProtocolError as refused:
                return refused
        if has_embeddings(request):
            return PdError("PD-META-005", why="the prompt has embeddings")
        whole = reservation is not None and WHOLE in reservation.needs and reservation.seed is not None
        return NewRequest(
            request_id=request.request_id,
            prompt=(request.num_prompt_tokens, request_hash(request)),
            push=push_id(self.engine.incarnation, uuid.uuid4().hex),
            reservation=reservation,
            meets=meets_under(params, request.request_id) if reservation is None else "",
            uuid=uuid.uuid4().hex,
            seed=self.first_tokens.seed_of(request) if whole and self.first_tokens is not None else None,
        )
