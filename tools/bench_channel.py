# SPDX-License-Identifier: Apache-2.0
"""Latency and rate of the side channel on loopback: two processes, round trips of a small message.

python tools/bench_channel.py [--round-trips 5000] [--secret]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Hashable
from multiprocessing.connection import Connection as Pipe
from typing import Any

from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.channel.link import Context
from vllm_ascend_pd.channel.listener import Listener
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Ack, Done


def _secrets(with_secret: bool) -> Secrets | None:
    if not with_secret:
        return None
    return Secrets(b"benchmark" * 4)


def _done(seq: int) -> Done:
    return Done(
        transfer=TransferId("d-incarnation", 1, "uuid"),
        push="push",
        p_incarnation="p-incarnation",
        d_incarnation="d-incarnation",
        contributor=Contributor(0, 0),
        d_rank=0,
        seq=seq,
        bytes=(1 << 26,),
        plan_digest="digest",
    )


def _serve(pipe: Pipe, with_secret: bool) -> None:
    async def run() -> None:
        def answer(peer: Hashable, message: Any) -> None:
            head = {name: getattr(message, name) for name in Ack.__struct_fields__ if name != "kind"}
            listener.send(peer, Ack(kind="done", **head))

        listener = Listener(
            host="127.0.0.1",
            port=0,
            incarnation="d-incarnation",
            secrets=_secrets(with_secret),
            on_message=answer,
            on_gone=lambda incarnation: None,
            on_back=lambda incarnation: None,
            count=lambda reason: None,
        )
        pipe.send((await listener.start()).port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await listener.close()

    asyncio.run(run())


async def _measure(port: int, round_trips: int, with_secret: bool) -> tuple[list[float], float, float]:
    endpoint = Endpoint("127.0.0.1", port)
    arrived: asyncio.Queue[int] = asyncio.Queue()
    context = Context(
        incarnation="p-incarnation",
        name="bench",
        secrets=_secrets(with_secret),
        on_message=lambda _, message: arrived.put_nowait(message.seq),
        on_unreachable=lambda _, detail: print("unreachable:", detail),
        count=lambda reason: None,
    )
    dialer = Dialer(context)
    begun = time.perf_counter()
    dialer.send(endpoint, _done(0))
    await asyncio.wait_for(arrived.get(), 5)
    first = time.perf_counter() - begun
    times = []
    for seq in range(1, round_trips + 1):
        begun = time.perf_counter()
        dialer.send(endpoint, _done(seq))
        await arrived.get()
        times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for seq in range(round_trips):
        dialer.send(endpoint, _done(seq))
        if seq % 100 == 99:
            for _ in range(100):
                await arrived.get()
    rate = round_trips / (time.perf_counter() - begun)
    await dialer.close()
    return times, first, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trips", type=int, default=5000)
    parser.add_argument("--secret", action="store_true", help="sign every frame")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, options.secret))
    child.start()
    times, first, rate = asyncio.run(_measure(ours.recv(), options.round_trips, options.secret))
    ours.send("stop")
    child.join(10)
    times.sort()
    print(f"first contact (connect, greeting, round trip): {first * 1e3:.2f} ms")
    print(f"round trip: p50 {statistics.median(times) * 1e6:.0f} us, p99 {times[int(len(times) * 0.99)] * 1e6:.0f} us")
    print(f"in windows of 100: {rate:,.0f} round trips/s")


if __name__ == "__main__":
    main()
