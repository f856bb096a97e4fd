# SPDX-License-Identifier: Apache-2.0
"""Scenarios to run with torch_npu: each function is one, named on the command line; a line "name: ok" for each.

An import of torch_npu takes longer than most scenarios, so one process runs several, and others are forked from it
before it uses an NPU (npu_forks.py).
The NPU's result is always compared with the CPU ops' on the same bytes. test_npu_binding.py starts it over the
stand-ins for CANN (STAND_INS=1), test_npu_hardware.py on NPUs, with the scenarios that apply there.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import npu_engine
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_npu
from native_cases import CELLS, pair, plans_of
from npu_forks import Nursery, counted
from unit.geometry.kit import CountedMemory, PlannedCluster, geometry
from unit.kits.watching import running
from unit.regroup.common import EngineCache, RegroupPrompt, config
from unit.regroup.engines import WORK, ProcessEngines
from unit.regroup.prefill import InProcessWorker, RegroupPrefillSite

from vllm_ascend_pd.device.current import current
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.regroup import RegroupPlan
from vllm_ascend_pd.prefill.worker.core.planning import StepPlan
from vllm_ascend_pd.prefill.worker.steps import Steps
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup import ops
from vllm_ascend_pd.regroup.exchange import hang_up

FILL = 0xA5
STAND_INS = "STAND_INS" in os.environ
at_the_end = ExitStack()


def to_npu(tensor: torch.Tensor) -> torch.Tensor:
    on_device = torch.empty(tensor.shape, dtype=tensor.dtype, device="npu")
    on_device.copy_(tensor)
    return on_device


def filled(size: int, device: str) -> torch.Tensor:
    host = torch.full((size,), FILL, dtype=torch.uint8)
    return host if device == "cpu" else to_npu(host)


def views(cache: CountedMemory, device: str) -> list[torch.Tensor]:
    facts = cache.geometry
    cell_views = []
    for region, memory in zip(facts.regions, cache.memory, strict=True):
        blocks = torch.from_numpy(memory).view(cache.blocks, region.block_stride)
        blocks = to_npu(blocks) if device == "npu" else blocks
        cell_views.append(ops.cell_view(blocks, region, len(cache.heads), 1 if region.opaque else facts.block_size))
    return cell_views


def expect(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    host = got.cpu()
    if not torch.equal(host, wanted):
        differing = int((host != wanted).sum())
        raise SystemExit(f"{what}: {differing} of {wanted.numel()} bytes differ")


def refuses(words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (RuntimeError, PdError) as error:
        if words not in str(error):
            raise SystemExit(f"refused with {error!s}, not with {words!r}") from error
        return
    raise SystemExit(f"not refused: {words!r}")


# ---- scenarios


def equal_to_cpu() -> str:
    """Compare every layout with the CPU, rows from the host and programs on the device: gather, scatter, assemble."""
    ops.use_own_kernels(True)
    for kind in ("token", "head", "opaque", "head>token"):
        for cells in CELLS:
            cluster = pair(kind, 8, 4, 2, CELLS[cells], tokens=150)
            plan, cache = plans_of(cluster)[1], cluster.ranks[1]
            host, device = views(cache, "cpu"), views(cache, "npu")
            rows, size = torch.from_numpy(plan.send), sum(plan.send_splits)
            wanted = filled(size, "cpu")
            ops.gather(host, rows, wanted)
            from_rows, from_program = filled(size, "npu"), filled(size, "npu")
            ops.gather(device, rows, from_rows)
            ops.Gather(plan.send, device, from_program)(device, from_program)
            expect(f"{kind} {cells} gather of rows", from_rows, wanted)
            expect(f"{kind} {cells} gather by program", from_program, wanted)
            back = [torch.zeros_like(memory) for memory in map(torch.from_numpy, cache.memory)]
            scatter_both(cache, rows, wanted, back)
            received = torch.randint(0, 256, (sum(plan.receive_splits),), dtype=torch.uint8)
            for slot in plan.slots:
                assemble_both(slot.received, received, slot.nbytes)
    long = np.array([[64, 1, 65536, 0, 0, 64, 0, 0, 64]])  # one row, more moves than a program first has room for
    assemble_both(long, torch.randint(0, 256, (1 << 22,), dtype=torch.uint8), 1 << 22)
    overlapping = np.array([[64, 3, 100, 0, 9000, 16, 0, 6400, 64]])  # no single copy can step through such a source
    assemble_both(overlapping, torch.randint(0, 256, (40_000,), dtype=torch.uint8), 20_000)
    return "ok"


class CountedPages:
    """torch_npu's own op."""

    def __init__(self) -> None:
        self.calls = 0
        self._op = torch.ops.npu.npu_gather_pa_kv_cache
        ops._pages = lambda: self

    def __call__(self, *arguments: torch.Tensor) -> None:
        self.calls += 1
        self._op(*arguments)


