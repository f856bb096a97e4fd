# SPDX-License-Identifier: Apache-2.0
"""Kit of no one folder: connectors, child processes, waiting and stalls."""
