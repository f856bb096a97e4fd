# SPDX-License-Identifier: Apache-2.0
"""Claims turned into batches, and what became of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.prefill.worker.core import batches
from vllm_ascend_pd.prefill.worker.core.batches import Bases, Batch, Triples, unit_of
from vllm_ascend_pd.prefill.worker.core.offering import MAX_CHARACTERS
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.prefill.worker.core.register import PushRegister
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.push import Claim
from vllm_ascend_pd.transport.base import WriteState

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # batches per destination: one on the wire, one behind it


class PushClaims:
    """Batches of up to `fuse` units. `bases` are the addresses of this worker's cache."""

    def __init__(self, register: PushRegister, fuse: int, bases: Bases) -> None:
        self._register, self._fuse, self.bases = register, fuse, bases

    def claim(self, now: float, in_flight: Sequence[Batch]) -> list[Batch]:
        """Return what may be written now, by destination and layer. Destinations with enough in flight wait."""
        register, sender = self._register, self._register.sender
        if not sender.anything_claimable:
            return []
        busy: Counter[object] = Counter(batch.peer for batch in in_flight)
        claims: list[Claim] = []
        for claim in sender.claim(now, lambda peer: busy[peer] < IN_FLIGHT):
            if register.records[claim.push].paused:
                register.do(now, sender.returned(now, claim))
            else:
                claims.append(claim)
        groups = batches.grouped(claims, register.records, self._fuse, self._session)
        made = [self._batch(now, peer, group) for peer, group in groups]
        return [batch for batch in made if batch is not None]

    def submitted(self, now: float, batch: Batch) -> None:
        for claim in batch.claims:
            self._register.do(now, self._register.sender.submitted(now, claim))
        self._register.note("layer_submitted", batch.facts)

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        """Handle a batch's outcome. Writes that were never issued cannot land: no block waits for them."""
        register, landed = self._register, state is WriteState.LANDED
        register.note("layer_pushed", lambda: {"ok": landed, "took": now - batch.submitted_at, **batch.facts()})
        if landed:
            register.measure("bytes_transferred", sum(batch.size))
            if batch.direct:
                register.measure("bytes_direct", batch.direct)
            register.measure("num_descriptors", len(batch.size))
        for claim in batch.claims:
            if state is WriteState.UNISSUED:
                register.do(now, register.sender.returned(now, claim))
            else:
                register.drop(register.records[claim.push], claim.d_rank, unit_of(claim))
                register.do(now, register.sender.wrote(now, claim, landed))
        if state is WriteState.UNISSUED:
            why = f"{batch.peer} does not take writes, nothing was sent"
            for name in dict.fromkeys(claim.push for claim in batch.claims):
                register.abort(now, name, Failure("PD-XFER-003", why))

    def _session(self, push: Push, claim: Claim) -> str | None:
        """Return the session of D's transfer engine to which a claim is written."""
        theirs = push.pairs[claim.d_rank].addresses
        return theirs.session if theirs is not None else None

    def _batch(self, now: float, peer: Endpoint, claims: list[Claim]) -> Batch | None:
        """Return these claims as one batch. A claim that cannot be written fails its push."""
        parts: list[Triples] = []
        taken, session, direct = [], "", 0
        for claim in claims:
            push = self._register.records[claim.push]
            try:
                theirs = batches.memory_of(push, claim)
                spans = batches.spans_of(push, claim, self.bases, theirs)
                self._add_checksum(push, claim)
            except PdError as error:
                self._unwritten(now, claim, Failure.of(error))
                continue
            except Exception as error:  # concerns one request's plan or memory: the others go on
                log.exception("a write for push %s cannot be prepared", claim.push)
                why = f"preparing the write failed: {error}"[:MAX_CHARACTERS]
                self._unwritten(now, claim, Failure("PD-XFER-003", why))
                continue
            parts += spans
            session = theirs.session
            taken.append(claim)
            if self._register.exchanges is not None and not unit_of(claim).sub_step:
                direct += sum(int(part.size.sum()) for part in spans)
        if not taken:
            return None
        triples = batches.joined(parts)
        transfers = sorted({str(self._register.records[claim.push].transfer) for claim in taken})
        lists = triples.src.tolist(), triples.dst.tolist(), triples.size.tolist()
        return Batch(peer, session, taken, transfers, *lists, direct)

    def _add_checksum(self, push: Push, claim: Claim) -> None:
        """Add the checksums of what an exchange has brought; `sealed` adds those of what is pushed directly."""
        unit = unit_of(claim)
        values = batches.staged(push, claim).checksums if unit.sub_step else None
        if values is not None:
            self._register.sender.checksum(push, claim.d_rank, push.index(unit.layer), values)

    def _unwritten(self, now: float, claim: Claim, failure: Failure) -> None:
        """Hand back a claim that cannot be submitted, and fail its push, which need not wait for it."""
        self._register.do(now, self._register.sender.returned(now, claim))
        self._register.abort(now, claim.push, failure)
