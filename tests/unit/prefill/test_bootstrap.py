# SPDX-License-Identifier: Apache-2.0
"""P's bootstrap endpoint for routers of Mooncake's dialect: real sockets, valid and hostile requests, and D's use of
the answer."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from unit.kits.watching import until
from unit.schedulers.kit import CACHE, SECRETS, engine, request
from unit.schedulers.rendezvous import D_ID, P_ID, TOY, BootstrapPair
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.prefill.scheduler import bootstrap
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.dialects import meets_under, read_meet
from vllm_ascend_pd.protocol.identity import Endpoint

LISTENER = Endpoint("10.0.0.1", 5600)


@pytest.fixture
def site() -> Iterator[BootstrapPair]:
    made = BootstrapPair()
    yield made
    made.p.close()
    made.d.close()


def mooncake(site: BootstrapPair, transfer: str = "xfer-1") -> dict[str, Any]:
    """Parameters as vLLM's proxy writes them, with what P has answered."""
    ranks = site.ask().json()
    address = f"http://127.0.0.1:{site.port}"
    both = {"transfer_id": transfer, "remote_engine_id": ranks["0"]["engine_id"], "remote_bootstrap_addr": address}
    return {"do_remote_decode": False, "do_remote_prefill": True, **both}


def test_both_meet_by_what_p_has_sent_whatever_the_request_is_called(site: BootstrapPair) -> None:
    """Under the dialect's transfer_id: a router need not send one X-Request-Id to both."""
    bind = site.load(mooncake(site), "cmpl-one-0-bbbbbbbb")
    asked = request("cmpl-another-0-aaaaaaaa", {**TOY, "transfer_id": "xfer-1"})
    until(lambda: site.p.book.counts()["waiting"], "the offer")
    site.p.allocated(asked)
    assert site.p.book.tracks("cmpl-another-0-aaaaaaaa") and bind is not None
    assert site.p.book.counts()["waiting"] == 0


def test_nothing_else_is_reported_and_nothing_changes(site: BootstrapPair) -> None:
    assert site.p.reception is not None
    where = {"0": {"engine_id": str(site.p.reception.endpoint)}}
    response = site.ask()
    assert (response.status_code, response.json(), response.headers["content-type"]) == (200, where, "application/json")
    assert site.ask("/query?x=1").json() == where
    assert [site.ask(path).status_code for path in ("/", "/query/x", "/metrics")] == [404] * 3
    assert [site.ask(method=method).status_code for method in ("POST", "PUT", "DELETE")] == [405] * 3


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"\r\n\r\n", 400), (b"GET\r\n\r\n", 400), (b"\xff\x00\r\n\r\n", 400), (b"GET /query HTTP/2\r\n\r\n", 400)],
)
def test_what_is_no_question_is_answered_shortly(site: BootstrapPair, sent: bytes, status: int) -> None:
    head, _, body = site.raw(sent).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status}".encode()) and json.loads(body) == {}


@pytest.mark.parametrize(("port", "ranks"), [(5600, 3), (0, 1)], ids=["ports by rank", "ports that the kernel chose"])
def test_the_ranks_behind_one_address_are_named_where_their_ports_are_known(port: int, ranks: int) -> None:
    of_three = dataclasses.replace(engine(SECRETS, side_channel_port=port), ranks_here=3)
    engines = json.loads(
        bootstrap.answer(b"GET /query HTTP/1.1\r\n\r\n", of_three.listeners(5600)).partition(b"\r\n\r\n")[2]
    )
    assert engines == {str(n): {"engine_id": f"127.0.0.1:{5600 + n}"} for n in range(ranks)}


def test_an_endless_or_silent_caller_is_let_go(site: BootstrapPair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "QUESTION_TIMEOUT_S", 0.3)
        with suppress(ConnectionError):  # closing with unread input resets the connection
            assert b" 200 " not in site.raw(b"GET /query HTTP/1.1\r\nX: " + b"x" * 4 * bootstrap.MAX_HEAD)
        assert site.raw(b"GET /query HTTP/1.1\r\n") == b""
    assert site.ask().status_code == 200


def test_a_crowd_is_not_let_in(site: BootstrapPair) -> None:
    crowd = [socket.create_connection(("127.0.0.1", site.port), 10) for _ in range(bootstrap.MAX_OPEN)]
    try:
        until(lambda: len(site.p.reception.bootstrap.callers) == bootstrap.MAX_OPEN)  # type: ignore[union-attr]
        with pytest.raises(httpx.HTTPError):
            site.ask()
    finally:
        for one in crowd:
            one.close()
    until(lambda: not site.p.reception.bootstrap.callers)  # type: ignore[union-attr]
    assert site.ask().status_code == 200
    site.p.close()
    with pytest.raises(httpx.ConnectError):
        site.ask()


def test_who_is_about_to_ask_when_it_closes_is_let_go(site: BootstrapPair) -> None:
    with socket.create_connection(("127.0.0.1", site.port), 10) as caller:
        until(lambda: site.p.reception.bootstrap.callers)  # type: ignore[union-attr]
        site.p.close()
        with suppress(ConnectionError):
            assert caller.recv(1) == b""


def test_a_port_that_is_taken_stops_the_start() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        scheduler = PrefillScheduler(engine(None, hold_sources=1, bootstrap_port=other.getsockname()[1]), blocks=10)
        with pytest.raises(PdError, match="PD-CTRL-001"):
            scheduler.attach_workers({(0, 0): WorkerFacts(None, CACHE)})


# -- what D reads of it

PARAMS = {"remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "10.0.0.1:5600", "transfer_id": "x"}


def read(params: dict[str, Any], listeners: Any = ("10.0.0.1",), request_id: str = D_ID) -> Any:
    meeting = read_meet(params, request_id, (10, "h"), listeners, SECRETS)
    return getattr(meeting, "code", meeting)


def test_the_name_has_the_place_of_the_prompt_on_both_sides() -> None:
    meeting = read(PARAMS)
    assert (meeting.listener, meeting.name) == (LISTENER, "x-0") and meets_under(PARAMS, P_ID) == "x-0"
    assert read(PARAMS, request_id="cmpl-y-7-bbbbbbbb").name == meets_under(PARAMS, "cmpl-z-7-aaaaaaaa") == "x-7"
    assert read(PARAMS, request_id="chatcmpl-y-bbbbbbbb").name == meets_under(PARAMS, "chatcmpl-z-aaaaaaaa") == "x"


@pytest.mark.parametrize("garbage", [None, "", 7, True, [], {}, "x" * 256, "ü"], ids=lambda value: repr(value)[:20])
def test_a_name_that_is_none_is_refused_by_d_and_not_taken_by_p(garbage: Any) -> None:
    assert read({**PARAMS, "transfer_id": garbage}) == "PD-META-029"
    assert meets_under({**PARAMS, "transfer_id": garbage}, P_ID) == "router-1-0"


@pytest.mark.parametrize(
    "garbage",
    [None, "", 7, [], "3f0c-an-id", "10.0.0.1", ":5600", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1:٣", "x" * 300],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_an_id_that_is_no_address_is_refused(garbage: Any) -> None:
    assert read({**PARAMS, "remote_engine_id": garbage}) == "PD-META-029"


def test_an_address_that_is_not_allowed_is_not_dialled_and_the_bootstrap_s_never_is() -> None:
    assert read(PARAMS, ("10.0.0.2",)) == read(PARAMS, ()) == "PD-META-030"
    assert read({**PARAMS, "remote_bootstrap_addr": {"any": "thing"}}).listener == LISTENER