class PagesOnHost:
    """Replacement of torch_npu's kernel, which needs CANN, by its documentation."""

    def __init__(self) -> None:
        self.calls = 0
        self._library = torch.library.Library("npu", "IMPL")
        self._library.impl("npu_gather_pa_kv_cache", self, "PrivateUse1")

    def __call__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        seq_offset: torch.Tensor | None = None,
        is_seq_lens_cumsum: bool = False,
    ) -> None:
        if seq_offset is not None or is_seq_lens_cumsum:
            raise SystemExit("only plain lengths are expected")
        self.calls += 1
        for cache, out in ((key_cache, key), (value_cache, value)):
            host = cache.cpu()
            sequences = [
                host[table].flatten(0, 1)[:length]
                for table, length in zip(block_tables.cpu().long(), seq_lens.cpu().tolist(), strict=True)
            ]
            out.copy_(torch.cat(sequences))


def copies() -> str:
    """Run the default on an NPU, without our own kernels: torch_npu's gather of pages where it applies, then copies."""
    pages = PagesOnHost() if STAND_INS else CountedPages()
    paged = 0
    for kind in ("token", "head", "opaque", "token>head", "head>token"):
        for cells in CELLS:
            cluster = pair(kind, 8, 4, 2, CELLS[cells], tokens=300)
            plan, cache = plans_of(cluster)[1], cluster.ranks[1]
            before = pages.calls
            wanted, out = (filled(sum(plan.send_splits), device) for device in ("cpu", "npu"))
            ops.gather(views(cache, "cpu"), torch.from_numpy(plan.send), wanted)
            device = [view.view(torch.int8) for view in views(cache, "npu")]
            gather = ops.Gather(plan.send, device, out)
            for _ in range(2):
                gather(device, out)
                expect(f"{kind} {cells} gather", out, wanted)
            paged += pages.calls - before
            received = torch.randint(0, 256, (sum(plan.receive_splits),), dtype=torch.uint8)
            for slot in plan.slots:
                staged, wanted = filled(slot.nbytes, "npu"), filled(slot.nbytes, "cpu")
                source = to_npu(received)
                ops.assemble(received, torch.from_numpy(slot.received), wanted)
                ops.Assemble(slot.received, source, staged)(source, staged)
                expect(f"{kind} {cells} assemble", staged, wanted)
    bad = np.array([[0, 10**6, 0, 0, 1, 1, 0, 0, 0]])
    refuses("gather: rows[0]: block = 1000000", lambda: ops.Gather(bad, device, out))
    refuses("PD-OPS-004", lambda: gather(device, out[:128]))
    return "ok" if paged else "the gather of pages was never used"


