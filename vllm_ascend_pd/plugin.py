# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point (`vllm.general_plugins`). It runs in the API server, the engine core and every worker.

It is idempotent. An error here is logged instead of raised: a plug-in that raises stops engines that do not use it.
"""

from __future__ import annotations

import logging

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
    try:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_ascend_pd.connector", CONNECTOR)
    except ValueError:
        log.debug("%s is registered already", CONNECTOR)


def _log_as_vllm() -> None:
    """Log this package's lines beside vLLM's, at its level.

    The root logger would drop them where torch_npu has set its level to errors.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_ascend_pd")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
