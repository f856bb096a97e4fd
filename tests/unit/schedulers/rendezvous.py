# SPDX-License-Identifier: Apache-2.0
"""Both schedulers over real sockets: P listens, D comes to it, and a router between them is played by the test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tools.support.process import free_port
from unit.kits.watching import until
from unit.schedulers.kit import CACHE, ENDPOINTS, WatchedSteps, engine, output, request
from vllm_ascend_pd.decode.scheduler.core.load import Start
from vllm_ascend_pd.decode.scheduler.first_tokens import FirstTokenReceiver
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.decode.scheduler.tokens_of_others import TokensOfOthers
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.vllm_patches.patience import Patience

TOY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOKEN = 7  # P's first token
P_ID, D_ID = "cmpl-router-1-0-aaaaaaaa", "cmpl-router-1-0-bbbbbbbb"


class SchedulerPair:
    def __init__(self, secrets: Secrets | None, p_keys: dict[str, Any], d_keys: dict[str, Any]) -> None:
        self.news = 0
        keys = {"hold_sources": 4, "hold_s": 60.0, **p_keys}
        self.p = PrefillScheduler(engine(secrets, **keys), self._rung, blocks=100, sends_first=True)
        self.p.attach_workers({(0, rank): WorkerFacts(None, CACHE) for rank in range(2)})
        made = engine(secrets, **({"prefill_listeners": ["127.0.0.1"]} if secrets is None else {}), **d_keys)
        self.d = DecodeScheduler(made, Patience(lambda: 0), vocabulary=100)
        self.d.attach_workers({(0, rank): WorkerFacts(where, CACHE) for rank, where in enumerate(ENDPOINTS)})
        self.steps = WatchedSteps(self.d)

    def _rung(self) -> None:
        self.news += 1

    def prefilled(
        self, params: Any = TOY, name: str = P_ID, **sampling: Any
    ) -> tuple[Request, bool, dict[str, Any] | None]:
        asked = request(name, params)
        asked.sampling_params = SamplingParams(max_tokens=1, **sampling)
        self.p.allocated(asked)
        self.p.build_step(output([(name, 0, 10, [1, 2, 3])]))
        assert self.p.first_tokens is not None
        self.p.first_tokens.before(None)  # as at the step's results
        return (asked, *self.ended(asked))

    def ended(self, asked: Request) -> tuple[bool, dict[str, Any] | None]:
        asked.append_output_token_ids([TOKEN])
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return self.p.request_finished(asked, True)

    @property
    def first_tokens(self) -> FirstTokenReceiver:
        assert isinstance(self.d.beginnings, TokensOfOthers)
        return self.d.beginnings.first_tokens

    def started(self) -> Start:
        """Wait until it is decided how D's held request starts."""
        starts: list[Start] = []

        def stepped() -> list[Start]:
            self.steps.take()
            starts.extend(self.d.book.take(0.0))
            return starts

        until(stepped, "the last word of P")
        return starts[0]

    def load(self, params: Any, name: str = D_ID) -> Any:
        asked = request(name, params)
        assert self.d.wanted(asked, 4) == 6
        self.d.allocated(asked, [[40, 41, 42, 43]], 6)
        return self.steps.bound()

    def address(self) -> dict[str, Any]:
        assert self.p.reception is not None
        where = self.p.reception.endpoint
        return {"do_remote_prefill": True, "remote_host": where.host, "remote_port": where.port}


@contextmanager
def pair(secrets: Secrets | None = None, p: Any = None, d: Any = None) -> Iterator[SchedulerPair]:
    made = SchedulerPair(secrets, p or {}, d or {})
    try:
        yield made
    finally:
        made.p.close()
        made.d.close()
        made.p.close()


class BootstrapPair(SchedulerPair):
    def __init__(self) -> None:
        self.port = free_port()
        super().__init__(None, {"bootstrap_port": self.port}, {})

    def ask(self, path: str = "/query", method: str = "GET") -> httpx.Response:
        return httpx.request(method, f"http://127.0.0.1:{self.port}{path}", trust_env=False, verify=False, timeout=10)

    def raw(self, sent: bytes) -> bytes:
        with closing(socket.create_connection(("127.0.0.1", self.port), 10)) as caller:
            caller.settimeout(20)
            caller.sendall(sent)
            return b"".join(iter(lambda: caller.recv(65536), b""))
