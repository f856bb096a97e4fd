# SPDX-License-Identifier: Apache-2.0
"""Faults on order, for tests only: a process stops itself at a stage event, or refuses what it would accept.

Put this folder in front of PYTHONPATH. An engine of vLLM loads it as a plug-in (and, for refusals over HTTP, with
`--middleware pd_test_faults.Door`); the metaserver is started as `python -m pd_test_faults metaserver …`.

Orders are files in the directory PD_TEST_FAULTS (tools/support/faults.py writes them):
    stop-at     holds a stage: the first process that reaches it renames the file to stopped-<pid> and stops itself
    refuse      holds the name of a refusal, in force while the file is there; `refused` says that it has happened
Without the variable nothing is changed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from vllm_ascend_pd.observe import trace

VARIABLE = "PD_TEST_FAULTS"
LOOK_S = 0.02
GENERATES = ("/v1/completions", "/v1/chat/completions")

_directory: Path | None = None
_installed = False


def install() -> None:
    """Install the plug-in: vLLM's entry point, called in every process of an engine."""
    if _begin():
        _patch_engine()


def refuses(name: str) -> bool:
    """Return whether this refusal is ordered, and record that it has happened."""
    if _directory is None or _read(_directory / "refuse") != name:
        return False
    (_directory / "refused").touch()
    return True


def _begin() -> bool:
    global _directory, _installed
    named = os.environ.get(VARIABLE, "")
    if not named or _installed:
        return False
    _directory, _installed = Path(named), True
    trace.subscribe(_stop_at)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _stop_at(stage: str, facts: Mapping[str, Any]) -> None:
    if _directory is None or _read(_directory / "stop-at") != stage:
        return
    try:
        (_directory / "stop-at").rename(_directory / f"stopped-{os.getpid()}")
    except FileNotFoundError:
        return  # another process was first
    os.kill(os.getpid(), signal.SIGSTOP)


# -- an engine's HTTP door

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Door:
    """ASGI middleware that reports a request's arrival, and refuses it before or after it was served."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATES:
            await self._app(scope, receive, send)
        elif refuses("503"):
            await _say(send, 503)
        else:
            trace.emit("arrived")
            if _directory is not None and _read(_directory / "refuse") == "500 after all":
                await self._app(scope, receive, _swallow)
                refuses("500 after all")
                await _say(send, 500)
            else:
                await self._app(scope, receive, send)


async def _swallow(message: Message) -> None:
    return


async def _say(send: Send, status: int) -> None:
    body = b'{"error": {"message": "refused by a test", "type": "TestError", "param": null, "code": %d}}' % status
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


# -- an engine's workers


def _patch_engine() -> None:
    from vllm_ascend_pd.decode.worker.runtime import ReceiveRuntime
    from vllm_ascend_pd.protocol.actions import Send as SendAction
    from vllm_ascend_pd.protocol.compose import refused
    from vllm_ascend_pd.protocol.failure import Failure
    from vllm_ascend_pd.protocol.messages import Begin, RefusalCode, Renew
    from vllm_ascend_pd.protocol.push import PushRecord, Sender
    from vllm_ascend_pd.protocol.reservation import Receiver

    listen, complete, start = Receiver.message, Sender.seal, ReceiveRuntime.__init__

    def message(self: Receiver, now: float, peer: Any, heard: Any) -> list[Any]:
        """Refuse every BEGIN and RENEW."""
        if isinstance(heard, Begin | Renew) and refuses("begin"):
            return [SendAction(peer, refused(heard, RefusalCode.MISMATCH, "refused by a test"))]
        return listen(self, now, peer, heard)

    def seal(self: Sender, now: float, push: PushRecord) -> list[Any]:
        """Fail a push at the moment when it would have been complete."""
        if refuses("done"):
            return self.abort(now, push, Failure("PD-XFER-006", "refused by a test"))
        return complete(self, now, push)

    def init(self: ReceiveRuntime, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        threading.Thread(target=_revoke_on_order, args=(self,), name="pd-test-faults", daemon=True).start()

    Receiver.message = message  # type: ignore[method-assign]
    Sender.seal = seal  # type: ignore[method-assign]
    ReceiveRuntime.__init__ = init  # type: ignore[method-assign]
    _patch_wire()


def _revoke_on_order(runtime: Any) -> None:
    """Revoke D's permission in the middle of the writes."""
    from vllm_ascend_pd.protocol.actions import Revoke

    def revoke() -> None:
        runtime.core._machine._fence.revoking = True
        with runtime._deciding():
            runtime._revoke(Revoke())

    while runtime.loop.alive:
        if refuses("writes"):
            assert _directory is not None
            (_directory / "refuse").unlink(missing_ok=True)
            runtime.loop.post(revoke)
        time.sleep(LOOK_S)


def _patch_wire() -> None:
    """Let P's transfer engine report every write as done, and write nothing; let D have no descriptor to revoke."""
    import itertools

    from vllm_ascend_pd.transport.base import WriteState
    from vllm_ascend_pd.transport.target import MooncakeTarget
    from vllm_ascend_pd.transport.wire import MooncakeWire

    submit, poll = MooncakeWire.submit, MooncakeWire.poll
    dropped, handles = set(), itertools.count(-1, -1)

    def submit_or_drop(self: MooncakeWire, session: str, src: Any, dst: Any, size: Any) -> int:
        if not refuses("drop writes"):
            return submit(self, session, src, dst, size)
        dropped.add(handle := next(handles))
        return handle

    def poll_or_claim(self: MooncakeWire, handle: int) -> WriteState:
        if handle not in dropped:
            return poll(self, handle)
        dropped.remove(handle)
        return WriteState.LANDED

    revoke = MooncakeTarget.revoke

    def revoke_or_fail(self: MooncakeTarget) -> str:
        if refuses("revocation"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return revoke(self)

    MooncakeTarget.revoke = revoke_or_fail  # type: ignore[method-assign]
    MooncakeWire.submit = submit_or_drop  # type: ignore[method-assign]
    MooncakeWire.poll = poll_or_claim  # type: ignore[method-assign]


# -- the metaserver


def _patch_metaserver() -> None:
    from vllm_ascend_pd.router import reserve
    from vllm_ascend_pd.router.core.decisions import Admission, Gatekeeper
    from vllm_ascend_pd.router.faults import fault
    from vllm_ascend_pd.router.intake import NotTaken

    ask, answer, run = Gatekeeper.ask, reserve.Reservations.answer, reserve.PostedPrefill.run

    def admit(self: Gatekeeper) -> Admission:
        return Admission.OVERLOADED if refuses("clients") else ask(self)

    async def take(self: Any, *args: Any) -> None:
        if refuses("reservations"):
            raise NotTaken(fault(500, "refused by a test", "PD-META-003"))
        await answer(self, *args)

    async def last_line(self: Any, *args: Any) -> dict[str, str]:
        line = await run(self, *args)
        if line["event"] == "prefilled" and refuses("prefilled"):
            return {"event": "failed", "code": "PD-META-006", "detail": "refused by a test"}
        return line

    Gatekeeper.ask = admit  # type: ignore[method-assign]
    reserve.Reservations.answer = take  # type: ignore[method-assign]
    reserve.PostedPrefill.run = last_line  # type: ignore[method-assign]


if __name__ == "__main__":
    from vllm_ascend_pd.cli.__main__ import main

    if _begin():
        _patch_metaserver()
    sys.exit(main())
