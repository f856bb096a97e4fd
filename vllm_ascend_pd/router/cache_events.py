# SPDX-License-Identifier: Apache-2.0
"""Engines' prefix caches by vLLM's KV events (`--kv-events-config`, published with ZMQ), if operators have them on.

The tokens that came into a cache and that left it are counted, from any sender. If events were missed or start anew,
everything known of the cache counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.fleet import NAMED, Fleet, Instance, parse_specs
from vllm_ascend_pd.router.instance_tasks import attend_each
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.settings import LAST_PORT

log = logging.getLogger(__name__)
MAX_BYTES = 16 << 20  # of a message
MAX_BLOCKS = 4 << 20  # blocks and groups that are kept of one cache
MAX_PORTS = 1024  # in one text of `parse_ports`
_MAX_SOCKETS = 1 << 14
_QUEUED = 1000  # messages that wait for this process
_OPTIONS = (
    (zmq.RCVHWM, _QUEUED),
    (zmq.MAXMSGSIZE, MAX_BYTES),
    (zmq.LINGER, 0),
    # Heartbeats show that a host is gone: a subscriber sends nothing that could fail.
    (zmq.HEARTBEAT_IVL, 10_000),
    (zmq.HEARTBEAT_TIMEOUT, 30_000),
    (zmq.RECONNECT_IVL_MAX, 5_000),
)
_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
# As vLLM 0.23 sends them: arrays that begin with the kind. Later versions send maps.
_IN_ORDER = {
    _STORED: (
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx"),
    ),
    _REMOVED: ("type", "block_hashes", "medium", "group_idx"),
}
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))  # first bytes of a map in MessagePack


class _EventBatch(msgspec.Struct, array_like=True):
    at: float
    events: list[msgspec.Raw]


class _CacheEvent(msgspec.Struct):
    """The fields of an event that are used."""

    type: str
    block_hashes: list[int | bytes] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


_BATCH, _EVENT = msgspec.msgpack.Decoder(_EventBatch), msgspec.msgpack.Decoder(_CacheEvent)


def parse_ports(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the ports on which instances publish, by the instance's name; "" has those of all others.

    Forms: `5557`; `5557+4` for four ranks behind one address; `10.0.0.1:9100=5557`; `10.0.0.1:9100+16=5557+16` for
    sixteen ranks with an address each. Raise ValueError for any other.
    """
    by_instance: dict[str, tuple[int, ...]] = {}
    for text in texts:
        named, _, value = text.rpartition("=")
        match = re.fullmatch(r"(\d{1,5})(?:\+(\d{1,4}))?", value)
        first, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (first > 0 and 0 < count <= MAX_PORTS and first + count - 1 <= LAST_PORT):
            raise ValueError(f"{value!r} is neither a port nor port+count")
        ports = tuple(range(first, first + count))
        names = [spec.name for spec in parse_specs(Role.PREFILL, named)] if named else [""]
        if len(names) > 1 and len(names) != count:
            raise ValueError(f"{text!r} has {len(names)} instances and {count} ports")
        for place, name in enumerate(names):
            if name in by_instance:
                raise ValueError(f"{text!r} gives ports a second time")
            by_instance[name] = ports[place : place + 1] if len(names) > 1 else ports
    return by_instance


class Cache:
    """One prefix cache, by its published events."""

    def __init__(self) -> None:
        self._number = -1
        self._blocks: defaultdict[int | None, dict[int | bytes, int]] = defaultdict(
            dict
        )  # by group: tokens of each block
        self._tokens: defaultdict[int | None, int] = defaultdict(int)

    @property
    def tokens(self) -> int:
        """Tokens of the largest group: a sliding-window group keeps only its last blocks."""
        return max(self._tokens.values(), default=0)

    def apply(self, number: int, payload: bytes) -> tuple[int, bool]:
        """Take in a batch; return the tokens that came, and whether any left.

        If a batch is missing or the numbers start anew, everything before counts as gone. Raise ValueError if it is no
        batch; then everything counts as gone too.
        """
        lost = self._number >= 0 and number != self._number + 1
        self._number = number
        if lost:
            self.clear()
        came = 0
        try:
            for event in map(_read, _BATCH.decode(payload).events):
                if event.type == _CLEARED:
                    self.clear()
                    lost = True
                elif event.type in (_STORED, _REMOVED) and event.medium in (None, "GPU"):
                    before = self.tokens
                    self._change(event)
                    came += max(0, self.tokens - before)
                    lost |= self.tokens < before
        except (ValueError, LookupError, TypeError, RecursionError) as problem:
            self.clear()
            raise ValueError(one_line(repr(problem))) from problem
        if sum(1 + len(blocks) for blocks in self._blocks.values()) > MAX_BLOCKS:
            self.clear()
            lost = True
        return came, lost

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._tokens.clear()

    def _change(self, event: _CacheEvent) -> None:
        group = event.group_idx
        blocks = self._blocks[group]
        for block in event.block_hashes:
            if event.type == _STORED:
                self._tokens[group] += event.block_size - blocks.get(block, 0)
                blocks[block] = event.block_size
            else:
                self._tokens[group] -= blocks.pop(block, 0)


def _read(raw: msgspec.Raw) -> _CacheEvent:
    if memoryview(raw)[0] in _MAPS:
        return _EVENT.decode(raw)
    fields: Any = msgspec.msgpack.decode(raw)
    names = _IN_ORDER.get(fields[0], ("type",))
    return msgspec.convert(dict(zip(names, fields, strict=False)), _CacheEvent)


class CacheEvents:
    """Subscriber to every instance whose ports are known."""

    def __init__(self, fleet: Fleet, ports: Mapping[str, tuple[int, ...]]) -> None:
        self._fleet, self._ports = fleet, ports
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)

    async def run(self) -> None:
        with self._context:
            await attend_each(self._fleet, "cache events", self._attend)

    async def _attend(self, instance: Instance) -> None:
        if instance.source == NAMED:  # the choice among these is made elsewhere
            return
        ports = self._ports.get(instance.name, self._ports.get("", ()))
        caches = [Cache() for _ in ports]
        await asyncio.gather(
            *(self._listen(instance, port, cache, caches) for port, cache in zip(ports, caches, strict=True))
        )

    async def _listen(self, instance: Instance, port: int, cache: Cache, caches: Sequence[Cache]) -> None:
        """Take in the events of one port, without end. `caches`: all caches of the instance."""
        host = instance.origin.host
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        try:
            socket = self._context.socket(zmq.SUB)
        except zmq.ZMQError as problem:
            log.warning("%s: its KV events are not received: %s", instance.name, problem)
            return
        with socket:
            try:
                for option, value in (*_OPTIONS, (zmq.IPV6, ":" in host)):
                    socket.setsockopt(option, value)
                socket.subscribe(b"")
                socket.connect(address)
            except zmq.ZMQError as problem:
                log.warning("%s: no KV events can be received from %s: %s", instance.name, address, problem)
                return
            warned = False
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number, payload = frames
                    came, lost = cache.apply(int.from_bytes(number, "big", signed=True), payload)
                except ValueError as problem:
                    came, lost = 0, True
                    if not warned:
                        log.warning(
                            "%s: %s publishes messages that are not vLLM's KV events: %s",
                            instance.name,
                            address,
                            problem,
                        )
                    warned = True
                METRICS.cache_events.labels(instance.role.value, instance.label).inc()
                instance.prompts.update(came, sum(one.tokens for one in caches), lost=lost)
                await asyncio.sleep(0)  # messages that wait already are received without a pause
