# SPDX-License-Identifier: Apache-2.0
"""Checks of an engine's --kv-transfer-config, by the engine's own rules (admission/).

These need torch, which is imported only if a configuration was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.cli.checkup.check import Check, failure, tried, warning
from vllm_ascend_pd.cli.checkup.host import HostOptions
from vllm_ascend_pd.plugin import CONNECTOR
from vllm_ascend_pd.shared.settings import impossible


def checks(asked: HostOptions) -> Iterator[Check]:
    if not asked.configured:
        return
    if asked.connector:
        yield tried("connector", lambda: our_connector(asked.connector))
    else:
        says = "kv_connector is missing: such an engine starts without any"
        yield warning("connector", says, f'Give "kv_connector": "{CONNECTOR}" and the kv_role.')
    if asked.connector or asked.role:
        yield _admitted(asked)


def our_connector(name: str) -> str:
    """Return the connector's name. Raise ConfigError if it is another connector."""
    if name != CONNECTOR:
        why, remedy = f"this package's connector is {CONNECTOR}", f'Give "kv_connector": "{CONNECTOR}".'
        impossible("kv_connector", name, why, remedy)
    return name


def _admitted(asked: HostOptions) -> Check:
    try:
        from vllm_ascend_pd import admission
        from vllm_ascend_pd.engine import own_address
    except (ImportError, OSError, RuntimeError) as problem:  # the last is torch's, for a backend that does not load
        return failure("admission", f"torch cannot be imported: {problem}", "docs/building.md says what is needed.")

    def attempt() -> str:
        admission.check_engine(_engine(asked), asked.push)
        own_address(asked.push, asked.environ)
        return f"{asked.role}: nothing that the engine would refuse"

    return tried("admission", attempt)


def _engine(asked: HostOptions) -> SimpleNamespace:
    """Return vLLM's configuration as far as the operator gave it. What was not given breaks no rule."""
    side = "decode" if asked.role == "kv_consumer" else "prefill"
    sizes = asked.push.sizes.get(side, {})
    parallel = SimpleNamespace(
        tensor_parallel_size=asked.tp or sizes.get("tp_size", 1),
        pipeline_parallel_size=asked.pp,
        decode_context_parallel_size=asked.dcp,
        prefill_context_parallel_size=asked.pcp,
        cp_kv_cache_interleave_size=asked.interleave,
        data_parallel_size=asked.dp or sizes.get("dp_size", 1),
        data_parallel_index=asked.dp_ranks[-1],
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=asked.role or None, engine_id=""),
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(),
        speculative_config=_speculative(asked.speculative),
    )


def _speculative(value: str) -> Any:
    from vllm_ascend_pd.admission import drafts

    try:
        speculative = json.loads(value or "null")
    except ValueError:
        return None  # vLLM reports that it is not JSON
    return drafts.described(speculative) if isinstance(speculative, dict) else None
