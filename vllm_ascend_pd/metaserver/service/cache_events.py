# SPDX-License-Identifier: Apache-2.0
"""What engines say of their prefix caches: vLLM's KV events (`--kv-events-config`, published with ZMQ), where operators have them on.

Counted are tokens that came into a cache and left it, whoever sent them. Events that were missed, or that begin anew, end all that is
known of the cache.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.metaserver.decisions import Role
from vllm_ascend_pd.metaserver.service.each import attend_each
from vllm_ascend_pd.metaserver.service.fleet import LAST_PORT, Fleet, Instance, parse_specs
from vllm_ascend_pd.metaserver.service.metrics import METRICS

log = logging.getLogger(__name__)
MOST_BYTES = 64 << 20  # of a message
MOST_BLOCKS = 4 << 20  # that are known of a cache
MOST_PORTS = 1024
_QUEUED = 10_000  # messages that wait for this process
_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_IN_ORDER = {  # as versions before vLLM 0.32 send them: arrays that begin with the kind
    _STORED: ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    _REMOVED: ("type", "block_hashes", "medium"),
    _CLEARED: ("type",),
}


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
        found.update({name: ports[place : place + 1] if len(names) > 1 else ports for place, name in enumerate(names)})
    return found


class Cache:
    """One prefix cache, by what was published of it."""

    def __init__(self) -> None:
        self._number = -1
        self._blocks: defaultdict[object, dict[object, int]] = defaultdict(dict)  # by group: tokens of each block
        self._tokens: defaultdict[object, int] = defaultdict(int)

    def heard(self, number: int, payload: bytes) -> tuple[int, int] | None:
        """Tokens that came and that left with this batch; None: nothing is known any more. Raises ValueError for what is no batch."""
        follows, self._number = number == self._number + 1 or self._number < 0, number
        if not follows:
            self._clear()
            return None
        try:
            batch: Any = msgspec.msgpack.decode(payload)
            came = left = 0
            for event in map(_fields, batch[1]):
                if event["type"] == _CLEARED:
                    self._clear()
                    return None
                if event.get("medium") not in (None, "GPU"):
                    continue
                change = self._change(event)
                came, left = came + max(0, change), left + max(0, -change)
        except (msgspec.DecodeError, LookupError, TypeError) as problem:
            raise ValueError(one_line(repr(problem))) from problem
        if sum(map(len, self._blocks.values())) > MOST_BLOCKS:
            self._clear()
            return None
        return came, left

    def _change(self, event: Mapping[str, Any]) -> int:
        """How the tokens of the largest group change: of a group with windows only the last blocks stay."""
        group = event.get("group_idx")
        blocks, before = self._blocks[group], max(self._tokens.values(), default=0)
        for block in event["block_hashes"]:
            if event["type"] == _STORED:
                self._tokens[group] += event["block_size"] - blocks.get(block, 0)
                blocks[block] = event["block_size"]
            else:
                self._tokens[group] -= blocks.pop(block, 0)
        return max(self._tokens.values()) - before

    def _clear(self) -> None:
        self._blocks.clear()
        self._tokens.clear()


def _fields(event: Any) -> Mapping[str, Any]:
    if isinstance(event, dict):
        return event
    return dict(zip(_IN_ORDER[event[0]], event, strict=False))


class CacheEvents:
    """Subscribes to every instance whose ports are known."""

    def __init__(self, fleet: Fleet, ports: Mapping[str, tuple[int, ...]]) -> None:
        self._fleet, self._ports = fleet, ports

    async def run(self) -> None:
        with zmq.asyncio.Context() as self._context:
            await attend_each(self._fleet, "cache events", self._attend)

    async def _attend(self, instance: Instance) -> None:
        ports = self._ports.get(instance.name, self._ports.get("", ()))
        await asyncio.gather(*(self._listen(instance, port) for port in ports))

    async def _listen(self, instance: Instance, port: int) -> None:
        host = instance.origin.host
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        socket = self._context.socket(zmq.SUB)
        for option, value in (
            (zmq.RCVHWM, _QUEUED),
            (zmq.MAXMSGSIZE, MOST_BYTES),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.LINGER, 0),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IPV6, ":" in host)
        socket.subscribe(b"")
        cache = Cache()
        with socket:
            socket.connect(address)
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number, payload = frames
                    change = cache.heard(int.from_bytes(number, "big", signed=True), payload)
                except ValueError as problem:
                    log.warning(
                        "%s: what %s publishes are no KV events of vLLM's and is not used: %s",
                        instance.name,
                        address,
                        problem,
                    )
                    instance.prompts.forget()
                    return
                METRICS.cache_events.labels(instance.role.value, instance.name).inc()
                if change is None:
                    instance.prompts.forget()
                else:
                    instance.prompts.stored(change[0])
                    if change[1]:
                        instance.prompts.removed(change[1])