def scatter_both(cache: CountedMemory, rows: torch.Tensor, buffer: torch.Tensor, zeros: list[torch.Tensor]) -> None:
    facts = cache.geometry
    on_host = [zero.clone() for zero in zeros]
    on_device = [to_npu(zero) for zero in zeros]

    def cells(memories: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            ops.cell_view(
                m.view(cache.blocks, r.block_stride), r, len(cache.heads), 1 if r.opaque else facts.block_size
            )
            for m, r in zip(memories, facts.regions, strict=True)
        ]

    ops.scatter(buffer, rows, cells(on_host))
    ops.scatter(to_npu(buffer), rows, cells(on_device))
    for host, device in zip(on_host, on_device, strict=True):
        expect("scatter", device, host)


def assemble_both(rows: np.ndarray, received: torch.Tensor, size: int) -> None:
    wanted, table = filled(size, "cpu"), torch.from_numpy(rows)
    ops.assemble(received, table, wanted)
    source, first, second = to_npu(received), filled(size, "npu"), filled(size, "npu")
    ops.assemble(source, table, first)
    ops.Assemble(rows, source, second)(source, second)
    expect("assemble of rows", first, wanted)
    expect("assemble by program", second, wanted)


def dtypes() -> str:
    """Run any dtype, also those that no NPU op knows: elements are bytes to the ops."""
    raw = torch.randint(0, 256, (6, 2, 16, 64), dtype=torch.uint8)
    rows = np.array([[0, 4, 0, 3, 2, 9, 32, 64, 128]])
    wanted = filled(4096, "cpu")
    ops.gather([raw], torch.from_numpy(rows), wanted)
    on_device = to_npu(raw)
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float32):
        out = filled(4096, "npu")
        ops.gather([on_device.view(dtype)], torch.from_numpy(rows), out)
        expect(str(dtype), out, wanted)
    return "ok"


REFUSED = (  # column, value, part of the error
    (5, 6, "token = 3, tokens = 6, but there are only 8"),
    (6, 200, "buffer offset = 200, heads = 2 x head_stride = 16, tokens = 4 x token_stride = 32, cell = 16 ends past"),
    (8, 8, "buffer head_stride = 16, token_stride = 8 make cells of 16 bytes overlap"),
)


def refusals() -> str:
    ops.use_own_kernels(True)
    cache, out = to_npu(torch.zeros(3, 4, 8, 16, dtype=torch.uint8)), filled(256, "npu")
    good = torch.tensor([[0, 2, 1, 3, 2, 4, 32, 16, 32]])
    bad = good.clone()
    bad[0, 1] = 3
    refuses("gather: rows[0]: block = 3, but it must be in [0, 3)", lambda: ops.gather([cache], bad, out))
    refuses("scatter: rows[0]: block = 3", lambda: ops.scatter(out, bad, [cache]))
    refuses("assemble: rows[0]: cell = 0", lambda: ops.assemble(out, torch.zeros((1, 9), dtype=torch.int64), out))
    refuses("a cache is not on the NPU", lambda: ops.gather([cache.cpu()], good, out))
    refuses("out must be contiguous", lambda: ops.gather([cache], good, out[::2]))
    refuses("caches[0] has 2 dimensions", lambda: ops.gather([cache[0, 0]], good, out))
    refuses("rows must be int64", lambda: ops.gather([cache], good.int(), out))
    refuses("rows has shape [1, 8]", lambda: ops.gather([cache], good[:, :8].contiguous(), out))
    refuses("rows has shape [1, 9], but it must be [n, 12]", lambda: ops.gather([cache], to_npu(good), out))
    refuses("9 caches, but there must be 1 to 8", lambda: ops.gather([cache] * 9, good, out))
    refuses("a cache is on npu:1, not on npu:0", lambda: ops.gather([on_second_device(cache)], good, out))
    overlapping = cache[:, :1].expand(3, 4, 8, 16)
    refuses("caches[0]: head stride = 0, but a cell holds 16", lambda: ops.gather([overlapping], good, out))
    for column, value, words in REFUSED:
        moved = good.clone()
        moved[0, column] = value
        refuses(f"gather: rows[0]: {words}", functools.partial(ops.gather, [cache], moved, out))
    work = ops.Gather(good.numpy(), [cache], out)
    refuses("PD-OPS-004", lambda: work([cache[:2]], out))
    refuses("PD-OPS-004", lambda: work([cache[0]], out))
    refuses("PD-OPS-004", lambda: work([cache], out[:128]))
    moving = ops.Assemble(np.array([[8, 1, 1, 0, 0, 0, 0, 0, 0]]), out, out)
    refuses("PD-OPS-004", lambda: moving(out, out[:128]))
    refuses("block = 3", lambda: ops.Gather(bad.numpy(), [cache], out))
    return "ok"


