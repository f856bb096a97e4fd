# SPDX-License-Identifier: Apache-2.0
"""With STAND_IN_NOTES, a folder: the stand-ins' notes get the names of threads, and the sizes of the loaded weights.

tests/native/stand_ins/notes.h writes the others; tests/ascend_host/seen.py reads them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

_USES: set[tuple[int, str]] = set()


def install() -> None:
    if "STAND_IN_NOTES" not in os.environ:
        return
    import torch

    _after(threading.Thread, "_set_native_id", _thread)  # called by each thread as it starts
    _after(torch.nn.Module, "eval", _weights)  # vLLM's loaders end with it


def use(call: str) -> None:
    """Note the calling thread's device, as the stand-ins do. Mooncake takes it over Ascend's links."""
    if "STAND_IN_NOTES" in os.environ:
        index = ctypes.c_int32()
        unset = ctypes.CDLL("libascendcl.so").aclrtGetDevice(ctypes.byref(index))
        line = f"use {threading.get_native_id()} {-1 if unset else index.value} {call}"
        if (os.getpid(), line) not in _USES:
            _USES.add((os.getpid(), line))
            _note(line)


def _after(owner: Any, name: str, look: Any) -> None:
    original = getattr(owner, name)

    def both(one: Any, *arguments: Any) -> Any:
        result = original(one, *arguments)
        look(one)
        return result

    setattr(owner, name, both)


def _thread(thread: threading.Thread) -> None:
    _note(f"thread {thread.native_id} {thread.name}")


def _weights(model: Any) -> None:
    for name, weight in model.named_parameters():
        _note(f"weight {name} {'x'.join(map(str, weight.shape))}")


def _note(line: str) -> None:
    with Path(os.environ["STAND_IN_NOTES"], str(os.getpid())).open("a") as notes:
        notes.write(line + "\n")
