# SPDX-License-Identifier: Apache-2.0
"""State that all requests of this process share, and what D's reports change in it."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from vllm_ascend_pd.errors import CATALOGUE, PdError, one_line
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import LoadReport
from vllm_ascend_pd.router import exchange as exchanges
from vllm_ascend_pd.router.aside import Aside
from vllm_ascend_pd.router.core.decisions import AGAINST_PAIR, AGAINST_PREFILL, Evidence, PairProof, RetryBudget
from vllm_ascend_pd.router.core.ends import LegEnd, decode_failed, known_failure
from vllm_ascend_pd.router.exchange import Attempt, HttpExchange, Journal, RoutedTransfer
from vllm_ascend_pd.router.fleet import Fleet, LegInFlight
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.spans import NoSpans
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError

log = logging.getLogger(__name__)

SHUTDOWN = known_failure(PdError("PD-META-010"))


class Shared:
    """The engines, the connections to them, and the journal of requests."""

    def __init__(
        self, settings: Settings, fleet: Fleet, upstream: Upstream, own_url: str, spans: NoSpans | None = None
    ) -> None:
        self.settings = settings
        self.spans = spans or NoSpans()
        self.fleet = fleet
        self.upstream = upstream
        self.own_url = own_url
        self.journal = Journal()
        self.aside = Aside()
        self.budget = RetryBudget()
        self.kept_bytes = 0  # of all streams that could be continued

    def leg_over(self, leg: LegInFlight, end: LegEnd, evidence: Evidence | None = None, why: str = "") -> None:
        """Note how a leg ends, and take in what that says about the engine.

        A stream is served as soon as it has begun; if it breaks, that is its end.
        """
        leg.end = end
        if evidence is not None:
            self.fleet.record(leg.instance, evidence, why)

    def is_late(self, leg: LegInFlight, problem: UpstreamError) -> bool:
        """Return whether an answer that comes as a whole only took too long, as its engine answers probes.

        Nothing shows that the engine hangs, and to compute the answer again would take as long.
        """
        return problem.failure is HttpFailure.TIMEOUT and leg.instance.healthy

    def leg_broke(self, leg: LegInFlight, problem: UpstreamError, request: str = "") -> None:
        """Note a leg that ends in an error, as evidence. `request`: the journal notes it under this id.

        Without `request` the journal notes the failure of the attempt, which the caller raises.
        """
        leg.end = LegEnd.BROKE
        self.fleet.failed(leg.instance, problem.failure, problem.why)
        if request:
            self.journal.trouble(decode_failed(problem.why), leg.instance.name, request)

    def accuse(self, attempt: Attempt, why: str) -> None:
        """Count D's failure against it, unless its load failed: with policy "fail" it must answer so.

        D's report says so, and may come long after the answer. If none comes, P's leg alone decides.
        """
        attempt.accused = why
        if attempt.explained():
            self._decide(attempt)
        else:
            asyncio.get_running_loop().call_later(exchanges.PAST_S, self._decide, attempt)

    def _decide(self, attempt: Attempt) -> None:
        why, attempt.accused = attempt.accused, ""
        if why and not attempt.load_failed:
            self.fleet.record(attempt.decode, Evidence.BROKE, why)

    def retry_delay(
        self, exchange: HttpExchange, failure: HttpFailure, made: int, repeatable: bool = False
    ) -> float | None:
        """Return the delay before another leg in place of one that failed; None: it was the last. `made`: legs so far.

        A canary's pair is fixed, so nothing can take its place.
        """
        if exchange.pinned is not None:
            return None
        return self.settings.retry.retry_delay(failure, made, repeatable, self.budget, random.random())

    def repeated(self, exchange: HttpExchange, failure: HttpFailure) -> None:
        """Note that another leg takes the place of one that failed."""
        exchange.stage("retry", failure.value)
        METRICS.retries.labels(failure.value).inc()

    def stream_broke(self, exchange: HttpExchange, decode: str, noted: Failure) -> None:
        """Note that a client has got a part of an answer only. A shutdown is no trouble of D."""
        METRICS.broken_streams.inc()
        exchange.stage("broken", noted.detail)
        self.journal.trouble(noted, "" if noted == SHUTDOWN else decode, exchange.request_id)

    def loaded(self, report: LoadReport) -> bool:
        """Take in D's report on how the KV of a transfer came. Return False if the request is not known.

        Only these reports prove a pair, and they say whether a failed load counts against P. The same report may come
        twice: in an answer and by itself.
        """
        attempt = self.journal.attempt(report.ticket)
        if attempt is None:
            return False
        if report.code and not attempt.transfers:  # D could not post its reservation
            attempt.transfers[report.transfer] = RoutedTransfer(report.transfer)
        transfer = attempt.transfers.get(report.transfer)
        if transfer is None:
            return False
        if transfer.report is not None:
            return True
        trial, transfer.report = transfer.trial, report
        decode, prefill = attempt.decode, transfer.prefill
        decode.history = decode.history.reported(report.decode, attempt.began, report.fingerprint)
        if prefill is not None:
            prefill.history = prefill.history.reported(report.prefill, transfer.asked)
        self._judge(attempt, transfer, report)
        if trial is not None:
            trial.returned()
        attempt.news.set()
        if attempt.explained():
            self._decide(attempt)
        self.journal.notify(attempt)
        return True

    def _judge(self, attempt: Attempt, transfer: RoutedTransfer, report: LoadReport) -> None:
        exchange, decode, prefill = attempt.exchange, attempt.decode, transfer.prefill
        name = prefill.name if prefill is not None else ""
        code = report.code if report.code in CATALOGUE else "unknown"
        METRICS.loads.labels(
            prefill.label if prefill is not None else "", "received" if report.received else code
        ).inc()
        METRICS.tokens_received.inc(report.received)
        METRICS.tokens_recomputed.inc(report.recomputed)
        METRICS.tokens_cached.inc(report.cached)
        if report.received:
            exchange.stage("loaded", f"{report.received} tokens")
            decode.loads.receive(name, time.monotonic())
            if prefill is not None and report.prefill:
                proof = PairProof(name, report.prefill, decode.name, report.decode, attempt.began)
                self.fleet.prove(proof)
                self.fleet.record(prefill, Evidence.SERVED)
            return
        exchange.stage("not loaded", code)
        why = one_line(f"{report.code} {report.detail}")
        log.warning("request %s: its KV did not come to %s: %s", exchange.request_id, decode.name, why)
        if report.code in AGAINST_PAIR:
            exchange.tried.add(decode.name)
            self.fleet.load_failed(decode, name, attempt.began, report.code, self.settings.canary)
            noted = Failure(report.code, "the KV of a request did not come")
            self.journal.trouble(noted, name or decode.name, exchange.request_id)
        if prefill is None:
            return
        exchange.bad_prefills.add(name)
        against = AGAINST_PREFILL.get(report.code)
        if against and not transfer.blamed:
            transfer.blamed = True
            self.fleet.record(prefill, Evidence.BROKE, f"{report.code}: {against}")