def on_second_device(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="npu:1")


def no_silent_fallback() -> str:
    """Run without the NPU library: torch_npu would run the CPU's kernel on copies; the package must refuse."""
    cache, out = to_npu(torch.zeros(3, 4, 8, 16, dtype=torch.uint8)), filled(256, "npu")
    rows = torch.tensor([[0, 2, 1, 3, 2, 4, 32, 16, 32]])
    refuses("PD-OPS-002", lambda: ops.gather([cache], rows, out))
    refuses("PD-OPS-002", lambda: ops.assemble(out, rows, out))
    refuses("PD-OPS-002", lambda: ops.scatter(out, rows, [cache]))
    refuses("PD-OPS-001", lambda: ops.use_own_kernels(True))
    ops.Gather(rows.numpy(), [cache], out)([cache], out)  # the default needs no kernels
    return "ok"


def streams() -> str:
    """Check that the stand-in's streams are real: work of another stream is visible after a wait, and not before."""
    ops.use_own_kernels(True)
    raw = torch.randint(0, 256, (6, 2, 16, 64), dtype=torch.uint8)
    rows = np.array([[0, 4, 0, 3, 2, 9, 32, 64, 128]])
    wanted = filled(4096, "cpu")
    ops.gather([raw], torch.from_numpy(rows), wanted)
    cache, side = to_npu(raw), torch.npu.Stream()
    work = ops.Gather(rows, [cache], torch.empty(4096, dtype=torch.uint8, device="npu"))
    torch.npu.synchronize()
    early = 0
    for _ in range(12):
        out, seen = filled(4096, "npu"), torch.empty(4096, dtype=torch.uint8, device="npu")
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            work([cache], out)
            done = torch.npu.Event()
            done.record()
        hasty = torch.empty_like(seen)
        hasty.copy_(out, non_blocking=True)  # nothing orders this copy after the gather
        torch.npu.current_stream().wait_event(done)
        seen.copy_(out, non_blocking=True)
        torch.npu.synchronize()
        expect("after the event", seen, wanted)
        if not done.query():
            raise SystemExit("the event of a finished stream is not done")
        early += not torch.equal(hasty.cpu(), wanted)
    return "ok" if early else "a copy without a wait never came too early: the stand-in hides races"


