# SPDX-License-Identifier: Apache-2.0
"""Around a step's outputs: `Scheduler.update_from_output` is wrapped, for all that acts before or after it.

That is first tokens and given tokens, ends of loads that were withheld, a standstill, and requests that were dropped.
What lets a request go on, or fail, whose load was withheld is here too.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.vllm_patches.wrapping import contained, differing, wrap

OUTPUTS_READ = "update_from_output"
OUTPUTS = ("self", "scheduler_output", "model_runner_output")  # its parameters
_FAILING = "_handle_failed_recving"  # from 0.30 on
_RETRYING = "_update_waiting_for_remote_kv"  # before: of a request without computed tokens the blocks are freed
_MOST_DROPS = 4096


class StepHooks:
    """Work of a role before and after vLLM reads a step's outputs. `entered`: it is reading them: `after` follows."""

    def __init__(self) -> None:
        self.entered = False

    def settle(self, vllm_config: Any) -> None:
        """Take what depends on the engine, once."""

    def before(self, output: Any) -> None:
        """Act before vLLM reads a step's results."""

    def after(self, scheduler: Any, outputs: Any) -> None:
        """Act after vLLM has read them. `outputs` are those for clients, by their front end."""


class Drops(StepHooks):
    """Requests that vllm-ascend's recompute scheduler ends halfway: their last output says so for the router too.

    A response has no other field for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, dict[str, Any]] = {}  # by request: what its answer says, until its last output is there

    def note(self, request_id: str, answer: dict[str, Any]) -> None:
        self.said[request_id] = answer
        if len(self.said) > _MOST_DROPS:  # no step's outputs are seen here
            self.said.clear()

    def after(self, scheduler: Any, outputs: Any) -> None:
        for one in outputs.values() if self.said else ():
            for output in one.outputs:
                if output.finish_reason is not None and output.request_id in self.said:
                    output.kv_transfer_params = self.said.pop(output.request_id)


class HasStepHooks:
    """Base of a connector whose roles act around a step's outputs. It may be inside another connector."""

    step_hooks: tuple[StepHooks, ...] = ()


def wrap_outputs(scheduler: type) -> str:
    """Call the connector's StepHooks around `update_from_output`, once. Return why not; empty: it is wrapped."""
    outputs = getattr(scheduler, OUTPUTS_READ, lambda: None)
    if differing((outputs, OUTPUTS)):
        return f"the scheduler {scheduler.__name__} differs in update_from_output"
    wrap(scheduler, OUTPUTS_READ, _with_hooks)
    return ""


def _with_hooks(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        roles = [hooks for one in contained(self.connector, HasStepHooks) for hooks in one.step_hooks]
        for role in roles:
            role.entered = True
            role.before(model_runner_output)
        outputs = original(self, scheduler_output, model_runner_output)
        for role in roles:
            role.after(self, outputs)
            role.entered = False
        return outputs

    return update_from_output


def release(scheduler: Any, request_id: str) -> None:
    """Report to vLLM what was withheld: the KV of the request is complete, or nothing writes there any more."""
    from vllm.v1.outputs import KVConnectorOutput

    if request_id in scheduler.requests:
        scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={request_id}))


def add(outputs: Any, client: int, output: Any) -> None:
    """Add an output to those that a step returns."""
    from vllm.v1.engine import EngineCoreOutputs

    outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)


def can_fail() -> bool:
    """Return whether this vLLM can still fail a load that is complete.

    Only then may all of a prompt be loaded into a cache in which its last token cannot be computed again. (Drafts
    beside such a cache are refused at the start.)
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return hasattr(Scheduler, _FAILING) or hasattr(Scheduler, _RETRYING)


def _failed(scheduler: Any, request_id: str) -> bool:
    """Apply vLLM's policy to a failed load. Return whether it ends the request."""
    if hasattr(scheduler, _FAILING):
        return bool(getattr(scheduler, _FAILING)({request_id}))
    if scheduler.recompute_kv_load_failures:
        # As vLLM does with the first block of a single table: nothing of the request is computed.
        scheduler.requests[request_id].num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)
    return not scheduler.recompute_kv_load_failures


def fail(scheduler: Any, request: Any) -> Any:
    """Release a held request without its KV, by vLLM's own policy.

    Return None if it computes its prompt, or the output for the client if it ends with an error.
    """
    request_id = request.request_id
    ends = _failed(scheduler, request_id)
    if not ends and request_id not in scheduler.failed_recving_kv_req_ids:
        raise LocalProtocolError(f"vLLM does not take {request_id} for a request whose load has failed")
    output = end(scheduler, request) if ends else None
    release(scheduler, request_id)
    return output


def end(scheduler: Any, request: Any) -> Any:
    """End a request with an error. Return the output for its client."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    facts = {"events": request.take_events(), "trace_headers": request.trace_headers}
    return EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason(), **facts)
