# SPDX-License-Identifier: Apache-2.0
"""Decisions of D. Pure: no lock, clock, thread or device in here; the simulator runs exactly this code."""