def exchange(world: int, *, kernels: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        if STAND_INS:
            pids = [nursery().start(_exchange_rank, rank, world, folder, kernels) for rank in range(world)]
            if any(ended := [nursery().wait(pid) for pid in pids]):
                return f"ranks ended with {ended}"
        else:
            mp.spawn(_exchange_rank, (world, folder, kernels), nprocs=world)
        done = sorted(path.name for path in Path(folder).glob("rank*"))
    return "ok" if done == [f"rank{rank}" for rank in range(world)] else f"only {done} came to an end"


def _exchange_rank(rank: int, world: int, folder: str, kernels: bool) -> None:
    """Run gather -> one all_to_all_single over HCCL -> assemble on a separate stream, for three layers."""
    ops.use_own_kernels(kernels)
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    side = torch.npu.Stream()
    for kind in ("token", "head"):
        for heads, d_tp in ((8, 1), (2 * world, max(1, world // 2)), (1, 1)):
            cluster = pair(kind, heads, world, d_tp, (256, 256), tokens=200)
            plans = plans_of(cluster)
            if plans[rank].exchanges:
                _exchange_step(cluster, plans, rank, side)
    torch.npu.synchronize()
    # Shows that the call exists and is accepted; its effect on other ranks needs an NPU.
    hang_up(dist.distributed_c10d._get_default_group(), torch.device("npu", rank))
    dist.destroy_process_group()
    Path(folder, f"rank{rank}").touch()


def _exchange_step(cluster: PlannedCluster, plans: list[RegroupPlan], rank: int, side: torch.npu.Stream) -> None:
    plan, caches = plans[rank], views(cluster.ranks[rank], "npu")
    sent = filled(sum(plan.send_splits), "npu")
    received = filled(sum(plan.receive_splits), "npu")
    slots = [filled(slot.nbytes, "npu") for slot in plan.slots]
    gather = ops.Gather(plan.send, caches, sent)
    gathers = [ops.Gather(slot.own_rows, caches, out) for slot, out in zip(plan.slots, slots, strict=True)]
    rest = [ops.Assemble(slot.received, received, out) for slot, out in zip(plan.slots, slots, strict=True)]
    for _ in range(3):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            gather(caches, sent)
            dist.all_to_all_single(received, sent, plan.receive_splits, plan.send_splits)
            for mine, arrived, out in zip(gathers, rest, slots, strict=True):
                mine(caches, out)
                arrived(received, out)
            done = torch.npu.Event()
            done.record()
        torch.npu.current_stream().wait_event(done)
    for out, wanted in zip(slots, _wanted(cluster, plans, rank), strict=True):
        expect(f"slot of rank {rank}", out, wanted)


def _wanted(cluster: PlannedCluster, plans: list[RegroupPlan], rank: int) -> list[torch.Tensor]:
    """Return the same step's result on the CPU, with all ranks in this process."""
    incoming = []
    for plan in plans:
        send = torch.zeros(sum(plan.send_splits), dtype=torch.uint8)
        ops.gather(views(cluster.ranks[plan.rank], "cpu"), torch.from_numpy(plan.send), send)
        incoming.append(send.split(plan.send_splits)[rank])
    received, expected = torch.cat(incoming), []
    for slot in plans[rank].slots:
        out = filled(slot.nbytes, "cpu")
        ops.gather(views(cluster.ranks[rank], "cpu"), torch.from_numpy(slot.own_rows), out)
        ops.assemble(received, torch.from_numpy(slot.received), out)
        expected.append(out)
    return expected


@functools.cache
def nursery() -> Nursery:
    """Return what forks ranks. Its first call is `main`'s, before a scenario uses an NPU."""
    made = Nursery()
    at_the_end.callback(made.close)
    return made


def _engine_rank(port: int) -> None:
    pages = PagesOnHost()
    npu_engine.serve(port)
    print(f"pages were gathered {pages.calls} times", file=sys.stderr)


@functools.cache
def fleet_of(world: int) -> npu_engine.NpuFleet:
    """Return the workers of engines of this size; they serve all scenarios and end with this process."""
    fleet = npu_engine.NpuFleet(world, nursery(), _engine_rank)
    at_the_end.callback(fleet.close)
    return fleet


def production(world: int, ds: tuple[tuple[int, int], ...], **keys: str) -> str:
    """Run a prefill engine of `world` devices with D's of other sizes, and compare D's memory byte by byte.

    Layer hooks launch the exchanges on a stream of their own; HCCL, staging and writes follow.
    """
    fleet = fleet_of(world)
    with tempfile.TemporaryDirectory() as folder:
        for packed, dtype in ((False, "bfloat16"), (True, "float8_e4m3fn")):
            p = EngineCache("token", world, 8, 8, packed, dtype)
            sites = [EngineCache("token", tp, 8, block, packed, dtype) for tp, block in ds]
            with ProcessEngines(fleet, p, *sites, folder=Path(folder), kind="npu", **keys) as engines:
                for hook in ("by name", "twice"):
                    work = [
                        (site, first, tokens, chunks) for site in range(len(ds)) for _, first, tokens, chunks in WORK
                    ]
                    engines.check(engines.push(work, hook))
                exchanges = engines.exchanges()
                if [(layer, part) for _, layer, part in exchanges] != [(0, 1), (1, 1)] * 6:
                    raise SystemExit(f"not one exchange for each layer and step: {exchanges}")
    return "ok"


@contextmanager
def one_to_one() -> Iterator[tuple[RegroupPrefillSite, npu_engine.NpuDecodeSite]]:
    """Run P and D with TP 1 on NPUs: D's gates are its device's events, and both sides checksum device memory."""
    p, d = EngineCache("token", 1, 4, 8), EngineCache("token", 1, 4, 16)
    site = npu_engine.NpuDecodeSite(d, push=config(verify="full"))
    rank = npu_engine.NpuPrefillRank(p, Contributor(0, 0), lambda *_: None, push=config(verify="full"))
    engine = RegroupPrefillSite(p, [InProcessWorker(rank)])
    with running(engine, site):
        yield engine, site


def load(engine: RegroupPrefillSite, site: npu_engine.NpuDecodeSite, *prompts: RegroupPrompt) -> None:
    """Compute what is left of the prompts in one step, and check what D has of them."""
    engine.admit(*prompts)
    engine.compute(*[(prompt, prompt.tokens - prompt.computed) for prompt in prompts])
    if not engine.ended(*prompts):
        raise SystemExit(f"not loaded: {site.reports}")
    site.check(*prompts)
    engine.finished(*prompts)


def decode() -> str:
    with one_to_one() as (engine, site):
        prompts = [site.reserve(tokens) for tokens in (3, 40, 97)]
        site.step()
        load(engine, site, *prompts)
    return "ok"


def in_flight() -> str:
    """Push a prefix that P's stream is still computing when the step begins that announces it.

    Without the wait for it (Steps._computed_before), D must get other bytes: otherwise this scenario shows nothing.
    """
    busy, other = filled(64, "npu"), filled(64, "npu")
    announce, ended = Steps._computed_before, SimpleNamespace(done=lambda: True)

    def without_a_wait(self: Steps, plan: StepPlan) -> None:
        record, self._record = self._record, lambda: ended
        announce(self, plan)
        self._record = record

    def push() -> None:
        with one_to_one() as (engine, site):
            prompt = site.reserve(97)
            site.step()
            torch.npu.synchronize()
            for _ in range(300):  # each waits for up to STAND_IN_DELAY_US
                busy.copy_(other, non_blocking=True)
            engine.cached_prefix(prompt, 64)
            load(engine, site, prompt)

    push()
    try:
        with mock.patch.object(Steps, "_computed_before", without_a_wait):
            push()
    except SystemExit as failed:
        if "PD-WIRE-004" in str(failed):
            return "ok"
        raise
    return "without the wait D has the same bytes"


def threads() -> str:
    """Check that a thread that reads device memory does not wait for the model's enqueued work.

    The model's thread keeps its stream.
    """
    ops.use_own_kernels(True)
    device = NpuDevice()
    done, seen = filled(64, "npu"), []
    torch.npu.synchronize()
    before = torch.npu.current_stream()
    device.attach_thread()
    if torch.npu.current_stream() != before:
        raise SystemExit("the model's thread got another stream")
    first, second = filled(64, "npu"), filled(64, "npu")
    for _ in range(400):  # each waits for up to STAND_IN_DELAY_US
        first.copy_(second, non_blocking=True)
    behind = device.record()

    def read() -> None:
        device.attach_thread()
        device.attach_thread()
        seen.append((bytes(done.cpu().numpy()), bytes(device.view(done.data_ptr(), 64)), behind.done()))

    reader = threading.Thread(target=read, name="reader")
    reader.start()
    reader.join(60)
    if seen != [(bytes([FILL] * 64), bytes([FILL] * 64), False)]:
        raise SystemExit(f"the reader waited for the model, or read something else: {seen}")
    with device.planning():
        ops.Gather(np.array([[0, 0, 0, 0, 1, 1, 0, 8, 8]]), [done.view(1, 1, 8, 8)], second)
    with device.planning():
        table = filled(64, "npu")
    if behind.done() or not torch.equal(table.cpu(), filled(64, "cpu")):
        raise SystemExit("planning a step waited for the model, or its table is wrong")
    torch.npu.synchronize()
    if not behind.done():
        raise SystemExit("the event of a finished stream is not done")
    refuses("aclrtMemcpy of 64 bytes", lambda: device.view(0, 64))
    return "ok"


def let_go() -> str:
    """Check that a call's table and buffers keep their memory until it has run, although nothing else keeps them.

    The allocator may give what is free to the next caller, on the stream for which it was allocated.
    """
    device, pages = NpuDevice(), PagesOnHost() if STAND_INS else None
    side = torch.npu.Stream()
    raw = torch.randint(0, 256, (40, 16, 2, 64), dtype=torch.uint8)
    caches = [to_npu(raw).view(torch.int8).permute(0, 2, 1, 3) for _ in range(2)]
    rows = np.array([[n % 2, 2 * n, 0, 0, 2, 16, n * 4096, 64, 128] for n in range(20)])
    wanted = filled(20 * 4096, "cpu")
    ops.gather([raw.permute(0, 2, 1, 3)] * 2, torch.from_numpy(rows), wanted)
    for kernels in (True, False):
        ops.use_own_kernels(kernels)
        out, busy = filled(20 * 4096, "npu"), filled(64, "npu")
        with device.planning():
            gather = ops.Gather(rows, caches, out)
        torch.npu.synchronize()
        with torch.npu.stream(side):
            if kernels:
                for _ in range(5):  # each waits for up to STAND_IN_DELAY_US
                    busy.copy_(busy.clone(), non_blocking=True)
            gather(caches, out)
        del gather
        with device.planning():
            later = [filled(size, "npu") for size in (1 << np.arange(9, 19)).tolist() for _ in range(4)]
        torch.npu.synchronize()
        expect(f"gather, {'own kernels' if kernels else 'by copies'}", out, wanted)
        del later
    if pages is not None and not pages.calls:
        raise SystemExit("no pages were gathered")
    return "ok"


def devices() -> str:
    """Check that a new thread gets the device of the model's thread: a rank's is the first one only for rank 0."""
    seen = []
    torch.npu.set_device(1)
    device = NpuDevice()

    def attach() -> None:
        seen.append(torch.npu.current_device())
        device.attach_thread()
        seen.append(torch.npu.current_device())
        seen.append(filled(8, "npu").device.index)

    thread = threading.Thread(target=attach, name="writer")
    thread.start()
    thread.join(60)
    return "ok" if seen == [0, 1, 1] else str(seen)


def formats() -> str:
    """Check fractal formats, which cannot be cut at tokens, whatever their shape is.

    The device is vLLM's platform's.
    """
    platforms: Any = SimpleNamespace(current_platform=SimpleNamespace(device_type="npu"))
    sys.modules["vllm.platforms"] = platforms
    device, shape = current(), (4, 16, 2, 64)
    plain = [torch.empty(shape[skip:], dtype=torch.float16, device="npu") for skip in (0, 1, 2)]
    plain.append(torch.empty((2, *shape), dtype=torch.float16, device="npu")[0])
    fractal = torch_npu.empty_with_format(shape, dtype=torch.float16, device="npu", acl_format=29)
    packings = [device.packing(cache, 16, 64) for cache in (*plain, fractal)]
    return "ok" if packings == [("plain", False)] * 4 + [("npu-format-29", True)] else str(packings)


def speed() -> str:
    """Print GB/s of one layer of Llama-70B 8 -> 2 on one rank, 8,192 tokens, by each path.

    Beside them a plain copy of as many bytes.
    """
    facts = geometry("token", heads=8, tp=8, block=128, cells=(256, 256))
    cluster = PlannedCluster(
        facts, [geometry("token", heads=8, tp=2, block=128, cells=(256, 256))], [(0, 0, 8192)], seed=4
    )
    plan, caches = plans_of(cluster)[1], [view.view(torch.bfloat16) for view in views(cluster.ranks[1], "npu")]
    sent, received = (filled(sum(splits), "npu") for splits in (plan.send_splits, plan.receive_splits))
    slot, other = filled(plan.slots[0].nbytes, "npu"), torch.empty_like(sent)
    runs: dict[str, tuple[int, Callable[[], object]]] = {"copy": (sent.nbytes, lambda: other.copy_(sent))}
    for path, kernels in (("torch_npu", False), ("own kernels", True)):
        if kernels and not ops.has_kernel("gather", "npu") and not ops._NPU_LIBRARY.is_file():
            continue
        ops.use_own_kernels(kernels)
        gather, assemble = ops.Gather(plan.send, caches, sent), ops.Assemble(plan.slots[0].received, received, slot)
        runs[f"gather, {path}"] = sent.nbytes, functools.partial(gather, caches, sent)
        runs[f"assemble, {path}"] = slot.nbytes, functools.partial(assemble, received, slot)
    for name, (nbytes, run) in runs.items():
        seconds = []
        for _ in range(20):
            torch.npu.synchronize()
            begun = time.perf_counter()
            run()
            torch.npu.synchronize()
            seconds.append(time.perf_counter() - begun)
        print(f"figure: {name}: {nbytes / min(seconds) / 1e9:.1f} GB/s, {min(seconds) * 1e6:.0f} us")
    return "ok"


def schemas() -> str:
    """Check the declarations of torch_npu's ops that the default path on the NPU calls."""
    return str(torch.ops.npu.npu_gather_pa_kv_cache.default._schema)


SCENARIOS: dict[str, Callable[[], str]] = {
    "equal_to_cpu": equal_to_cpu,
    "dtypes": dtypes,
    "refusals": refusals,
    "no_silent_fallback": no_silent_fallback,
    "streams": streams,
    "copies": copies,
    "exchange2": lambda: exchange(2, kernels=True),
    "exchange4": lambda: exchange(4, kernels=True),
    "exchange2 by copies": lambda: exchange(2, kernels=False),
    "exchange over all devices": lambda: exchange(torch.npu.device_count(), kernels=False),
    "exchange over all devices, own kernels": lambda: exchange(torch.npu.device_count(), kernels=True),
    "speed": speed,
    "schemas": schemas,
    "production 2": lambda: production(2, ((1, 16),)),
    "production 4": lambda: production(4, ((2, 8), (1, 16))),
    "production 4 with own kernels": lambda: production(4, ((1, 16), (2, 4)), regroup_kernels="own", verify="full"),
    "decode": decode,
    "threads": threads,
    "let_go": let_go,
    "in_flight": in_flight,
    "devices": devices,
    "formats": formats,
}


def main(names: Sequence[str]) -> int:
    failed = 0
    with at_the_end:
        if STAND_INS:
            nursery()
        at_the_end.enter_context(counted())
        for name in names:
            ops.use_own_kernels(False)  # as in a new process
            try:
                result = SCENARIOS[name]()
            except (Exception, SystemExit) as error:  # noqa: BLE001  its scenario has failed, others go on
                traceback.print_exc()
                result = f"failed: {error}"
                failed += 1
            print(f"{name}: {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
