# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share, tests/native too: engines without vLLM, builders, stand-ins, waiting."""
