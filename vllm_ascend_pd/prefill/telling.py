# SPDX-License-Identifier: Apache-2.0
"""P's side of the first token: what it says of the token that it sampled for a request whose D asks for it."""

from __future__ import annotations

import base64
from typing import Any

from vllm_ascend_pd import first_token
from vllm_ascend_pd.prefill.core.desk import Desk, Sample
from vllm_ascend_pd.protocol import sampling
from vllm_ascend_pd.protocol.auth import Secrets, seal_first
from vllm_ascend_pd.protocol.first import LogProb, Seed


class Telling(first_token.Around):
    """Log-probabilities are read from a step's results, of those requests only whose D asks for them."""

    def __init__(self, secrets: Secrets | None) -> None:
        super().__init__()
        self._secrets = secrets
        self._counts: dict[str, int] = {}  # log-probabilities asked for, by request
        self._logprobs: dict[str, tuple[LogProb, ...]] = {}

    def attached(self, request_id: str, seed: Seed | None) -> None:
        if seed is not None and seed.logprobs is not None:
            self._counts[request_id] = seed.logprobs

    def before(self, output: Any) -> None:
        for request_id, count in self._counts.items():
            if told := first_token.reported(output, request_id, count):
                self._logprobs[request_id] = told

    def told(self, request: Any, desk: Desk) -> str:
        """The sealed token, in base64; empty if there is none for D. To be asked before the desk hears of the end."""
        request_id = request.request_id
        self._counts.pop(request_id, None)
        logprobs = self._logprobs.pop(request_id, ())
        first = desk.first(request_id, request.num_prompt_tokens, lambda: _sampled(request, logprobs))
        return base64.b64encode(seal_first(first, self._secrets)).decode() if first is not None else ""


def _sampled(request: Any, logprobs: tuple[LogProb, ...]) -> Sample | None:
    if len(request.output_token_ids) != 1 or first_token.barred(request):
        return None
    if request.get_finished_reason() not in first_token.well_finished():
        return None
    given = first_token.given(request.sampling_params)
    if sampling.refusal(given):
        return None
    return int(request.output_token_ids[0]), sampling.digest(given), logprobs
