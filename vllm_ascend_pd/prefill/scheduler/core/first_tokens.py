# SPDX-License-Identifier: Apache-2.0
"""The first token that P sends to a D: the one that it sampled, if D asks for it."""

from __future__ import annotations

from vllm_ascend_pd.protocol.first import FirstToken, Sample
from vllm_ascend_pd.protocol.messages import Reservation


def first_token(reservation: Reservation, push: str, sample: Sample) -> FirstToken | None:
    """Return a sampled token for D, if D asks for it and accepts how it was chosen."""
    seed = reservation.seed
    if seed is None:
        return None
    token, digest, logprobs = sample
    if seed.digest != digest or len(logprobs) != (0 if seed.logprobs is None else seed.logprobs + 1):
        return None
    at = reservation.prompt_length
    return FirstToken(
        transfer=reservation.transfer, push=push, position=at, token=token, digest=digest, logprobs=tuple(logprobs)
    )
