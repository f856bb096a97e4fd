# SPDX-License-Identifier: Apache-2.0
"""Traces for the scripts and tests: the package's own reader (`vllm-ascend-pd trace` is its command)."""

from vllm_ascend_pd.observe.timeline import REPORTED, RESERVED, Event, Trace, Way, Write, picture, table

__all__ = ["REPORTED", "RESERVED", "Event", "Trace", "Way", "Write", "picture", "table"]
