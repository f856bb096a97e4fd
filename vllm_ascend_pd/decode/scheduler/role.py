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
from functools import partial
from typing import Any

import msgspec

from vllm_ascend_pd.decode.scheduler.beginnings import Beginnings, WithheldLoads
from vllm_ascend_pd.decode.scheduler.core.book import AWAITED, OPEN, WITHHELD, LoadBook
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.load import USELESS, LoadEffect, LoadState, RemoteLoad
from vllm_ascend_pd.decode.scheduler.core.routes import KvRoute, Ticket, read_ticket
from vllm_ascend_pd.decode.scheduler.foreign import ForeignRouters, read_route
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome
from vllm_ascend_pd.decode.scheduler.no_prompts import NoPrompts
from vllm_ascend_pd.decode.scheduler.tokens_of_others import TokensOfOthers
from vllm_ascend_pd.engine import Engine, WorkerFacts, has_embeddings, merge_geometries, request_hash
from vllm_ascend_pd.errors import PdError, one_line
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol.auth import seal
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId, pushed_by
from vllm_ascend_pd.protocol.reports import DROPPED_KEY, MAX_DETAIL, LoadReport, params_of
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews
from vllm_ascend_pd.shared.exposure import UNREACHABLE_REMEDY, unreachable_warning
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.shared.wake import Doorbell
from vllm_ascend_pd.vllm_patches import requests
from vllm_ascend_pd.vllm_patches.patience import Patience
from vllm_ascend_pd.vllm_patches.standstill import Standstill
from vllm_ascend_pd.vllm_patches.step_hooks import Drops, StepHooks

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
        computes_prompts: bool = True,
    ) -> None:
        """`longest`: tokens of this engine's longest prompt. `vocabulary`: its size if P's first token is taken, or 0.
        `whole`: with P's first token, all of a prompt may be loaded into any cache. `fails`: this vLLM does not take
        failed loads by request, so they are failed around its step. `yields`: a loaded request gives its blocks back
        where nothing else could go on. `gives`: requests may begin with given tokens. `computes_prompts`: this
        engine can compute a prompt itself.
        """
        self.engine, self._patience = engine, patience
        if longest:
            log.info("%s", pace(longest, engine.config.timers.recv_deadline_s))
        self._recomputes = recomputes
        self.tally = Tally()
        self._allowed = frozenset(url.rstrip("/") for url in engine.config.metaserver.metaserver_urls)
        self._outcomes: deque[tuple[Hashable, Outcome]] = deque()
        self._online: _Online | None = None
        self._foreign: ForeignRouters | None = None
        timers = engine.config.timers
        self.book: LoadBook
        self.beginnings: Beginnings
        if vocabulary:
            self.book = book = TokenBook(engine.incarnation, timers.first_token_wait_s, timers.lease_s, fails=fails)
            taken = engine, self.tally, book, self, vocabulary, longest
            self.beginnings = TokensOfOthers(*taken, whole=whole, gives=gives)
        else:
            self.book = LoadBook(engine.incarnation, fails=fails)
            self.beginnings = Beginnings(self.tally, self.book, WithheldLoads(self.book, self))
        self._no_prompts = None if computes_prompts else NoPrompts(self._refused)
        self._standstill = Standstill(self._gave_back) if yields else None
        self._drops = Drops()

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        geometry = merge_geometries(workers)
        kernel_blocks = next(iter(workers.values())).kernel_blocks
        if why_no_first_token := next(
            (facts.why_no_first_token for facts in workers.values() if facts.why_no_first_token), ""
        ):
            self.beginnings.off(why_no_first_token)
        endpoints = tuple(facts.endpoint for _, facts in sorted(workers.items()) if facts.endpoint is not None)
        allowed = sorted(self._allowed)
        if words := next((words for one in endpoints if (words := unreachable_warning(one.host, allowed))), ""):
            log.warning("%s %s", words, UNREACHABLE_REMEDY)
        loop = LoopThread("pd-reserve")
        doorbell = Doorbell(self._patience.news)
        client = MetaserverClient(self.engine.config.metaserver, loop, self._on_outcome)
        wake = doorbell.start(loop, self.engine.host)
        self._online = _Online(geometry, kernel_blocks, endpoints, loop, client, doorbell, wake)

    # -- the scheduler's thread

    def wanted(self, request: Any, computed: int) -> int | None:
        """Return how many tokens to load remotely beyond `computed`; None: not yet. Repeatable."""
        if self._online is not None and self._route(request) is not None and self.beginnings.waits(request):
            return None
        count = self._to_load(request, computed)
        if self._no_prompts is not None and self._no_prompts.refuses(request, computed, count):
            return None
        if not count:
            requests.drop_placeholders(request)
        return count

    def _to_load(self, request: Any, computed: int) -> int:
        if self._online is None:
            return 0
        self._route(request)
        geometry = self._online.geometry
        leaves = geometry.recomputes_last and not self.beginnings.begins(request)
        length = request.num_prompt_tokens + self.beginnings.behind(request.request_id)
        states = any(group.stateful for group in geometry.groups)
        single = self._no_prompts is not None and request.num_tokens - computed > 1
        wanted = request.request_id, length, computed
        return self.book.wanted(*wanted, recomputes_last=leaves, states=states, single=single)

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
        begins = self.beginnings.of(request, bind, recomputes_last=online.geometry.recomputes_last)
        model = self.engine.model_now

        def sealed() -> bytes:
            prompt = len(begins.tokens), request_hash(request, begins.tokens)
            reservation = bind.reservation(model, online.geometry, online.endpoints, *prompt)
            return seal(msgspec.structs.replace(reservation, seed=begins.seed, needs=begins.needs), self.engine.secrets)

        if trace.enabled():
            named = {"transfer": str(bind.transfer), "request": request.request_id, "ticket": route.ticket}
            trace.emit("reserved", **named, first=bind.first, end=bind.end, blocks=len(bind.taken()))
        if not isinstance(route, Ticket):
            self._others(online).reserve(route, bind.transfer, sealed)
            return

        def body() -> dict[str, Any]:
            """Return what is posted. It is made on the loop thread: a long prompt takes its time to be hashed."""
            encoded = base64.b64encode(sealed()).decode()
            named = {"ticket": route.ticket, "transfer": str(bind.transfer), "decode": self.engine.incarnation}
            made: dict[str, Any] = {**named, "fingerprint": self.engine.fingerprint, "reservation": encoded}
            if route.send_tokens and not request.mm_features:  # media are more than ids
                made["prompt_token_ids"] = list(begins.tokens)
            return made | dict(begins.params)

        online.client.reserve(bind.transfer, route.metaserver, body, deadline)

    def _route(self, request: Any) -> KvRoute | None:
        """Return who brings the request's KV; None if it is prefilled locally."""
        return self.book.route(request.request_id, lambda: self._read(request), request)

    def _read(self, request: Any) -> KvRoute | None:
        params = request.kv_transfer_params
        route: KvRoute | PdError | str | None = read_ticket(params, self._allowed)
        if route is not None and has_embeddings(request):
            route = "the prompt has embeddings"
        elif isinstance(route, PdError | str):
            route = read_route(self.engine, request, self._allowed) or route
        if isinstance(route, PdError | str):
            done = "is prefilled locally" if self._no_prompts is None else "cannot be prefilled"
            log.warning("request %s %s: %s", request.request_id, done, route)
            return None
        if route is not None:
            self.beginnings.arrived(request)
        return route

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
        elif effect is LoadEffect.NOT_FETCHED and route is not None:
            self._others(online).not_fetched(route)
        elif effect is LoadEffect.HANG_UP and transfer is not None:
            (self._others(online) if load.p_waits else online.client).forget(transfer)

    def _others(self, online: _Online) -> ForeignRouters:
        """Return what serves requests of other routers, which is made for the first of them."""
        if self._foreign is None:
            count = partial(self.tally.count, "num_side_channel_faults")
            self._foreign = ForeignRouters(self.engine, online.client, online.loop, self._on_outcome, count)
        return self._foreign

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
        if self._no_prompts is not None:
            self._no_prompts.check(output)
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
            if isinstance(key, TransferId):
                self.book.answered(key, outcome.failure)
            self.beginnings.outcome(key, outcome)

    def client(self) -> MetaserverClient | None:
        """Return what posts to metaservers, while there is one. What comes of it goes to `listen`."""
        return self._online.client if self._online is not None else None

    def take_news(self, news: WorkerNews) -> None:
        self.ended(news.ends)

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        self.book.ended(ends)

    def received(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it was a load of ours, which is over now."""
        load = self.beginnings.received(time.monotonic(), request_id)
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
        optional = self._standstill, self._no_prompts
        return *self.beginnings.hooks, self._drops, *(hooks for hooks in optional if hooks is not None)

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

    def _refused(self, request_id: str) -> None:
        error = PdError("PD-XFER-010")
        log.warning("request %s: %s", request_id, error)
        self.tally.count("num_failed_recvs", error.code)

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
        self.beginnings.forget(request_id)
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
        return self.book.count(*AWAITED, *WITHHELD) + self.beginnings.open_count()

    def due_s(self) -> float:
        return self.book.due_s(time.monotonic())

    def close(self) -> None:
        """Cancel open calls, so that the metaserver and P learn of it at once. Idempotent."""
        online, self._online = self._online, None
        if online is None:
            return
        try:
            online.loop.call(online.client.close(), CLOSE_GRACE_S)
            if self._foreign is not None:
                online.loop.call(self._foreign.close(), CLOSE_GRACE_S)
        except TimeoutError:
            log.error("the metaserver client did not close within %.0f s", CLOSE_GRACE_S)
        online.loop.post(online.doorbell.close)
        online.loop.stop(CLOSE_GRACE_S)

    # -- the loop thread

    def _on_outcome(self, key: Hashable, outcome: Outcome) -> None:
        if isinstance(key, TransferId):
            stage = {"accepted": "accepted", "prefilled": "prefilled"}.get(outcome.kind, "metaserver_failed")
            why = outcome.failure or Failure("")
            trace.emit(stage, transfer=str(key), code=why.code, detail=why.detail, prefill=outcome.prefill)
            if not outcome.final:
                return
            self.tally.time("metaserver_time_seconds", outcome.seconds)
            if outcome.kind == "failed":
                log.warning("transfer %s: %s", key, one_line(str(why)))
        self._outcomes.append((key, outcome))
        self._patience.news()
