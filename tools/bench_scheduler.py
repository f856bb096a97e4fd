# SPDX-License-Identifier: Apache-2.0
"""Processor time that a request costs D's scheduler, that is the thread of its engine core: each of vLLM's calls.

One process without an engine. Requests are loaded one after the other: asked for, reserved, reported, begun with P's
token being late, ended. Calls to a metaserver are real, to a socket that answers nothing; they run on a thread of their
own, which does not count. Shown are the time of a request with its four steps in the undisturbed tenth of the requests,
and the median.

    python -m tools.bench_scheduler [--requests 1000] [--tokens 512 8192]
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.scheduler.metaserver import Outcome
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import Engine, WorkerFacts
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.roles import WorkerNews
from vllm_ascend_pd.vllm_patches.patience import Patience

RANKS, LAYERS, BLOCK, CELL = 8, 61, 128, 256
FIRST_TOKEN_S = 60.0  # added to the clock: P's token is late


class MeasuredScheduler:
    """D's scheduler with its calls timed, by the name of the call."""

    def __init__(self, url: str) -> None:
        keys = PushConfig.parse({"metaserver_urls": [url]})
        engine = Engine(keys, "i" * 16, "engine", "m", "127.0.0.1", Secrets(b"s" * 32))
        self.scheduler = DecodeScheduler(engine, Patience(lambda: 0), longest=1 << 17, vocabulary=150_000)
        regions = tuple(Region(name, BLOCK * CELL, BLOCK * CELL, CELL, CELL) for name in "kv")
        layers = tuple(f"model.layers.{index}.self_attn.attn" for index in range(LAYERS))
        cache = CacheGeometry(BLOCK, RANKS, RANKS, "bfloat16", "plain", regions, (layers,))
        ranks = {(0, rank): WorkerFacts(Endpoint("127.0.0.1", 20_000 + rank), cache) for rank in range(RANKS)}
        self.scheduler.attach_workers(ranks)
        self.url = url
        self.times: dict[str, list[float]] = {}
        self._now: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.thread_time()
        result = call(*arguments)
        self._now[name] = self._now.get(name, 0.0) + time.thread_time() - begin
        return result

    def load(self, name: str, length: int) -> None:
        """Load one request, from its arrival to its end."""
        scheduler, book = self.scheduler, self.scheduler.book
        params = {"do_remote_prefill": True, "metaserver": self.url, "ticket": "t" * 32, "first_token": True}
        sampling = SamplingParams(temperature=0.7, max_tokens=100, extra_args={"kv_transfer_params": params})
        request = Request(name, list(range(1000, 1000 + length)), sampling, None)
        step = SimpleNamespace(recomputed_reqs=None, total_num_scheduled_tokens=1)
        self._now = {}
        count = self.time("wanted", scheduler.wanted, request, 0)
        self.time("reserve", scheduler.allocated, request, [list(range(-(-length // BLOCK)))], count)
        transfer = book.find(name).transfer  # type: ignore[union-attr]
        self.time("four steps", scheduler.metadata, step)
        scheduler._on_outcome(transfer, Outcome("prefilled"))  # the loop thread's
        self.time("four steps", scheduler.metadata, step)
        self.time("reports", scheduler.take_news, WorkerNews(ends=frozenset({LoadEnd(name, None, "p:1/1")})))
        self.time("reports", scheduler.received, name)
        self.time("begin", book.take, time.monotonic() + FIRST_TOKEN_S)
        self.time("begin", scheduler.act)
        self.time("four steps", scheduler.metadata, step)
        self.time("end", scheduler.request_finished, request, True)
        self.time("four steps", scheduler.metadata, step)
        scheduler._online.client.forget(transfer)  # type: ignore[union-attr]
        for each, spent in {**self._now, "all": sum(self._now.values())}.items():
            self.times.setdefault(each, []).append(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192])
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(args.requests)
        print(f"{'µs of the engine thread a request':36}{'undisturbed':>14}{'median':>10}")
        for length in args.tokens:
            measured = MeasuredScheduler(f"http://127.0.0.1:{mute.getsockname()[1]}")
            for index in range(args.requests):
                measured.load(f"r{index}", length)
            for name, times in measured.times.items():
                few, half = (1e6 * sorted(times)[len(times) // part] for part in (10, 2))
                print(f"{f'{length:,} tokens: {name}':36}{few:14.0f}{half:10.0f}", flush=True)
            measured.scheduler.close()


if __name__ == "__main__":
    main()
