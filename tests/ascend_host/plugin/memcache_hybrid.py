# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the module memcache_hybrid, as far as vllm-ascend's AscendStoreConnector calls it: a folder of files.

Each value is a file: the bytes of the addresses in a row. The folder (STAND_IN_POOL) is shared by all processes that
name it. An address outside of the registered buffers, or a value of another length, is an error as it is there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

PUT, GET = 0, 1  # MmcDirect: device to pool, pool to device
DONE, MISSING, WRONG = 0, -1, -2


class DistributedObjectStore:
    def __init__(self) -> None:
        self._folder = Path(os.environ["STAND_IN_POOL"])
        self._buffers: list[tuple[int, int]] = []

    def init(self, device: int, init_bm: bool = True) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        return DONE

    def register_buffer(self, address: int, size: int) -> int:
        self._buffers.append((address, address + size))
        return DONE

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [int(self._file(key).exists()) for key in keys]

    def batch_put_from_layers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], way: int
    ) -> list[int]:
        assert way == PUT
        return [self._put(*one) for one in zip(keys, addresses, sizes, strict=True)]

    def batch_get_into_layers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], way: int
    ) -> list[int]:
        assert way == GET
        return [self._get(*one) for one in zip(keys, addresses, sizes, strict=True)]

    def _file(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _put(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        if not self._registered(addresses, sizes):
            return WRONG
        parts = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        made = self._folder / f"{os.getpid()}.new"  # a worker has one thread that puts
        made.write_bytes(b"".join(parts))
        made.replace(self._file(key))
        return DONE

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        if not self._registered(addresses, sizes):
            return WRONG
        try:
            value = self._file(key).read_bytes()
        except FileNotFoundError:
            return MISSING
        if len(value) != sum(sizes):
            return WRONG
        at = 0
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, value[at : at + size], size)
            at += size
        return DONE

    def _registered(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        return all(
            any(begin <= address and address + size <= end for begin, end in self._buffers)
            for address, size in zip(addresses, sizes, strict=True)
        )
