# SPDX-License-Identifier: Apache-2.0
"""Reading of trace files: one clock for all processes, the stages of a request, pictures of them."""
