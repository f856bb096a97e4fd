# SPDX-License-Identifier: Apache-2.0
"""Failures of an HTTP exchange, and which of its requests may be sent again. Pure."""

from __future__ import annotations

from enum import Enum

from vllm_ascend_pd.shared.backoff import Backoff


class HttpFailure(Enum):
    """Way in which an HTTP call failed; see `NOT_EXECUTED` too."""

    CONNECT = "connect"  # no connection, so nothing was sent
    REFUSED = "refused"  # `DECLINED`
    BROKEN = "broken"  # the connection ended without an answer: may have been executed
    TIMEOUT = "timeout"  # no answer in time: may have been executed
    SERVER = "server"  # 500, 502, 504: executed, and failed
    PREFILL = "prefill"  # the prefill leg failed after it may have started
    EMPTY = "empty"  # 200 without a byte of body
    DROPPED = "dropped"  # D ended it halfway for lack of blocks, and asks for it to be sent again
    ENDED = "ended"  # D ended a stream by itself, as it shuts down
    OURS = "ours"  # this process lacked files, ports or memory: no engine is to blame


class UpstreamError(Exception):
    """A failed HTTP call; `failure` says how far it may have got."""

    def __init__(self, failure: HttpFailure, why: str) -> None:
        super().__init__(why)
        self.failure = failure
        self.why = why


DECLINED = (429, 503)  # statuses by which a server says that it did not execute a request
# Failures after which work counts as not executed.
NOT_EXECUTED = frozenset({HttpFailure.CONNECT, HttpFailure.REFUSED, HttpFailure.OURS})


def post_again(
    failure: HttpFailure, attempt: int, left_s: float, retry_after_s: float | None, rand: float, backoff: Backoff
) -> float | None:
    """Return the delay before D repeats its POST, or None. Only a POST that surely was not executed is repeated."""
    if failure not in NOT_EXECUTED:
        return None
    delay = backoff.delay(attempt, rand)
    if retry_after_s is not None:
        delay += min(max(retry_after_s, 0.0), backoff.longest_s)
    return delay if delay < left_s else None
