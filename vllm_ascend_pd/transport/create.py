# SPDX-License-Identifier: Apache-2.0
"""From configuration to a transfer engine. Nothing of an engine is imported before it is chosen."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ascend_pd.config import WireConfig
from vllm_ascend_pd.transport.base import Transport


def create(
    wire: WireConfig, host: str, *, quiet_s: float | None = None, attach_thread: Callable[[], None] = lambda: None
) -> Transport:
    """`host` is the address that peers reach this engine under. `attach_thread` binds a thread to its device and is
    called on each thread that the transport starts. PD-WIRE-001 says what is missing."""
    if wire.transport == "memory":
        from vllm_ascend_pd.transport.memory import MemoryTransport

        return MemoryTransport(quiet_s=quiet_s or 0.0)
    from vllm_ascend_pd.transport.mooncake import MooncakeTransport

    return MooncakeTransport(
        host,
        wire.mooncake_protocol or _default_protocol(),
        transfer_timeout_s=wire.transfer_timeout_s,
        max_descriptors=wire.max_descriptors,
        quiet_s=wire.transfer_timeout_s + 10.0 if quiet_s is None else quiet_s,
        attach_thread=attach_thread,
    )


def _default_protocol() -> str:
    """Ascend where an NPU is present."""
    from importlib.util import find_spec

    if find_spec("torch_npu") is None:
        return "tcp"
    import torch

    npu = getattr(torch, "npu", None)
    return "ascend" if npu is not None and npu.is_available() else "tcp"
