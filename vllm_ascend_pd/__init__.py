# SPDX-License-Identifier: Apache-2.0
"""KV cache push between prefill and decode engines of vLLM on Ascend NPUs."""

__version__ = "0.1.0"
