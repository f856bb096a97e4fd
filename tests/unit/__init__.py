# SPDX-License-Identifier: Apache-2.0
"""Tests of the package without engines, in folders that mirror it. Kits of several folders are in kits/."""
