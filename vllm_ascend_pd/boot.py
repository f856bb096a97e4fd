# SPDX-License-Identifier: Apache-2.0
"""The incarnation of an engine: the same in all of its processes, another one after every start."""

from __future__ import annotations

import hashlib
import os

BOOT_VARIABLE = "VLLM_ASCEND_PD_BOOT"  # the prefix makes vLLM's executors carry it to other hosts


def mark_boot() -> None:
    """Called by the plug-in in the first process of an engine, before it spawns the others: they inherit the mark."""
    os.environ.setdefault(BOOT_VARIABLE, os.urandom(8).hex())


def incarnation(engine_id: str, instance_id: str) -> str:
    """A user may fix the engine id; the mark and vLLM's instance id still change with every start."""
    mark_boot()
    named = "/".join((os.environ[BOOT_VARIABLE], engine_id, instance_id))
    return hashlib.sha256(named.encode()).hexdigest()[:16]
