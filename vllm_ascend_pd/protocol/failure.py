# SPDX-License-Identifier: Apache-2.0
"""Cause of a failure as one value, in memory and on the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.identity import Token

MAX_TEXT = 1024
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A code of the catalogue, and details as text."""

    code: Token
    detail: Text = ""

    @classmethod
    def of(cls, error: PdError) -> Failure:
        return cls(error.code, error.sentence[:MAX_TEXT])

    def __str__(self) -> str:
        return f"{self.code} {self.detail}"
