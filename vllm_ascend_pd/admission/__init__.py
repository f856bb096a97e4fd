# SPDX-License-Identifier: Apache-2.0
"""Admission of engines: only what is proven may start with this connector.

Anything else stops the start with a code and a sentence: wrong KV that looks right costs more than a failed start.
An engine's configuration is checked first, its process and its model's cache once vLLM has made them.
"""

from vllm_ascend_pd.admission.cache import cache_shape, check_groups, computes_no_prompts, group_refusals, is_grouped
from vllm_ascend_pd.admission.configuration import check_engine, engine_refusals, model_fingerprint
from vllm_ascend_pd.admission.process import check_contained, is_alone, older_scheduler
from vllm_ascend_pd.admission.sizes import dp_rank, listening_offsets, ranks_here, token_division

__all__ = [
    "cache_shape",
    "check_contained",
    "check_engine",
    "check_groups",
    "computes_no_prompts",
    "dp_rank",
    "engine_refusals",
    "group_refusals",
    "is_alone",
    "is_grouped",
    "listening_offsets",
    "model_fingerprint",
    "older_scheduler",
    "ranks_here",
    "token_division",
]
