# SPDX-License-Identifier: Apache-2.0
"""In the place of pyACL, which comes with CANN: what vllm-ascend imports of it."""
