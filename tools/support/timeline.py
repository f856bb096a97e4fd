# SPDX-License-Identifier: Apache-2.0
"""Reader of traces for the scripts and tests: the package's own, the one behind `vllm-ascend-pd trace`."""

from vllm_ascend_pd.observe.timeline import REPORTED, RESERVED, Event, Trace, Way, Write, picture, table

__all__ = ["REPORTED", "RESERVED", "Event", "Trace", "Way", "Write", "picture", "table"]
