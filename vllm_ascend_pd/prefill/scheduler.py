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

from vllm_ascend_pd.engine import Engine, WorkerFacts, merge_geometries, request_hash
from vllm_ascend_pd.errors import LocalProtocolError, PdError, RemoteProtocolError
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.core.computing import Chunk, Computing
from vllm_ascend_pd.prefill.core.desk import Asked, Desk
from vllm_ascend_pd.prefill.core.meetings import Holding, Meetings, Record
from vllm_ascend_pd.prefill.decisions import PushBook
from vllm_ascend_pd.prefill.reception import Reception
from vllm_ascend_pd.prefill.telling import FirstTokenSource
from vllm_ascend_pd.protocol.auth import seal_source, unseal
from vllm_ascend_pd.protocol.dialects import is_prefill, meets_under
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, push_id
from vllm_ascend_pd.protocol.meeting import Source
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.protocol.reports import PushReport, params_of
from vllm_ascend_pd.protocol.versions import WHOLE
from vllm_ascend_pd.roles import SchedulerRole, StepMetadata, WorkerNews

log = logging.getLogger(__name__)

EXPIRED = "PD-XFER-001"  # the code of every missed deadline
REMEMBERED = 4096
LOOK_S = 0.05  # no news tells P that its workers are done with held blocks
_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _only(params: Any, token: int) -> Any:
    """Return sampling parameters with which no other token is sampled.

    A drafter makes its KV at each position from the next token. Behind a prompt that ends one token early this is the
    sampled one, and the draft layers are pushed: it must be the token that was taken off.
    """
    if params.structured_outputs is not None:
        return params  # a grammar may forbid the token; D's drafts are then a little worse
    only = params.clone()
    only.temperature, only.allowed_token_ids, only.logit_bias, only.min_tokens = 0.0, [token], None, 0
    only.bad_words, only._bad_words_token_ids = [], None
    return only


