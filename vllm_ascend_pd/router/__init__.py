# SPDX-License-Identifier: Apache-2.0
"""The router, which users start as `vllm-ascend-pd metaserver`: an HTTP service in front of P and D engines.

It needs aiohttp, which vLLM brings, and of this package few modules (tests/unit/test_imports.py names them): neither
torch nor vLLM nor the ops. No engine imports it.
"""
