# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point (`vllm.general_plugins`), which it calls in the API server, the engine core and every worker.

A vLLM that has no place for connectors is logged and not raised: it would stop engines that do not use this one.
"""

from __future__ import annotations

import logging

from vllm_ascend_pd.vllm_patches import front_end

log = logging.getLogger(__name__)

CONNECTOR = "AscendPushConnector"


def register() -> None:
    """Make `--kv-transfer-config '{"kv_connector": "AscendPushConnector", ...}'` work."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        log.warning("vllm_ascend_pd: this vLLM has no KV connector factory (%s); the connector is not available", error)
        return
    _log_as_vllm()
    if why := front_end.install(CONNECTOR):
        log.warning("vllm_ascend_pd: no answer goes on token by token: %s", why)
    try:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_ascend_pd.connector", CONNECTOR)
    except ValueError:
        log.debug("%s is registered already", CONNECTOR)


def _log_as_vllm() -> None:
    """Give this package's logger vLLM's handlers and level.

    It would inherit the root logger's level, which torch_npu sets to ERROR.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_ascend_pd")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
