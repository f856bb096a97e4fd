# SPDX-License-Identifier: Apache-2.0
"""Cost of a prompt of 1,048,576 tokens beside one of 131,072: D's scheduler, metaserver, P's scheduler, P's plans.

One core, no engine. A model of 61 layers, chunks of 8,192 tokens; block ids are random, so no writes merge. Shows the
best of the rounds.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from vllm_ascend_pd.decode.scheduler.core.book import LoadBook
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.protocol.auth import Secrets, prompt_hash, seal, unseal
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.router.core.bodies import for_prefill, parse
from vllm_ascend_pd.router.reserve import reading

LENGTHS = (131_072, 1_048_576)
CHUNK = 8192
LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(61))
CELL = 256  # bytes: 128 numbers of two bytes
LATENT = 1152
INCARNATION = "0123456789abcdef"


@dataclass(frozen=True)
class LongCase:
    name: str
    block: int
    heads: int
    p_ranks: int
    d_ranks: int

    def cache(self, ranks: int) -> CacheGeometry:
        heads, page = max(1, self.heads // ranks), self.block
        if self.heads == 1:
            regions = [Region("latent", page * LATENT, 0, LATENT, LATENT)]
        else:
            regions = [Region(name, page * heads * CELL, page * CELL, CELL, CELL) for name in "kv"]
        return CacheGeometry(page, self.heads, ranks, "bfloat16", "plain", tuple(regions), (LAYERS,))


CASES = (
    LongCase("GQA, 8 heads, 8 -> 2", 128, 8, 8, 2),
    LongCase("GQA, 8 heads, 8 -> 2", 16, 8, 8, 2),
    LongCase("MLA, 8 -> 1", 128, 1, 8, 1),
)


class Costs:
    """Times of several rounds, and sizes in bytes, by name."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        self.times[name] = min(spent, self.times.get(name, spent))


def walk(case: LongCase, length: int, costs: Costs) -> None:
    """Run one request, from D's blocks to P's last chunk."""
    p, d = case.cache(case.p_ranks), case.cache(case.d_ranks)
    secrets = Secrets(b"s" * 32)
    ids = np.random.default_rng(length).integers(0, 150_000, length).tolist()
    tables = [np.random.default_rng(seed).permutation(length // case.block).astype(np.int32) for seed in (1, 2)]
    endpoints = tuple(Endpoint("127.0.0.1", 20_000 + rank) for rank in range(case.d_ranks))
    with costs("D: reserve, hash the prompt"):
        loads = LoadBook(INCARNATION)
        loads.wanted("r", length, 0)
        bind = loads.reserve("r", length, [tables[0].tolist()], d.tables, 300.0, "a nonce")
        digest = prompt_hash(ids)
        reservation = bind.reservation("a model", d, endpoints, length, digest)
    with costs("D: sign, encode the POST"):
        sealed = seal(reservation, secrets)
        named = {"ticket": "t", "transfer": str(bind.transfer), "decode": INCARNATION}
        body = msgspec.json.encode({**named, "reservation": base64.b64encode(sealed).decode(), "prompt_token_ids": ids})
    request = parse("/v1/completions", b'{"model": "m", "prompt": "p"}')
    with costs("metaserver: read the POST, write P's request"):
        read = reading(body, {"t"})
        for_prefill(request, {"reservation": read.reservation}, read.prompt_token_ids)
    costs.bytes["POST of D"] = len(body)
    costs.bytes["reservation"] = len(sealed)
    costs.bytes["beside the prompt"] = len(body) - len(msgspec.json.encode(ids))
    with costs("P: check the reservation"):
        pushes = PushBook(model="a model", geometry=p)
        taken = unseal(base64.b64decode(read.reservation, validate=True), secrets)
        refusal = pushes.take(0.0, NewRequest("r", (length, prompt_hash(ids)), "a push", taken))
    if refusal is not None:
        raise SystemExit(f"refused: {refusal}")
    planner = StepPlanner(p, 0)
    wanted = np.frombuffer(taken.blocks[0], dtype="<i4").astype(np.int32)
    for first in range(0, length, CHUNK):
        name = {0: "P: plan the first chunk", length - CHUNK: "P: plan the last chunk"}.get(first, "P: plan a chunk")
        with costs(name):
            have = tables[1][: (first + CHUNK) // case.block]
            planner.plan([Job(d, 0, first, first + CHUNK, have, wanted)], first // CHUNK)


def peak(case: LongCase, length: int) -> int:
    """Return the peak of Python's and NumPy's memory in bytes, with the prompt's own ids."""
    tracemalloc.start()
    walk(case, length, Costs())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for case in CASES:
        short, long = Costs(), Costs()
        for _ in range(args.rounds):
            for length, costs in zip(LENGTHS, (short, long), strict=True):
                walk(case, length, costs)
        print(f"\n{case.name}, blocks of {case.block}")
        print(f"{'':46} {LENGTHS[0]:>12,} {LENGTHS[1]:>12,}")
        for name in short.times:
            print(f"{name + ', ms':46} {short.times[name] * 1e3:12.2f} {long.times[name] * 1e3:12.2f}")
        for name in short.bytes:
            print(f"{name + ', bytes':46} {short.bytes[name]:12,} {long.bytes[name]:12,}")
        most = [peak(case, length) >> 20 for length in LENGTHS]
        print(f"{'memory of all of it in one process, MiB':46} {most[0]:12,} {most[1]:12,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
