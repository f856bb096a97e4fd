# SPDX-License-Identifier: Apache-2.0
"""What engines say of their prefix caches: vLLM's KV events (`--kv-events-config`, published with ZMQ), where operators have them on.

Counted are tokens that came into a cache and left it, whoever sent them. Where events were missed, or begin anew, all that was known of
the cache has left it.
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
from vllm_ascend_pd.metaserver.decisions import Role
from vllm_ascend_pd.metaserver.service.each import attend_each
from vllm_ascend_pd.metaserver.service.fleet import LAST_PORT, Fleet, Instance, parse_specs
from vllm_ascend_pd.metaserver.service.metrics import METRICS
from vllm_ascend_pd.metaserver.service.named import SOURCE as NAMED

log = logging.getLogger(__name__)
MOST_BYTES = 16 << 20  # of a message
MOST_BLOCKS = 4 << 20  # and groups that are known of a cache
MOST_PORTS = 1024  # of one text
_MOST_SOCKETS = 1 << 14
_QUEUED = 1000  # messages that wait for this process
_OPTIONS = (
    (zmq.RCVHWM, _QUEUED),
    (zmq.MAXMSGSIZE, MOST_BYTES),
    (zmq.LINGER, 0),
    # A host that is gone says nothing, and a listener has nothing to say.
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
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))  # how a map begins in MessagePack


class _Batch(msgspec.Struct, array_like=True):
    at: float
    events: list[msgspec.Raw]


class _Event(msgspec.Struct):
    """What is looked at of an event."""

    type: str
    block_hashes: list[int | bytes] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


_BATCH, _EVENT = msgspec.msgpack.Decoder(_Batch), msgspec.msgpack.Decoder(_Event)


def parse_ports(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The ports on which instances publish, by the instance's name; \"\": of all others. `5557`, `5557+4` for four ranks that one
    address serves, `10.0.0.1:9100=5557`, `10.0.0.1:9100+16=5557+16` for as many that are served apart. Raises ValueError."""
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        named, _, told = text.rpartition("=")
        match = re.fullmatch(r"(\d{1,5})(?:\+(\d{1,4}))?", told)
        first, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (first > 0 and 0 < count <= MOST_PORTS and first + count - 1 <= LAST_PORT):
            raise ValueError(f"{told!r} is neither a port nor port+count")
        ports = tuple(range(first, first + count))
        names = [spec.name for spec in parse_specs(Role.PREFILL, named)] if named else [""]
        if len(names) > 1 and len(names) != count:
            raise ValueError(f"{text!r} has {len(names)} instances and {count} ports")
        for place, name in enumerate(names):
            if name in found:
                raise ValueError(f"{text!r} gives ports a second time")
            found[name] = ports[place : place + 1] if len(names) > 1 else ports
    return found


class Cache:
    """One prefix cache, by what was published of it."""

    def __init__(self) -> None:
        self._number = -1
        self._blocks: defaultdict[int | None, dict[int | bytes, int]] = defaultdict(
            dict
        )  # by group: tokens of each block
        self._tokens: defaultdict[int | None, int] = defaultdict(int)

    @property
    def tokens(self) -> int:
        """Of the largest group: of one with windows only the last blocks stay."""
        return max(self._tokens.values(), default=0)

    def heard(self, number: int, payload: bytes) -> tuple[int, bool]:
        """Take in a batch: tokens that came, and whether any left. Where a batch is missing, or a new beginning is made, all before has
        left. Raises ValueError for what is no batch; then nothing is known of the cache."""
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
        if sum(1 + len(blocks) for blocks in self._blocks.values()) > MOST_BLOCKS:
            self.clear()
            lost = True
        return came, lost

    def clear(self) -> None:
        """Know nothing of it."""
        self._blocks.clear()
        self._tokens.clear()

    def _change(self, event: _Event) -> None:
        group = event.group_idx
        blocks = self._blocks[group]
        for block in event.block_hashes:
            if event.type == _STORED:
                self._tokens[group] += event.block_size - blocks.get(block, 0)
                blocks[block] = event.block_size
            else:
                self._tokens[group] -= blocks.pop(block, 0)


def _read(raw: msgspec.Raw) -> _Event:
    if memoryview(raw)[0] in _MAPS:
        return _EVENT.decode(raw)
    fields: Any = msgspec.msgpack.decode(raw)
    names = _IN_ORDER.get(fields[0], ("type",))
    return msgspec.convert(dict(zip(names, fields, strict=False)), _Event)


class CacheEvents:
    """Subscribes to every instance whose ports are known."""

    def __init__(self, fleet: Fleet, ports: Mapping[str, tuple[int, ...]]) -> None:
        self._fleet, self._ports = fleet, ports
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)

    async def run(self) -> None:
        with self._context:
            await attend_each(self._fleet, "cache events", self._attend)

    async def _attend(self, instance: Instance) -> None:
        if instance.source == NAMED:  # chosen elsewhere
            return
        ports = self._ports.get(instance.name, self._ports.get("", ()))
        caches = [Cache() for _ in ports]
        await asyncio.gather(
            *(self._listen(instance, port, cache, caches) for port, cache in zip(ports, caches, strict=True))
        )

    async def _listen(self, instance: Instance, port: int, cache: Cache, caches: Sequence[Cache]) -> None:
        """`caches`: all that the instance has."""
        host = instance.origin.host
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        try:
            socket = self._context.socket(zmq.SUB)
        except zmq.ZMQError as problem:
            log.warning("%s: its KV events are not heard: %s", instance.name, problem)
            return
        with socket:
            try:
                for option, value in (*_OPTIONS, (zmq.IPV6, ":" in host)):
                    socket.setsockopt(option, value)
                socket.subscribe(b"")
                socket.connect(address)
            except zmq.ZMQError as problem:
                log.warning("%s: no KV events can be heard at %s: %s", instance.name, address, problem)
                return
            warned = False
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number, payload = frames
                    came, lost = cache.heard(int.from_bytes(number, "big", signed=True), payload)
                except ValueError as problem:
                    came, lost = 0, True
                    if not warned:
                        log.warning(
                            "%s: %s publishes what are no KV events of vLLM's: %s", instance.name, address, problem
                        )
                    warned = True
                METRICS.cache_events.labels(instance.role.value, instance.name).inc()
                instance.prompts.tell(came, sum(one.tokens for one in caches), lost=lost)
                await asyncio.sleep(0)  # those that wait already come without a pause
