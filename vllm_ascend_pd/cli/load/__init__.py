# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan --load`: how the router would spread a load over engines that need not exist."""