class PrefillScheduler(SchedulerRole):
    """P's role in the scheduler's process.

    If reservations come with the requests there is no thread and no socket. With `hold_sources` they may also come
    before or after the requests, to a `Reception` that starts with the handshake. `blocks` counts the cache's blocks.
    """

    def __init__(
        self,
        engine: Engine,
        news: Callable[[], None] = lambda: None,
        blocks: int = 0,
        *,
        tells: bool = False,
    ) -> None:
        """`tells`: P's first tokens are sent to D."""
        self._engine, self._news = engine, news
        book = PushBook(model=engine.model)
        meet, timers = engine.config.meet, engine.config.timers
        holding = Holding(meet.hold_sources, int(meet.hold_share * blocks), timers.hold_s, timers.meet_s)
        self._desk = Desk(book, Meetings(book, engine.incarnation, holding), Computing())
        self._reception: Reception | None = None
        self._counted: dict[str, None] = {}  # failed transfers, oldest first
        self._found: dict[str, int] = {}  # tokens in the prefix cache, of requests that wait for their first step
        self.tally = Tally()
        self.first_tokens = FirstTokenSource(engine.secrets) if tells else None

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        self._desk.meetings.engine = merge_geometries(workers)
        if self._engine.config.meet.hold_sources:
            self._reception = Reception(self._engine, self._desk, self._news)

    def _deciding(self) -> AbstractContextManager[float]:
        """Return the context in which the books, which a reception shares, may be used."""
        return self._reception.deciding() if self._reception is not None else nullcontext(0.0)

    def arrived(self, request: Any) -> None:
        """Take the last token off the prompt, if the cache does not keep all tokens.

        D runs that token and needs the cache as it was before it. So the prompt that is computed here ends before that
        token, unless D begins with P's first token. In either case nothing may be computed behind the prompt.
        """
        engine = self._desk.engine
        if engine is None or not engine.leaves_last:
            return
        self.allocated(request)
        if self._desk.ends(request.request_id):
            request.max_tokens = 1
        if self._desk.cuts(request.request_id):
            last = request.prompt_token_ids[-1]
            for tokens in (request.prompt_token_ids, request._all_token_ids):
                tokens.pop()
            request.num_prompt_tokens -= 1
            if engine.drafter:
                request.sampling_params = _only(request.sampling_params, last)

    def wanted(self, request: Any, computed: int) -> int:
        """Load nothing, but note what is in the prefix cache: vLLM calls computed what another connector loads, too."""
        self._found[request.request_id] = computed
        return 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]] = (), count: int = 0) -> None:
        """Take the reservation of a request that vLLM schedules, once."""
        params = request.kv_transfer_params
        if not is_prefill(params) or params.get("do_virtual") is True:
            return  # virtual: a warm-up without a decode engine behind it; there is nothing to push
        with self._deciding() as now:
            if self._desk.knows(request.request_id):
                return
            asked = self._asked(request, params)
            if isinstance(asked, PdError):
                error: PdError | None = self._desk.book.refuse(request.request_id, asked)
            else:
                error = self._desk.take(now, asked)
                if error is None:
                    self._taken(request, asked)
            if error is not None:
                log.warning("request %s is prefilled but not pushed: %s", request.request_id, error)

    def _taken(self, request: Any, asked: Asked) -> None:
        facts = {"request": asked.request_id, "push": asked.push}
        if asked.reservation is None:
            trace.emit("collecting", **facts)
        else:
            trace.emit("attached", transfer=str(asked.reservation.transfer), **facts)
        if self.first_tokens is not None and (asked.reservation is None or asked.reservation.seed is not None):
            self.first_tokens.taken(request)

    def metadata(self, output: Any) -> StepMetadata:
        return StepMetadata(prefill=self.build_step(output))

    def build_step(self, output: Any) -> PrefillStep:
        """Translate one SchedulerOutput."""
        with self._deciding():
            return self._build_step(output)

    def _build_step(self, output: Any) -> PrefillStep:
        for request_id in output.preempted_req_ids or ():
            self._desk.preempted(request_id)
        counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        chunks = [
            Chunk(
                new.req_id,
                new.num_computed_tokens,
                counts[new.req_id],
                new.block_ids,
                replaces=True,
                found=self._found.pop(new.req_id, None),
            )
            for new in output.scheduled_new_reqs
        ]
        chunks += [
            Chunk(
                request_id,
                computed,
                counts[request_id],
                more,
                replaces=request_id in cached.resumed_req_ids,
                found=self._found.pop(request_id, None),
            )
            for request_id, more, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        over = (*(output.preempted_req_ids or ()), *output.finished_req_ids)

        def tables(request_id: str) -> Sequence[Sequence[int]]:
            found: Sequence[Sequence[int]] = output.kv_connector_block_state.get_block_ids(request_id)
            return found  # called for states only; older_groups.py lends it where vLLM does not have it

        self._desk.step(chunks, over, tables)
        return self._desk.book.take_step(self._desk.engine)

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        return self.finished(request, holds_blocks)

    def finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request. Return whether its blocks are held, and the push's part of its HTTP answer."""
        with self._deciding() as now:
            return self._finished(now, request, holds_blocks)

    def _finished(self, now: float, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        tells = self.first_tokens
        self._found.pop(request.request_id, None)
        ending = self._desk.finished(
            now,
            request.request_id,
            holds_blocks=holds_blocks,
            well=request.status in _WELL,
            why="the request ended on prefill",
            sampled=lambda: tells.sampled(request) if tells is not None else None,
        )
        first = tells.told(ending.first) if tells is not None else ""
        if tells is not None:
            tells.forget(request.request_id)
        if ending.source is not None:
            return ending.held, self._source(request, ending.source)
        if (error := ending.refusal) is not None:
            if error.code == "PD-META-028":
                log.warning("request %s is prefilled but not held: %s", request.request_id, error)
            return ending.held, params_of(self._report(error.code, error.sentence))
        return ending.held, params_of(self._report(first=first)) if ending.pushed else None

    def _source(self, request: Any, record: Record) -> dict[str, Any]:
        """Return the part of P's answer that names held blocks: routers hand it to D as it is."""
        if record.source is None or self._reception is None:
            raise LocalProtocolError(f"{request.request_id} is held, and has no source")
        source, prompt = record.source, (record.prompt_length, record.prompt_hash)
        hold_s = self._engine.config.timers.hold_s
        told = Source(PROTOCOL_VERSION, source, self._reception.endpoint, *prompt, hold_s)
        sealed = base64.b64encode(seal_source(told, self._engine.secrets)).decode()
        trace.emit("held", request=request.request_id, source=str(source))
        said = {"do_remote_prefill": True, "do_remote_decode": False, "source": sealed}
        return {**said, **params_of(self._report())}

    def _report(self, code: str = "", detail: str = "", first: str = "") -> PushReport:
        tells = self.first_tokens is not None
        return PushReport(self._engine.incarnation, code, detail, self._engine.fingerprint, first, tells)

    def around(self) -> tuple[FirstTokenSource, ...]:
        return (self.first_tokens,) if self.first_tokens is not None else ()

    def released(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it held blocks here: they are free now."""
        with self._deciding():
            free = self._desk.book.released(request_id)
        if free:
            trace.emit("released", request=request_id)
        return free

    def heard(self, news: WorkerNews) -> None:
        with self._deciding():
            self._desk.book.missed(news.missed)
        self.failed(news.failures)

    def failed(self, failures: Iterable[tuple[str, str]]) -> None:
        """Count failed pushes that workers report; each transfer counts once, whichever rank reports it first."""
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
        with self._deciding():
            self.tally.level("blocks_held", self._desk.meetings.counts()["held_blocks"])
        return self.tally.take()

    def must_step(self) -> bool:
        return self._desk.book.must_step()

    def open_loads(self) -> int:
        return -1 if self.must_step() else 0

    def due_s(self) -> float:
        return LOOK_S

    def close(self) -> None:
        """Close the reception. D engines that wait here learn of it from the end of their connections. Idempotent."""
        if self._reception is not None:
            self._reception.close()

    def _asked(self, request: Any, params: Mapping[str, Any]) -> Asked | PdError:
        encoded, reservation = params.get("reservation"), None
        if encoded is not None or self._reception is None:
            if not isinstance(encoded, str) or len(encoded) > 2 * MAX_MESSAGE_BYTES:
                return PdError("PD-META-005", why="the request carries no reservation")
            try:
                reservation = unseal(base64.b64decode(encoded, validate=True), self._engine.secrets)
            except ValueError:
                return PdError("PD-META-005", why="it is not base64")
            except RemoteProtocolError as refused:
                return refused
        if request.prompt_token_ids is None:
            return PdError("PD-META-005", why="the prompt came as embeddings")
        push, prompt = (
            push_id(self._engine.incarnation, uuid.uuid4().hex),
            (request.num_prompt_tokens, request_hash(request)),
        )
        facts = request.request_id, prompt, push, reservation, meets_under(params, request.request_id), uuid.uuid4().hex
        whole = reservation is not None and WHOLE in reservation.needs
        return Asked(*facts, self.first_tokens.would(request) if whole and self.first_tokens is not None else None)
