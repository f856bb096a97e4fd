# SPDX-License-Identifier: Apache-2.0
"""D in the scheduler's process: reservations out, outcomes and reports back in."""
