# SPDX-License-Identifier: Apache-2.0
"""Optional features that have a room each: its modules, and who may enter."""

from __future__ import annotations

# Tokens that D did not compute: P's first one, and an answer that another D had begun. Closed by `first_token: off`.
TOKENS_OF_OTHERS = (
    *("decode.scheduler.tokens_of_others", "decode.scheduler.first_tokens", "decode.scheduler.going_on"),
    *("decode.scheduler.core.first_tokens", "decode.scheduler.core.given"),
    *("prefill.scheduler.first_tokens", "prefill.scheduler.core.first_tokens"),
    *("vllm_patches.first_token", "vllm_patches.given_tokens", "vllm_patches.one_by_one", "vllm_patches.token_reports"),
    "protocol.sampling",
)
# Other routers than our metaserver. On P closed by `hold_sources: 0`, on D until a request names such a router or a P.
FOREIGN_ROUTERS = (
    *("decode.scheduler.foreign", "decode.scheduler.core.offers"),
    *("prefill.scheduler.reception", "prefill.scheduler.bootstrap", "protocol.dialects"),
)
# Who imports a room from outside: vLLM's entry points, the roles, and P's table, which asks for the token of a sample.
DOORS = {
    TOKENS_OF_OTHERS: {
        *("connector", "decode.scheduler.role", "prefill.scheduler.role", "prefill.scheduler.core.rules"),
        "vllm_patches.front_end",
    },
    FOREIGN_ROUTERS: {"decode.scheduler.role", "prefill.scheduler.role"},
}
