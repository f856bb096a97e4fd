# SPDX-License-Identifier: Apache-2.0
"""D revokes access while the new transfer engine cannot be opened at once: blocks are still released, a little
later."""

from __future__ import annotations

import threading

from unit.device.caches import CacheModel
from unit.kits.watching import traced, until
from unit.runtime.sites import DecodeSite, PrefillSite, config, sites
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write


def test_a_revocation_that_cannot_open_a_new_engine_is_tried_again() -> None:
    push = config(lease_s=2.0, margin_s=0.5, quiet_s=0.3)
    release = threading.Event()

    class HeldTransport(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            return super().land(write) if release.is_set() else WriteState.PENDING

    class Unlucky(MemoryTransport):
        tries = 0

        def revoke(self) -> str:
            self.tries += 1
            if self.tries == 1:
                raise PdError("PD-WIRE-001", why="bind: Address already in use")
            return super().revoke()

    model = CacheModel("token")
    p = PrefillSite(model, 1, push=push, make_transport=HeldTransport)
    d = DecodeSite(model, 1, push=push, make_transport=Unlucky)
    with traced() as events, sites(p, d):
        request = d.reserve("r", 40)
        d.step()
        assert p.admit(request) is None
        p.compute((request, 20))
        until(lambda: any(stage == "layer_submitted" for stage, _ in events), "a write that is out")
        (worker,) = p.workers.values()
        assert worker._runtime is not None
        awake = threading.Event()
        worker._runtime._loop.post(awake.wait, 30.0)
        d.book.request_finished(request.name)
        assert not d.received(request)[0].ok
        assert d.workers[0]._runtime._target.tries == 2  # type: ignore[union-attr]
        release.set()
        awake.set()
        p.finish(request)
        p.released_blocks_of(request)
        later = d.reserve("later", 30)
        d.step()
        p.prefill(later)
        assert d.received(later)[0].ok
        d.check(later)
