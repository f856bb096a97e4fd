# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform in a Ray cluster, for tests: vLLM places its workers by a resource that the platform names, and the CPU's names none.
It takes the name that Ray knows NPUs by. Workers of Ray load no plug-ins of vLLM before they ask for it, so this comes with the interpreter.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any

CPU = "vllm.platforms.cpu"


class _WithResource(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != CPU:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(CPU)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.CpuPlatform.ray_device_key = "NPU"

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WithResource())
