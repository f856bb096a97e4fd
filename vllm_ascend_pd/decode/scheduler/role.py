# SPDX-License-Identifier: Apache-2.0
"""D's scheduler as vLLM sees it: reservations out over HTTP, outcomes and reports back in."""

from __future__ import annotations

import base64
import logging
import time
import uuid
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_ascend_pd.decode.scheduler.core.book import LoadBook, read_ticket
from vllm_ascend_pd.decode.scheduler.core.first_tokens import FirstTokenBook
from vllm_ascend_pd.decode.scheduler.core.requests import LoadRequests, Way
from vllm_ascend_pd.decode.scheduler.first_tokens import TAKEN, FirstTokenReceiver
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome
from vllm_ascend_pd.decode.scheduler.offering import Offering
from vllm_ascend_pd.engine import Engine, WorkerFacts, has_embeddings, merge_geometries, request_hash
from vllm_ascend_pd.errors import LocalProtocolError, PdError, one_line
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol.auth import seal
from vllm_ascend_pd.protocol.dialects import Meet, PassingRouter, read_meet, read_passing_router
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId, pushed_by
from vllm_ascend_pd.protocol.meeting import OFFER_ROOM, Offer, Unwanted
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.protocol.reports import LoadReport, params_of
from vllm_ascend_pd.protocol.versions import WHOLE
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews
from vllm_ascend_pd.shared.exposure import UNREACHABLE_REMEDY, unreachable_warning
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.shared.wake import Doorbell
from vllm_ascend_pd.vllm_patches import requests
from vllm_ascend_pd.vllm_patches.first_token import StepHooks
from vllm_ascend_pd.vllm_patches.patience import Patience
from vllm_ascend_pd.vllm_patches.standstill import Standstill

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
EXPIRED = "PD-XFER-001"  # the code of every missed deadline


@dataclass(slots=True)
class _AskedLoad:
    """A load, with what its report needs."""

    way: Way
    tokens: int
    request: Any  # vLLM's
    there: int  # tokens of its prompt that are in D's own cache
    transfer: TransferId
    first_token: str = ""  # where it came from, once that is known
    report: LoadReport | None = None  # once the load is over
    untold: bool = False  # the report is not sent yet: whether the load was of use may show with P's token
    request_over: bool = False


@dataclass(frozen=True, slots=True)
class _Online:
    """All that exists once the workers have reported their addresses."""

    geometry: CacheGeometry
    kernel_blocks: tuple[int, ...]
    endpoints: tuple[Endpoint, ...]
    loop: LoopThread
    client: MetaserverClient
    offering: Offering
    doorbell: Doorbell
    wake: tuple[str, int]


def pace(longest: int, deadline_s: float) -> str:
    """Return, for the log at the start, how fast P must be for the longest prompt."""
    return (
        f"the longest prompt, {longest:,} tokens, has {deadline_s:g} s to come (recv_deadline_s): prefill engines need "
        f"{longest / deadline_s:,.0f} tokens a second for it, the wait in their queues included"
    )


