# SPDX-License-Identifier: Apache-2.0
"""A router that forwards D's post as P's request, unchanged: D's post, no answer until P has ended, P's reading of
it."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from unit.kits.watching import until
from unit.schedulers.kit import CACHE, SECRETS, decode, engine, request
from unit.schedulers.recording_router import GIVEN, loading
from unit.schedulers.rendezvous import D_ID
from vllm_ascend_pd.decode.scheduler import metaserver as client
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.prefill.scheduler.core.fitting import is_prefill
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import unseal
from vllm_ascend_pd.protocol.dialects import PassingRouter, read_passing_router
from vllm_ascend_pd.protocol.failure import Failure

ALLOWED = frozenset({"http://10.0.0.1:8000"})


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
        assert is_prefill(body) and p.book.tracks(asked.request_id)
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


def test_clients_behind_it_do_not_see_the_addresses_of_a_failure() -> None:
    """Such a router hands D's answer on as it is."""
    with loading() as (_, steps, _):
        steps.scheduler.ended([LoadEnd(D_ID, Failure("PD-XFER-004", "10.0.0.7:5001: refused"), "")])
        assert steps.scheduler.received(D_ID)
        answer = steps.scheduler.finished(D_ID)
        assert answer is not None and answer["pd_load"]["code"] == "PD-XFER-004"
        assert "10.0.0.7" not in str(answer)


def test_it_is_hung_up_when_the_request_ends() -> None:
    with loading() as (router, steps, _):
        steps.scheduler.finished(D_ID)
        until(lambda: router.left, "the end of the call")


# -- what D reads


def read(params: dict[str, Any], name: str = D_ID) -> Any:
    router = read_passing_router(params, name, ALLOWED)
    return getattr(router, "code", router)


def test_the_request_has_the_name_that_the_front_end_gave_it() -> None:
    assert read(GIVEN) == PassingRouter("http://10.0.0.1:8000", "cmpl-router-1-0")
    assert read(GIVEN, "chatcmpl-x-bbbbbbbb").ticket == "chatcmpl-x"
    assert read(GIVEN).metaserver == ""
    asked = {**GIVEN, "metaserver": GIVEN["metaserver"] + "?attempt=3&x=a-b.c"}
    assert read(asked) == PassingRouter("http://10.0.0.1:8000", "cmpl-router-1-0", "attempt=3&x=a-b.c")


@pytest.mark.parametrize(
    ("changes", "name", "code"),
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
    changes: dict[str, Any], name: str, code: str | None
) -> None:
    assert read({**GIVEN, **changes}, name) == code


def test_a_forged_router_is_said_once_and_the_prompt_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = decode("http://127.0.0.1:1")
    try:
        asked = request(D_ID, GIVEN)
        assert scheduler.wanted(asked, 0) == scheduler.wanted(asked, 0) == 0
        assert caplog.text.count("PD-META-001") == 1
    finally:
        scheduler.close()
