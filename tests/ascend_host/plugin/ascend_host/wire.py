# SPDX-License-Identifier: Apache-2.0
"""With ASCEND_HOST_WIRE=tcp, Mooncake's protocol `ascend` is TCP: the device's memory is the host's.

For connectors that always use `ascend`, and for this package's own wire over Ascend's links.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ascend_host import notes

PENDING, LANDED = 0, 1  # Mooncake's


def install() -> None:
    if os.environ.get("ASCEND_HOST_WIRE") != "tcp":
        return
    import mooncake.engine as mooncake

    engine = mooncake.TransferEngine

    class OverTcp(engine):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            os.environ["MC_FORCE_TCP"] = "1"  # not before: the package refuses it beside this protocol
            super().__init__()

        def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
            notes.use("mooncake.initialize")
            code: int = super().initialize(host, metadata, "tcp" if protocol == "ascend" else protocol, "")
            return code

        def batch_transfer_sync_write(self, session: str, *spans: Sequence[int]) -> int:
            """Write a batch. Mooncake's own call spins, and takes the cores from those who must receive it."""
            notes.use("mooncake.batch_transfer_sync_write")
            parts = [self.transfer_submit_write(session, *part) for part in zip(*spans, strict=True)]
            states = [self._ended(part) for part in parts]
            return 0 if all(state == LANDED for state in states) else -1

        def _ended(self, part: int) -> int:
            while (state := int(self.transfer_check_status(part))) == PENDING:
                time.sleep(0.001)
            return state

    mooncake.TransferEngine = OverTcp
