# SPDX-License-Identifier: Apache-2.0
"""Wire format of a reservation: D's layout, and a slice of blocks for each group.

The layout is sent in full, because a receiver cannot ask D for it. The version is at the same place in every version. A
field that is filled but not supported is refused by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.geometry.layout import MAX_GROUPS, Group
from vllm_ascend_pd.protocol.first import FirstTokenRequest
from vllm_ascend_pd.protocol.identity import Count, Token, TransferId
from vllm_ascend_pd.protocol.layouts import MAX_LAYOUT_BYTES, EngineLayout, read, written
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Needs, Reservation, Seconds


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group for tokens [first, end). `index` is the place of the first block in the prompt."""

    first: Count
    end: Count
    index: Count
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]  # int32, little-endian


class SentReservation(msgspec.Struct, frozen=True):
    """A reservation as it is sent: the fields that `Reservation` has in other types are in bytes."""

    version: int
    transfer: TransferId
    layout: Annotated[bytes, msgspec.Meta(max_length=MAX_LAYOUT_BYTES)]
    groups: Annotated[tuple[Slice, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    deadline_s: Seconds
    prompt_length: Count
    prompt_hash: Token
    needs: Needs = ()
    seed: FirstTokenRequest | None = None


def as_sent(reservation: Reservation) -> SentReservation:
    r = reservation
    layout = written(EngineLayout(r.model, r.geometry, r.endpoints))
    slices = tuple(
        Slice(group.begins(r.first, r.end), r.end, group.blocks(r.first, r.end).start, ids)
        for group, ids in zip(r.geometry.tables, r.blocks, strict=True)
    )
    return SentReservation(
        r.version, r.transfer, layout, slices, r.deadline_s, r.prompt_length, r.prompt_hash, r.needs, r.seed
    )


def reservation_of(sent: SentReservation) -> Reservation:
    """Read a reservation. Raise PD-CTRL-002 if it contradicts itself, PD-CTRL-004 if it has something not supported."""
    layout = read(sent.layout)
    why = _contradiction(sent.groups, layout.geometry.tables)
    if why:
        raise RemoteProtocolError("PD-CTRL-002", why=why)
    return Reservation(
        version=sent.version,
        transfer=sent.transfer,
        model=layout.model,
        first=min(group.first for group in sent.groups),
        end=sent.groups[0].end,
        blocks=tuple(group.ids for group in sent.groups),
        geometry=layout.geometry,
        endpoints=layout.endpoints,
        deadline_s=sent.deadline_s,
        prompt_length=sent.prompt_length,
        prompt_hash=sent.prompt_hash,
        needs=sent.needs,
        seed=sent.seed,
    )


def _contradiction(slices: Sequence[Slice], groups: Sequence[Group]) -> str:
    """Return what is impossible about the slices; empty if nothing is."""
    if len(slices) != len(groups):
        count = len(groups) if len(groups) > 1 else "one"
        return f"{len(slices)} slices for {count} group{'s' if len(groups) > 1 else ''}"
    first, end = min(one.first for one in slices), slices[0].end
    for one, group in zip(slices, groups, strict=True):
        if one.end != end:
            return f"slices that end at {end} and at {one.end}"
        if one.first != group.begins(first, end):
            return f"a slice that begins at {one.first} where {group} of [{first}, {end}) are to come"
        if one.index != group.blocks(first, end).start:
            return f"token {one.first} is not in the block of index {one.index}"
    return ""
