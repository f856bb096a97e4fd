# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the module memcache_hybrid, as far as vllm-ascend's AscendStoreConnector calls it: a folder of files.

Each value is a file: the bytes of the addresses in a row. The folder (STAND_IN_POOL) is shared by all processes that
name it. An address outside of the registered buffers, or a value of another length, is an error as it is there.

Layer by layer a value is a range of the pool's own memory (the file `memory`) with an address that all processes know.
It is there for others once its writer has said that it is complete.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PUT, GET = 0, 1  # MmcDirect: device to pool, pool to device
DONE, MISSING, WRONG = 0, -1, -2
MEMORY = 1 << 46  # the pool's first address, where no process has anything
DRAM = 1  # medium of all values


@dataclass(frozen=True)
class _Range:
    """A value in the pool's memory, as the client describes it."""

    address: int
    length: int

    def size(self) -> int:
        return self.length

    def gva_list(self) -> list[int]:
        return [self.address]

    def type_list(self) -> list[int]:
        return [DRAM]


class DistributedObjectStore:
    def __init__(self) -> None:
        self._folder = Path(os.environ["STAND_IN_POOL"])
        self._buffers: list[tuple[int, int]] = []

    def init(self, device: int, init_bm: bool = True) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._memory = os.open(self._folder / "memory", os.O_RDWR | os.O_CREAT)
        return DONE

    def register_buffer(self, address: int, size: int) -> int:
        self._buffers.append((address, address + size))
        return DONE

    def unregister_buffer(self, address: int, size: int) -> int:
        self._buffers.remove((address, address + size))
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

    # -- layer by layer

    def batch_alloc(self, keys: Sequence[str], sizes: Sequence[int], replicas: int, lease_ms: int) -> list[int]:
        return [self._allocated(*one) for one in zip(keys, sizes, strict=True)]

    def batch_copy(self, objects: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], way: int) -> int:
        if not self._registered(addresses, sizes):
            return WRONG
        for place, address, size in zip(objects, addresses, sizes, strict=True):
            if way == PUT:
                os.pwrite(self._memory, ctypes.string_at(address, size), place - MEMORY)
            else:
                ctypes.memmove(address, os.pread(self._memory, size, place - MEMORY), size)
        return DONE

    def batch_write_finish(self, keys: Sequence[str], results: Sequence[int]) -> list[int]:
        for key, result in zip(keys, results, strict=True):
            file = self._file(key)
            if result == DONE:
                file.with_suffix(".new").rename(file)
            else:
                file.with_suffix(".new").unlink()
        return [DONE] * len(keys)

    def batch_get_key_info(self, keys: Sequence[str]) -> list[_Range | None]:
        files = [self._file(key) for key in keys]
        return [_Range(*map(int, file.read_text().split())) if file.exists() else None for file in files]

    def batch_add_lease(self, keys: Sequence[str], lease_ms: int) -> list[int]:
        return [DONE] * len(keys)  # nothing is ever given up here

    def batch_remove_lease(self, keys: Sequence[str]) -> int:
        return DONE

    def _allocated(self, key: str, size: int) -> int:
        """Return the address of a new value's range. Ranges begin at whole pages."""
        fcntl.lockf(self._memory, fcntl.LOCK_EX)
        try:
            end = os.fstat(self._memory).st_size
            os.ftruncate(self._memory, end + (size + 4095) // 4096 * 4096)
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)
        self._file(key).with_suffix(".new").write_text(f"{MEMORY + end} {size}")
        return MEMORY + end

    # -- files

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
