# SPDX-License-Identifier: Apache-2.0
"""Decisions of D's scheduler: the requests that load remote KV, their transfers, and when a load is over.

Pure: the adapter in ../role.py translates vLLM's objects and makes the HTTP call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group, in_kernel_blocks
from vllm_ascend_pd.metadata import Bind, DecodeStep, LoadCancel, LoadEnd
from vllm_ascend_pd.protocol.identity import TransferId

MAX_TICKET = 256


@dataclass(frozen=True, slots=True)
class Ticket:
    """The metaserver's part of a request: the address to call, and the request's name there."""

    metaserver: str
    ticket: str
    send_tokens: bool = False
    first_token: bool = False  # each P that it may ask sends its first token


@dataclass(frozen=True, slots=True)
class Verdict:
    """End of a load as a whole."""

    code: str = ""  # why the KV did not come: the first code that a rank reported
    push: str = ""
    cached: int = 0

    @property
    def hangs_up(self) -> bool:
        """True if the metaserver's call is of no use any more. After a complete load it ends by itself, with P."""
        return bool(self.code)


@dataclass(slots=True)
class _Load:
    request_id: str
    transfer: TransferId
    blocks: int
    answered: bool = False  # the metaserver's call has ended
    cancelled: bool = False
    ends: list[LoadEnd] = field(default_factory=list)  # of the ranks, as they come


@dataclass(slots=True)
class _PendingLoads:
    binds: list[Bind] = field(default_factory=list)
    cancels: list[LoadCancel] = field(default_factory=list)
    settles: list[TransferId] = field(default_factory=list)
    overs: list[TransferId] = field(default_factory=list)


def read_ticket(params: Mapping[str, Any] | None, allowed: frozenset[str]) -> Ticket | str | None:
    """Return a ticket, or why there is none (the request is then prefilled locally), or None if none was meant.

    A client can reach an engine without a router: `params` may be any JSON.
    """
    if (
        not isinstance(params, Mapping)
        or params.get("do_remote_prefill") is not True
        or params.get("do_virtual") is True
    ):
        return None  # virtual: a warm-up that names no prefill engine; it is prefilled locally
    url, ticket = params.get("metaserver"), params.get("ticket")
    if not isinstance(url, str) or url.rstrip("/") not in allowed:
        return "its metaserver is not in metaserver_urls"
    if not isinstance(ticket, str) or not 0 < len(ticket) <= MAX_TICKET or not ticket.isascii():
        return "it carries no ticket"
    return Ticket(url.rstrip("/"), ticket, params.get("send_tokens") is True, params.get("first_token") is True)


