# SPDX-License-Identifier: Apache-2.0
"""Notes of an engine's processes: what they asked of the stand-ins, and which switches these show.

A switch of vllm-ascend that is misspelt, or has lost its meaning, changes nothing, and answers stay right. So each has
an effect here that is looked for on the side that has it, and must be missing on the side that has not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "pd-"  # names of this package's threads begin with it


@dataclass(frozen=True)
class DeviceUse:
    """A thread's call that takes the thread's current device; -1: it has set none."""

    thread: str
    device: int
    call: str


@dataclass
class DeviceProcess:
    """Notes of one process."""

    operators: dict[str, set[int]] = field(default_factory=dict)  # and the streams that ran them; 0 is the first one
    kernels: set[str] = field(default_factory=set)  # of csrc/npu
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    uses: list[DeviceUse] = field(default_factory=list)  # in the order in which each was first made

    def device(self) -> int:
        """Return the device on which the model runs: on the way there torch_npu uses the first one."""
        return [use.device for use in self.uses if use.thread == "MainThread"][-1]


def processes(folder: Path) -> list[DeviceProcess]:
    """Return the processes that used the device."""
    all_processes = [_read(path) for path in sorted(folder.iterdir())]
    return [process for process in all_processes if process.operators]


def _read(path: Path) -> DeviceProcess:
    process, threads = DeviceProcess(), {path.name: "MainThread"}
    for line in path.read_text().splitlines():
        kind, name, *rest = line.split(" ", 2 if line.startswith("thread") else -1)
        if kind == "operator":
            process.operators.setdefault(name, set()).add(int(rest[0]))
        elif kind == "kernel":
            process.kernels.add(name)
        elif kind == "weight":
            process.weights[name] = tuple(int(size) for size in rest[0].split("x") if size)
        elif kind == "thread":
            threads[name] = rest[0]  # numbers return once a thread has ended
        elif kind == "use":
            process.uses.append(DeviceUse(threads.get(name, "?"), int(rest[0]), rest[1]))
    return process


# ---- switches


Shown = Callable[[DeviceProcess, Mapping[str, Any]], bool]  # by a rank's notes and its model's configuration


def _numbers(process: DeviceProcess, name: str) -> list[int]:
    """Return how many numbers each weight with this name has."""
    return [math.prod(shape) for layer, shape in process.weights.items() if layer.endswith(f"{name}.weight")]


def _head_divided(process: DeviceProcess, config: Mapping[str, Any]) -> bool:
    return min(_numbers(process, "lm_head")) < min(_numbers(process, "embed_tokens"))


def _shared_expert_whole(process: DeviceProcess, config: Mapping[str, Any]) -> bool:
    whole: int = config["hidden_size"] * config["moe_intermediate_size"] * config["n_shared_experts"]
    return min(_numbers(process, "shared_experts.down_proj")) == whole


def _shared_expert_aside(process: DeviceProcess, config: Mapping[str, Any]) -> bool:
    """Its activation runs on another stream than the experts'."""
    return any(process.operators.get("npu::npu_swiglu", set()) - {0})


def _keys_in_runs(process: DeviceProcess, config: Mapping[str, Any]) -> bool:
    return "_C_ascend::store_kv_block" in process.operators


EFFECTS: Mapping[str, Shown] = {
    "finegrained_tp_config.lmhead_tensor_parallel_size": _head_divided,
    "enable_shared_expert_dp": _shared_expert_whole,  # and flash communication by itself
    "multistream_overlap_shared_expert": _shared_expert_aside,
    "c8_enable_reshape_optim": _keys_in_runs,
}
