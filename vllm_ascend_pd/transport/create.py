# SPDX-License-Identifier: Apache-2.0
"""From configuration to a target and a wire. Nothing of an engine is imported before it is chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_pd.config import WireConfig
from vllm_ascend_pd.transport.base import Target, Wire

if TYPE_CHECKING:
    from vllm_ascend_pd.transport.engine import RawEngine

Attach = Callable[[], None]


def create_target(wire: WireConfig, host: str, attach_thread: Attach = lambda: None) -> Target:
    """`host` is the address that peers reach this engine under. `attach_thread` binds the calling thread to its device.
    PD-WIRE-001 says what is missing."""
    if wire.transport == "memory":
        from vllm_ascend_pd.transport.memory import MemoryTransport

        return MemoryTransport()
    from vllm_ascend_pd.transport.target import MooncakeTarget

    protocol = protocol_of(wire)
    return MooncakeTarget(_kind(wire, protocol), host, protocol, attach_thread)


def create_wire(
    wire: WireConfig, host: str, *, quiet_s: float, attach_thread: Attach = lambda: None, target: Target | None = None
) -> Wire:
    """`attach_thread` is called on each thread that the wire starts. `target`: what peers of this process write to, where
    one process does both."""
    if wire.transport == "memory":
        from vllm_ascend_pd.transport.memory import MemoryTransport

        return MemoryTransport()
    from vllm_ascend_pd.transport.ascend import AscendEngine
    from vllm_ascend_pd.transport.engine import Engine, can_ask
    from vllm_ascend_pd.transport.flights import Flights
    from vllm_ascend_pd.transport.lanes import Lanes
    from vllm_ascend_pd.transport.target import MooncakeTarget
    from vllm_ascend_pd.transport.tcp import TcpEngines
    from vllm_ascend_pd.transport.wire import Engines, MooncakeWire

    protocol, timeout_s, clock = protocol_of(wire), wire.transfer_timeout_s, time.monotonic
    kind = _kind(wire, protocol)
    if protocol == "ascend":
        shared = target if isinstance(target, MooncakeTarget) else MooncakeTarget(kind, host, protocol, attach_thread)
        engines: Engines = AscendEngine(shared, Lanes(wire.max_descriptors, timeout_s, attach_thread, clock))
    else:
        flights = Flights(wire.max_descriptors, timeout_s, clock)
        engines = TcpEngines(lambda: Engine(kind, host, protocol), flights, registers=protocol != "tcp", clock=clock)
    return MooncakeWire(engines, can_ask=can_ask(kind), wait_s=quiet_s - timeout_s)


def protocol_of(wire: WireConfig) -> str:
    """Ascend where an NPU is present, unless the configuration says."""
    if wire.mooncake_protocol:
        return wire.mooncake_protocol
    from importlib.util import find_spec

    if find_spec("torch_npu") is None:
        return "tcp"
    import torch

    npu = getattr(torch, "npu", None)
    return "ascend" if npu is not None and npu.is_available() else "tcp"


def _kind(wire: WireConfig, protocol: str) -> type[RawEngine]:
    from vllm_ascend_pd.transport.package import load, prepare_environment

    prepare_environment(os.environ, protocol, wire.transfer_timeout_s)
    return load(protocol)
