# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the metaserver itself: OpenAI's format, a code of the catalogue, the same from every part."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from unit.router.cluster import FakeCluster, cluster, until
from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.router import app
from vllm_ascend_pd.router.intake import Intake

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def one() -> Iterator[FakeCluster]:
    with cluster(max_body_bytes=1 << 16) as c:
        yield c


@pytest.fixture(scope="module")
def locked() -> Iterator[FakeCluster]:
    with cluster(admin_token="a" * 16) as c:
        yield c


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code and code in CATALOGUE
    assert error["message"] and error["type"].isidentifier()
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/v1/completions", b"{", 400, "PD-META-012"),
        ("POST", "/v1/chat/completions", b"[]", 400, "PD-META-012"),
        ("POST", "/v1/embeddings", b"[" * 60_000, 400, "PD-META-012"),
        ("POST", "/v1/completions", b"a" * 70_000, 413, "PD-META-013"),
        ("POST", "/v1/embeddings", b"a" * 70_000, 413, "PD-META-013"),
        ("POST", "/instances", b"{", 400, "PD-META-012"),
        ("POST", "/instances", b'{"role": "cook", "url": "h:1"}', 400, "PD-META-012"),
        ("POST", "/instances", b'{"role": "decode", "url": "h:1:2"}', 400, "PD-META-012"),
        ("POST", "/instances", b'"' + b"a" * 70_000 + b'"', 413, "PD-META-013"),
        ("DELETE", "/instances/h:9", b"", 404, "PD-META-018"),
        ("POST", "/instances/h:9/drain", b"{}", 404, "PD-META-018"),
        ("GET", "/nonsense", b"", 404, "PD-META-016"),
        ("POST", "/chat/completions", b"{}", 404, "PD-META-016"),
        ("PUT", "/instances", b"{}", 405, "PD-META-017"),
        ("POST", "/status", b"{}", 405, "PD-META-017"),
        ("TRACE", "/v1/models", b"", 405, "PD-META-017"),
        ("GET", "/v1/metaserver", b"", 405, "PD-META-017"),
        ("PATCH", "/v1/metaserver", b"{}", 405, "PD-META-017"),
        ("TRACE", "/v1/metaserver", b"{}", 405, "PD-META-017"),
        ("POST", "/v1/metaserver", b"{", 400, "PD-META-003"),
    ],
)
def test_a_refusal_has_openais_shape_and_a_code(
    one: FakeCluster, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    answer = one.http.request(method, path, content=content, headers={**JSON, "x-request-id": "mine"})
    refused(answer, status, code)
    assert (status == 405) == ("allow" in answer.headers)
    if code != "PD-META-003":  # a post of D, not a client's request
        long = {**JSON, "x-request-id": ("a \t b\u00e9" + "x" * 9_000).encode("latin-1")}
        given = one.http.request(method, path, content=content, headers=long)
        assert given.status_code == status and given.headers.get_list("x-request-id") == ["ab" + "x" * 126]
        assert answer.headers.get_list("x-request-id") == ["mine"]
        made = one.http.request(method, path, content=content, headers=JSON)
        assert made.status_code == status and len(made.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("path", "takes"),
    [
        ("/instances", {"GET", "HEAD", "POST"}),
        ("/instances/h:1", {"DELETE"}),
        ("/instances/h:1/drain", {"POST"}),
        ("/reset_prefix_cache", {"POST"}),
        ("/status", {"GET", "HEAD"}),
        ("/metrics", {"GET", "HEAD"}),
        ("/v1/metaserver", {"POST"}),
        ("/v1/models", {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}),
        ("/v1/completions", {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}),
    ],
)
def test_allow_names_what_the_path_takes_and_nothing_else(one: FakeCluster, path: str, takes: set[str]) -> None:
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
    answers = {method: one.http.request(method, path, content=b"", headers=JSON) for method in methods}
    assert {method for method, answer in answers.items() if answer.status_code != 405} == takes
    for method in set(methods) - takes:
        assert set(answers[method].headers["allow"].split(", ")) == takes


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("intake", "status", "code"),
    [(Intake(stall_s=0.2), 408, "PD-META-014"), (Intake(short=1000, room_s=0.0), 429, "PD-META-015")],
)
def test_a_body_that_is_not_waited_for_is_answered_with_the_clients_id(
    path: str, intake: Intake, status: int, code: str
) -> None:
    with cluster() as c, socket.create_connection(("127.0.0.1", c.served.port), 20) as client:
        c.worker.intake = intake
        if status == 429:
            intake.short.held_bytes = intake.short.most  # by others
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: 5000\r\n\r\n"
        client.sendall(head.encode() + b"a" * 2000)
        came = http.client.HTTPResponse(client)
        came.begin()
        assert came.status == status and came.headers.get_all("x-request-id") == ["mine"]
        assert json.loads(came.read())["error"]["code"] == code


def test_the_admin_api_refuses_with_codes(one: FakeCluster, locked: FakeCluster) -> None:
    d = one.decode[0].address
    refused(one.http.post(f"/instances/{d}/sing", json={}), 404, "PD-META-016")
    refused(one.http.post("/instances", json={"role": "prefill", "url": d}), 409, "PD-META-019")
    refused(one.http.post("/instances", content=b"{}", headers={"content-type": "text/plain"}), 415, "PD-META-020")
    refused(one.http.get("/status", headers={"host": "evil.example"}), 403, "PD-SEC-006")
    answer = locked.http.get("/status", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    refused(answer, 401, "PD-SEC-005")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_refused_body_comes_back_with_the_clients_id(one: FakeCluster) -> None:
    for path in ("/v1/completions", "/v1/embeddings"):
        answer = one.http.post(path, content=b"[" * 60_000, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")


def test_a_browsers_question_goes_to_a_d(one: FakeCluster) -> None:
    """Access for pages of another origin is the engine's decision (vLLM's --allowed-origins)."""
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        assert one.http.options(path, headers=asked).status_code == 200
        seen = one.decode[0].seen[-1]
        assert seen.route == path and asked.items() <= seen.headers.items()


def test_a_stream_that_has_begun_holds_no_place_for_its_prompt() -> None:
    with cluster() as c:
        c.decode[0].behaviour.paused = True
        with c.http.stream("POST", "/v1/completions", json={"prompt": "x" * 50_000, "stream": True}) as answer:
            pieces = answer.iter_raw()  # kept, as a collected generator closes the connection
            next(pieces)
            until(lambda: not c.worker.intake.held_bytes)
            assert c.worker.front.journal.exchanges, "it goes on"
            c.decode[0].behaviour.paused = False
        c.decode[0].behaviour.hold = True
        with ThreadPoolExecutor(1) as clients:
            asking = clients.submit(c.complete, "y" * 50_000)
            until(lambda: c.worker.intake.held_bytes > 50_000)
            c.decode[0].behaviour.hold = False
            assert asking.result().status_code == 200
        until(lambda: not c.worker.intake.held_bytes)


def test_the_posts_of_a_d_have_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's short body fits here, and a reservation would not fit beside it."""
    monkeypatch.setattr(app, "Intake", partial(Intake, short=150, room_s=0.0))
    with cluster() as c:
        assert c.complete("p").status_code == 200
        assert len(c.prefill[0].generations()) == 1 and c.decode[0].local_prefills == 0
