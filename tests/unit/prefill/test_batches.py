# SPDX-License-Identifier: Apache-2.0
"""Contents of one batch, and what must not be in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.prefill.worker.core.batches import grouped
from vllm_ascend_pd.prefill.worker.core.push import Unit
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.push import Claim

PEER = Endpoint("127.0.0.1", 1)
WORKS: Any = {name: SimpleNamespace(endpoint=lambda d_rank: PEER) for name in ("before", "after")}


def claim(push: str, layer: int) -> Claim:
    return Claim(push, 0, Unit(0, layer), 0)


def test_a_revoked_session_and_its_successor_never_share_a_batch() -> None:
    """A batch for the new session would let writes land that the revocation cut off. Found by the simulator, seed
    103412."""
    claims = [claim(push, layer) for layer in (1, 0) for push in ("before", "after")]
    groups = grouped(claims, WORKS, 4, lambda push, claim: claim.push)
    assert [(peer, [(c.push, c.unit.layer) for c in group]) for peer, group in groups] == [
        (PEER, [("before", 0), ("before", 1)]),
        (PEER, [("after", 0), ("after", 1)]),
    ]


def test_everything_for_one_session_goes_together_in_layer_order() -> None:
    claims = [claim(push, layer) for layer in (1, 0) for push in ("before", "after")]
    ((_, group),) = grouped(claims, WORKS, 4, lambda push, claim: "the session")
    assert [c.unit.layer for c in group] == [0, 0, 1, 1]
    assert len(grouped(claims, WORKS, 1, lambda push, claim: "the session")) == 2
