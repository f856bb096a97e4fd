# SPDX-License-Identifier: Apache-2.0
"""Messages, recording ends and a child process for the side channel's tests. Real sockets on loopback.

    python -m unit.channel.kit PORT INCARNATION [SECRET]

dials PORT, sends a message every 20 ms, and prints `up` when the greeting is complete.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

from tools.support.process import freeze
from vllm_ascend_pd.channel.connection import Connection, Ending
from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.channel.frames import CLEAR, OF_WORKERS, Goodbye, decode_clear
from vllm_ascend_pd.channel.limits import ChannelLimits
from vllm_ascend_pd.channel.link import Context
from vllm_ascend_pd.channel.listener import Listener
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Ack, Cancel, Message
from vllm_ascend_pd.protocol.versions import OURS, Release

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).parents[3]
FAST = ChannelLimits(
    greeting_s=3.0,
    frame_s=0.5,
    linger_s=0.5,
    sweep_s=0.02,
    backoff_first_s=0.01,
    backoff_max_s=0.05,
    message_ttl_s=60.0,
)
IMPATIENT = replace(FAST, greeting_s=0.3)
NO_RETURN = replace(FAST, backoff_first_s=3600.0, backoff_max_s=3600.0)  # a lost connection is not made again


def message(seq: int = 0, p: str = "p-1", text: str = "") -> Cancel:
    """A message with a text of any length; its kind does not matter here."""
    return Cancel(
        transfer=TransferId("d-1", 1, "u"),
        push="push",
        p_incarnation=p,
        d_incarnation="d-1",
        contributor=Contributor(0, 0),
        d_rank=0,
        seq=seq,
        failure=Failure("PD-XFER-002", text),
    )


def answer(to: Message) -> Ack:
    head = {name: getattr(to, name) for name in Ack.__struct_fields__ if name != "kind"}
    return Ack(kind="cancel", **head)


class AnsweringListener:
    """A listener that answers every message and records what it received."""

    def __init__(
        self,
        secrets: Secrets | None = None,
        limits: ChannelLimits = FAST,
        port: int = 0,
        release: Release = OURS,
        host: str = LOOPBACK,
        accepts: tuple[type, ...] = OF_WORKERS,
    ) -> None:
        self.heard: list[tuple[str, int]] = []
        self.events: list[tuple[str, str]] = []
        self.faults: Counter[str] = Counter()
        self.listener = Listener(
            host=host,
            port=port,
            incarnation="d-1",
            secrets=secrets,
            on_message=self._on_message,
            on_gone=lambda peer: self.events.append(("gone", peer)),
            on_back=lambda peer: self.events.append(("back", peer)),
            count=lambda reason: self.faults.update([reason]),
            limits=limits,
            release=release,
            accepts=accepts,
        )
        self.endpoint = Endpoint(LOOPBACK, 1)
        self.accepted = 0
        self.endings: list[Ending] = []
        self._take, self._lose = self.listener.connected, self.listener.ended
        self.listener.connected = self._connected  # type: ignore[method-assign]
        self.listener.ended = self._ended  # type: ignore[method-assign]

    def _connected(self, connection: Connection) -> None:
        self.accepted += 1
        self._take(connection)

    def _ended(self, connection: Connection, ending: Ending, detail: str) -> None:
        self.endings.append(ending)
        self._lose(connection, ending, detail)

    async def __aenter__(self) -> AnsweringListener:
        self.endpoint = await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()

    def stats(self) -> dict[str, int]:
        """Return the faults that the listener counted, and the connections that it has."""
        mine = self.listener
        return {**self.faults, "connections": len(mine.callers), "unproven": len(mine.unproven)}

    def connected_to(self, incarnation: str) -> bool:
        callers = self.listener.callers.values()
        return any(one.proven and one.hello is not None and one.hello.incarnation == incarnation for one in callers)

    def _on_message(self, peer: Hashable, got: Message) -> None:
        self.heard.append((str(peer), got.seq))
        self.listener.send(peer, answer(got))


class RecordingDialer:
    """A dialer that records what it received."""

    def __init__(
        self,
        p: str = "p-1",
        secrets: Secrets | None = None,
        limits: ChannelLimits = FAST,
        release: Release = OURS,
        accepts: tuple[type, ...] = OF_WORKERS,
    ) -> None:
        self.p = p
        self.got: list[Message] = []
        self.unreachable: list[str] = []
        self.faults: Counter[str] = Counter()
        context = Context(
            incarnation=p,
            name="dialing",
            secrets=secrets,
            on_message=lambda _, got: self.got.append(got),
            on_unreachable=lambda _, detail: self.unreachable.append(detail),
            count=lambda reason: self.faults.update([reason]),
            limits=limits,
            release=release,
            accepts=accepts,
            jitter=lambda: 0.5,
        )
        self.dialer = Dialer(context)

    @property
    def answers(self) -> list[int]:
        return [message.seq for message in self.got]

    async def __aenter__(self) -> RecordingDialer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dialer.close()

    def stats(self) -> dict[str, int]:
        """Return the faults that the dialer counted, and the links that it has."""
        links = self.dialer.links.values()
        return {**self.faults, "links": len(links), "links_up": sum(link.up for link in links)}

    def say(self, endpoint: Endpoint, seq: int = 0, text: str = "") -> bool:
        return self.dialer.send(endpoint, message(seq, self.p, text))


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.002)


class DialingChild:
    """A process of its own that dials and sends, to be stopped and killed."""

    def __init__(self, port: int, incarnation: str = "p-1") -> None:
        command = [sys.executable, "-m", "unit.channel.kit", str(port), incarnation]
        environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, cwd=ROOT)

    def __enter__(self) -> DialingChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class RawConnection:
    """A bare TCP connection to a listener."""

    def __init__(self, answering: AnsweringListener) -> None:
        self.answering = answering

    async def __aenter__(self) -> RawConnection:
        self.reader, self.writer = await asyncio.open_connection(LOOPBACK, self.answering.endpoint.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> tuple[int, bytes]:
        (length,) = struct.unpack(">I", await asyncio.wait_for(self.reader.readexactly(4), 2))
        body = await self.reader.readexactly(length)
        return body[0], body[1:]

    async def goodbye(self) -> Goodbye:
        """Read the refusal, whatever comes before it, and then the end."""
        while True:
            kind, payload = await self.frame()
            said = decode_clear(memoryview(payload)) if kind == CLEAR else None
            if isinstance(said, Goodbye):
                await self.end()
                return said

    async def end(self) -> None:
        try:
            while await asyncio.wait_for(self.reader.read(65536), 2):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass


async def still_works(answering: AnsweringListener, secrets: Secrets | None = None) -> None:
    async with RecordingDialer("p-good", secrets) as dialing:
        dialing.say(answering.endpoint, 99)
        await until(lambda: dialing.answers == [99])


async def _speak(port: int, incarnation: str) -> None:
    dialing = RecordingDialer(incarnation)
    seq = 0
    while True:
        dialing.say(Endpoint(LOOPBACK, port), seq)
        seq += 1
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(_speak(int(sys.argv[1]), sys.argv[2]))
