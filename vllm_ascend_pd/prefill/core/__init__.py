# SPDX-License-Identifier: Apache-2.0
"""What P's worker decides. Pure: no lock, clock, thread or device in here; the simulator runs exactly this."""
