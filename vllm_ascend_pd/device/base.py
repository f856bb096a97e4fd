# SPDX-License-Identifier: Apache-2.0
"""What the rest of the package asks of a device: events on the compute stream, and threads that may use it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from vllm_ascend_pd.shared.event import Event


class Device(Protocol):
    name: str
    collectives: str  # torch.distributed backend
    exchanges_inline: bool  # collectives are launched from the layer's hook, in the order of the model's own
    token_major: bool  # which axis comes first where the numbers cannot tell (as many heads as tokens in a block)

    def record(self) -> Event:
        """An event behind everything enqueued on the current compute stream so far."""

    def side_stream(self, after: Event) -> AbstractContextManager[None]:
        """Work launched inside runs on a stream of its own, after `after`."""

    def planning(self) -> AbstractContextManager[None]:
        """What is copied to the device inside waits for nothing that the model has enqueued, and is there afterwards."""

    def attach_thread(self) -> None:
        """Called first in every thread that touches device memory or the transfer engine."""

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> tuple[str, bool]:
        """(packing id, token axis opaque): how bytes are arranged inside a (block, head) plane."""

    def view(self, address: int, length: int) -> memoryview:
        """Host-readable bytes at an address (checksums of `verify: full`)."""
