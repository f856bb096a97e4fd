# SPDX-License-Identifier: Apache-2.0
"""Load generator: closed loops of streaming requests, each timed to its first byte and to its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time

import uvloop

from tools.bench_metaserver_parts.wire import ClientProtocol, post


async def client(port: int, request: bytes, until: float, total: list[int], out: list[tuple[float, float]]) -> None:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(ClientProtocol, "127.0.0.1", port)
    while loop.time() < until and total[0] > 0:
        total[0] -= 1
        start = time.perf_counter()
        status = await connection.ask(request)
        if status != 200 or not connection.tail.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"status {status}, ended with {connection.tail[-80:]!r}")
        out.append((connection.first - start, time.perf_counter() - start))
    connection.transport.close()


async def main(args: argparse.Namespace) -> None:
    body = {"model": "m", "prompt": "word " * args.words, "max_tokens": args.pieces, "stream": True, "temperature": 0}
    content = json.dumps({**body, "user": f"{args.gap_ms:g}"}).encode()  # a field that every metaserver accepts
    request = post("/v1/completions", f"127.0.0.1:{args.port}", content)
    loop = asyncio.get_running_loop()
    out: list[tuple[float, float]] = []
    total = [args.requests or 1 << 60]
    start, cpu = time.perf_counter(), time.process_time()

    until = loop.time() + args.seconds

    async def late(i: int) -> None:
        await asyncio.sleep(args.ramp_s * i / args.streams)
        await client(args.port, request, until, total, out)

    tasks = [asyncio.create_task(late(i)) for i in range(args.streams)]
    done, late_ones = await asyncio.wait(tasks, timeout=args.seconds + args.timeout_s)
    took = time.perf_counter() - start
    for task in late_ones:
        task.cancel()
    for task in done:
        task.result()
    first = sorted(f for f, _ in out) or [float("inf")]
    longer = sorted(whole - f - (args.pieces - 1) * args.gap_ms / 1e3 for f, whole in out) or [float("inf")]
    print(
        json.dumps(
            {
                "requests": len(out),
                "rate": len(out) / took,
                "ttfb_p10_ms": 1000 * first[len(first) // 10],
                "ttfb_p50_ms": 1000 * first[len(first) // 2],
                "ttfb_p99_ms": 1000 * first[int(len(first) * 0.99)],
                "longer_p99_ms": 1000 * longer[int(len(longer) * 0.99)],  # from first to last piece, than sent
                "load_cpu": (time.process_time() - cpu) / took,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--timeout-s", type=float, default=3.0, help="for requests under way at the end")
    parser.add_argument("--ramp-s", type=float, default=0.0)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    uvloop.install()
    asyncio.run(main(parser.parse_args()))
