# SPDX-License-Identifier: Apache-2.0
"""Creation of target and wire, and choice of the protocol. No transfer engine is imported before it is chosen."""

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


def create_target(config: WireConfig, host: str, attach_thread: Attach = lambda: None) -> Target:
    """Create a target. `host` is the address at which peers reach it; `attach_thread` binds a thread to its device.

    Raise PD-WIRE-001 if Mooncake is missing or too old.
    """
    if config.transport == "memory":
        from vllm_ascend_pd.transport.memory import MemoryTransport

        return MemoryTransport()
    from vllm_ascend_pd.transport.target import MooncakeTarget

    protocol = protocol_of(config)
    return MooncakeTarget(_load_engine_class(config, protocol), host, protocol, attach_thread)


def create_wire(
    config: WireConfig, host: str, *, quiet_s: float, attach_thread: Attach = lambda: None, target: Target | None = None
) -> Wire:
    """Create a wire. `attach_thread` is called on each thread that it starts to make writes. `quiet_s`: T, the time
    after which a lost write cannot land any more.

    `target` is the target of the same process, if it has one: over Ascend's links they share an engine.
    """
    if config.transport == "memory":
        from vllm_ascend_pd.transport.memory import MemoryTransport

        return MemoryTransport()
    from vllm_ascend_pd.transport.ascend import AscendEngine
    from vllm_ascend_pd.transport.blocking_writes import BlockingWrites
    from vllm_ascend_pd.transport.engine import OpenEngine, can_ask
    from vllm_ascend_pd.transport.flights import Flights
    from vllm_ascend_pd.transport.target import MooncakeTarget
    from vllm_ascend_pd.transport.tcp import PolledEngines
    from vllm_ascend_pd.transport.wire import MooncakeWire, TransferEngines

    protocol, timeout_s, clock = protocol_of(config), config.transfer_timeout_s, time.monotonic
    kind = _load_engine_class(config, protocol)
    if protocol == "ascend":
        shared = target if isinstance(target, MooncakeTarget) else MooncakeTarget(kind, host, protocol, attach_thread)
        engines: TransferEngines = AscendEngine(
            shared, BlockingWrites(config.max_descriptors, timeout_s, attach_thread, clock)
        )
    else:
        flights = Flights(config.max_descriptors, timeout_s, clock)
        engines = PolledEngines(
            lambda: OpenEngine(kind, host, protocol), flights, registers=protocol != "tcp", clock=clock
        )
    return MooncakeWire(engines, can_ask=can_ask(kind), wait_s=quiet_s - timeout_s)


def protocol_of(config: WireConfig) -> str:
    """Return the configured protocol; if none is configured, ascend if an NPU is present, else tcp."""
    if config.mooncake_protocol:
        return config.mooncake_protocol
    from importlib.util import find_spec

    if find_spec("torch_npu") is None:
        return "tcp"
    import torch

    npu = getattr(torch, "npu", None)
    return "ascend" if npu is not None and npu.is_available() else "tcp"


def _load_engine_class(config: WireConfig, protocol: str) -> type[RawEngine]:
    """Prepare the process's environment, then load Mooncake's class for the protocol."""
    from vllm_ascend_pd.transport.package import load, prepare_environment

    prepare_environment(os.environ, protocol, config.transfer_timeout_s)
    return load(protocol)
