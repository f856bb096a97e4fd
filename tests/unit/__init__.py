# SPDX-License-Identifier: Apache-2.0
"""Tests of the package without engines, in folders that mirror it. Kits are beside the tests that use them."""
