# SPDX-License-Identifier: Apache-2.0
"""D in a worker's process: it listens for P, and checks what came."""
