# SPDX-License-Identifier: Apache-2.0
"""Possible guards of a connection, made from both greetings: one per secret that is accepted."""

from __future__ import annotations

import os

from vllm_ascend_pd.channel.frames import NONCE_BYTES, Guard, Hello, Unguarded
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.protocol.auth import Greeting, Secrets, sessions
from vllm_ascend_pd.protocol.versions import OURS, Release


def greeting(incarnation: str, secrets: Secrets | None, name: str = "", ours: Release = OURS) -> Hello:
    nonce, guarded = os.urandom(NONCE_BYTES), secrets is not None
    return Hello(ours.newest, incarnation, nonce, guarded, name, ours.oldest, ours.features)


def check_greeting(hello: Hello, guarded: bool, ours: Release = OURS) -> None:
    """Raise RemoteProtocolError if the sides have no version in common, or only one of them has a secret."""
    if not ours.speaks_with(hello.release):
        raise RemoteProtocolError("PD-CTRL-003", theirs=hello.release, ours=ours)
    if hello.guarded != guarded:
        one, other = ("a", "none") if hello.guarded else ("no", "one")
        raise RemoteProtocolError("PD-SEC-003", why=f"the sender has {one} secret_file, the receiver has {other}")


def candidates(secrets: Secrets | None, dialer: Hello, listener: Hello, *, as_dialer: bool) -> list[Guard]:
    """Return the guards to try, the current secret's first."""
    if secrets is None:
        return [Unguarded()]
    said = [Greeting(hello.nonce, hello.incarnation) for hello in (dialer, listener)]
    return list(sessions(secrets, *said, as_dialer=as_dialer))
