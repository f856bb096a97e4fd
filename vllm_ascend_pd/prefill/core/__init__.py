# SPDX-License-Identifier: Apache-2.0
"""Decisions of P. Pure: no lock, clock, thread or device in here; the simulator runs exactly this code."""
