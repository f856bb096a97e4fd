# SPDX-License-Identifier: Apache-2.0
"""Names of engines, with a name server in the test's hands: which failure says what about the engine."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from unit.kits.names import WAIT_S, NameServer
from unit.kits.raw_server import RawServer, says
from unit.kits.refusing import no_more_threads
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared import resolver as module
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.http_session import Origin


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = NameServer(monkeypatch)
    yield made
    made.gate.set()


@pytest.mark.parametrize(
    ("error", "failure"), [(socket.EAI_AGAIN, HttpFailure.OURS), (socket.EAI_NONAME, HttpFailure.CONNECT)]
)
async def test_an_engine_is_not_blamed_if_no_name_server_answers(
    error: int, failure: HttpFailure, server: NameServer
) -> None:
    server.wrong["engine.test"], upstream = error, Upstream(5.0, 5.0)
    with pytest.raises(UpstreamError) as raised:
        await upstream.ask(Origin("http", "engine.test", 9), "GET", b"/", [], b"", 5.0).head()
    assert raised.value.failure is failure
    await upstream.close()


async def test_an_engine_is_not_blamed_if_there_is_no_thread_to_look_its_name_up() -> None:
    upstream = Upstream(5.0, 5.0)
    with no_more_threads("name engine.test"), pytest.raises(UpstreamError) as raised:
        await upstream.ask(Origin("http", "engine.test", 9), "GET", b"/", [], b"", 5.0).head()
    assert raised.value.failure is HttpFailure.OURS
    await upstream.close()


@pytest.mark.parametrize(
    ("host", "asked", "called"),
    [
        ("engine.test", "engine.test", b"engine.test"),
        ("münchen.test", "xn--mnchen-3ya.test", b"xn--mnchen-3ya.test"),
        ("xn--mnchen-3ya.test", "xn--mnchen-3ya.test", b"xn--mnchen-3ya.test"),
        ("::1", "", b"[::1]"),
    ],
)
async def test_an_engine_is_called_by_its_name(host: str, asked: str, called: bytes, server: NameServer) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    try:
        listening = await RawServer(says(answer)).start("::1" if host == "::1" else "127.0.0.1")
    except OSError:
        pytest.skip("this host has no IPv6")
    upstream = Upstream(5.0, 5.0)
    async with upstream.ask(Origin("http", host, listening.port), "GET", b"/", [], b"", 5.0) as reply:
        assert await reply.read() == b""
    assert b"\r\nhost: %b:%d\r\n" % (called, listening.port) in listening.requests[0].lower()
    assert list(server.asked) == ([asked] if asked else [])
    await upstream.close()
    listening.stop()


async def test_a_request_whose_name_is_slow_has_all_its_time_afterwards(server: NameServer) -> None:
    listening, upstream = await RawServer(says()).start(), Upstream(WAIT_S, 5.0)
    server.slow = {"slow.test"}
    began = asyncio.get_running_loop().time()
    asking = asyncio.create_task(
        upstream.ask(Origin("http", "slow.test", listening.port), "GET", b"/", [], b"", 0.3).head()
    )
    assert not (await asyncio.wait({asking}, timeout=0.5))[0]
    server.gate.set()
    with pytest.raises(UpstreamError) as raised:
        await asyncio.wait_for(asking, WAIT_S)
    assert raised.value.failure is HttpFailure.TIMEOUT and asyncio.get_running_loop().time() - began > 0.8
    assert len(listening.requests) == 1
    await upstream.close()
    listening.stop()


async def test_an_engine_whose_name_was_known_and_is_lost_counts_as_not_reached(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, origin = Upstream(0.05, 5.0), Origin("http", "engine.test", 9)
    server.slow = {"engine.test"}
    with pytest.raises(UpstreamError) as raised:
        await upstream.ask(origin, "GET", b"/", [], b"", 5.0).head()
    assert raised.value.failure is HttpFailure.OURS, "it is looked up for the first time"
    server.gate.set()
    while upstream.session.resolver.known("engine.test") is None:
        await asyncio.sleep(0.001)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    server.gate.clear()
    with pytest.raises(UpstreamError) as raised:
        await upstream.ask(origin, "GET", b"/", [], b"", 5.0).head()
    assert raised.value.failure is HttpFailure.CONNECT
    await upstream.close()
