# SPDX-License-Identifier: Apache-2.0
"""With ASCEND_HOST_WIRE=tcp, Mooncake's protocol `ascend` is TCP: the device's memory is the host's.

For connectors that always use `ascend`; this package's has a key for it.
"""

from __future__ import annotations

import os


def install() -> None:
    if os.environ.get("ASCEND_HOST_WIRE") != "tcp":
        return
    os.environ["MC_FORCE_TCP"] = "1"
    import mooncake.engine as mooncake

    engine = mooncake.TransferEngine

    class OverTcp(engine):  # type: ignore[misc,valid-type]
        def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
            code: int = super().initialize(host, metadata, "tcp" if protocol == "ascend" else protocol, "")
            return code

    mooncake.TransferEngine = OverTcp
