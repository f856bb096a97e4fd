# SPDX-License-Identifier: Apache-2.0
"""P's side of the first token: it reports the token that it sampled for a request whose D asks for it."""

from __future__ import annotations

import base64
from typing import Any

from vllm_ascend_pd.protocol import sampling
from vllm_ascend_pd.protocol.auth import Secrets, seal_first
from vllm_ascend_pd.protocol.first import FirstToken, FirstTokenRequest, LogProb, Sample
from vllm_ascend_pd.vllm_patches import first_token


class FirstTokenSource(first_token.FirstTokenHooks):
    """First tokens of P. Log-probabilities are read from a step's results, only for requests that ask for them."""

    def __init__(self, secrets: Secrets | None) -> None:
        super().__init__()
        self._secrets = secrets
        self._counts: dict[str, int] = {}  # log-probabilities asked for, by request
        self._logprobs: dict[str, tuple[LogProb, ...]] = {}

    def taken(self, request: Any) -> None:
        """Note a request whose first token D may want."""
        params = request.sampling_params
        if params is not None and params.logprobs is not None and not sampling.refusal(first_token.given(params)):
            self._counts[request.request_id] = params.logprobs

    def before(self, output: Any) -> None:
        for request_id, count in self._counts.items():
            if logprobs := first_token.reported(output, request_id, count):
                self._logprobs[request_id] = logprobs

    def seed_of(self, request: Any) -> FirstTokenRequest | None:
        """Return how the first token of a request is chosen and reported; None if it is not sent to D."""
        if self.refusal(request):
            return None
        given = first_token.chosen(request)
        return FirstTokenRequest(sampling.digest(given), given.get("logprobs")) if not sampling.refusal(given) else None

    def sampled(self, request: Any) -> Sample | None:
        """Return the first token of a request that has ended, if D may start with it."""
        if len(request.output_token_ids) != 1 or request.get_finished_reason() not in first_token.well_finished():
            return None
        seed = self.seed_of(request)
        if seed is None:
            return None
        return int(request.output_token_ids[0]), seed.digest, self._logprobs.get(request.request_id, ())

    def answered(self, request_id: str, first: FirstToken | None) -> str:
        """Forget a request that has ended. Return its sealed token for P's answer, in base64; empty without one."""
        self._counts.pop(request_id, None)
        self._logprobs.pop(request_id, None)
        return base64.b64encode(seal_first(first, self._secrets)).decode() if first is not None else ""
