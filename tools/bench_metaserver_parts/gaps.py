# SPDX-License-Identifier: Apache-2.0
"""Longest gap between two ticks of the metaserver's event loop while a client sends long bodies.

Client and engine are other processes, so only the metaserver's own work is measured. Each line is one kind of body;
beside it is the gap with nothing sent, which is caused by other load on the machine. Time is the wall's: a thread that
decodes a long body keeps the interpreter, and the loop waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import httpx

from tools.bench_metaserver_parts.wire import ServerProtocol
from tools.support.process import free_port
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.server import HttpServer, listen
from vllm_ascend_pd.router.settings import Settings

MIB = 1 << 20
BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "nothing": ("/v1/completions", lambda size: b""),
    "a text": ("/v1/completions", lambda size: b'{"prompt": "' + b"x" * size + b'"}'),
    "token ids": ("/v1/completions", lambda size: b'{"prompt": [' + b"12345," * (size // 6) + b"1]}"),
    "prompts": ("/v1/completions", lambda size: b'{"prompt": [' + b'"a",' * (size // 4) + b'"z"]}'),
    "brackets": ("/v1/completions", lambda size: b'{"prompt": "x", "a": [' + b"[]," * (size // 3) + b"1]}"),
    "names": ("/v1/completions", lambda size: b"{" + b",".join(b'"%x":1' % i for i in range(size // 11)) + b"}"),
    "a chat": (
        "/v1/chat/completions",
        lambda size: json.dumps({"messages": [{"role": "user", "content": 'say "a" ' * 100}] * (size // 940)}).encode(),
    ),
    "passed on": ("/v1/embeddings", lambda size: b'{"input": [' + b'"a",' * (size // 4) + b'"z"]}'),
    "a reservation": ("/v1/metaserver", lambda size: b'{"ticket": "x", "a": [' + b"1," * (size // 2) + b"1]}"),
    "a long answer": ("/v1/completions", lambda size: b'{"prompt": "long"}'),
}


def serve(port: int, size: int) -> None:
    """Run an engine that answers at once; with a long answer to the prompt "long"."""
    answer = b'{"choices": ["' + b"y" * size + b'"], "kv_transfer_params": {"pd_load": null}}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

    async def handle(path: bytes, body: bytes, connection: ServerProtocol) -> None:
        said = answer if len(body) < 1000 and b'"long"' in body else b"{}"
        connection.write(head % len(said) + said)

    async def run() -> None:
        await asyncio.get_running_loop().create_server(lambda: ServerProtocol(handle), "127.0.0.1", port)
        await asyncio.Event().wait()

    asyncio.run(run())


def ask(url: str, size: int, times: int, line: Connection) -> None:
    """Send each kind of body named on `line`, and report the statuses."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        while name := line.recv():
            route, make = BODIES[name]
            body = make(size)
            line.send("begin")
            line.recv()
            statuses = []
            for _ in range(times):
                if body:
                    statuses.append(http.post(route, content=body).status_code)
                else:
                    time.sleep(0.3)
            line.send(statuses)


async def measure(port: int, engine: int, line: Connection, names: list[str]) -> None:
    url = f"http://127.0.0.1:{port}"
    worker = WorkerProcess(
        Settings(port=port, decode=(f"127.0.0.1:{engine}",), canary=False, max_body_bytes=256 * MIB), url
    )
    server = HttpServer(worker, [listen("127.0.0.1", port)])
    serving = asyncio.create_task(server.serve())
    print(f"{'body':15} {'longest gap ms':>15} {'median of gaps over 2 ms':>25}  answers")
    for name in names:
        line.send(name)
        await asyncio.to_thread(line.recv)
        line.send("go")
        received = asyncio.create_task(asyncio.to_thread(line.recv))
        gaps, before = [0.0], time.perf_counter()
        while not received.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now
        long = sorted(gap for gap in gaps if gap > 0.002) or [0.0]
        print(f"{name:15} {max(gaps) * 1e3:15.1f} {long[len(long) // 2] * 1e3:25.1f}  {received.result()}", flush=True)
    server.stop()
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=57)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("kinds", nargs="*", default=list(BODIES))
    given = parser.parse_args()
    port, engine = free_port(), free_port()
    mine, theirs = multiprocessing.Pipe()
    start = multiprocessing.get_context("fork").Process
    others = [
        start(target=serve, args=(engine, given.mib * MIB)),
        start(target=ask, args=(f"http://127.0.0.1:{port}", given.mib * MIB, given.times, theirs)),
    ]
    for process in others:
        process.start()
    try:
        asyncio.run(measure(port, engine, mine, given.kinds))
    finally:
        for process in others:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
