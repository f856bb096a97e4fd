# SPDX-License-Identifier: Apache-2.0
"""Whose key a client's request brings to an engine: the client's own, unless the operator lends the engines' key."""

from __future__ import annotations

import hmac

from vllm_ascend_pd.router.faults import known
from vllm_ascend_pd.router.intake import NotTaken
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.shared.http_session import Headers


def bearer(token: str) -> Headers:
    """Return the header that carries a token; none if there is no token."""
    return [(b"authorization", b"Bearer " + token.encode())] if token else []


class ClientKeys:
    def __init__(self, settings: Settings) -> None:
        self._accepted = [token.encode() for token in settings.client_tokens]
        self._lent = bearer(settings.engine_token) if settings.lend_engine_token else []

    def for_engine(self, method: str, headers: Headers) -> Headers:
        """Return a client's headers as an engine gets them. Raise NotTaken for a client without an accepted key.

        A browser's preflight never has a key, and engines answer it without one.
        """
        if method == "OPTIONS":
            return headers
        given = [value for name, value in headers if name == b"authorization"]
        if self._accepted and not (len(given) == 1 and self._accepts(given[0])):
            refusal = known(401, "PD-SEC-007")
            refusal.headers.append((b"www-authenticate", b"Bearer"))
            raise NotTaken(refusal)
        if not self._lent or (given and not self._accepted):
            return headers
        return [header for header in headers if header[0] != b"authorization"] + self._lent

    def _accepts(self, authorization: bytes) -> bool:
        """Compare with all keys, each in constant time."""
        scheme, _, word = authorization.partition(b" ")
        equal = [hmac.compare_digest(word.strip(), key) for key in self._accepted]
        return scheme.lower() == b"bearer" and any(equal)
