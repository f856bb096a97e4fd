# SPDX-License-Identifier: Apache-2.0
"""Checks of P's scheduler: what is a request for it, and which reservation fits a prompt and a cache."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.match import mismatches, range_fault
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import Gone, Offer
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.versions import OURS, WHOLE


def opened(offer: Offer, unseal: Callable[[bytes], Reservation]) -> Reservation | Gone:
    """Return the reservation that an offer has sealed, or the answer that refuses the offer."""
    try:
        reservation = unseal(offer.reservation)
        if reservation.transfer != offer.transfer:
            raise PdError("PD-CTRL-002", why="an offer of another transfer than its reservation's")
    except PdError as refused:
        return Gone(offer.transfer, Failure.of(refused))
    return reservation


def is_prefill(params: object) -> bool:
    """Return whether a request asks P to prefill for another engine. They may be anything that JSON has."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def not_held(geometry: CacheGeometry) -> str:
    """Return why sources of this cache are not held; empty if they are.

    Draft layers: only steps with a push check that the draft model has run. Windows and states: P frees or overwrites
    what a later target would need.
    """
    if geometry.drafts:
        return "its cache has layers of a draft model"
    partial = "its cache does not keep every token (sliding windows, or recurrent states)"
    return partial if geometry.recomputes_last else ""


def refusal_of(
    reservation: Reservation,
    prompt: tuple[int, str],
    model: str,
    geometry: CacheGeometry | None,
    pushed: Container[TransferId],
) -> PdError | None:
    """Return why this prompt cannot be pushed for this reservation; None if it can.

    What cannot be pushed from this cache is refused at once, not only by D's deadline.
    """
    refusal = OURS.refusal(reservation.version, reservation.needs)
    if refusal is not None:
        return refusal
    length, digest = prompt
    if reservation.transfer in pushed:
        return PdError("PD-META-005", why=f"transfer {reservation.transfer} was pushed already")
    if reservation.model != model:
        return PdError("PD-GEO-001", field="model", prefill=model, decode=reservation.model)
    if reservation.prompt_length != length:
        return PdError("PD-META-005", why=f"{length} prompt tokens here, {reservation.prompt_length} reserved")
    if reservation.prompt_hash != digest:
        return PdError("PD-META-005", why="the prompts differ (tokens, LoRA, multimodal input or cache salt)")
    why = _malformed(reservation)
    if why:
        return PdError("PD-META-005", why=why)
    differences = mismatches(geometry, reservation.geometry) if geometry is not None else ()
    return differences[0].error() if differences else None


def _malformed(reservation: Reservation) -> str:
    """Return why no decode engine reserves like this; empty if one does. The workers' arithmetic relies on it."""
    d = reservation.geometry
    if reservation.end > reservation.prompt_length:
        return f"tokens [{reservation.first}, {reservation.end}) of {reservation.prompt_length}"
    if len(reservation.endpoints) != d.workers:
        return f"{len(reservation.endpoints)} endpoints for {d.workers} workers"
    if d.recomputes_last and reservation.end >= reservation.prompt_length and WHOLE not in reservation.needs:
        return f"{reservation.end} tokens of {reservation.prompt_length}, of a cache of which the last is not pushed"
    if WHOLE in reservation.needs and reservation.end < reservation.prompt_length:
        return f"{reservation.end} tokens of {reservation.prompt_length}, which is said to be all of them"
    sizes = [len(ids) for ids in reservation.blocks]
    if any(size % 4 for size in sizes):
        return f"{', '.join(map(str, sizes))} bytes of block ids"
    return range_fault(d, reservation.first, reservation.end, *(size // 4 for size in sizes))
