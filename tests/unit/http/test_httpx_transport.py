# SPDX-License-Identifier: Apache-2.0
"""The transport of D's httpx client: what its errors say."""

from __future__ import annotations

import os
import resource
import socket

import httpx
import pytest

from unit.kits.refusing import no_more_threads
from vllm_ascend_pd.http.httpx_transport import Transport


async def test_without_a_file_handle_nothing_was_sent() -> None:
    """D repeats a post after httpx's error for a missing connection only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        transport = Transport(5.0, 5.0, None, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(server.fileno())  # the lowest handle that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(httpx.ConnectError, match="Too many open files"):
                await transport.handle_async_request(httpx.Request("POST", url))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await transport.aclose()


async def test_without_a_thread_to_look_a_name_up_nothing_was_sent() -> None:
    transport = Transport(5.0, 5.0, None, 1)
    with no_more_threads("name"), pytest.raises(httpx.ConnectError, match="no thread to look a name up"):
        await transport.handle_async_request(httpx.Request("POST", "http://localhost:1/"))
    await transport.aclose()
