# SPDX-License-Identifier: Apache-2.0
"""Names of metrics that alerts and the runbook may use."""

from __future__ import annotations

import re

from vllm_ascend_pd.observe.tally import METRICS, PREFIX
from vllm_ascend_pd.router import metrics as metaserver

OF_VLLM = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting")
FAMILIES = {family.name for family in metaserver.Metrics().registry.collect()}


def ours(name: str) -> bool:
    """Return whether an engine's connector or the metaserver has this series."""
    if name.startswith(PREFIX):
        return re.sub(r"_(total|count)$", "", name.removeprefix(PREFIX)) in METRICS
    return name.removesuffix("_total") in FAMILIES
