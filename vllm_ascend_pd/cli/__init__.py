# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd`. Each subcommand is a module of this package with `add_parser` and `run`."""
