# SPDX-License-Identifier: Apache-2.0
"""The protocol with one rule taken out at a time. The simulator must find each of them: that is how we know that it
looks. Nothing of this is in the package: rules are removed by subclassing the machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.protocol.fence import Writer
from vllm_ascend_pd.protocol.messages import Begin, Cancel, Done, Failed
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.tables import PairState, ReservationState, WriterState
from vllm_ascend_pd.protocol.timing import RunningClock


@dataclass(frozen=True, slots=True)
class Mutation:
    """`Mutation()` is the protocol as it is."""

    name: str = ""
    receiver: Callable[..., Receiver] = Receiver
    sender: Callable[..., Sender] = Sender
    hasty_preemption: bool = False  # P does not wait for writes that read preempted blocks
    hasty_release: bool = False  # P frees a finished request's blocks at once
