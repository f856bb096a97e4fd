# SPDX-License-Identifier: Apache-2.0
"""Ends of a leg, that is of one request at an engine: how it is counted, and what is raised if it brought too little.

Each error has its HTTP failure, which decides about repetitions, and what is noted of it: its code, and a sentence that
quotes no answer of an engine, which may have a prompt in it.
"""

from __future__ import annotations

from enum import Enum

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.shared.core.failures import DECLINED, HttpFailure


class LegEnd(Enum):
    """End of a leg, as a label of the metric."""

    SERVED = "served"
    REFUSED = "refused"  # not executed
    BROKE = "broke"
    DROPPED = "dropped"  # D lacked blocks halfway
    ENDED = "ended"  # by the engine itself, as it shuts down
    NO_PREFILL = "no prefill"  # D failed, but only because no KV came
    CUT = "cut"  # from here

    @classmethod
    def of(cls, status: int) -> LegEnd:
        """Return the end of a leg that was answered with `status`. One that blames the request is served too."""
        return cls.REFUSED if status in DECLINED else cls.BROKE if status >= 500 else cls.SERVED


class LegFailed(Exception):
    """A leg that brought less than it was for."""

    def __init__(self, failure: HttpFailure, noted: Failure, why: str = "") -> None:
        super().__init__(why or noted.detail)
        self.failure = failure
        self.noted = noted


def decode_failed(why: str) -> Failure:
    return Failure("PD-META-007", why)


def known_failure(error: PdError) -> Failure:
    """Return what is noted of an error of the catalogue, whole: it goes on no wire."""
    return Failure(error.code, error.sentence)


class PrefillFailed(LegFailed):
    """A prefill that brought no KV. Its text may have P's own."""


class StreamBroke(LegFailed):
    """A kept answer that D broke off. `final`: why no other D can go on with it, if so."""

    def __init__(self, failure: HttpFailure, noted: Failure, final: str = "") -> None:
        super().__init__(failure, noted)
        self.final = final


class RequestOver(Exception):
    """The end of a prefill of which the client's request is over, or which D gave up."""

    def __init__(self) -> None:
        super().__init__("the client's request is over, or D gave it up")


class ShutDown(Exception):
    """The end of what a request waits for, because this server shuts down."""
