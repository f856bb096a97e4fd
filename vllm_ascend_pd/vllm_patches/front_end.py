# SPDX-License-Identifier: Apache-2.0
"""Changes to vLLM's front end of a D that takes tokens of others, made once its configuration is known.

vLLM loads plug-ins in each process before there is a configuration, and makes no connector in its API server. The first
object that it makes there of a configuration is what processes inputs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_ascend_pd.vllm_patches import one_by_one, token_reports
from vllm_ascend_pd.vllm_patches.wrapping import wrap

log = logging.getLogger(__name__)


def unfit() -> str:
    """Return why vLLM's front end, which may be in another process, is not changed; empty: it is."""
    return _unreachable() or one_by_one.unfit()


def _unreachable() -> str:
    from vllm import envs

    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        return "vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND) takes no changes from here"
    try:
        import vllm.v1.engine.input_processor  # noqa: F401
    except ImportError as missing:
        return f"this vLLM has {missing.name} elsewhere"
    return ""


def install(connector: str) -> str:
    """Wrap the making of vLLM's front end, once. Return why not; empty: it is wrapped.

    `connector`: the name of ours.
    """
    if why := _unreachable():
        return why
    from vllm.v1.engine.input_processor import InputProcessor

    def around(original: Any) -> Any:
        def __init__(self: Any, vllm_config: Any, *args: Any, **named: Any) -> None:  # noqa: N807
            original(self, vllm_config, *args, **named)
            if takes_tokens(vllm_config.kv_transfer_config, connector):
                _prepare()

        return __init__

    wrap(InputProcessor, "__init__", around)
    return ""


def takes_tokens(transfer: Any, connector: str) -> bool:
    """Return whether an engine is a D with a connector of ours, alone or among others, that takes tokens of others."""
    return any(
        one.get("kv_role") != "kv_producer" and (one.get("kv_connector_extra_config") or {}).get("first_token") != "off"
        for one in _connectors(transfer)
        if one.get("kv_connector") == connector
    )


def _connectors(transfer: Any) -> Iterator[Mapping[str, Any]]:
    if transfer is not None:
        extra = transfer.kv_connector_extra_config or {}
        yield {"kv_connector": transfer.kv_connector, "kv_role": transfer.kv_role, "kv_connector_extra_config": extra}
        yield from extra.get("connectors") or ()


def _prepare() -> None:
    lacks = {"no answer goes on token by token": one_by_one.install()}
    if "vllm.v1.engine.async_llm" in sys.modules:  # else no server is here, and the import of one takes seconds
        lacks["streams of responses and messages do not go on elsewhere"] = token_reports.wrap_servers()
    for what, why in lacks.items():
        if why:
            log.warning("vllm_ascend_pd: %s: %s", what, why)
