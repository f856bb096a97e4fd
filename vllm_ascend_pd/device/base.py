# SPDX-License-Identifier: Apache-2.0
"""Interface of devices: events on the compute stream, streams, and threads that may use the device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from vllm_ascend_pd.shared.event import Event


class Packing(NamedTuple):
    """Arrangement of bytes inside a (block, head) plane."""

    name: str  # the same on P and D
    opaque: bool  # the plane is moved whole: a token's bytes are not one range in it


PLAIN = Packing("plain", opaque=False)  # token by token


class Device(Protocol):
    name: str
    collectives: str  # torch.distributed backend
    exchanges_inline: bool  # the layer's hook launches collectives, in the order of the model's own ones
    token_major: bool  # axis order where sizes do not show it: as many heads as tokens in a block

    def record(self) -> Event:
        """Return an event behind everything enqueued on the current compute stream so far."""

    def side_stream(self, after: Event) -> AbstractContextManager[None]:
        """Run work that is launched inside this context on a stream of its own, after `after`."""

    def planning(self) -> AbstractContextManager[None]:
        """Keep copies to the device inside this context from waiting for the model. They are complete at its end."""

    def attach_thread(self) -> None:
        """Bind the calling thread to the device, before it touches device memory or the transfer engine."""

    def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
        """Return how this device's kernels arrange the bytes of a tensor of the cache."""

    def view(self, address: int, length: int) -> memoryview:
        """Return the bytes at an address, readable by the host (for checksums of `verify: full`)."""
