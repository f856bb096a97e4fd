# SPDX-License-Identifier: Apache-2.0
"""D revokes access, and that fails for a while, whatever the reason: it is tried again until it succeeds.

Until then nothing is proven: the blocks stay fenced, and no BEGIN is answered. How long it takes is a metric.
"""

from __future__ import annotations

import errno
import os
import threading

import pytest

from unit.device.caches import CacheModel
from unit.kits.watching import running, traced, until
from unit.runtime.sites import DecodeSite, PrefillSite, config, pushed
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

REASONS = {
    "no descriptor": OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/self/fd"),
    "still in use": LocalProtocolError("the engine is closed while another thread is in it"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_revocation_that_fails_is_tried_again_until_it_succeeds(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    push = config(lease_s=2.0, margin_s=0.5, quiet_s=0.3)
    release, cured = threading.Event(), threading.Event()

    class HeldTransport(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            return super().land(write) if release.is_set() else WriteState.PENDING

    class Unlucky(MemoryTransport):
        tries = 0

        def revoke(self) -> str:
            self.tries += 1
            if not cured.is_set():
                raise REASONS[reason]  # the old session is still open
            return super().revoke()

    model = CacheModel("token")
    p = PrefillSite(model, 1, push=push, make_transport=HeldTransport)
    other = PrefillSite(model, 1, push=push, seed=8)
    d = DecodeSite(model, 1, push=push, make_transport=Unlucky)
    (worker,) = d.workers
    target = worker.runtime.target  # type: ignore[union-attr]
    with traced() as events, running(p, other, d):
        request = p.begun(d, "r", 40, 20)
        until(lambda: any(stage == "layer_submitted" for stage, _ in events), "a write that is out")
        (writer,) = p.workers.values()
        assert writer.runtime is not None
        awake = threading.Event()
        writer.runtime.loop.post(awake.wait, 60.0)
        d.book.request_finished(request.name)
        d.step()
        until(lambda: target.tries >= 3, "the second try after the failure")
        until(lambda: _revoking(worker) > 0, "how long it takes")
        meanwhile = other.begun(d, "meanwhile", 30, 30)
        d.step()
        assert not d.done and not d.outcomes, "nothing is known of the writer, and its blocks stay fenced"
        assert not any(facts.get("transfer") == str(meanwhile.reservation.transfer) for stage, facts in events
                       if stage == "ready")  # fmt: skip
        said = [record for record in caplog.records if "access is not revoked yet: PD-WIRE-001" in record.getMessage()]
        assert len(said) >= 2 and [bool(record.exc_info) for record in said[:2]] == [True, False]
        cured.set()
        assert not d.received(request)[0].ok
        assert d.received(meanwhile)[0].ok, "its BEGIN is answered, with the new session"
        d.check(meanwhile)
        until(lambda: _revoking(worker) == 0, "the end of it")
        release.set()
        awake.set()
        p.finish_and_free(request)
        later, (load,) = pushed(p, d, "later", 30)
        assert load.ok
        d.check(later)


def _revoking(worker: object) -> int:
    """Return the metric of a decode worker, as vLLM collects it with each step."""
    levels = (worker.stats() or {}).get("levels", {})  # type: ignore[attr-defined]
    return sum(levels.get("revoking_seconds", {}).values())
