# SPDX-License-Identifier: Apache-2.0
"""Plug-in of vLLM for benchmarks: an engine without our connector waits as one with it does."""

from __future__ import annotations


def install() -> None:
    from vllm_ascend_pd.patience import install_shm

    install_shm()
