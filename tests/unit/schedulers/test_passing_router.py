# SPDX-License-Identifier: Apache-2.0
"""A router that forwards D's post as P's request, unchanged: D's post, no answer until P has ended, P's reading of
it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from unit.kits.watching import WatchedSteps, until
from unit.metaserver.fake_engine import ServedApp
from unit.schedulers.kit import CACHE, SECRETS, decode, engine, request
from unit.schedulers.rendezvous import D_ID
from vllm_ascend_pd.decode import metaserver as client
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler
from vllm_ascend_pd.protocol.auth import unseal
from vllm_ascend_pd.protocol.dialects import PassingRouter, is_prefill, read_passing_router

ALLOWED = frozenset({"http://10.0.0.1:8000"})
GIVEN = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": "http://10.0.0.1:8000/v1/metaserver"}


class RecordingRouter:
    """Router that records what D posts; answers only when P's request has ended, like vllm-ascend's."""

    def __init__(self, status: int = 200) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.ended, self.left = False, False
        self.status = status
        self.served = ServedApp(self._app, "a router")
        self.url = f"http://{self.served.address}"

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        query = scope["query_string"].decode()
        self.posts.append((scope["path"] + (query and f"?{query}"), msgspec.json.decode(message["body"])))
        gone = asyncio.ensure_future(receive())
        while not self.ended and not gone.done():
            await asyncio.sleep(0.02)
        self.left = gone.done()
        gone.cancel()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": kind})
        await send({"type": "http.response.body", "body": b"null"})


@contextmanager
def loading(
    status: int = 200, name: str = D_ID, query: str = ""
) -> Iterator[tuple[RecordingRouter, WatchedSteps, Bind]]:
    router = RecordingRouter(status)
    scheduler = decode(router.url, secrets=SECRETS)
    try:
        asked = request(name, {**GIVEN, "metaserver": router.url + "/v1/metaserver" + query})
        assert scheduler.wanted(asked, 4) == 6
        scheduler.allocated(asked, [[40, 41, 42, 43]], 6)
        steps = WatchedSteps(scheduler)
        bind = steps.bound()
        until(lambda: router.posts, "the POST")
        yield router, steps, bind
    finally:
        scheduler.close()
        router.served.stop()


def test_what_d_posts_is_what_p_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing heartbeat is no failure: such a router sends nothing until P has ended."""
    monkeypatch.setattr(client, "HEARTBEAT_S", 0.1)
    with loading() as (router, steps, bind):
        ((path, body),) = router.posts
        assert path == "/v1/metaserver" and body["request_id"] == "cmpl-router-1-0", "as its own dictionary has it"
        assert unseal(base64.b64decode(body["reservation"]), SECRETS).transfer == bind.transfer
        p = PrefillScheduler(engine(SECRETS))
        p.attach_workers({(0, rank): WorkerFacts(None, CACHE) for rank in range(2)})
        asked = request("cmpl-router-1-0-aaaaaaaa", body)
        p.allocated(asked)
        assert is_prefill(body) and p._requests.book.tracks(asked.request_id)
        begun = time.monotonic()
        while time.monotonic() < begun + 2.0:  # without an answer, longer than a metaserver's limit
            steps.take()
            time.sleep(0.05)
        assert not steps.codes(bind.transfer)
        router.ended = True
        steps.settled(bind.transfer)
        assert steps.scheduler.received(D_ID) and not router.left
        assert len(router.posts) == 1, "nothing is reported to a router that has not asked"


def test_a_router_that_could_not_send_it_fails_the_load_at_once() -> None:
    with loading(status=500) as (router, steps, bind):
        router.ended = True
        assert steps.cancelled(bind.transfer) == "PD-META-003"


def test_it_is_hung_up_when_the_request_ends() -> None:
    with loading() as (router, steps, _):
        steps.scheduler.finished(D_ID)
        until(lambda: router.left, "the end of the call")


# -- what D reads


def read(params: dict[str, Any], name: str = D_ID) -> Any:
    found = read_passing_router(params, name, ALLOWED)
    return getattr(found, "code", found)


def test_the_request_has_the_name_that_the_front_end_gave_it() -> None:
    assert read(GIVEN) == PassingRouter("http://10.0.0.1:8000", "cmpl-router-1-0")
    assert read(GIVEN, "chatcmpl-x-bbbbbbbb").ticket == "chatcmpl-x"
    assert read(GIVEN).metaserver == ""
    asked = {**GIVEN, "metaserver": GIVEN["metaserver"] + "?attempt=3&x=a-b.c"}
    assert read(asked) == PassingRouter("http://10.0.0.1:8000", "cmpl-router-1-0", "attempt=3&x=a-b.c")


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        ({"metaserver": "http://10.0.0.2:8000/v1/metaserver"}, D_ID, "PD-META-001"),
        ({"metaserver": "http://10.0.0.1:8000/x/v1/metaserver"}, D_ID, "PD-META-001"),
        ({"metaserver": "http://me@10.0.0.1:8000/v1/metaserver"}, D_ID, "PD-META-001"),
        ({"metaserver": "x" * 10_000 + "/v1/metaserver"}, D_ID, "PD-META-001"),
        ({"metaserver": GIVEN["metaserver"] + "?attempt=%0a"}, D_ID, "PD-META-029"),
        ({"metaserver": GIVEN["metaserver"] + "?" + "x" * 100}, D_ID, "PD-META-029"),
        ({"metaserver": GIVEN["metaserver"] + "?a=1&"}, D_ID, "PD-META-029"),
        ({"metaserver": "http://10.0.0.1:8000?/v1/metaserver"}, D_ID, None),
        ({}, "0_cmpl-router-1-0-bbbbbbbb", "PD-META-029"),
        ({}, "something-else", "PD-META-029"),
        ({"ticket": "t"}, D_ID, None),
        ({"metaserver": "http://10.0.0.1:8000"}, D_ID, None),
        ({"metaserver": 7}, D_ID, None),
        ({"metaserver": None}, D_ID, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_router_is_called_if_its_address_is_allowed_and_it_knows_the_request(
    changes: dict[str, Any], name: str, found: str | None
) -> None:
    assert read({**GIVEN, **changes}, name) == found


def test_a_forged_router_is_said_once_and_the_prompt_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = decode("http://127.0.0.1:1")
    try:
        asked = request(D_ID, GIVEN)
        assert scheduler.wanted(asked, 0) == scheduler.wanted(asked, 0) == 0
        assert caplog.text.count("PD-META-001") == 1
    finally:
        scheduler.close()
