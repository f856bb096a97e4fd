# SPDX-License-Identifier: Apache-2.0
"""P in the scheduler's process: reservations in, each step's slices out to the workers."""
