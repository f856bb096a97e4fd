# SPDX-License-Identifier: Apache-2.0
"""P's first token in vLLM. Only this file and step_hooks.py reach into vLLM's scheduler and batches for it.

On P, what a step reports of a token is read before vLLM drops it. On D, a request whose KV is complete is started with
P's token after the step: the token becomes the request's first output, for the client and in the request. The next step
computes that token's KV and samples the second one, by vLLM's own code.

A worker of vLLM's first model runner receives only the prompt of a new request. P's token, or the tokens with which an
answer goes on (given_tokens.py), come to it in the request's extra arguments. `InputBatch.add_request` is wrapped: it
adds them as earlier outputs, as a resumed request has. A worker of the second model runner receives all tokens of a new
request, and which of them are the prompt.

All this is done only if all that it uses is as it was in the releases that were tried, and this is one of them
(`install`, `install_on_worker`). Elsewhere D computes the first token itself, as without this file.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vllm_ascend_pd.protocol.first import FirstToken, LogProb
from vllm_ascend_pd.protocol.sampling import GRAMMAR
from vllm_ascend_pd.vllm_patches.step_hooks import OUTPUTS, OUTPUTS_READ, StepHooks, wrap_outputs
from vllm_ascend_pd.vllm_patches.tried import TRIED_DRAFTS, TRIED_GRAMMARS, TRIED_SECOND, untried
from vllm_ascend_pd.vllm_patches.wrapping import differing, wrap

GIVEN_ARG = "pd_given_tokens"  # in a request's extra arguments, on its way to the workers
_SCHEDULE, _ADDED = "schedule", "add_request"
_ALL_TOKENS = "_all_token_ids"  # which the second model runner gets of each new request
# Parameters, by method.
_BATCH, _ADVANCED = ("self", "request"), ("self", "request", "new_token_ids")
_STATES = ("self", "req_id", "prompt_len", "all_token_ids", "num_computed_tokens", "max_tokens")
_ACCEPTED, _VALIDATED = ("self", "request_id", "tokens"), ("self", "tokens")
_SCHEDULER = ("_update_from_kv_xfer_finished", "finish_requests")
REQUEST_USED = ("append_output_token_ids", "take_events", "take_prefill_stats", "record_event", "get_finished_reason")
OUTPUT_USED = (
    "new_logprobs",
    "finish_reason",
    "stop_reason",
    "events",
    "kv_transfer_params",
    "trace_headers",
    "prefill_stats",
)
_STATE = ("sampling_params", "output_token_ids")


class GivenIds(tuple[int, ...]):
    """Outputs of a new request on their way to the workers. A client's extra arguments are JSON, so none is of it."""


class FirstTokenHooks(StepHooks):
    """Those of first tokens, on either side.

    `why_no_grammar`: why requests with a grammar do not start with P's token on this engine. `logits`: this engine
    reports other numbers than the model's raw log-probabilities.
    """

    def __init__(self) -> None:
        super().__init__()
        self.why_no_grammar, self.logits = "", False

    def settle(self, vllm_config: Any) -> None:
        self.why_no_grammar = why_no_grammar(vllm_config)
        self.logits = vllm_config.model_config.logprobs_mode != "raw_logprobs"

    def refusal(self, request: Any) -> str:
        """Return why P's token cannot be the first on this engine, sampling parameters aside; empty if it can."""
        why = refusal(request, self.why_no_grammar)
        return why or ("logprobs" if self.logits and request.sampling_params.logprobs is not None else "")


def install(vllm_config: Any) -> str:
    """Wrap vLLM's scheduler, once. Return why not; empty: it is wrapped."""
    return unproven(vllm_config) or wrap_outputs(vllm_config.scheduler_config.get_scheduler_cls())


def install_on_worker(vllm_config: Any) -> str:
    """Let workers go on behind a token that they have not sampled, once. Return why not; empty: they do."""
    if why := unproven(vllm_config):
        return why
    batch = _batches(vllm_config)
    for one in batch.__subclasses__():
        if _ADDED in vars(one):
            return f"the batch {one.__name__} was not tried"
    if not is_second(vllm_config):
        wrap(batch, _ADDED, _with_token)
    return ""


def _with_token(original: Any) -> Any:
    def add_request(self: Any, request: Any) -> Any:
        extra = request.sampling_params.extra_args if request.sampling_params is not None else None
        tokens = extra.get(GIVEN_ARG) if extra else None
        if isinstance(tokens, GivenIds) and not request.output_token_ids:
            request.output_token_ids.extend(tokens)
        return original(self, request)

    return add_request


