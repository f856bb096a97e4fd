# SPDX-License-Identifier: Apache-2.0
"""Checks of `vllm-ascend-pd doctor`: this host (host.py, npu.py), an engine's configuration (engine.py), and a pair of
hosts (pair.py over line.py)."""
