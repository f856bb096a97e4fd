# SPDX-License-Identifier: Apache-2.0
"""D's scheduler as vLLM sees it: reservations out over HTTP, outcomes and reports back in."""

from __future__ import annotations

import base64
import logging
import uuid
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_ascend_pd.channel.exposure import COME_OUT, secluded
from vllm_ascend_pd.decode.decisions import DecodeStep, LoadBook, LoadEnd, Ticket, read_ticket
from vllm_ascend_pd.decode.seeding import Seeding
from vllm_ascend_pd.engine import Engine, WorkerFacts, merge_geometries, request_hash
from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metaserver.client import MetaserverClient, Outcome
from vllm_ascend_pd.metaserver.reports import LoadReport, params_of
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.patience import Patience
from vllm_ascend_pd.protocol.auth import seal
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId, pushed_by
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.shared.wake import Doorbell

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
EXPIRED = "PD-XFER-001"  # the code of every missed deadline


@dataclass(slots=True)
class _Asked:
    """A load as its report will tell it."""

    ticket: Ticket
    tokens: int
    first_token: str = ""  # whose it is, once that is known
    report: LoadReport | None = None  # once the load is over
    request_over: bool = False


@dataclass(frozen=True, slots=True)
class _Online:
    """What exists once the workers have told where they are."""

    geometry: CacheGeometry
    endpoints: tuple[Endpoint, ...]
    loop: LoopThread
    client: MetaserverClient
    doorbell: Doorbell
    wake: tuple[str, int]


