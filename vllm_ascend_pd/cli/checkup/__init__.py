# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd doctor` looks at: this host (host.py, npu.py), and a pair of hosts (pair.py over line.py)."""
