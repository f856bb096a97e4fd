# SPDX-License-Identifier: Apache-2.0
"""Replacement of pyACL, which comes with CANN: the parts that vllm-ascend imports."""
