# SPDX-License-Identifier: Apache-2.0
"""Plug-in of vLLM for benchmarks that lets the in-tree MooncakeConnector start on a CPU, which has no device index."""

from __future__ import annotations


def install() -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
