# SPDX-License-Identifier: Apache-2.0
"""Wake-ups are a help only: nothing fails without them."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from vllm_ascend_pd.shared.wake import Ringer


def test_a_worker_without_a_free_descriptor_rings_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address comes with a step, and a step of D is not repeated: it must not fail over a wake-up."""

    def refuse(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bell:
        bell.bind(("127.0.0.1", 0))
        bell.settimeout(20)
        ringer = Ringer()
        with monkeypatch.context() as starved:
            starved.setattr(socket, "socket", refuse)
            ringer.aim(bell.getsockname())
            ringer.ring()
        ringer.aim(bell.getsockname())
        ringer.ring()
        assert bell.recv(1) == b"\0"
        ringer.close()
