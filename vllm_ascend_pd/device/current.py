# SPDX-License-Identifier: Apache-2.0
"""The device of this process. torch_npu is imported only if that is an NPU."""

from __future__ import annotations

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.vllm_patches import compat


def current() -> Device:
    """Return the device of this process, by vLLM's platform."""
    if compat.device_type() == "npu":
        from vllm_ascend_pd.device.npu import NpuDevice

        return NpuDevice()
    from vllm_ascend_pd.device.cpu import CpuDevice

    return CpuDevice()
