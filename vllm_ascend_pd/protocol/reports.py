# SPDX-License-Identifier: Apache-2.0
"""Reports of engines on a transfer: D's on how the KV of a request came, P's on its push.

Each stands in `kv_transfer_params` of an engine's whole answer, under its own key. Streams and error answers have no
such field, so D also posts its report to the metaserver as soon as a load is over. One of the two may arrive, or both
in any order, or none if D dies. A report is idempotent: the transfer identifies it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from vllm_ascend_pd.protocol.first import MAX_FIRST_BYTES
from vllm_ascend_pd.protocol.versions import MAX_FINGERPRINT

DROPPED_KEY = "pd_dropped"  # true: D has ended the request halfway, for lack of blocks
LOAD_KEY = "pd_load"
PUSH_KEY = "pd_push"
ROUTE = "/v1/metaserver/loads"  # beside the route of the reservations
MAX_REPORT_BYTES = 4096
MAX_DETAIL = 400
MAX_FIRST = 2 * MAX_FIRST_BYTES  # of a sealed first token, in base64

_Word = Annotated[str, msgspec.Meta(max_length=256)]
Fingerprint = Annotated[str, msgspec.Meta(max_length=MAX_FINGERPRINT)]  # decides which engines can pair with this one
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LoadReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """D's report on the KV of one request. `received` and `recomputed` add up to the tokens that D asked for."""

    transfer: _Word
    ticket: _Word
    decode: _Word  # D's incarnation
    received: _Tokens = 0  # tokens whose KV came from P
    recomputed: _Tokens = 0  # tokens whose KV did not come: D computes them itself, or fails the request
    code: _Word = ""  # of the error, if it did not come
    prefill: _Word = ""  # P's incarnation; empty when no P began to push
    fingerprint: Fingerprint = ""  # D's
    first_token: _Word = (
        ""  # its source: "prefill", or why D computed it; empty while unknown, and if the feature is off
    )
    cached: _Tokens = 0  # tokens of the prompt that P had in its cache
    detail: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL)] = ""  # of the error, for logs


class PushReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """P's report on its push, in its answer. With a `code` it computed the prompt and pushed nothing."""

    prefill: _Word  # P's incarnation
    code: _Word = ""
    detail: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    fingerprint: Fingerprint = ""  # P's
    first: Annotated[str, msgspec.Meta(max_length=MAX_FIRST)] = ""  # the token that P sampled, sealed for D
    # This engine sends its first token to a D that asks for it. Its name on the wire is older.
    sends_first: bool = msgspec.field(default=False, name="tells")


class SaidByEngine(msgspec.Struct, frozen=True):
    """The `kv_transfer_params` of an engine's whole answer."""

    pd_load: LoadReport | None = None
    pd_push: PushReport | None = None
    pd_dropped: bool = False


class _AnswerBody(msgspec.Struct, frozen=True):
    kv_transfer_params: SaidByEngine | None = None


_ANSWER = msgspec.json.Decoder(_AnswerBody)
_LOAD = msgspec.json.Decoder(LoadReport)


def params_of(report: LoadReport | PushReport) -> dict[str, Any]:
    """Return the `kv_transfer_params` that an engine gives to vLLM for its answer."""
    return {LOAD_KEY if isinstance(report, LoadReport) else PUSH_KEY: msgspec.to_builtins(report)}


def said_in(body: bytes) -> SaidByEngine:
    """Return what an engine's whole answer says. Raise msgspec's errors if it is no object or has wrong types."""
    return _ANSWER.decode(body).kv_transfer_params or SaidByEngine()


def read_answer(body: bytes) -> tuple[LoadReport | None, PushReport | None]:
    """Return the reports in an engine's whole answer. Raise as `said_in` does."""
    said = said_in(body)
    return said.pd_load, said.pd_push


def read_posted(body: bytes) -> LoadReport:
    """Return the report that D posted. Raise msgspec's errors."""
    return _LOAD.decode(body)
