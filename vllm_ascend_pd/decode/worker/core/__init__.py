# SPDX-License-Identifier: Apache-2.0
"""The pure part of D's worker: the loads of one rank."""
