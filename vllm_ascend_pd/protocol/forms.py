# SPDX-License-Identifier: Apache-2.0
"""A reservation as it travels: D's layout in full, since on its way nobody can be asked, and a slice of blocks for each group.

Its version stands where every version's reservation has it. What is filled and not understood is refused by its name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.geometry.layout import Name
from vllm_ascend_pd.protocol.identity import Count, Token, TransferId
from vllm_ascend_pd.protocol.layouts import MAX_GROUPS, MAX_LAYOUT_BYTES, Told, read, written
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Needs, Reservation, Seconds


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """What is wanted of one group: tokens [first, end), which begin in the block of the prompt with this index."""

    first: Count
    end: Count
    index: Count
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]  # int32, little-endian


class Form(msgspec.Struct, frozen=True):
    version: int
    transfer: TransferId
    layout: Annotated[bytes, msgspec.Meta(max_length=MAX_LAYOUT_BYTES)]
    groups: Annotated[tuple[Slice, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    deadline_s: Seconds
    prompt_length: Count
    prompt_hash: Token
    needs: Needs = ()
    seed: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack's nothing
    meets: Name = ""


def form_of(reservation: Reservation) -> Form:
    r = reservation
    layout = written(Told(r.model, r.geometry, r.endpoints))
    group = Slice(r.first, r.end, r.first // r.geometry.block_size, r.blocks)
    return Form(r.version, r.transfer, layout, (group,), r.deadline_s, r.prompt_length, r.prompt_hash, r.needs)


def reservation_of(form: Form) -> Reservation:
    """Raises PD-CTRL-002 and PD-CTRL-004."""
    for word, filled in (("seed", bytes(form.seed) != b"\xc0"), ("meets", bool(form.meets))):
        if filled:
            raise RemoteProtocolError("PD-CTRL-004", word=word)
    told = read(form.layout)
    if len(form.groups) != 1:
        raise RemoteProtocolError("PD-CTRL-002", why=f"{len(form.groups)} slices for one group")
    (group,) = form.groups
    if group.index != group.first // told.geometry.block_size:
        why = f"token {group.first} is not in the block of index {group.index}"
        raise RemoteProtocolError("PD-CTRL-002", why=why)
    return Reservation(
        version=form.version,
        transfer=form.transfer,
        model=told.model,
        first=group.first,
        end=group.end,
        blocks=group.ids,
        geometry=told.geometry,
        endpoints=told.endpoints,
        deadline_s=form.deadline_s,
        prompt_length=form.prompt_length,
        prompt_hash=form.prompt_hash,
        needs=form.needs,
    )
