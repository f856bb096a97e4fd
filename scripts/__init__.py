# SPDX-License-Identifier: Apache-2.0
"""Run as modules from the repository: `python -m scripts.quickstart`."""