class LoadBook:
    """D's loads by request. A request loads once: after that, `wanted` returns 0."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._n = 0
        self._candidates: dict[str, int] = {}  # request id → first token wanted
        self._loads: dict[str, _Load] = {}
        self._by_transfer: dict[TransferId, _Load] = {}
        self._consumed: set[str] = set()
        self._pending = _PendingLoads()

    def wanted(self, request_id: str, prompt_length: int, computed: int, *, recomputes_last: bool = False) -> int:
        """Return how many tokens to load remotely. Repeatable.

        A single token is not worth it: D computes the last one anyway. With `recomputes_last` that one is never loaded.
        """
        if request_id in self._consumed or prompt_length - computed <= 1:
            return 0
        self._candidates[request_id] = computed
        return prompt_length - computed - recomputes_last

    def reserve(
        self,
        request_id: str,
        count: int,
        blocks: Sequence[Sequence[int]],
        groups: Sequence[Group],
        deadline_s: float,
        uuid: str,
        kernel_blocks: tuple[int, ...] = (),
    ) -> Bind:
        """Reserve for `count` tokens. `blocks` are those that vLLM has allocated: the whole table of each group.

        `kernel_blocks`: how many of the groups' blocks are one of vLLM's; none: they are the same.
        """
        first = self._candidates.pop(request_id, None)
        if first is None or count <= 0:
            raise LocalProtocolError(f"reserve({request_id!r}, {count}) without a wanted load")
        self._n += 1
        end = first + count
        kernel_blocks = kernel_blocks or (1,) * len(groups)
        begins = [group.begins(first, end) for group in groups]
        places = [group.blocks(first, end) for group in groups]
        wanted = tuple(
            np.asarray(table[some.start : some.stop], dtype=np.int32)
            for table, some in zip(in_kernel_blocks(blocks, kernel_blocks), places, strict=True)
        )
        for ids, group, begin, some in zip(wanted, groups, begins, places, strict=True):
            if group.partial and (not ids.all() or len(ids) < len(some)):
                raise LocalProtocolError(
                    f"vLLM keeps no block for some of [{begin}, {end}), of {group}: {ids.tolist()}"
                )
        transfer = TransferId(self._incarnation, self._n, uuid)
        bind = Bind(request_id, transfer, min(begins), end, wanted, deadline_s, kernel_blocks)
        self._loads[request_id] = self._by_transfer[transfer] = _Load(request_id, transfer, len(bind.taken()))
        self._consumed.add(request_id)
        self._pending.binds.append(bind)
        return bind

    def has_loaded(self, request_id: str) -> bool:
        """Return whether the request loads, or has loaded: it does so once."""
        return request_id in self._consumed

    def answered(self, transfer: TransferId, kind: str, code: str = "", detail: str = "") -> None:
        """Record how the metaserver's call has ended."""
        if kind == "prefilled":
            self.prefilled(transfer)
        else:
            self.failed(transfer, code, detail)

    def prefilled(self, transfer: TransferId) -> None:
        """Record that P has finished: what is missing must come soon."""
        load = self._by_transfer.get(transfer)
        if load is not None and not load.answered:
            load.answered = True
            self._pending.settles.append(transfer)

    def failed(self, transfer: TransferId, code: str, detail: str) -> None:
        """Record that the metaserver's call failed: the load is fenced before the request goes on."""
        load = self._by_transfer.get(transfer)
        if load is not None and not load.answered:
            load.answered = True
            self._cancel(load, code, detail)

    def request_finished(self, request_id: str) -> TransferId | None:
        """Handle the end of a request. Cancel a load that is still open, and return its transfer."""
        self._candidates.pop(request_id, None)
        self._consumed.discard(request_id)
        load = self._loads.get(request_id)
        if load is None:
            return None
        self._cancel(load, "PD-XFER-002", "the request ended on decode")
        return load.transfer

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        """Record how workers' parts of loads ended, which comes before the load as a whole is reported."""
        for end in sorted(ends, key=lambda end: (end.request_id, end.code)):
            load = self._loads.get(end.request_id)
            if load is not None:
                load.ends.append(end)

    def verdict(self, request_id: str) -> Verdict:
        """Return the end of a load by the ranks' reports. To be called before `received`."""
        load = self._loads.get(request_id)
        ends = load.ends if load is not None else []
        code = next((end.code for end in ends if end.code), "")
        cached = 0 if code else max((end.cached for end in ends), default=0)
        return Verdict(code, next((end.push for end in ends if end.push), ""), cached)

    def received(self, request_id: str) -> TransferId | None:
        """Record that all workers have reported a request. None if it is no load of ours (any more)."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return None
        del self._by_transfer[load.transfer]
        self._pending.overs.append(load.transfer)
        return load.transfer

    def open_count(self) -> int:
        return len(self._loads)

    def waiting_count(self) -> int:
        """Return the number of open loads whose requests wait for them: those of ended requests are only fenced."""
        return sum(request_id in self._consumed for request_id in self._loads)

    def fencing_blocks(self) -> int:
        """Return the number of blocks of cancelled loads whose writers are not known to be quiet yet."""
        return sum(load.blocks for load in self._loads.values() if load.cancelled)

    def take_step(self, wake: tuple[str, int] | None, geometry: CacheGeometry | None) -> DecodeStep:
        """Return this step's metadata; the next call starts anew."""
        pending, self._pending = self._pending, _PendingLoads()
        return DecodeStep(
            binds=tuple(pending.binds),
            cancels=tuple(pending.cancels),
            settles=tuple(pending.settles),
            overs=tuple(pending.overs),
            wake=wake,
            incarnation=self._incarnation,
            geometry=geometry if pending.binds else None,
        )

    def _cancel(self, load: _Load, code: str, detail: str) -> None:
        if not load.cancelled:
            load.cancelled = True
            self._pending.cancels.append(LoadCancel(load.transfer, code, detail))
