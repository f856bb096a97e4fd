# SPDX-License-Identifier: Apache-2.0
"""The id of a response, which says where it is stored: a D keeps responses in its own memory.

Pure. vLLM names a response as its request is named, so the metaserver chooses the name and writes into it what requests
for that response need: which D has it, and by which mark engines have its prompt in their caches. So nothing is kept
here, and each worker, host and later process reads the same. Anyone can write such an id, so it says no number: how
long a conversation is, the metaserver knows by that mark, and D says it in its post.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

from vllm_ascend_pd.router.core.prefixes import Mark, Marks

# At most 62 characters: a longer value of a field is not read.
_ID = re.compile(r"resp_([0-9a-f]{16})([0-9a-f]{16})([mt])[0-9a-f]{24}")
_NO_MARK = bytes(8)


class Stored(NamedTuple):
    """A stored response, as its id says."""

    home: str  # which D has it
    end: bytes  # digest of its prompt's last mark
    has_media: bool  # its prompt is more than token ids

    @property
    def marks(self) -> Marks:
        return (Mark(self.end, 0),) if self.end != _NO_MARK else ()


def home_of(decode: str, key: str) -> str:
    """Return how ids name the D with this address. Without the engines' key nobody can tell the address from it."""
    secret = hashlib.blake2b(key.encode()).digest()
    return hashlib.blake2b(decode.encode(), digest_size=8, key=secret).hexdigest()


def new_id(home: str, marks: Marks, has_media: bool) -> str:
    """Return the id for the response of this D to a prompt."""
    digest = marks[-1].digest if marks else _NO_MARK
    return f"resp_{home}{digest.hex()}{'m' if has_media else 't'}{secrets.token_hex(12)}"


def read(name: object) -> Stored | None:
    """Return what an id says; None if it is not of the metaserver's making."""
    match = _ID.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    home, digest, kind = match.groups()
    return Stored(home, bytes.fromhex(digest), kind == "m")


def of_path(path: str) -> Stored | None:
    """Return what the id in a path below `/v1/responses/` says."""
    _, _, rest = path.partition("/v1/responses/")
    return read(rest.partition("/")[0])
