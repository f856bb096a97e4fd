# SPDX-License-Identifier: Apache-2.0
"""From two greetings to the guards that a connection may be under: one per secret that is accepted."""

from __future__ import annotations

from vllm_ascend_pd.channel.frames import Guard, Hello, Unguarded
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION


def check_greeting(hello: Hello, guarded: bool) -> None:
    """Raises the refusal that the other side is to read."""
    if hello.version != PROTOCOL_VERSION:
        raise RemoteProtocolError("PD-CTRL-003", theirs=hello.version, ours=PROTOCOL_VERSION)
    if hello.guarded != guarded:
        who = "the caller has no secret_file, the called has one"
        if not guarded:
            who = "the caller has a secret_file, the called has none"
        raise RemoteProtocolError("PD-SEC-003", why=who)


def candidates(secrets: object | None, dialer: Hello, listener: Hello, *, as_listener: bool) -> list[Guard]:
    """The guards to try, the current secret's first."""
    if secrets is None:
        return [Unguarded()]
    raise NotImplementedError