def is_second(vllm_config: Any) -> bool:
    """Return whether the engine's workers have vLLM's second model runner."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def _batches(vllm_config: Any) -> Any:
    """Return the class whose `add_request` takes a new request in."""
    if is_second(vllm_config):
        from vllm.v1.worker.gpu.states import RequestState

        return RequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch

    return InputBatch


def unproven(vllm_config: Any) -> str:
    """Return why this engine neither takes nor sends first tokens; empty: it does."""
    if why := untried():
        return why
    if vllm_config.kv_transfer_config.is_kv_consumer:
        second, drafts = is_second(vllm_config), vllm_config.speculative_config is not None
        if second and (why := untried(tried=TRIED_SECOND)):
            return f"{why} with the second model runner"
        if drafts and (why := untried(tried=TRIED_DRAFTS)):
            return f"{why} with drafts"
        if second and drafts:
            return "drafts were not tried with the second model runner"
        if vllm_config.model_config.logits_processors:
            return "logits processors may remember tokens"
    if getattr(vllm_config, "watermark_config", None) is not None:
        return "watermarks remember tokens"
    return _other_shape(vllm_config, vllm_config.scheduler_config.get_scheduler_cls())


def _other_shape(vllm_config: Any, scheduler: type) -> str:
    """Return what in this vLLM differs from the releases that were tried; empty: nothing."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.request import Request
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        batch = _batches(vllm_config)
    except ImportError as missing:
        return f"this vLLM has {missing.name} elsewhere"
    if not issubclass(scheduler, Scheduler):
        return f"the scheduler {scheduler.__name__} is none of vLLM's"
    for one in scheduler.__mro__[: scheduler.__mro__.index(Scheduler)]:
        if OUTPUTS_READ in vars(one) and not _reads(vars(one)[OUTPUTS_READ], f"super().{OUTPUTS_READ}"):
            return f"the scheduler {one.__name__} reads a step's outputs without vLLM's own method"
    second = is_second(vllm_config)
    if second and not _reads(getattr(scheduler, _SCHEDULE), f"req.{_ALL_TOKENS}"):
        return f"the scheduler {scheduler.__name__} does not hand all tokens of a new request to the workers"
    unlike = differing(
        (Scheduler.update_from_output, OUTPUTS),
        (check_stop, ("request", "max_model_len")),
        (getattr(batch, _ADDED), _STATES if second else _BATCH),
    )
    unlike += [name for name in _SCHEDULER if not hasattr(scheduler, name)]
    unlike += [name for name in REQUEST_USED if not hasattr(Request, name)]
    unlike += [name for name in OUTPUT_USED if name not in EngineCoreOutput.__struct_fields__]
    unlike += [name for name in _STATE if name not in CachedRequestState.__dataclass_fields__]
    return f"this vLLM's {', '.join(unlike)} differ" if unlike else ""


def _reads(method: Callable[..., Any], attribute: str) -> bool:
    """Return whether a method's code has this attribute, such as a call of its base's method."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):  # it has no source
        return False
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == attribute for node in ast.walk(tree))


# -- parameters


def given(params: Any) -> dict[str, Any]:
    """Return the sampling parameters that differ from vLLM's defaults, for the rules in protocol/sampling.py."""
    kind: Callable[[], Any] = type(params)
    usual = _usual(kind)
    return {name: getattr(params, name) for name in params.__struct_fields__ if getattr(params, name) != usual[name]}


@lru_cache(maxsize=4)
def _usual(kind: Callable[[], Any]) -> Mapping[str, Any]:
    usual = kind()
    return {name: getattr(usual, name) for name in usual.__struct_fields__}


def why_no_grammar(vllm_config: Any) -> str:
    """Return why this engine may read a grammar differently than another one; empty: it reads it alike.

    Engines do not exchange these settings.
    """
    if other_grammars():
        return "version"
    settings = vllm_config.structured_outputs_config
    if getattr(settings, "reasoning_parser", ""):
        return "reasoning"  # the grammar begins where the model's reasoning ends
    theirs = ("disable_any_whitespace", "disable_additional_properties")
    return "grammar settings" if any(getattr(settings, name, False) for name in theirs) else ""


