# SPDX-License-Identifier: Apache-2.0
"""Replacement of acl.rt: copies that wait for no stream."""

from __future__ import annotations

import ctypes

_runtime = ctypes.CDLL("libascendcl.so")
_runtime.aclrtMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def memcpy(to: int, room: int, source: int, length: int, kind: int) -> int:
    return int(_runtime.aclrtMemcpy(to, room, source, length, kind))
