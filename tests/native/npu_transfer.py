# SPDX-License-Identifier: Apache-2.0
"""Mooncake writes from one device into another: each byte compared by checksum, GB/s for spans of several sizes.

    python npu_transfer.py [--protocol ascend|tcp] [--megabytes N] [--devices 0,1]

With `tcp` memory is the host's, which shows without an NPU that this program is right. The parent writes, a child
of its own device receives. Prints a line "figure: …" per size of span, then "ok".
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_ascend_pd.config import WireConfig
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.create import create_target, create_wire

LOOPBACK = "127.0.0.1"
ALIGNMENT = 2 << 20  # size of an NPU's pages
SPANS = (4 << 10, 16 << 10, 128 << 10, 1 << 20)
DEADLINE_S = 120.0


class DeviceMemory:
    """Aligned bytes on a device, registered with a target and a wire."""

    def __init__(self, size: int, protocol: str, device: int) -> None:
        self.device = f"npu:{device}" if protocol == "ascend" else "cpu"
        if protocol == "ascend":
            torch.npu.set_device(device)
        whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=self.device)
        skip = -whole.data_ptr() % ALIGNMENT
        self.bytes = whole[skip : skip + size]
        asked = WireConfig(mooncake_protocol=protocol)
        self.target = create_target(asked, LOOPBACK)
        self.wire = create_wire(asked, LOOPBACK, quiet_s=asked.transfer_timeout_s + 10.0, target=self.target)
        self.target.register([(self.bytes.data_ptr(), size)])
        self.wire.register([(self.bytes.data_ptr(), size)])

    def fill(self, seed: int | None) -> None:
        size = self.bytes.numel()
        host = (
            np.zeros(size, np.uint8) if seed is None else np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        )
        self.bytes.copy_(torch.from_numpy(host))

    def close(self) -> None:
        self.wire.close()
        self.target.close()

    def sum(self) -> str:
        return hashlib.sha256(self.bytes.cpu().numpy().tobytes()).hexdigest()


def receive(size: int, protocol: str, device: int) -> None:
    """Print the session and the address, then run commands: clear, sum, end."""
    memory = DeviceMemory(size, protocol, device)
    memory.fill(None)
    print(memory.target.session, memory.bytes.data_ptr(), flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "end":
            break
        if word == "clear":
            memory.fill(None)
        print(memory.sum(), flush=True)
    memory.close()


def write(memory: DeviceMemory, session: str, base: int, span: int) -> tuple[float, str]:
    """Write every span to its place, in an order in which no two neighbours can be merged.

    Return the seconds and an error.
    """
    count = memory.bytes.numel() // span
    order = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]) * span
    here, there = (order + memory.bytes.data_ptr()).tolist(), (order + base).tolist()
    begun = time.perf_counter()
    handle = memory.wire.submit(session, here, there, [span] * count)
    state = WriteState.PENDING
    while state is WriteState.PENDING and time.perf_counter() - begun < DEADLINE_S:
        state = memory.wire.poll(handle)
        time.sleep(0.0001)
    return time.perf_counter() - begun, state.value


def run(size: int, protocol: str, devices: Sequence[int]) -> int:
    command = [sys.executable, __file__, "--receive", "--protocol", protocol, "--megabytes", str(size >> 20)]
    command += ["--devices", ",".join(map(str, devices))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert child.stdin is not None and child.stdout is not None

    def ask(word: str) -> str:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(word + "\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    try:
        memory = DeviceMemory(size, protocol, devices[0])
        session, base = child.stdout.readline().split()
        wrong = 0
        write(memory, session, int(base), SPANS[-1])  # the first contact is not measured
        for seed, span in enumerate(SPANS):
            memory.fill(seed)
            empty = ask("clear")
            seconds, state = write(memory, session, int(base), span)
            right = state == "landed" and ask("sum") == memory.sum() != empty
            wrong += not right
            verdict = (
                "checksums equal" if right else f"WRONG: the write is {state}, or what arrived is not what was sent"
            )
            print(f"figure: mooncake {protocol}, spans of {span >> 10} KiB: {size / seconds / 1e9:.2f} GB/s, {verdict}")
        memory.close()
        child.stdin.write("end\n")
        child.stdin.flush()
        child.wait(60)
    finally:
        child.kill()
        child.wait()
    print("wrong" if wrong else "ok")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=("ascend", "tcp"), default="ascend")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--devices", default="0,1", help="of the writer and of the receiver")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.protocol == "ascend":
        import torch_npu  # noqa: F401 (registers the device)
    size, devices = args.megabytes << 20, [int(word) for word in args.devices.split(",")]
    if args.receive:
        receive(size, args.protocol, devices[1])
    else:
        sys.exit(bool(run(size, args.protocol, devices)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