class DecodeScheduler(SchedulerRole):
    """D's role in the scheduler's process.

    The constructor does no network I/O; the client and the doorbell start with the handshake.
    """

    def __init__(
        self,
        engine: Engine,
        patience: Patience,
        *,
        longest: int = 0,
        recomputes: bool = False,
        vocabulary: int = 0,
        whole: bool = False,
        fails: bool = False,
        yields: bool = False,
    ) -> None:
        """`longest`: tokens of this engine's longest prompt. `vocabulary`: its size if P's first token is taken, or 0.
        `whole`: with P's first token, all of a prompt may be loaded into any cache. `fails`: this vLLM does not take
        failed loads by request, so they are failed around its step. `yields`: a loaded request gives its blocks back
        where nothing else could go on.
        """
        self._engine, self._patience = engine, patience
        if longest:
            log.info("%s", pace(longest, engine.config.timers.recv_deadline_s))
        self._recomputes, self._fails = recomputes, fails
        self._failing: set[str] = set()  # failed loads that are not reported to vLLM yet
        self._asked: dict[str, _AskedLoad] = {}  # by request id, until request and load are over
        self.tally = Tally()
        self._allowed = frozenset(url.rstrip("/") for url in engine.config.metaserver.metaserver_urls)
        self._outcomes: deque[tuple[TransferId, Outcome]] = deque()
        self._online: _Online | None = None
        timers = engine.config.timers
        self._requests = LoadRequests(
            LoadBook(engine.incarnation), FirstTokenBook(timers.first_token_wait_s, timers.lease_s)
        )
        self.first_tokens = FirstTokenReceiver(engine, self.tally, vocabulary, self._requests, self, whole=whole)
        self._standstill = Standstill(self._gave_back) if yields else None

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        geometry = merge_geometries(workers)
        kernel_blocks = next(iter(workers.values())).kernel_blocks
        if why_no_first_token := next(
            (facts.why_no_first_token for facts in workers.values() if facts.why_no_first_token), ""
        ):
            self.first_tokens.off(why_no_first_token)
        endpoints = tuple(facts.endpoint for _, facts in sorted(workers.items()) if facts.endpoint is not None)
        allowed = sorted(self._allowed)
        if words := next((words for one in endpoints if (words := unreachable_warning(one.host, allowed))), ""):
            log.warning("%s %s", words, UNREACHABLE_REMEDY)
        loop = LoopThread("pd-reserve")
        doorbell = Doorbell(self._patience.news)
        client = MetaserverClient(self._engine.config.metaserver, loop, self._on_outcome)
        known_as = self._engine.config.timers, self._engine.incarnation, self._engine.secrets
        offering = Offering(
            *known_as, loop, self._on_outcome, lambda reason: self.tally.count("num_side_channel_faults", reason)
        )
        wake = doorbell.start(loop, self._engine.host)
        self._online = _Online(geometry, kernel_blocks, endpoints, loop, client, offering, doorbell, wake)

    # -- the scheduler's thread

    def wanted(self, request: Any, computed: int) -> int:
        """Return how many tokens to load remotely beyond `computed`. Repeatable."""
        count = self._to_load(request, computed)
        if not count:
            requests.drop_placeholders(request)
        return count

    def _to_load(self, request: Any, computed: int) -> int:
        if self._online is None:
            return 0
        self._way(request)
        leaves = self._online.geometry.recomputes_last and not self.first_tokens.begins(request)
        return self._requests.wanted(request.request_id, request.num_prompt_tokens, computed, recomputes_last=leaves)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """Reserve the blocks that vLLM allocated for `count` tokens; ask the metaserver, router or P for a prefill."""
        online, way = self._online, self._way(request)
        if count <= 0:
            self._send_unwanted(self._requests.loads_nothing(request.request_id))
        if count <= 0 or online is None or way is None:
            return
        deadline = self._engine.config.timers.recv_deadline_s
        given = online.geometry.tables, deadline, uuid.uuid4().hex, online.kernel_blocks
        bind = self._requests.book.reserve(request.request_id, count, blocks, *given)
        prompt = request.num_prompt_tokens, request_hash(request)
        reservation = bind.reservation(self._engine.model_now, online.geometry, online.endpoints, *prompt)
        self._asked[request.request_id] = _AskedLoad(way, count, request, bind.first, bind.transfer)
        whole = online.geometry.recomputes_last and bind.end == request.num_prompt_tokens
        leaves = online.geometry.recomputes_last and not whole
        asks = self.first_tokens.ask(request, bind.transfer, recomputes_last=leaves, whole=whole)
        if asks is not None:
            reservation = msgspec.structs.replace(reservation, seed=asks[0], needs=(WHOLE,) if whole else ())
        elif whole:
            raise LocalProtocolError(f"all of {request.request_id} is reserved, and no first token is asked for")
        sealed = seal(reservation, self._engine.secrets)
        trace.emit(
            "reserved",
            transfer=str(bind.transfer),
            request=request.request_id,
            ticket=way.ticket,
            first=bind.first,
            end=bind.end,
            blocks=len(bind.taken()),
        )
        if isinstance(way, Meet):
            self._offer(online, way, bind.transfer, sealed)
            return
        encoded = base64.b64encode(sealed).decode()
        if isinstance(way, PassingRouter):
            asked_for = bind.transfer, way.router, way.body(encoded), deadline
            online.client.reserve(*asked_for, query=way.query, silent_s=deadline)
            return
        body: dict[str, Any] = {
            "ticket": way.ticket,
            "transfer": str(bind.transfer),
            "decode": self._engine.incarnation,
            "fingerprint": self._engine.fingerprint,
            "reservation": encoded,
        }
        if asks is not None:
            body["first_token"] = asks[1]
        if way.send_tokens:
            body["prompt_token_ids"] = list(request.prompt_token_ids)
        online.client.reserve(bind.transfer, way.metaserver, body, deadline)

    def _way(self, request: Any) -> Way | None:
        """Return how the request's KV is to be had; None if it is prefilled locally, and log the reason once."""

        def read() -> Way | None:
            way = self._read(request)
            if isinstance(way, str):
                log.warning("request %s is prefilled locally: %s", request.request_id, way)
                return None
            return way

        return self._requests.way(request.request_id, read)

    def _read(self, request: Any) -> Way | str | None:
        params = request.kv_transfer_params
        ticket = read_ticket(params, self._allowed)
        if ticket is not None and has_embeddings(request):
            return "the prompt has embeddings"
        if not isinstance(ticket, str):
            return ticket
        found: Meet | PassingRouter | PdError | None
        if "metaserver" in params:
            found = read_passing_router(params, request.request_id, self._allowed)
        else:
            prompt = request.num_prompt_tokens, request_hash(request)
            listeners = self._engine.config.meet.prefill_listeners
            found = read_meet(params, request.request_id, prompt, listeners, self._engine.secrets)
        return str(found) if isinstance(found, PdError) else found or ticket

    def _offer(self, online: _Online, meet: Meet, transfer: TransferId, sealed: bytes) -> None:
        if len(sealed) > MAX_MESSAGE_BYTES - OFFER_ROOM:
            error = PdError("PD-CTRL-002", why=f"a reservation of {len(sealed)} bytes does not fit an offer")
            self._on_outcome(transfer, Outcome("failed", error.code, error.sentence))
        else:
            online.offering.offer(meet.listener, Offer(transfer, sealed, meet.source, meet.name))

    def _send_unwanted(self, meet: Meet | None) -> None:
        """Notify a P that may compute or hold what D will not fetch."""
        if meet is not None and self._online is not None:
            unwanted = Unwanted(self._engine.incarnation, meet.source, meet.name)
            self._online.offering.send_unwanted(meet.listener, unwanted)

    def _hang_up(self, transfer: TransferId, way: Way) -> None:
        """Drop the call or offer for a transfer: nothing more is wanted of it."""
        if self._online is not None and isinstance(way, Meet):
            self._online.offering.forget(transfer)
        elif self._online is not None:
            self._online.client.forget(transfer)

    def metadata(self, output: Any) -> StepMetadata:
        # vllm-ascend's recompute scheduler ends requests that find no block in a step, and reports it nowhere else.
        for dropped in getattr(output, "recomputed_reqs", None) or ():
            self.finished(dropped.request_id)
        if self._standstill is not None:
            self._standstill.scheduled(output.total_num_scheduled_tokens)
        return StepMetadata(decode=self.build_step())

    def build_step(self) -> DecodeStep:
        self.listen()
        online = self._online
        return self._requests.book.take_step(*((online.wake, online.geometry) if online is not None else (None, None)))

    def listen(self) -> None:
        """Handle the outcomes that the loop thread has received."""
        while self._outcomes:
            transfer, outcome = self._outcomes.popleft()
            self._requests.outcome(transfer, outcome.kind, outcome.code, outcome.detail)
            self.first_tokens.outcome(transfer, outcome.first, outcome.code)

    def take_news(self, news: WorkerNews) -> None:
        self.ended(news.ends)

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        self._requests.book.ended(ends)

    def received(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it was a load of ours, which is over now."""
        asked = self._asked.get(request_id)
        received = self._requests.received(time.monotonic(), request_id, starts=self.first_tokens.entered)
        if received is None or asked is None:
            return False
        transfer, verdict, code = received.transfer, received.verdict, received.verdict.code
        if code:
            self._failed(code)
            if self._fails and not asked.request_over:
                self._failing.add(request_id)
        trace.emit("reported", transfer=str(transfer), request=request_id)
        if received.hangs_up:
            self._hang_up(transfer, asked.way)
        if asked.request_over:
            del self._asked[request_id]
            return True
        requests.report_cached(asked.request, asked.there if code else verdict.cached)
        if received.why_no_first_token:
            self.first_tokens.count_computed(request_id, received.why_no_first_token)
        asked.report = LoadReport(
            transfer=str(transfer),
            ticket=asked.way.ticket,
            decode=self._engine.incarnation,
            received=0 if code else asked.tokens,
            recomputed=asked.tokens if code else 0,
            code=code,
            prefill=pushed_by(verdict.push) if verdict.push else "",
            fingerprint=self._engine.fingerprint,
            first_token=asked.first_token,
            cached=verdict.cached,
        )
        asked.untold = True
        if not self._requests.first_token_book.whole(request_id):
            self._report(asked)
        return True

    def _report(self, asked: _AskedLoad) -> None:
        """Report to the metaserver how a load ended, once."""
        if self._online is not None and asked.way.metaserver and asked.report is not None and asked.untold:
            self._online.client.report(asked.way.metaserver, asked.report)
        asked.untold = False

    def around(self) -> tuple[StepHooks, ...]:
        return (self.first_tokens,) if self._standstill is None else (self.first_tokens, self._standstill)

    def holds(self, request_id: str) -> bool:
        return self._requests.first_token_book.holds(request_id) or request_id in self._failing

    def take_failing(self) -> set[str]:
        failing, self._failing = self._failing, set()
        return failing

    def first_token_from(self, request_id: str, source: str) -> None:
        if (asked := self._asked.get(request_id)) is not None:
            asked.first_token = source
            if source != TAKEN:
                self._expects_nothing(asked)
            if asked.report is not None:
                asked.report = msgspec.structs.replace(asked.report, first_token=source)
                self._report(asked)

    def useless(self, request_id: str, why: str) -> None:
        """Record a load as failed: its KV came, but is of no use without P's token."""
        asked, error = self._asked.get(request_id), PdError("PD-XFER-008", why=why)
        log.warning("request %s: %s", request_id, error)
        self._failed(error.code)
        if asked is not None:
            self._hang_up(asked.transfer, asked.way)
            requests.report_cached(asked.request, asked.there)
            if asked.report is not None:
                asked.report = msgspec.structs.replace(
                    asked.report, received=0, recomputed=asked.tokens, code=error.code, cached=0
                )

    def _failed(self, code: str) -> None:
        self.tally.count("num_failed_recvs", code)
        if code == EXPIRED:
            self.tally.count("num_kv_expired_reqs", code)
        if self._recomputes:
            self.tally.count("num_recomputed_reqs", code)

    def _gave_back(self, request_id: str) -> None:
        asked, error = self._asked.get(request_id), PdError("PD-XFER-009")
        if asked is not None:
            requests.report_cached(asked.request, asked.there)
        log.warning("request %s: %s", request_id, error)
        self.tally.count("num_recomputed_reqs", error.code)

    def _expects_nothing(self, asked: _AskedLoad) -> None:
        """Drop the offer to a P whose last answer would still have brought a first token."""
        if isinstance(asked.way, Meet):
            self._hang_up(asked.transfer, asked.way)

    def answer(self, request_id: str) -> dict[str, Any] | None:
        asked = self._asked.get(request_id)
        return params_of(asked.report) if asked is not None and asked.report is not None else None

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        self._way(request)  # also of a request that never left the queue: P may hold something for it
        return False, self.finished(request.request_id)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """Handle the end of a request. Return the load's part of its answer."""
        ended = self._requests.finished(request_id)
        self._send_unwanted(ended.unwanted)
        if ended.open is not None:
            self._hang_up(ended.open, self._asked[request_id].way)
            self._asked[request_id].request_over = True
            return None
        answer = self.answer(request_id)
        if (asked := self._asked.pop(request_id, None)) is not None:
            self._expects_nothing(asked)
            self._report(asked)
        return answer

    def stats(self) -> dict[str, Any] | None:
        self.tally.level("reservations_open", self._requests.book.open_count())
        self.tally.level("blocks_quarantined", self._requests.book.fencing_blocks())
        if self._online is not None:
            self.tally.totals("num_protocol_events", self._online.client.counters)
        return self.tally.take()

    def open_loads(self) -> int:
        return self._requests.book.waiting_count() + self._requests.first_token_book.held_count()

    def due_s(self) -> float:
        return self._requests.first_token_book.due_s(time.monotonic())

    def close(self) -> None:
        """Cancel open calls, so that the metaserver and P learn of it at once. Idempotent."""
        online, self._online = self._online, None
        if online is None:
            return
        try:
            online.loop.call(online.client.close(), CLOSE_GRACE_S)
            online.loop.call(online.offering.close(), CLOSE_GRACE_S)
        except TimeoutError:
            log.error("the metaserver client did not close within %.0f s", CLOSE_GRACE_S)
        online.loop.post(online.doorbell.close)
        online.loop.stop(CLOSE_GRACE_S)

    # -- the loop thread

    def _on_outcome(self, key: Hashable, outcome: Outcome) -> None:
        if not isinstance(key, TransferId):
            return
        stage = {"accepted": "accepted", "prefilled": "prefilled"}.get(outcome.kind, "metaserver_failed")
        trace.emit(stage, transfer=str(key), code=outcome.code, detail=outcome.detail, prefill=outcome.prefill)
        if outcome.final:
            self.tally.time("metaserver_time_seconds", outcome.seconds)
            if outcome.kind == "failed":
                log.warning("transfer %s: %s %s", key, outcome.code, one_line(outcome.detail))
            self._outcomes.append((key, outcome))
            self._patience.news()
