# SPDX-License-Identifier: Apache-2.0
"""Ray workers on vLLM's CPU platform, for tests.

vLLM places workers by a resource of the platform, and the CPU's has none; this sets the name that Ray uses for NPUs. It
is a sitecustomize because Ray's workers need the name before they load vLLM's plug-ins.
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
