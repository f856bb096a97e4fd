# SPDX-License-Identifier: Apache-2.0
"""D's calls to the metaserver: thousands of open reservations on one loop thread, each with a limit for every phase.

`reserve` may be called from the scheduler's thread: it does bookkeeping under a lock and posts to the loop. The
answer is a stream of JSON lines (docs/protocol.md); a read fails after a silence of three heartbeats. A POST is
repeated only if it surely was not executed. Each key gets exactly one final outcome, unless it is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import msgspec

from vllm_ascend_pd.config import MetaserverConfig
from vllm_ascend_pd.decode.scheduler.core import answers
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.httpx_transport import REPEATABLE, Transport
from vllm_ascend_pd.errors import PdError, one_line
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol import continuing, reports
from vllm_ascend_pd.protocol.continuing import AnswerWanted
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import LoadReport
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import DECLINED, HttpFailure, post_again
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.shared.tls_files import TlsFiles

__all__ = ["MetaserverClient", "Outcome", "origin"]

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
MAX_LINE_BYTES = 64 << 10
_RETRIES_TIMEOUT_S = 10.0  # a metaserver that is away for longer has lost its memory, and the ticket with it
_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
_REPORT_S = 10.0
_SHORT_AT_ONCE = 16  # of the reports, and of the questions for answers so far
_KIND = {"content-type": "application/json"}
_MAX_REPORTS = 4096
_MAX_CONNECTING = 64  # at once: a burst of reservations connects by and by, and none times out for that

ReservedBody = dict[str, Any] | Callable[[], dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Call:
    key: Hashable
    url: str
    body: ReservedBody | AnswerWanted | None  # the latter is for an answer so far
    deadline_s: float
    query: str = ""
    silent_s: float | None = None  # longest silence of the answer; None: three heartbeats
    asks: bool = False  # for an answer so far
    started: float = 0.0
    task: asyncio.Task[None] | None = None
    ended: bool = False  # final outcome given, or forgotten
    attempts: int = 0


class _FailedAttempt(Exception):
    """A failed attempt: how it failed, and the error to report."""

    def __init__(self, error: PdError, failure: HttpFailure, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.failure = failure
        self.retry_after_s = retry_after_s


class MetaserverClient:
    def __init__(
        self, config: MetaserverConfig, loop: LoopThread, on_outcome: Callable[[Hashable, Outcome], None]
    ) -> None:
        self._config = config
        self._loop = loop
        self._on_outcome = on_outcome
        self._allowed = frozenset(origin(url) for url in config.metaserver_urls)
        self._lock = threading.Lock()
        self._calls: dict[Hashable, _Call] = {}
        self._questions: set[Hashable] = set()  # of these; not more than there are requests
        self._closed = False
        self._http: httpx.AsyncClient | None = None
        self._slots: dict[str, asyncio.Semaphore] = {}  # made on the loop
        self._reports: set[asyncio.Task[None]] = set()
        self._reporting = 0  # reports that wait or are in flight
        self.counters: Counter[str] = Counter()  # for metrics

    # -- any thread

    def reserve(
        self,
        key: Hashable,
        url: str,
        body: ReservedBody,
        deadline_s: float,
        *,
        query: str = "",
        silent_s: float | None = None,
    ) -> None:
        """POST `body` to `url`/v1/metaserver. Never block: every outcome, also a refusal, comes on the loop thread.

        `body` may be what makes it, there. `silent_s`: longest silence of a server that sends no heartbeats.
        """
        self._call(_Call(key, url, body, deadline_s, query, silent_s))

    def ask(self, key: Hashable, url: str, wanted: AnswerWanted, deadline_s: float) -> None:
        """POST a question for an answer so far. Otherwise as `reserve`."""
        self._call(_Call(key, url, wanted, deadline_s, asks=True))

    def _call(self, call: _Call) -> None:
        key, url, error = call.key, call.url, None
        with self._lock:
            if key in self._calls:
                raise ValueError(f"the call {key!r} is already open")
            self._calls[key] = call
            if call.asks:
                self._questions.add(key)
            max_calls = self._config.metaserver_max_connections + self._config.metaserver_max_queue
            if self._closed:
                error = PdError("PD-XFER-002", why="the engine is closing")
            elif origin(url) not in self._allowed:
                error = PdError("PD-META-001", url=url)
            elif not call.asks and len(self._calls) - len(self._questions) > max_calls:
                error = PdError("PD-META-004", count=max_calls)
        if error is None:
            self._loop.post(self._start, call)
        else:
            self._loop.post(self._end, call, _failed(error))

    def forget(self, key: Hashable) -> None:
        """Cancel the call. The key gets no outcome any more, except for one that is already on its way."""
        with self._lock:
            call = self._calls.pop(key, None)
            self._questions.discard(key)
            if call is None:
                return
            call.ended = True
        self._loop.post(self._cancel, call)

    def open_count(self) -> int:
        with self._lock:
            return len(self._calls)

    def report(self, url: str, report: LoadReport) -> None:
        """POST how a load ended. Never block. Reports are only evidence: one that is late is counted and dropped."""
        with self._lock:
            if self._closed or origin(url) not in self._allowed:
                return
            lost = self._reporting >= _MAX_REPORTS
            self._reporting += not lost
            self.counters["report_lost"] += lost
        if not lost:
            self._loop.post(self._start_report, url, report)

    # -- the loop thread

    async def close(self) -> None:
        """End every open call as failed, then close the connections."""
        with self._lock:
            self._closed = True
            calls = list(self._calls.values())
        tasks = [call.task for call in calls if call.task is not None]
        for call in calls:
            self._end(call, _failed(PdError("PD-XFER-002", why="the engine is closing")))
            self._cancel(call)
        for report in self._reports:
            report.cancel()
        await asyncio.gather(*tasks, *self._reports, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    def _start(self, call: _Call) -> None:
        if call.ended:
            return
        call.started = self._loop.loop.time()
        call.task = self._loop.loop.create_task(self._run(call), name=f"call {call.key}")

    @staticmethod
    def _cancel(call: _Call) -> None:
        if call.task is not None:
            call.task.cancel()

    def _tell(self, call: _Call, outcome: Outcome) -> None:
        with self._lock:
            if call.ended:
                return
        self._on_outcome(call.key, outcome)

    def _end(self, call: _Call, outcome: Outcome) -> None:
        with self._lock:
            if call.ended:
                return
            call.ended = True
            self._calls.pop(call.key, None)
            self._questions.discard(call.key)
        self._on_outcome(call.key, outcome)

    async def _run(self, call: _Call) -> None:
        outcome = _failed(PdError("PD-XFER-002", why="the call to the metaserver was cut off"))
        try:
            outcome = await asyncio.wait_for(self._attempts(call), call.deadline_s)
        except asyncio.TimeoutError:  # not the builtin one before Python 3.11
            outcome = _failed(PdError("PD-XFER-001", why="metaserver"))
        except _FailedAttempt as failed:
            outcome = _failed(failed.error)
        except OSError as problem:  # unreadable TLS files, too many open files
            outcome = _failed(PdError("PD-META-002", why=_why(problem)))
        finally:  # whatever happened, the key gets its one outcome, unless it was forgotten
            seconds = self._loop.loop.time() - call.started
            self._end(call, replace(outcome, seconds=seconds))

    def _start_report(self, url: str, report: LoadReport) -> None:
        task = self._loop.loop.create_task(self._report(url, report), name=f"report {report.transfer}")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _report(self, url: str, report: LoadReport) -> None:
        taken = False
        try:
            taken = await asyncio.wait_for(self._post_report(url, report), _REPORT_S)
        except (asyncio.TimeoutError, httpx.HTTPError, OSError) as problem:
            log.debug("the report of %s was not taken: %s", report.transfer, _why(problem))
        finally:
            with self._lock:
                self._reporting -= 1
                self.counters["report_lost"] += not taken

    async def _post_report(self, url: str, report: LoadReport) -> bool:
        """Post a report; return whether the metaserver took it. It is no failure if the request is unknown there."""
        async with self._at_once("reports", _SHORT_AT_ONCE):
            body = msgspec.json.encode(report)
            repeatable = {REPEATABLE: True}
            answer = await self._client().post(
                url.rstrip("/") + reports.ROUTE, content=body, headers=_KIND, extensions=repeatable
            )
            return answer.status_code < 500

    async def _attempts(self, call: _Call) -> Outcome:
        body = call.body() if callable(call.body) else call.body
        content = msgspec.json.encode(body)  # 20 times as fast as httpx's encoder; a prompt may have a million ids
        call.body = body = None  # a call may be open for minutes, and its list of ids is larger than their text
        while True:
            try:
                async with self._slot(call):
                    return await self._post(call, content)
            except _FailedAttempt as failed:
                left = min(call.deadline_s, _RETRIES_TIMEOUT_S) - (self._loop.loop.time() - call.started)
                delay = post_again(failed.failure, call.attempts, left, failed.retry_after_s, random.random(), _BACKOFF)
                if delay is None:
                    raise
                log.info("%s; the POST was not executed, again in %.2f s", failed, delay)
                self.counters["question_repeated" if call.asks else "reservation_repeated"] += 1
            await asyncio.sleep(delay)  # outside the slot, so that it delays no other call

    def _slot(self, call: _Call) -> asyncio.Semaphore:
        """Return what a call holds: no question waits for P, as reservations do, or for reports."""
        if call.asks:
            return self._at_once("questions", _SHORT_AT_ONCE)
        return self._at_once("reservations", self._config.metaserver_max_connections)

    def _at_once(self, what: str, most: int) -> asyncio.Semaphore:
        return self._slots.setdefault(what, asyncio.Semaphore(most))

    def _client(self) -> httpx.AsyncClient:
        """Return the HTTP client. It is made at the first call, on the loop."""
        if self._http is None:
            files = self._config.tls_ca_file, self._config.tls_cert_file, self._config.tls_key_file
            tls = TlsFiles(lambda: _tls(self._config), *files)
            transport = Transport(self._config.metaserver_connect_timeout_s, tls, _MAX_CONNECTING)
            self._http = httpx.AsyncClient(transport=transport, timeout=3 * HEARTBEAT_S, trust_env=False)
        return self._http

    async def _post(self, call: _Call, content: bytes) -> Outcome:
        """Make one attempt and return its outcome. Raise _FailedAttempt."""
        call.attempts += 1
        if trace.enabled() and not call.asks:
            trace.emit("posted", transfer=str(call.key), attempt=call.attempts)
        route = continuing.ROUTE if call.asks else "/v1/metaserver"
        url = call.url.rstrip("/") + route + (call.query and f"?{call.query}")
        try:
            silence_s = 3 * HEARTBEAT_S if call.silent_s is None else call.silent_s
            async with self._client().stream("POST", url, content=content, headers=_KIND, timeout=silence_s) as answer:
                if answer.status_code != 200:
                    raise await _refusal(answer)
                if call.asks:
                    return answers.so_far(await _bounded(answer, continuing.MAX_ANSWER_BYTES))
                if "ndjson" in answer.headers.get("content-type", ""):
                    return await self._follow(call, answer)
                return answers.plain(await _bounded(answer))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as problem:
            failure = HttpFailure.BROKEN if _untrusted(problem) else HttpFailure.CONNECT
            raise _FailedAttempt(PdError("PD-META-002", why=_why(problem)), failure) from problem
        except httpx.TimeoutException as problem:
            raise _FailedAttempt(PdError("PD-META-002", why=_why(problem)), HttpFailure.TIMEOUT) from problem
        except (httpx.HTTPError, answers.BadAnswer) as problem:
            raise _FailedAttempt(PdError("PD-META-002", why=_why(problem)), HttpFailure.BROKEN) from problem

    async def _follow(self, call: _Call, answer: httpx.Response) -> Outcome:
        """Return the final outcome. Read on to the end of the stream, so that the connection can be used again."""
        lines, final = answers.Lines(MAX_LINE_BYTES), None
        reading = cast("AsyncGenerator[bytes, None]", answer.aiter_raw())  # it is one, but typed as an iterator
        async with aclosing(reading) as pieces:
            async for piece in pieces:
                for outcome in map(answers.outcome, lines.feed(piece)):
                    if outcome is not None and outcome.final:
                        final = replace(outcome, seconds=self._loop.loop.time() - call.started)
                        self._end(call, final)
                    elif outcome is not None:
                        self._tell(call, outcome)
        if final is None:
            raise answers.BadAnswer("its answer ended without saying how the prefill went")
        return final


def origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port, which the allow-list compares; ("", "", 0) if `url` is no plain http(s) address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ("", "", 0)
    if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.username is not None:
        return ("", "", 0)
    if parts.query or parts.fragment:
        return ("", "", 0)
    return (parts.scheme, parts.hostname or "", port or (443 if parts.scheme == "https" else 80))


def _tls(config: MetaserverConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.tls_ca_file or None)
    if not config.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.tls_cert_file:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file or None)
    return context


def _failed(error: PdError) -> Outcome:
    return Outcome("failed", Failure.of(error))


def _untrusted(problem: BaseException) -> bool:
    """Return whether a certificate was not trusted: another attempt would end the same way."""
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _why(problem: Exception) -> str:
    named = "" if isinstance(problem, answers.BadAnswer) else type(problem).__name__
    return one_line(f"{named} {problem}".strip())


async def _bounded(answer: httpx.Response, most: int = MAX_LINE_BYTES) -> bytes:
    body = bytearray()
    async for chunk in answer.aiter_raw():
        body += chunk
        if len(body) > most:
            raise answers.BadAnswer("its answer is too long")
    return bytes(body)


async def _refusal(answer: httpx.Response) -> _FailedAttempt:
    body = await _bounded(answer)
    why = answers.reason(body) or answer.reason_phrase
    failure = HttpFailure.REFUSED if answer.status_code in DECLINED else HttpFailure.SERVER
    error = PdError("PD-META-003", status=answer.status_code, why=why)
    return _FailedAttempt(error, failure, answers.seconds(answer.headers.get("retry-after")))
