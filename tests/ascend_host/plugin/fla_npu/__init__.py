# SPDX-License-Identifier: Apache-2.0
"""Stands in for flash-linear-attention-npu, which vllm-ascend 0.30 imports and does not require."""
