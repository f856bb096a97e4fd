# SPDX-License-Identifier: Apache-2.0
"""Modules to run from the repository's root: `python -m tools.quickstart`."""
