# SPDX-License-Identifier: Apache-2.0
"""Triton on vLLM's CPU platform, for tests: its interpreter runs the kernels.

vLLM wants a build of Triton with a backend for CPUs, which the package index does not have. Here a backend of that name
is listed. It compiles nothing, as the interpreter takes each kernel first. It is a sitecustomize because vLLM looks
when it is imported, before it loads plug-ins.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Listed:
    driver, compiler = _Driver, None


backends["cpu"] = _Listed
