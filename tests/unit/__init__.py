# SPDX-License-Identifier: Apache-2.0
"""Tests of the package without engines, in folders that mirror it, each with its own kit. kits/ is of no one folder."""
