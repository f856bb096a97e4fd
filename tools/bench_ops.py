# SPDX-License-Identifier: Apache-2.0
"""GB/s of gather and assemble on the CPU, beside memcpy and beside the torch expression that computes the same.

All run in turn within each round, with the same threads over the same number of bytes. A shape is one P rank's part of
a step: `blocks` D blocks, K and V (or the MLA latent), D ranks and owners as geometry.md divides them, block ids
shuffled as in a used free list.

`--tails` measures something else: the processor time in which D clears its last blocks behind a prompt's last token.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from vllm_ascend_pd.device import caches
from vllm_ascend_pd.device.base import PLAIN, Packing
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.device.tails import BlockTails
from vllm_ascend_pd.geometry.images import BUFFER_ROW, CACHE_ROW
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.regroup import ops

BLOCK = 128


@dataclass(frozen=True)
class HeadShape:
    """Head counts of one P rank and one D rank; both sides are token-major."""

    name: str
    p_heads: int
    d_heads: int
    cell: int = 256
    regions: int = 2

    @property
    def d_ranks(self) -> int:
        """Return the number of D ranks that divide the rank's heads (P < D), else 1."""
        return max(1, self.p_heads // self.d_heads)

    @property
    def sources(self) -> int:
        """Return the number of ranks whose heads lie side by side in one D block."""
        return max(1, self.d_heads // self.p_heads)

    @property
    def gather_slice(self) -> int:
        """Return the number of contiguous bytes that gather copies at once."""
        return self.cell * min(self.p_heads, self.d_heads) if self.d_ranks > 1 else BLOCK * self.cell * self.p_heads

    @property
    def assemble_slice(self) -> int:
        return BLOCK * self.cell * self.p_heads if self.sources == 1 else self.cell * self.p_heads


SHAPES = (
    HeadShape("Llama-70B 8->2", p_heads=1, d_heads=4),
    HeadShape("Llama-70B 8->4", p_heads=1, d_heads=2),
    HeadShape("Llama-70B 4->8 (pack)", p_heads=2, d_heads=1),
    HeadShape("Qwen3-235B 16->2", p_heads=1, d_heads=2),
    HeadShape("Llama-70B 2->1", p_heads=4, d_heads=8),
    HeadShape("MHA-64 8->2", p_heads=8, d_heads=32),
    HeadShape("DeepSeek-V3 MLA 16->4", p_heads=1, d_heads=1, cell=1152, regions=1),
)


class OpsCase:
    """Tensors and rows of one shape, and the four compared functions."""

    def __init__(self, shape: HeadShape, megabytes: int, seed: int) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        per_block = BLOCK * shape.p_heads * shape.cell
        self.units = (megabytes << 20) // (per_block * shape.regions) // shape.sources * shape.sources
        dims = (self.units * 5 // 4, BLOCK, shape.p_heads, shape.cell // 2)
        self.caches = [torch.empty(dims, dtype=torch.bfloat16) for _ in range(shape.regions)]
        for cache in self.caches:
            cache.view(torch.int16).random_(generator=generator)
        self.views = [cache.permute(0, 2, 1, 3) for cache in self.caches]
        self.ids = torch.randperm(dims[0], generator=generator)[: self.units]
        self.bytes = self.units * per_block * shape.regions
        self.send = torch.zeros(self.bytes, dtype=torch.uint8)
        self.staging = torch.zeros(self.bytes, dtype=torch.uint8)
        self.gather_rows = torch.from_numpy(self._gather_rows())
        self.assemble_rows = torch.from_numpy(self._assemble_rows())
        self.selected = torch.zeros((self.units, *dims[1:]), dtype=torch.bfloat16)
        self.source = torch.zeros(self.bytes, dtype=torch.uint8)

    def _gather_rows(self) -> np.ndarray:
        """Return gather's rows, ordered by block, so that each is read from memory once.

        The send buffer has the order (D rank, unit, region), each chunk the order [token, head].
        """
        s = self.shape
        heads = s.p_heads // s.d_ranks
        chunk = BLOCK * heads * s.cell
        unit, region, rank = (a.ravel() for a in np.indices((self.units, s.regions, s.d_ranks)))
        rows = np.zeros((rank.size, len(CACHE_ROW)), dtype=np.int64)
        rows[:, 0], rows[:, 1] = region, self.ids.numpy()[unit]
        rows[:, 2], rows[:, 4], rows[:, 5] = rank * heads, heads, BLOCK
        rows[:, 6] = ((rank * self.units + unit) * s.regions + region) * chunk
        rows[:, 7], rows[:, 8] = s.cell, heads * s.cell
        return rows

    def _assemble_rows(self) -> np.ndarray:
        """Return assemble's rows: from (source, unit, region) as received to (region, unit) as staged.

        Each token has the sources' heads side by side.
        """
        s = self.shape
        units = self.units // s.sources
        slice_ = s.cell * s.p_heads
        chunk, block = BLOCK * slice_, BLOCK * slice_ * s.sources
        unit, region, source = (a.ravel() for a in np.indices((units, s.regions, s.sources)))
        rows = np.zeros((unit.size, len(BUFFER_ROW)), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = s.cell, s.p_heads, BLOCK
        rows[:, 3] = ((source * units + unit) * s.regions + region) * chunk
        rows[:, 4], rows[:, 5] = s.cell, slice_
        rows[:, 6] = (region * units + unit) * block + source * slice_
        rows[:, 7], rows[:, 8] = s.cell, slice_ * s.sources
        return rows

    def gather(self) -> None:
        ops.gather(self.views, self.gather_rows, self.send)

    def assemble(self) -> None:
        ops.assemble(self.send, self.assemble_rows, self.staging)

    def torch_gather(self) -> None:
        s = self.shape
        heads = s.p_heads // s.d_ranks
        out = self.staging.view(torch.bfloat16).view(s.d_ranks, self.units, s.regions, BLOCK, heads, s.cell // 2)
        for region, cache in enumerate(self.caches):
            torch.index_select(cache, 0, self.ids, out=self.selected)
            split = self.selected.view(self.units, BLOCK, s.d_ranks, heads, s.cell // 2)
            out[:, :, region].copy_(split.permute(2, 0, 1, 3, 4))

    def torch_assemble(self) -> None:
        s = self.shape
        units = self.units // s.sources
        received = self.send.view(torch.bfloat16).view(s.sources, units, s.regions, BLOCK, s.p_heads, s.cell // 2)
        out = self.source.view(torch.bfloat16).view(s.regions, units, BLOCK, s.sources, s.p_heads, s.cell // 2)
        out.copy_(received.permute(2, 1, 3, 0, 4, 5))

    def check(self) -> None:
        """Check that the compared functions compute the same."""
        self.gather()
        self.torch_gather()
        if not torch.equal(self.send, self.staging):
            raise SystemExit(f"{self.shape.name}: gather differs from torch")
        self.assemble()
        self.torch_assemble()
        if not torch.equal(self.staging, self.source):
            raise SystemExit(f"{self.shape.name}: assemble differs from torch")


class Memcpy:
    """The C library's memcpy, each thread over its share."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._memmove = ctypes.CDLL(None).memmove
        self._memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memmove.restype = ctypes.c_void_p

    def __call__(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        cuts = [dst.numel() * i // self._threads for i in range(self._threads + 1)]
        futures = [
            self._pool.submit(self._memmove, dst.data_ptr() + lo, src.data_ptr() + lo, hi - lo)
            for lo, hi in itertools.pairwise(cuts)
        ]
        for future in futures:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()


def measure(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of each function by round: within a round all run under the same conditions."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(0.005)  # threads of the function before may still spin on these cores
            start = time.perf_counter()
            run()
            if round_:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def describe(shape: HeadShape, size: int, seconds: dict[str, np.ndarray]) -> str:
    """Return a line: rates from the best round, ratios as the median of the rounds' own ratios."""
    best = {name: size / values.min() / 1e9 for name, values in seconds.items()}
    line = f"{shape.name:24} {best['memcpy']:7.1f}"
    for op, slice_ in (("gather", shape.gather_slice), ("assemble", shape.assemble_slice)):
        to_memcpy = np.median(seconds["memcpy"] / seconds[op])
        to_torch = np.median(seconds[f"torch {op}"] / seconds[op])
        line += f" | {slice_:7} {best[op]:8.1f} {to_memcpy:7.2f} {best[f'torch {op}']:6.1f} {to_torch:6.1f}"
    return line


class NpuLayoutDevice(CpuDevice):
    """Host memory with the layout of an NPU's caches. vLLM's planes on a CPU have no order of tokens."""

    token_major = True

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        return PLAIN


TAILS = {  # layers; heads and head size of each tensor of a layer
    "32 layers, 8 KV heads x 128": (32, 8, (128, 128)),
    "the same, one byte a cell": (32, 8, (1, 1)),
    "61 layers, MLA 512 + 64": (61, 1, (512, 64)),
    "61 layers, MLA 576": (61, 1, (576,)),
}


@torch.inference_mode()  # as vLLM's workers run
def tails(rounds: int) -> None:
    """Print microseconds of a load in steps of 1, 8 and 64 loads: one token to a whole block is to be cleared."""
    print(f"{'D clears its last blocks, us a load':36}" + "".join(f"{f'{count} loads':>10}" for count in (1, 8, 64)))
    blocks, table = 64, np.arange(33, dtype=np.int32)
    for name, (layers, heads, sizes) in TAILS.items():
        dtype = torch.int8 if sizes[0] == 1 else torch.bfloat16
        parts = {
            f"l.{layer}": tuple(torch.ones(blocks, BLOCK, heads, size, dtype=dtype) for size in sizes)
            for layer in range(layers)
        }
        shape = caches.CacheShape(BLOCK, heads, heads, max(sizes), tp_size=1)
        cleared = BlockTails(caches.describe(parts, shape, NpuLayoutDevice()), 0)
        line = f"{name:36}"
        for count in (1, 8, 64):
            ends = [32 * BLOCK + (64 + 61 * n) % BLOCK for n in range(count)]
            binds = [Bind("r", TransferId("d", 1, "bench"), 0, end, (table,), 1.0, (1,)) for end in ends]
            least = min(_seconds(cleared, binds) for _ in range(rounds))
            line += f"{least / count * 1e6:10.0f}"
        print(line, flush=True)


def _seconds(cleared: BlockTails, binds: list[Bind]) -> float:
    began = time.thread_time()
    for bind in binds:
        cleared.clear(bind)
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--megabytes", type=int, default=128, help="payload of each run")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tails", action="store_true", help="measure only what D clears")
    args = parser.parse_args()
    if args.tails:
        torch.set_num_threads(1)
        tails(args.rounds)
        return
    torch.set_num_threads(args.threads)
    memcpy = Memcpy(args.threads)
    print(
        f"{args.threads} threads, {args.megabytes} MiB of payload, GB/s (best of {args.rounds} rounds; ratios: median)"
    )
    head = "".join(
        f" | {'slice B':>7} {op:>8} {'/memcpy':>7} {'torch':>6} {'/torch':>6}" for op in ("gather", "assemble")
    )
    print(f"{'shape':24} {'memcpy':>7}{head}")
    for shape in SHAPES:
        case = OpsCase(shape, args.megabytes, seed=1)
        case.check()
        runs: dict[str, Callable[[], None]] = {
            "memcpy": functools.partial(memcpy, case.send, case.source),
            "gather": case.gather,
            "torch gather": case.torch_gather,
            "assemble": case.assemble,
            "torch assemble": case.torch_assemble,
        }
        print(describe(shape, case.bytes, measure(runs, args.rounds)), flush=True)
    memcpy.close()


if __name__ == "__main__":
    main()
