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


def checks(options: HostOptions) -> Iterator[Check]:
    if not options.configured:
        return
    if options.connector:
        yield tried("connector", lambda: our_connector(options.connector))
    else:
        says = "kv_connector is missing: such an engine starts without any"
        yield warning("connector", says, f'Give "kv_connector": "{CONNECTOR}" and the kv_role.')
    if options.connector or options.role:
        yield _admitted(options)


def our_connector(name: str) -> str:
    """Return the connector's name. Raise ConfigError if it is another connector."""
    if name != CONNECTOR:
        why, remedy = f"this package's connector is {CONNECTOR}", f'Give "kv_connector": "{CONNECTOR}".'
        impossible("kv_connector", name, why, remedy)
    return name


def _admitted(options: HostOptions) -> Check:
    try:
        from vllm_ascend_pd import admission
        from vllm_ascend_pd.engine import own_address
    except (ImportError, OSError, RuntimeError) as problem:  # the last is torch's, for a backend that does not load
        return failure("admission", f"torch cannot be imported: {problem}", "docs/building.md says what is needed.")

    def attempt() -> str:
        admission.check_engine(_engine(options), options.push)
        own_address(options.push, options.environ)
        return f"{options.role}: nothing that the engine would refuse"

    return tried("admission", attempt)


def _engine(options: HostOptions) -> SimpleNamespace:
    """Return vLLM's configuration as far as the operator gave it. What was not given breaks no rule."""
    side = "decode" if options.role == "kv_consumer" else "prefill"
    sizes = options.push.sizes.get(side, {})
    parallel = SimpleNamespace(
        tensor_parallel_size=options.tp or sizes.get("tp_size", 1),
        pipeline_parallel_size=options.pp,
        decode_context_parallel_size=options.dcp,
        prefill_context_parallel_size=options.pcp,
        cp_kv_cache_interleave_size=options.interleave,
        data_parallel_size=options.dp or sizes.get("dp_size", 1),
        data_parallel_index=options.dp_ranks[-1],
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=options.role or None, engine_id=""),
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(),
        speculative_config=_speculative(options.speculative),
    )


def _speculative(value: str) -> Any:
    from vllm_ascend_pd.admission import drafts

    try:
        speculative = json.loads(value or "null")
    except ValueError:
        return None  # vLLM reports that it is not JSON
    return drafts.described(speculative) if isinstance(speculative, dict) else None
