# SPDX-License-Identifier: Apache-2.0
"""Two hosts for tests: two network namespaces of this machine, joined by a wire.

The test's thread, and what it starts, is on the first. Each host has its own loopback, so nothing arrives that is sent
to a wrong host. The addresses exist in these namespaces only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tools.support.checks import eventually

WIRE = "pd0"
HERE, THERE = "10.213.0.1", "10.213.0.2"
CLONE_NEWNET = 0x40000000


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def _entered(holder: subprocess.Popen[bytes]) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder.pid}/ns/net")


def _join(path: str) -> None:
    """Move this thread, and what it starts from now on, into a network namespace."""
    with Path(path).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")


@contextmanager
def _holding() -> Iterator[subprocess.Popen[bytes]]:
    """Hold a new network namespace by a process that only sleeps."""
    our_namespace = Path("/proc/self/ns/net").readlink()
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        eventually(
            lambda: holder.poll() is not None or Path(f"/proc/{holder.pid}/ns/net").readlink() != our_namespace,
            "unshare",
        )
        yield holder
    finally:
        holder.kill()
        holder.wait(10.0)


@contextmanager
def two_hosts(*more_tools: str) -> Iterator[tuple[str, ...]]:
    """Yield words before a command that run it on the second host."""
    for needed in ("unshare", "nsenter", "ip", *more_tools):
        if shutil.which(needed) is None:
            pytest.skip(f"this machine has no {needed}")
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False, timeout=20
    )
    if tried.returncode:
        pytest.skip(f"this machine allows no network namespaces: {tried.stderr.strip()}")
    with ExitStack() as stack:
        first, second = (stack.enter_context(_holding()) for _ in range(2))
        run(*_entered(first), "ip", "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", str(second.pid))
        for holder, address in ((first, HERE), (second, THERE)):
            for words in (f"addr add {address}/24 dev {WIRE}", f"link set {WIRE} up", "link set lo up"):
                run(*_entered(holder), "ip", *words.split())
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, before)
        stack.callback(_join, f"/proc/self/fd/{before}")
        _join(f"/proc/{first.pid}/ns/net")
        yield _entered(second)