class DecodeScheduler(SchedulerRole):
    """The constructor does no network I/O; the client and the doorbell start with the handshake."""

    def __init__(self, engine: Engine, patience: Patience, *, recomputes: bool = False, vocabulary: int = 0) -> None:
        """With a `vocabulary` of so many tokens P's first one is taken."""
        self._engine, self._patience = engine, patience
        self._book = LoadBook(engine.incarnation)
        self._recomputes = recomputes
        self._asked: dict[str, _Asked] = {}  # by request id, until request and load are over
        self.tally = Tally()
        self._allowed = frozenset(url.rstrip("/") for url in engine.config.metaserver.metaserver_urls)
        self._outcomes: deque[tuple[TransferId, Outcome]] = deque()
        self._online: _Online | None = None
        self._told: set[str] = set()  # requests whose bad ticket was logged
        self.first_tokens = Seeding(engine, self.tally, vocabulary, self._listen, self._first_token, self._answer)

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        geometry = merge_geometries(workers)
        endpoints = tuple(facts.endpoint for _, facts in sorted(workers.items()) if facts.endpoint is not None)
        allowed = sorted(self._allowed)
        if words := next((words for one in endpoints if (words := secluded(one.host, allowed))), ""):
            log.warning("%s %s", words, COME_OUT)
        loop = LoopThread("pd-reserve")
        doorbell = Doorbell(self._patience.news)
        client = MetaserverClient(self._engine.config.metaserver, loop, self._on_outcome)
        wake = doorbell.start(loop, self._engine.host)
        self._online = _Online(geometry, endpoints, loop, client, doorbell, wake)

    # -- the scheduler's thread

    def wanted(self, request: Any, computed: int) -> int:
        """Tokens to load remotely beyond `computed`. Repeatable, without side effects that count."""
        if self._online is None or request.prompt_token_ids is None:
            return 0
        ticket = read_ticket(request.kv_transfer_params, self._allowed)
        if isinstance(ticket, str) and request.request_id not in self._told:
            self._told.add(request.request_id)  # it is asked about in every step that it waits
            log.warning("request %s is prefilled locally: %s", request.request_id, ticket)
        if not isinstance(ticket, Ticket):
            return 0
        leaves = self._online.geometry.leaves_last
        return self._book.wanted(request.request_id, request.num_prompt_tokens, computed, leaves_last=leaves)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """vLLM allocated blocks and will load `count` tokens: reserve them and ask the metaserver for a prefill."""
        online, ticket = self._online, read_ticket(request.kv_transfer_params, self._allowed)
        if count <= 0 or online is None or not isinstance(ticket, Ticket):
            return
        deadline = self._engine.config.timers.recv_deadline_s
        groups = online.geometry.tables
        bind = self._book.reserve(request.request_id, count, blocks, groups, deadline, uuid.uuid4().hex)
        prompt = request.num_prompt_tokens, request_hash(request)
        reservation = bind.reservation(self._engine.model, online.geometry, online.endpoints, *prompt)
        self._asked[request.request_id] = _Asked(ticket, count)
        leaves = online.geometry.leaves_last
        if (asks := self.first_tokens.ask(request, bind.transfer, leaves_last=leaves)) is not None:
            reservation = msgspec.structs.replace(reservation, seed=asks[0])
        sealed = seal(reservation, self._engine.secrets)
        body: dict[str, Any] = {
            "ticket": ticket.ticket,
            "transfer": str(bind.transfer),
            "decode": self._engine.incarnation,
            "fingerprint": self._engine.fingerprint,
            "reservation": base64.b64encode(sealed).decode(),
        }
        if asks is not None:
            body["first_token"] = asks[1]
        if ticket.send_tokens:
            body["prompt_token_ids"] = list(request.prompt_token_ids)
        trace.emit(
            "reserved",
            transfer=str(bind.transfer),
            request=request.request_id,
            ticket=ticket.ticket,
            first=bind.first,
            end=bind.end,
            blocks=sum(map(len, bind.blocks)),
        )
        online.client.reserve(bind.transfer, ticket.metaserver, body, deadline)

    def metadata(self, output: Any) -> StepMetadata:
        # vllm-ascend's recompute scheduler ends requests that find no block in a step, and tells it nowhere else.
        for dropped in getattr(output, "recomputed_reqs", None) or ():
            self.finished(dropped.request_id)
        return StepMetadata(decode=self.build_step())

    def build_step(self) -> DecodeStep:
        self._listen()
        online = self._online
        return self._book.take_step(*((online.wake, online.geometry) if online is not None else (None, None)))

    def _listen(self) -> None:
        """Take in what the loop thread has heard."""
        while self._outcomes:
            transfer, outcome = self._outcomes.popleft()
            self._book.answered(transfer, outcome.kind, outcome.code, outcome.detail)
            self.first_tokens.heard(transfer, outcome.first, outcome.code)

    def heard(self, news: WorkerNews) -> None:
        self.ended(news.ends)

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        self._book.ended(ends)

    def received(self, request_id: str) -> bool:
        """All workers have reported this request: whether it was a load of ours, which is over now."""
        verdict = self._book.verdict(request_id)
        transfer, asked, code = self._book.received(request_id), self._asked.get(request_id), verdict.code
        if transfer is None or asked is None:
            return False
        if code:
            self.tally.count("num_failed_recvs", code)
            if code == EXPIRED:
                self.tally.count("num_kv_expired_reqs", code)
            if self._recomputes:
                self.tally.count("num_recomputed_reqs", code)
        trace.emit("reported", transfer=str(transfer), request=request_id)
        if verdict.hangs_up and self._online is not None:
            self._online.client.forget(transfer)
        if asked.request_over:
            del self._asked[request_id]
            return True
        self.first_tokens.complete(request_id, verdict.push, code)
        asked.report = LoadReport(
            transfer=str(transfer),
            ticket=asked.ticket.ticket,
            decode=self._engine.incarnation,
            received=0 if code else asked.tokens,
            recomputed=asked.tokens if code else 0,
            code=code,
            prefill=pushed_by(verdict.push) if verdict.push else "",
            fingerprint=self._engine.fingerprint,
            first_token=asked.first_token,
        )
        if self._online is not None:
            self._online.client.report(asked.ticket.metaserver, asked.report)
        return True

    def around(self) -> Seeding:
        return self.first_tokens

    def holds(self, request_id: str) -> bool:
        return self.first_tokens.holds(request_id)

    def _first_token(self, request_id: str, whose: str) -> None:
        if (asked := self._asked.get(request_id)) is not None:
            asked.first_token = whose
            if asked.report is not None:
                asked.report = msgspec.structs.replace(asked.report, first_token=whose)

    def _answer(self, request_id: str) -> dict[str, Any] | None:
        asked = self._asked.get(request_id)
        return params_of(asked.report) if asked is not None and asked.report is not None else None

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        return False, self.finished(request.request_id)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The request ended: what its answer says of the load."""
        self._told.discard(request_id)
        self.first_tokens.over(request_id)
        transfer = self._book.request_finished(request_id)
        if transfer is not None:
            if self._online is not None:
                self._online.client.forget(transfer)
            self._asked[request_id].request_over = True
            return None
        answer = self._answer(request_id)
        self._asked.pop(request_id, None)
        return answer

    def stats(self) -> dict[str, Any] | None:
        self.tally.level("reservations_open", self._book.open_count())
        self.tally.level("blocks_quarantined", self._book.fencing_blocks())
        return self.tally.take()

    def open_loads(self) -> int:
        return self._book.open_count() + self.first_tokens.held_count()

    def close(self) -> None:
        """Idempotent. Cancels open calls, so that the metaserver and P learn of it at once."""
        online, self._online = self._online, None
        if online is None:
            return
        try:
            online.loop.call(online.client.close(), CLOSE_GRACE_S)
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
