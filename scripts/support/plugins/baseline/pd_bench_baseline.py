# SPDX-License-Identifier: Apache-2.0
"""A plug-in of vLLM for benchmarks: lets the in-tree MooncakeConnector start on CPU, where no accelerator has an index."""

from __future__ import annotations


def install() -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
