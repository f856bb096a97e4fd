# SPDX-License-Identifier: Apache-2.0
"""Runtimes whose peers are named, with a name server that is wrong for a while."""

from __future__ import annotations

import pytest

from tools.support.process import free_port
from unit.device.caches import CacheModel
from unit.kits.names import NameServer
from unit.kits.watching import running
from unit.runtime.sites import LOOPBACK, DecodeSite, PrefillSite, config, pushed

PLANES = CacheModel("opaque")
ELSEWHERE = "127.0.0.2"


def test_a_name_that_led_to_another_decode_engine_does_so_no_longer_than_its_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both engines listen on one port, as each pod of a deployment does. Nothing breaks the wrong connection."""
    names, port = NameServer(monkeypatch), free_port()
    named = config(side_channel_port=port, advertise_host="d.test")
    p, wanted = PrefillSite(PLANES, 1), DecodeSite(PLANES, 1, push=named)
    other = DecodeSite(PLANES, 1, push=config(side_channel_port=port), hosts=(ELSEWHERE,))
    with running(p, wanted, other):
        to_other, (load,) = pushed(p, other, "own", 9)  # so that it knows its own name
        assert load.ok
        names.addresses = [ELSEWHERE]
        _, (load,) = pushed(p, wanted, "lost", 9, deadline_s=1.0)
        assert not load.ok
        names.addresses = [LOOPBACK]
        pushed(p, wanted, "seen", 9, deadline_s=1.0)  # the refusal of this one shows that the name is right now
        later, (load,) = pushed(p, wanted, "later", 9)
        assert load.ok
        wanted.check(later)
        other.check(to_other)
