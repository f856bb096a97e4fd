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

from vllm_ascend_pd.decode.scheduler.core.book import AWAITED, OPEN, WITHHELD, LoadBook
from vllm_ascend_pd.decode.scheduler.core.given import Question
from vllm_ascend_pd.decode.scheduler.core.load import USELESS, LoadEffect, LoadState, RemoteLoad
from vllm_ascend_pd.decode.scheduler.core.routes import KvRoute, read_ticket
from vllm_ascend_pd.decode.scheduler.first_tokens import FirstTokenReceiver
from vllm_ascend_pd.decode.scheduler.going_on import GoingOn
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome
from vllm_ascend_pd.decode.scheduler.offering import Offering
from vllm_ascend_pd.engine import Engine, WorkerFacts, has_embeddings, merge_geometries, request_hash
from vllm_ascend_pd.errors import LocalProtocolError, PdError, one_line
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol.auth import seal
from vllm_ascend_pd.protocol.continuing import AnswerWanted
from vllm_ascend_pd.protocol.dialects import Meet, PassingRouter, read_meet, read_passing_router
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId, pushed_by
from vllm_ascend_pd.protocol.meeting import OFFER_ROOM, Offer, Unwanted
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.protocol.reports import DROPPED_KEY, MAX_DETAIL, LoadReport, params_of
from vllm_ascend_pd.protocol.versions import WHOLE
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews
from vllm_ascend_pd.shared.exposure import UNREACHABLE_REMEDY, unreachable_warning
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.shared.wake import Doorbell
from vllm_ascend_pd.vllm_patches import requests
from vllm_ascend_pd.vllm_patches.first_token import Drops, StepHooks
from vllm_ascend_pd.vllm_patches.patience import Patience
from vllm_ascend_pd.vllm_patches.standstill import Standstill

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
EXPIRED = "PD-XFER-001"  # the code of every missed deadline


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
        gives: bool = False,
    ) -> None:
        """`longest`: tokens of this engine's longest prompt. `vocabulary`: its size if P's first token is taken, or 0.
        `whole`: with P's first token, all of a prompt may be loaded into any cache. `fails`: this vLLM does not take
        failed loads by request, so they are failed around its step. `yields`: a loaded request gives its blocks back
        where nothing else could go on. `gives`: requests may begin with given tokens.
        """
        self.engine, self._patience = engine, patience
        if longest:
            log.info("%s", pace(longest, engine.config.timers.recv_deadline_s))
        self._recomputes = recomputes
        self.tally = Tally()
        self._allowed = frozenset(url.rstrip("/") for url in engine.config.metaserver.metaserver_urls)
        self._outcomes: deque[tuple[TransferId | Question, Outcome]] = deque()
        self._online: _Online | None = None
        timers = engine.config.timers
        self.book = LoadBook(engine.incarnation, timers.first_token_wait_s, timers.lease_s, fails=fails)
        self.first_tokens = FirstTokenReceiver(engine, self.tally, vocabulary, self.book, self, whole=whole)
        self.going_on = GoingOn(self.tally, self.book, self, vocabulary if gives else 0, longest)
        self._standstill = Standstill(self._gave_back) if yields else None
        self._drops = Drops()

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        geometry = merge_geometries(workers)
        kernel_blocks = next(iter(workers.values())).kernel_blocks
        if why_no_first_token := next(
            (facts.why_no_first_token for facts in workers.values() if facts.why_no_first_token), ""
        ):
            self.first_tokens.off(why_no_first_token)
            self.going_on.vocabulary = 0
        endpoints = tuple(facts.endpoint for _, facts in sorted(workers.items()) if facts.endpoint is not None)
        allowed = sorted(self._allowed)
        if words := next((words for one in endpoints if (words := unreachable_warning(one.host, allowed))), ""):
            log.warning("%s %s", words, UNREACHABLE_REMEDY)
        loop = LoopThread("pd-reserve")
        doorbell = Doorbell(self._patience.news)
        client = MetaserverClient(self.engine.config.metaserver, loop, self._on_outcome)
        known_as = self.engine.config.timers, self.engine.incarnation, self.engine.secrets
        offering = Offering(
            *known_as, loop, self._on_outcome, lambda reason: self.tally.count("num_side_channel_faults", reason)
        )
        wake = doorbell.start(loop, self.engine.host)
        self._online = _Online(geometry, kernel_blocks, endpoints, loop, client, offering, doorbell, wake)

    # -- the scheduler's thread

    def wanted(self, request: Any, computed: int) -> int | None:
        """Return how many tokens to load remotely beyond `computed`; None: not yet. Repeatable."""
        if self._online is not None and self._route(request) is not None and self.going_on.waits(request):
            return None
        count = self._to_load(request, computed)
        if not count:
            requests.drop_placeholders(request)
        return count

    def _to_load(self, request: Any, computed: int) -> int:
        if self._online is None:
            return 0
        self._route(request)
        given = self.book.given(request.request_id)
        geometry = self._online.geometry
        leaves = geometry.recomputes_last and not given and not self.first_tokens.begins(request)
        length = request.num_prompt_tokens + max(0, len(given) - 1)
        states = any(group.stateful for group in geometry.groups)
        return self.book.wanted(request.request_id, length, computed, recomputes_last=leaves, states=states)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """Reserve the blocks that vLLM allocated for `count` tokens; ask the metaserver, router or P for a prefill."""
        online, route = self._online, self._route(request)
        if count <= 0:
            self.book.loads_nothing(request.request_id)
            self.act()
        if count <= 0 or online is None or route is None:
            return
        deadline = self.engine.config.timers.recv_deadline_s
        wanted = online.geometry.tables, deadline, uuid.uuid4().hex, online.kernel_blocks
        bind = self.book.reserve(request.request_id, count, blocks, *wanted)
        given = self.book.given(request.request_id)
        # The last given token is the next one that is computed here: to P all the others are prompt.
        tokens = [*request.prompt_token_ids, *given[:-1]] if given else request.prompt_token_ids
        whole = online.geometry.recomputes_last and bind.end == len(tokens)
        leaves = online.geometry.recomputes_last and not whole
        asked = request, bind.transfer
        asks = None if given else self.first_tokens.ask(*asked, recomputes_last=leaves, whole=whole)
        if whole and asks is None and not given:
            raise LocalProtocolError(f"all of {request.request_id} is reserved, and no first token is asked for")
        model = self.engine.model_now

        def sealed() -> bytes:
            prompt = len(tokens), request_hash(request, tokens)
            reservation = bind.reservation(model, online.geometry, online.endpoints, *prompt)
            if asks is not None or given:
                seed = asks[0] if asks is not None else None
                reservation = msgspec.structs.replace(reservation, seed=seed, needs=(WHOLE,) if whole else ())
            return seal(reservation, self.engine.secrets)

        if trace.enabled():
            named = {"transfer": str(bind.transfer), "request": request.request_id, "ticket": route.ticket}
            trace.emit("reserved", **named, first=bind.first, end=bind.end, blocks=len(bind.taken()))
        if isinstance(route, Meet):
            self._offer(online, route, bind.transfer, sealed())
            return

        def body() -> dict[str, Any]:
            """Return what is posted. It is made on the loop thread: a long prompt takes its time to be hashed."""
            encoded = base64.b64encode(sealed()).decode()
            if isinstance(route, PassingRouter):
                return route.body(encoded)
            named = {"ticket": route.ticket, "transfer": str(bind.transfer), "decode": self.engine.incarnation}
            made: dict[str, Any] = {**named, "fingerprint": self.engine.fingerprint, "reservation": encoded}
            if asks is not None:
                made["first_token"] = asks[1]
            if given:  # a drafter's KV at a position is that of the next token too
                made["first_token"] = {"temperature": 0.0, "allowed_token_ids": [given[-1]]}
            if given or (route.send_tokens and not request.mm_features):  # media are more than ids
                made["prompt_token_ids"] = list(tokens)
            return made

        if isinstance(route, PassingRouter):
            online.client.reserve(bind.transfer, route.router, body, deadline, query=route.query, silent_s=deadline)
        else:
            online.client.reserve(bind.transfer, route.metaserver, body, deadline)

    def _route(self, request: Any) -> KvRoute | None:
        """Return who brings the request's KV; None if it is prefilled locally."""
        return self.book.route(request.request_id, lambda: self._read(request), request)

    def _read(self, request: Any) -> KvRoute | None:
        params = request.kv_transfer_params
        route: KvRoute | PdError | str | None = read_ticket(params, self._allowed)
        if route is not None and has_embeddings(request):
            route = "the prompt has embeddings"
        elif isinstance(route, PdError | str) and "metaserver" in params:
            route = read_passing_router(params, request.request_id, self._allowed) or route
        elif isinstance(route, str):
            prompt = request.num_prompt_tokens, request_hash(request)
            listeners = self.engine.config.meet.prefill_listeners
            route = read_meet(params, request.request_id, prompt, listeners, self.engine.secrets) or route
        if isinstance(route, PdError | str):
            log.warning("request %s is prefilled locally: %s", request.request_id, route)
            return None
        return route

    def _offer(self, online: _Online, meet: Meet, transfer: TransferId, sealed: bytes) -> None:
        if len(sealed) > MAX_MESSAGE_BYTES - OFFER_ROOM:
            error = PdError("PD-CTRL-002", why=f"a reservation of {len(sealed)} bytes does not fit an offer")
            self._on_outcome(transfer, Outcome("failed", Failure.of(error)))
        else:
            online.offering.offer(meet.listener, Offer(transfer, sealed, meet.source, meet.name))

    def act(self) -> None:
        """Do what the book wants done."""
        for effect, load in self.book.take_effects():
            if effect is LoadEffect.FIRST_COMPUTED:
                self.tally.count("num_first_tokens_computed", load.source or "aborted")
            elif self._online is not None:
                self._act_outside(self._online, effect, load)

    def _act_outside(self, online: _Online, effect: LoadEffect, load: RemoteLoad) -> None:
        route, transfer = load.route, load.transfer
        if effect is LoadEffect.OVER and route is not None and route.metaserver:
            online.client.report(route.metaserver, self._report(load))
        elif effect is LoadEffect.NOT_FETCHED and isinstance(route, Meet):
            unwanted = Unwanted(self.engine.incarnation, route.source, route.name)
            online.offering.send_unwanted(route.listener, unwanted)
        elif effect is LoadEffect.HANG_UP and transfer is not None:
            (online.offering if isinstance(route, Meet) else online.client).forget(transfer)

    def _report(self, load: RemoteLoad) -> LoadReport:
        why, route = load.failure or Failure(""), load.route
        # Other routers than a metaserver hand D's answer to clients as it is, and details have addresses.
        shown = route is not None and route.metaserver
        return LoadReport(
            transfer=str(load.transfer),
            ticket=route.ticket if route is not None else "",
            decode=self.engine.incarnation,
            received=0 if load.failure else load.tokens,
            recomputed=load.tokens if load.failure else 0,
            code=why.code,
            detail=one_line(why.detail)[:MAX_DETAIL] if shown else "",
            prefill=pushed_by(load.push) if load.push else "",
            fingerprint=self.engine.fingerprint,
            first_token=load.source,
            cached=load.cached,
        )

    def metadata(self, output: Any) -> StepMetadata:
        # vllm-ascend's recompute scheduler ends requests that find no block in a step, and reports it nowhere else.
        for dropped in getattr(output, "recomputed_reqs", None) or ():
            answer = self.finished(dropped.request_id) or {}
            self._drops.note(dropped.request_id, {**answer, DROPPED_KEY: True})
        if self._standstill is not None:
            self._standstill.scheduled(output.total_num_scheduled_tokens)
        return StepMetadata(decode=self.build_step())

    def build_step(self) -> DecodeStep:
        self.listen()
        online = self._online
        return self.book.take_step(*((online.wake, online.geometry) if online is not None else (None, None)))

    def listen(self) -> None:
        """Handle the outcomes that the loop thread has received."""
        while self._outcomes:
            key, outcome = self._outcomes.popleft()
            if isinstance(key, Question):
                self.going_on.answered(key, outcome)
                continue
            self.book.answered(key, outcome.failure)
            self.first_tokens.outcome(key, outcome.first, failed=outcome.failure is not None)

    def ask(self, question: Question, metaserver: str, wanted: AnswerWanted, deadline_s: float) -> None:
        if self._online is not None:
            self._online.client.ask(question, metaserver, wanted, deadline_s)

    def hang_up(self, question: Question) -> None:
        if self._online is not None:
            self._online.client.forget(question)

    def take_news(self, news: WorkerNews) -> None:
        self.ended(news.ends)

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        self.book.ended(ends)

    def received(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it was a load of ours, which is over now."""
        load = self.book.received(time.monotonic(), request_id, starts=self.first_tokens.entered)
        if load is None:
            return False
        if load.failure is not None:
            if load.state is not LoadState.OVER:  # else its client has left, which is no trouble
                why = one_line(load.failure)
                log.warning("request %s: its KV did not come, transfer %s failed: %s", request_id, load.transfer, why)
            self._failed(load.failure.code)
        trace.emit("reported", transfer=str(load.transfer), request=request_id)
        self.act()
        if load.state is not LoadState.OVER:
            requests.report_cached(load.request, load.first if load.failure else load.cached)
        return True

    def step_hooks(self) -> tuple[StepHooks, ...]:
        ours = self.first_tokens, self.going_on, self._drops
        return ours if self._standstill is None else (*ours, self._standstill)

    def holds(self, request_id: str) -> bool:
        return self.book.withholds(request_id)

    def useless(self, request_id: str, why: str) -> None:
        error = PdError(USELESS, why=why)
        log.warning("request %s: %s", request_id, error)
        self._failed(error.code)
        self._computed_here(request_id)

    def _failed(self, code: str) -> None:
        self.tally.count("num_failed_recvs", code)
        if code == EXPIRED:
            self.tally.count("num_kv_expired_reqs", code)
        if self._recomputes:
            self.tally.count("num_recomputed_reqs", code)

    def _gave_back(self, request_id: str) -> None:
        error = PdError("PD-XFER-009")
        self._computed_here(request_id)
        log.warning("request %s: %s", request_id, error)
        self.tally.count("num_recomputed_reqs", error.code)

    def _computed_here(self, request_id: str) -> None:
        """Report what P has brought for a request as computed by D."""
        if (load := self.book.find(request_id)) is not None and load.transfer is not None:
            requests.report_cached(load.request, load.first)

    def answer(self, request_id: str) -> dict[str, Any] | None:
        load = self.book.find(request_id)
        return params_of(self._report(load)) if load is not None and load.ended else None

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        self._route(request)  # also of a request that never left the queue: P may hold something for it
        return False, self.finished(request.request_id)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """Handle the end of a request. Return the load's part of its answer."""
        answer = self.answer(request_id)
        self.going_on.forget(request_id)
        self.book.request_finished(request_id)
        self.act()
        return answer

    def stats(self) -> dict[str, Any] | None:
        self.tally.level("reservations_open", self.book.count(*OPEN))
        self.tally.level("blocks_quarantined", self.book.fencing_blocks())
        if self._online is not None:
            self.tally.totals("num_protocol_events", self._online.client.counters)
        return self.tally.take()

    def nap_budget(self) -> int:
        return self.book.count(*AWAITED, *WITHHELD) + self.going_on.open()

    def due_s(self) -> float:
        return self.book.due_s(time.monotonic())

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
        if isinstance(key, Question):
            self._outcomes.append((key, outcome))
            self._patience.news()
        if not isinstance(key, TransferId):
            return
        stage = {"accepted": "accepted", "prefilled": "prefilled"}.get(outcome.kind, "metaserver_failed")
        why = outcome.failure or Failure("")
        trace.emit(stage, transfer=str(key), code=why.code, detail=why.detail, prefill=outcome.prefill)
        if outcome.final:
            self.tally.time("metaserver_time_seconds", outcome.seconds)
            if outcome.kind == "failed":
                log.warning("transfer %s: %s", key, one_line(str(why)))
            self._outcomes.append((key, outcome))
            self._patience.news()
