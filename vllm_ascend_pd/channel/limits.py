# SPDX-License-Identifier: Apache-2.0
"""Limits of the side channel, and of its warnings. There are no options for them: they are far from normal use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.errors import one_line

log = logging.getLogger(__name__)

WARN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Sizes in bytes, durations in seconds."""

    max_connections: int = 4096  # a listener's, over all peers
    max_unproven: int = 512  # of these, connections whose peer has not proven itself
    max_per_incarnation: int = 8  # connections; beyond it the oldest, left half open by a reconnect, is closed
    greeting_s: float = 5.0  # to connect, and again to complete the greeting
    name_s: float = 1.0  # of that for a name's look-up, before an earlier answer serves
    frame_s: float = 30.0  # from a frame's first byte to its last
    linger_s: float = 1.0  # for a peer to read a farewell
    sweep_s: float = 0.25  # interval at which these times are checked
    send_buffer_bytes: int = 8 << 20  # not read by the peer yet, per connection
    remembered_gone: int = 4096  # incarnations whose end was reported
    max_links: int = 4096  # a dialer's endpoints
    max_queued: int = 256  # messages that wait for one link to come up
    message_ttl_s: float = 5.0  # longest wait in that queue; the protocol repeats what matters
    idle_link_s: float = 60.0  # a link that is down is forgotten after this time without a send
    backoff_first_s: float = 0.05
    backoff_max_s: float = 2.0


class RateLimitedWarnings:
    """Warnings about peers, at most one per kind and `WARN_EVERY_S`: a peer must not be able to fill the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def __call__(self, kind: str, text: str, *args: object) -> None:
        now = self._clock()
        if now - self._last.get(kind, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._last[kind] = now
            log.warning("%s", one_line(text % args))
