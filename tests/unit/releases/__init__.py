# SPDX-License-Identifier: Apache-2.0
"""Tests with other releases of vLLM."""
