# SPDX-License-Identifier: Apache-2.0
"""Requests that may start with P's first token, and the parameters that P needs to sample the same token.

One table has vLLM's sampling parameters. P's token becomes the first output of D's request, so all that counts or
remembers generated tokens goes on as in one engine. A parameter that is not in the table is of a later release of vLLM:
a request that sets it does not start with P's token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

MAX_LOGPROBS = 20  # vLLM's own default for what a request may ask for
MAX_LISTED = 1024  # tokens that a request may list
MAX_WRITTEN = 16384  # bytes of JSON for its structured output and its bad words


GRAMMAR = "grammar read by"  # no parameter of vLLM: two libraries may allow different first tokens


class ParameterRole(Enum):
    """Role of a parameter for the first token."""

    CHOOSES = "it chooses the first token: P is sent it, and both sides hash it"
    REPORTS = "what is reported of the first token: P is sent it"
    AFTER = "what is done with a token that is there: D does it, as with a first token of its own"
    BARS = "its state is not the tokens alone, or it was not tried: such a request starts with D's token"


PARAMETERS: dict[str, tuple[ParameterRole, str]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), (ParameterRole.CHOOSES, "")),
    **dict.fromkeys(
        ("logit_bias", "allowed_token_ids", "min_tokens", "_all_stop_token_ids"), (ParameterRole.CHOOSES, "")
    ),
    **dict.fromkeys(("bad_words", "_bad_words_token_ids", "structured_outputs"), (ParameterRole.CHOOSES, "")),
    "logprobs": (ParameterRole.REPORTS, ""),
    **dict.fromkeys(
        ("n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "_eos_token_id"), (ParameterRole.AFTER, "")
    ),
    **dict.fromkeys(("flat_logprobs", "detokenize", "skip_special_tokens", "output_kind"), (ParameterRole.AFTER, "")),
    **dict.fromkeys(("spaces_between_special_tokens", "include_stop_str_in_output"), (ParameterRole.AFTER, "")),
    **dict.fromkeys(("stream_interval", "skip_clone", "output_text_buffer_length"), (ParameterRole.AFTER, "")),
    "skip_reading_prefix_cache": (ParameterRole.AFTER, ""),
    # They count generated tokens, of which there are none before the first.
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_detection"), (ParameterRole.AFTER, "")),
    "seed": (ParameterRole.BARS, "seed"),  # the generator's state is in D's workers; greedy sampling has none
    "thinking_token_budget": (ParameterRole.BARS, "thinking budget"),
    **dict.fromkeys(
        ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"), (ParameterRole.BARS, "prompt")
    ),
    "logprob_token_ids": (ParameterRole.BARS, "logprobs"),
    # In an engine that makes watermarks no request starts with P's token. In any other engine these have no effect.
    **dict.fromkeys(("watermarking", "_watermarking_skipped"), (ParameterRole.AFTER, "")),
    **dict.fromkeys(("routed_experts_prompt_start", "trace_decode_token_ids"), (ParameterRole.BARS, "tracing")),
    "extra_args": (ParameterRole.BARS, "extra arguments"),
    GRAMMAR: (ParameterRole.CHOOSES, ""),
}
OTHER = "unknown parameter"  # the reason if a parameter that is not in the table is set

_OURS = "kv_transfer_params"  # the only extra argument that is allowed: the router's


def refusal(given: Mapping[str, Any]) -> str:
    """Return why P's token cannot be the first; empty if it can. `given` has what differs from vLLM's defaults."""
    for name, value in given.items():
        part, why = PARAMETERS.get(name, (ParameterRole.BARS, OTHER))
        if part is not ParameterRole.BARS:
            continue
        if name == "seed" and _greedy(given):
            continue
        if name == "extra_args" and isinstance(value, Mapping) and set(value) <= {_OURS}:
            continue
        return why
    if not -1 < (given.get("logprobs") or 0) <= MAX_LOGPROBS:
        return "logprobs"
    listed = (
        given.get("logit_bias") or (),
        given.get("allowed_token_ids") or (),
        given.get("_all_stop_token_ids") or (),
    )
    written = json.dumps([_grammar(given), given.get("bad_words"), given.get("_bad_words_token_ids")])
    return "long lists" if max(map(len, listed)) > MAX_LISTED or len(written) > MAX_WRITTEN else ""


def sent(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters to send to P for a request that `refusal` lets pass.

    Temperature, repetition penalty and, unless greedy, the filters are always sent: P's server may have other defaults.
    """
    fields: dict[str, Any] = {"temperature": given.get("temperature", 1.0), "repetition_penalty": _repetition(given)}
    if not _greedy(given):
        fields |= {"top_p": given.get("top_p", 1.0), "top_k": _top_k(given), "min_p": given.get("min_p", 0.0)}
    if given.get("logit_bias"):
        fields["logit_bias"] = {str(token): bias for token, bias in given["logit_bias"].items()}
    if given.get("allowed_token_ids"):
        fields["allowed_token_ids"] = list(given["allowed_token_ids"])
    if given.get("min_tokens"):  # the first token must not end the answer; P's limit of one token allows no more
        fields["min_tokens"] = 1
    if _ends(given):
        fields |= {"stop_token_ids": _stops(given), "ignore_eos": bool(given.get("ignore_eos"))}
    if given.get("bad_words"):
        fields["bad_words"] = list(given["bad_words"])
    if grammar := _grammar(given):
        fields["structured_outputs"] = grammar
    if given.get("logprobs") is not None:
        fields["logprobs"] = given["logprobs"]
    return fields


def digest(given: Mapping[str, Any]) -> str:
    """Return 32 hex digits that are equal if the first token is chosen alike, whatever else is asked."""
    chosen = {
        "temperature": float(given.get("temperature", 1.0)),
        "repetition": float(_repetition(given)),
        "filters": None
        if _greedy(given)
        else [float(given.get("top_p", 1.0)), _top_k(given), float(given.get("min_p", 0.0))],
        "bias": sorted((int(token), float(bias)) for token, bias in (given.get("logit_bias") or {}).items()),
        "allowed": sorted(given.get("allowed_token_ids") or ()),
        "ends": [bool(given.get("min_tokens")), _stops(given)] if _ends(given) else None,
        "bad words": sorted(map(list, given.get("_bad_words_token_ids") or ())),
        "grammar": [_grammar(given), given.get(GRAMMAR)],
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:32]


def _greedy(given: Mapping[str, Any]) -> bool:
    return float(given.get("temperature", 1.0)) == 0.0


def _repetition(given: Mapping[str, Any]) -> float:
    return float(given.get("repetition_penalty", 1.0))


def _top_k(given: Mapping[str, Any]) -> int:
    return max(0, int(given.get("top_k", 0)))  # -1 and 0 both mean "all"


def _grammar(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraints on the form of an answer that are set."""
    asked = vars(given["structured_outputs"]) if given.get("structured_outputs") else {}
    return {name: value for name, value in asked.items() if value not in (None, False) and not name.startswith("_")}


def _ends(given: Mapping[str, Any]) -> bool:
    """Return whether the stop tokens affect the first token.

    They do if `min_tokens` forbids them there, or if a grammar may allow them at once.
    """
    return bool(given.get("min_tokens") or _grammar(given))


def _stops(given: Mapping[str, Any]) -> list[int]:
    return sorted(given.get("_all_stop_token_ids") or ())
