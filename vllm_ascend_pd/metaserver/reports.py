# SPDX-License-Identifier: Apache-2.0
"""What engines report of a transfer: D how the KV of a request came, P which push it made.

Both stand in `kv_transfer_params` of an engine's whole answer, under a key of their own. Streams and error answers have no
such field, so D also posts its report to the metaserver as soon as a load is over: either may come first, or both, or,
from a D that dies, neither. A report is idempotent: the transfer names it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from vllm_ascend_pd.protocol.first import MAX_FIRST_BYTES
from vllm_ascend_pd.protocol.versions import MAX_FINGERPRINT

LOAD_KEY = "pd_load"
PUSH_KEY = "pd_push"
ROUTE = "/v1/metaserver/loads"  # beside the route of the reservations
MAX_REPORT_BYTES = 4096
MAX_FIRST = 2 * MAX_FIRST_BYTES  # of a sealed first token, in base64

_Word = Annotated[str, msgspec.Meta(max_length=256)]
Fingerprint = Annotated[str, msgspec.Meta(max_length=MAX_FINGERPRINT)]  # which engines this one can be a pair with
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LoadReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the KV of one request came to D. `received` and `recomputed` add up to the tokens that D asked for."""

    transfer: _Word
    ticket: _Word
    decode: _Word  # D's incarnation
    received: _Tokens = 0  # tokens whose KV came from P
    recomputed: _Tokens = 0  # tokens whose KV did not come: D computes them itself, or fails the request
    code: _Word = ""  # why it did not come
    prefill: _Word = ""  # P's incarnation; empty when no P began to push
    fingerprint: Fingerprint = ""  # D's
    first_token: _Word = (
        ""  # whose it is: "prefill", or why D computed it; empty while that is not known, and where it is off
    )
    cached: _Tokens = 0  # of the prompt, that P had in its cache


class PushReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What P says of its part, in its answer. A `code`: it computed the prompt and pushed nothing."""

    prefill: _Word  # P's incarnation
    code: _Word = ""
    detail: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    fingerprint: Fingerprint = ""  # P's
    first: Annotated[str, msgspec.Meta(max_length=MAX_FIRST)] = ""  # the token that P has sampled, for D to unseal
    tells: bool = False  # this engine tells its first tokens to those that ask


class _Params(msgspec.Struct, frozen=True):
    pd_load: LoadReport | None = None
    pd_push: PushReport | None = None


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: _Params | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_LOAD = msgspec.json.Decoder(LoadReport)


def params_of(report: LoadReport | PushReport) -> dict[str, Any]:
    """What an engine returns to vLLM as `kv_transfer_params` of its answer."""
    return {LOAD_KEY if isinstance(report, LoadReport) else PUSH_KEY: msgspec.to_builtins(report)}


def read_answer(body: bytes) -> tuple[LoadReport | None, PushReport | None]:
    """The reports in an engine's whole answer. Raises msgspec's errors for what is no JSON object or has wrong types."""
    params = _ANSWER.decode(body).kv_transfer_params
    return (None, None) if params is None else (params.pd_load, params.pd_push)


def read_posted(body: bytes) -> LoadReport:
    """The report that D posted. Raises msgspec's errors."""
    return _LOAD.decode(body)
