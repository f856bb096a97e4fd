# SPDX-License-Identifier: Apache-2.0
"""P in a worker's process: the hooks of a step, the writer's thread, exchanges."""
