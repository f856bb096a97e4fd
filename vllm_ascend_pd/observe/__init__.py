# SPDX-License-Identifier: Apache-2.0
"""Metrics and traces of an engine, and traces of the router."""
