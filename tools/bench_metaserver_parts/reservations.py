# SPDX-License-Identifier: Apache-2.0
"""Thousands of open reservations from one D scheduler process: the cost in its scheduler thread and its memory.

The main thread acts as the scheduler: a step every 2 ms, in which some reservations are posted. Printed are the longest
call of `reserve` and the longest delay of a step, beside the delay in a thread without reservations.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import resource
import threading
import time
from collections import Counter
from multiprocessing.synchronize import Event

import psutil

from tools.bench_metaserver_parts.wire import ServerProtocol
from vllm_ascend_pd.config import MetaserverConfig
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome
from vllm_ascend_pd.shared.loop import LoopThread

STARTED_S = 120.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


def line(text: bytes) -> bytes:
    return b"%x\r\n%s\n\r\n" % (len(text) + 1, text)


def serve(port: int, hold_s: float, ready: Event) -> None:
    """Run a metaserver that takes `hold_s` for every prefill."""

    async def handle(path: bytes, body: bytes, connection: ServerProtocol) -> None:
        connection.write(HEAD + line(b'{"event":"accepted","prefill":"p:1"}'))
        end = time.monotonic() + hold_s
        while time.monotonic() + 2 < end:
            await asyncio.sleep(2)
            connection.write(line(b'{"event":"heartbeat"}'))
        await asyncio.sleep(end - time.monotonic())
        connection.write(line(b'{"event":"prefilled"}') + b"0\r\n\r\n")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: ServerProtocol(handle), "127.0.0.1", port, backlog=4096)
        ready.set()
        await asyncio.Event().wait()

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(run())


class StepLoop:
    """The steps of a scheduler, and how late they were."""

    def __init__(self, client: MetaserverClient, url: str) -> None:
        self._client, self._url = client, url
        self.longest_call = self.longest_delay = 0.0
        self._keys = 0

    def run(self, seconds: float, reserve: int = 0, per_step: int = 10) -> None:
        self.longest_call = self.longest_delay = 0.0
        end = time.monotonic() + seconds
        body = {"ticket": "t", "transfer": "d/1", "reservation": "x" * 2000}
        while (now := time.monotonic()) < end or reserve > 0:
            for _ in range(min(per_step, reserve)):
                reserve -= 1
                self._keys += 1
                called = time.perf_counter()
                self._client.reserve(self._keys, self._url, body, 120.0)
                self.longest_call = max(self.longest_call, time.perf_counter() - called)
            time.sleep(max(0.0, 0.002 - (time.monotonic() - now)))
            self.longest_delay = max(self.longest_delay, time.monotonic() - now - 0.002)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--hold-s", type=float, default=8.0)
    parser.add_argument("--port", type=int, default=19490)
    args = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    server = spawn.Process(target=serve, args=(args.port, args.hold_s, ready), daemon=True)
    server.start()
    if not ready.wait(STARTED_S):  # D's client repeats a call for a few seconds only
        raise SystemExit(f"the metaserver of this bench has not started within {STARTED_S:.0f} s")
    url = f"http://127.0.0.1:{args.port}"
    kinds: Counter[str] = Counter()
    loop = LoopThread("metaserver client")
    client = MetaserverClient(
        MetaserverConfig(metaserver_urls=(url,), metaserver_max_connections=max(2048, args.count)),
        loop,
        lambda key, outcome: kinds.update(
            [outcome.failure.code if isinstance(outcome, Outcome) and outcome.failure else outcome.kind]
        ),
    )
    scheduler = StepLoop(client, url)
    scheduler.run(1.0, reserve=1)
    while not kinds["accepted"]:
        if not client.open_count():
            raise SystemExit(f"the metaserver of this bench does not answer: {dict(kinds)}")
        time.sleep(0.01)
    gc.collect()
    gc.freeze()  # as vLLM's engine core does after its start
    scheduler.run(2.0)
    print(f"a scheduler thread without reservations: longest delay of a step {1e3 * scheduler.longest_delay:.1f} ms")
    memory = psutil.Process().memory_info
    print(
        "\n| wave | open | accepted | prefilled | longest reserve() ms | longest delay of a step ms | CPU ms each | threads | MiB |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for wave in range(args.waves):
        kinds.clear()
        used = time.process_time()
        scheduler.run(args.hold_s - 2, reserve=args.count)
        most_open, accepted = client.open_count(), kinds["accepted"]
        while client.open_count():
            time.sleep(0.05)
        times = f"{1e3 * scheduler.longest_call:.2f} | {1e3 * scheduler.longest_delay:.1f}"
        times += f" | {1e3 * (time.process_time() - used) / args.count:.2f}"
        rss = memory().rss / (1 << 20)
        print(
            f"| {wave + 1} | {most_open} | {accepted} | {kinds['prefilled']} | {times} | {threading.active_count()} | {rss:.1f} |",
            flush=True,
        )
    loop.call(client.close(), 10)
    loop.stop()
    server.terminate()
    server.join(5)


if __name__ == "__main__":
    main()
