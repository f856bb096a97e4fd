# SPDX-License-Identifier: Apache-2.0
"""HCCL's stand-in between two processes, called by torch.distributed: results compared with expected values.

python tests/ascend_host/collectives.py         as a process of .venv-ascend-host
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 2


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[1, -2, 3, 70], [5, 6, -7, 70]][rank]).to(dtype)


def expect(what: str, got: torch.Tensor, wanted: list[int]) -> None:
    if got.cpu().tolist() != wanted:
        raise SystemExit(f"{what}: {got.cpu().tolist()}, not {wanted}")


def reductions(rank: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8):
        for op, wanted in (
            (dist.ReduceOp.MAX, [5, 6, 3, 70]),
            (dist.ReduceOp.MIN, [1, -2, -7, 70]),
            (dist.ReduceOp.SUM, [6, 4, -4, -116 if dtype == torch.int8 else 140]),
        ):
            x = of_rank(rank, dtype).npu()
            dist.all_reduce(x, op)
            expect(f"all_reduce {op} {dtype}", x, wanted)
        x = of_rank(rank, dtype).npu()
        half = torch.empty(2, dtype=dtype, device="npu")
        dist.reduce_scatter_tensor(half, x)
        expect(f"reduce_scatter {dtype}", half, [[6, 4], [-4, -116 if dtype == torch.int8 else 140]][rank])


def messages(rank: int) -> None:
    for turn in range(3):
        x = of_rank(rank, torch.float32).npu() + turn
        got = torch.empty_like(x)
        if rank == 0:
            dist.send(x, 1)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0)
            dist.send(x, 0)
        expect(f"message {turn}", got, (of_rank(1 - rank, torch.int64) + turn).tolist())
    x, got = of_rank(rank, torch.float32).npu(), torch.empty(4, device="npu")
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
        work.wait()
    expect("both at once", got, of_rank(1 - rank, torch.int64).tolist())


def worker(rank: int, meeting: str) -> None:
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{meeting}", world_size=SIZE, rank=rank)
    reductions(rank)
    messages(rank)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store",), nprocs=SIZE)
    print("as worked out by hand")


if __name__ == "__main__":
    main()
