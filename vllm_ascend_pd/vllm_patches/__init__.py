# SPDX-License-Identifier: Apache-2.0
"""All that this package changes in vLLM, and what of its privates it reads: README.md has the table."""
