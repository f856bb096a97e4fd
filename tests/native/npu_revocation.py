# SPDX-License-Identifier: Apache-2.0
"""Revocation between two devices: a writer that is stopped in the middle of a write must hit nothing afterwards.

    python npu_revocation.py [--protocol ascend|tcp] [--megabytes N] [--devices 0,1] [--keep]

The child writes to the parent from its own device, and is stopped with a part of its write landed; the parent revokes
access and clears its memory; the child continues with the rest, then writes once more to the session that it knows.
No byte may arrive then; through the new session all must. With `--keep` nothing is revoked, which shows that this
program detects failures. Prints a line "figure: …", then "ok" or "wrong".
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from npu_transfer import DeviceMemory, write

SPAN = 4 << 10
ATTEMPTS = 10
SETTLE_S = 2.0  # work that the stopped process has given to its device continues, which revocation does not prevent
LIMIT_S = 60.0


class WritingProcess:
    """The child process, from the parent's side."""

    def __init__(self, size: int, protocol: str, devices: Sequence[int]) -> None:
        command = [sys.executable, __file__, "--write", "--protocol", protocol, "--megabytes", str(size >> 20)]
        command += ["--devices", ",".join(map(str, devices))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.line() != "ready":
            raise SystemExit("the writing process did not start")

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(size: int, protocol: str, device: int) -> None:
    """Write ones wherever the parent says."""
    memory = DeviceMemory(size, protocol, device)
    memory.bytes.fill_(1)
    print("ready", flush=True)
    for line in sys.stdin:
        session, base = line.split()
        print(write(memory, session, int(base), SPAN)[1], flush=True)


def landed(memory: DeviceMemory) -> int:
    return int(torch.count_nonzero(memory.bytes))


def catch(memory: DeviceMemory, writer: WritingProcess) -> bool:
    """Stop the writer with a part of its write landed. It writes the last span last."""
    for _ in range(ATTEMPTS):
        memory.fill(None)
        writer.say(memory.target.session, memory.bytes.data_ptr())
        until = time.monotonic() + LIMIT_S
        while not int(memory.bytes[0]) and time.monotonic() < until:
            pass
        writer.signal(signal.SIGSTOP)
        time.sleep(SETTLE_S)
        if int(memory.bytes[0]) and not int(memory.bytes[-1]):
            return True
        writer.signal(signal.SIGCONT)
        writer.line()
    return False


def run(size: int, protocol: str, devices: Sequence[int], *, keep: bool) -> bool:
    memory = DeviceMemory(size, protocol, devices[1])
    memory.fill(None)
    writer = WritingProcess(size, protocol, devices)
    try:
        base, old = memory.bytes.data_ptr(), memory.target.session
        writer.say(old, base)
        if writer.line() != "landed" or landed(memory) != size:
            print("figure: nothing arrives even before the revocation")
            return False
        if not catch(memory, writer):
            print(f"figure: the writer was never caught in the middle of a write in {ATTEMPTS} attempts")
            return False
        before = landed(memory)
        new = old if keep else memory.target.revoke()
        memory.fill(None)  # the memory has another owner now
        writer.signal(signal.SIGCONT)
        woken = writer.line()
        time.sleep(SETTLE_S)
        late = landed(memory)
        memory.fill(None)
        writer.say(old, base)
        old_state = writer.line()
        time.sleep(SETTLE_S)
        cached = landed(memory)
        memory.fill(None)
        writer.say(new, base)
        state, whole = writer.line(), landed(memory)
    finally:
        writer.end()
        memory.close()
    right = not late and not cached and state == "landed" and whole == size
    print(
        f"figure: revocation over {protocol}, writer stopped with {before / size:.0%} landed: {late} bytes landed when it "
        f"woke ({woken}), {cached} through the old session ({old_state}), "
        f"{whole / size:.0%} through the new one ({state}), " + ("as it must be" if right else "WRONG")
    )
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=("ascend", "tcp"), default="ascend")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--devices", default="0,1", help="of the writer and of the receiver")
    parser.add_argument("--keep", action="store_true", help="do not revoke: must end with WRONG")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.protocol == "ascend":
        import torch_npu  # noqa: F401 (registers the device)
    size, devices = args.megabytes << 20, [int(word) for word in args.devices.split(",")]
    if args.write:
        serve(size, args.protocol, devices[0])
        return
    right = run(size, args.protocol, devices, keep=args.keep)
    print("ok" if right else "wrong")
    sys.exit(not right)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
