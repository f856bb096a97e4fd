# SPDX-License-Identifier: Apache-2.0
"""Engines without vLLM whose prefill ranks exchange, in one process or in several."""