def other_grammars() -> str:
    """Return why no token can be given to a grammar of this vLLM; empty: it can."""
    if why := untried(tried=TRIED_GRAMMARS):
        return f"{why} with grammars"
    try:
        from vllm.v1.structured_output import StructuredOutputManager as Manager
        from vllm.v1.structured_output.backend_types import StructuredOutputGrammar as Grammar

        taken, asked = (Grammar.accept_tokens, _ACCEPTED), (Grammar.validate_tokens, _VALIDATED)
        unlike = differing(taken, asked, (Manager.accept_tokens, _ADVANCED))
    except (ImportError, AttributeError) as missing:
        return f"this vLLM has {missing.name} elsewhere"
    return f"this vLLM's {', '.join(unlike)} differ" if unlike else ""


def chosen(request: Any) -> dict[str, Any]:
    """Return how a request's tokens are chosen: the parameters `given`, and the library that reads its grammar."""
    fields, shaped = given(request.sampling_params), request.structured_output_request
    return fields if shaped is None else {**fields, GRAMMAR: type(shaped.grammar).__name__}


def refusal(request: Any, why_no_grammar: str = "") -> str:
    """Return why P's token cannot be a request's first, sampling parameters aside; empty if it can."""
    if request.sampling_params is None or request.prompt_token_ids is None:
        return "prompt"
    if request.resumable:
        return "session"
    if getattr(request, "prompt_is_token_ids", None) is not None or request.mm_features:
        return "multimodal"
    if why_no_grammar and request.structured_output_request is not None:
        return why_no_grammar
    return "LoRA" if request.lora_request is not None else ""


# -- P


def well_finished() -> tuple[Any, ...]:
    """Return the finish reasons of requests that have their token."""
    from vllm.v1.engine import FinishReason

    return (FinishReason.STOP, FinishReason.LENGTH)


def reported(output: Any, request_id: str, count: int) -> tuple[LogProb, ...]:
    """Return the log-probabilities that a step reports for a request: its sampled token, then the `count` likeliest."""
    index = output.req_id_to_index.get(request_id)
    if index is None or output.logprobs is None or not output.sampled_token_ids[index]:
        return ()
    rows = output.logprobs.slice_request(index, 1)
    tokens, values = rows.logprob_token_ids[0][: count + 1], rows.logprobs[0][: count + 1]
    ranks = (int(rows.sampled_token_ranks[0]), *range(1, count + 1))
    return tuple((int(token), float(value), rank) for token, value, rank in zip(tokens, values, ranks, strict=False))


# -- D


def unfit(request: Any, token: int) -> str:
    """Return why a request cannot begin with this token after all; empty: it can."""
    if request.num_output_tokens:
        return "preempted"
    asked = request.structured_output_request
    return "grammar" if asked is not None and asked.grammar.validate_tokens([token]) != [token] else ""


def start(scheduler: Any, request: Any, first: FirstToken, params: dict[str, Any] | None) -> Any:
    """Give a released request its first token, and return the output for the client.

    `params` stand in its answer if the token is the last one.
    """
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput

    if scheduler.log_stats:
        request.record_event(EngineCoreEventType.SCHEDULED)  # else its prefill would begin after its first token
    facts = {
        "new_logprobs": logprob_rows([first.logprobs]) if first.logprobs else None,
        "events": request.take_events(),
        "trace_headers": request.trace_headers,
        "prefill_stats": request.take_prefill_stats(),
    }
    if request.structured_output_request is not None:
        request.structured_output_request.grammar.accept_tokens(request.request_id, [first.token])
    status = request.status
    request.append_output_token_ids(first.token)
    if check_stop(request, scheduler.max_model_len):
        ended, request.status = request.status, status
        scheduler.finish_requests(request.request_id, ended)
        facts |= {"finish_reason": request.get_finished_reason(), "stop_reason": request.stop_reason}
        return EngineCoreOutput(request.request_id, [first.token], kv_transfer_params=params, **facts)
    tell_workers(request, [first.token])
    return EngineCoreOutput(request.request_id, [first.token], **facts)


def tell_workers(request: Any, tokens: Sequence[int]) -> None:
    """Send the outputs of a new request to the workers, with its parameters."""
    params = request.sampling_params = copy.copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), GIVEN_ARG: GivenIds(tokens)}


def logprob_rows(rows: Sequence[Sequence[LogProb]]) -> Any:
    """Return what vLLM has of the log-probabilities of an output, a row for each of its tokens."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    return LogprobsLists(
        np.array([[token for token, _, _ in row] for row in rows], dtype=np.int32),
        np.array([[value for _, value, _ in row] for row in rows], dtype=np.float32),
        np.array([row[0][2] for row in rows], dtype=np.int32),
    )
