# SPDX-License-Identifier: Apache-2.0
"""Shared by several folders of tests, tests/native too: engines without vLLM, builders, stand-ins, waiting."""
