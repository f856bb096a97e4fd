# SPDX-License-Identifier: Apache-2.0
"""The transport of D's httpx client: what its errors say, and what it does with an answer."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from unit.kits.raw_server import RawServer, says
from unit.kits.refusing import no_more_threads
from vllm_ascend_pd.decode.scheduler.httpx_transport import REPEATABLE, Transport

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def calling(timeout: float = 5.0) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=Transport(5.0, None, 1), timeout=timeout, trust_env=False) as client:
        yield client


async def test_without_a_file_handle_nothing_was_sent() -> None:
    """D repeats a post after httpx's error for a missing connection only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with calling() as client:
            free = os.dup(server.fileno())  # the lowest handle that is free
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                with pytest.raises(httpx.ConnectError, match="Too many open files"):
                    await client.post(url)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_a_thread_to_look_a_name_up_nothing_was_sent() -> None:
    async with calling() as client:
        with no_more_threads("name"), pytest.raises(httpx.ConnectError, match="no thread to look a name up"):
            await client.post("http://localhost:1/")


async def test_a_request_that_may_have_been_read_does_not_count_as_never_sent() -> None:
    """Else D would post its reservation again, for which P may have begun to push."""
    for answer in ((b"",), (b"HTTP/1.1 200 OK\r\n",), (b"nonsense\r\n\r\n",)):
        server = await RawServer(says(*answer, close=True)).start()
        async with calling() as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(f"http://127.0.0.1:{server.port}/", content=b"{}")
            assert len(server.requests) == 1
        server.stop()


async def test_only_what_may_be_repeated_is_sent_again_on_another_connection() -> None:
    async def closes_every_second(request: bytes, reader: object, writer: object) -> None:
        if len(server.requests) % 2:
            writer.write(LENGTH)  # type: ignore[attr-defined]
        else:
            writer.close()  # type: ignore[attr-defined]

    server = await RawServer(closes_every_second).start()
    async with calling() as client:
        url = f"http://127.0.0.1:{server.port}/"
        assert (await client.post(url)).text == "hello"
        assert (await client.post(url, extensions={REPEATABLE: True})).text == "hello"
        assert (len(server.requests), server.connections) == (3, 2)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(url)
        assert len(server.requests) == 4
    server.stop()


async def test_silence_ends_an_answer_and_what_came_before_a_break_is_given() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"

    for handle, error in (
        (says(head + b"hello"), httpx.ReadTimeout),
        (says(head + b"hello", close=True), httpx.RemoteProtocolError),
    ):
        server, came = await RawServer(handle).start(), b""
        async with calling(0.3) as client, client.stream("POST", f"http://127.0.0.1:{server.port}/") as answer:
            with pytest.raises(error):
                async for piece in answer.aiter_raw():
                    came += piece
            assert came == b"hello"
        server.stop()


async def test_a_request_has_its_own_headers_and_no_others() -> None:
    server = await RawServer(says(LENGTH)).start()
    async with calling() as client:
        await client.post(f"http://127.0.0.1:{server.port}/v1?a=%20b", content=b"{}", headers={"x-a": "1"})
    target, *lines = server.requests[0].split(b"\r\n")
    assert target == b"POST /v1?a=%20b HTTP/1.1"
    assert [line for line in lines if line.lower().startswith(b"content-length")] == [b"content-length: 2"]
    assert b"x-a: 1" in lines and not any(b"aiohttp" in line for line in lines)
    server.stop()
