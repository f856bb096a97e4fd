# SPDX-License-Identifier: Apache-2.0
"""The pure part of P's worker: pushes, batches and exchanges."""
