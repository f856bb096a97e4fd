# SPDX-License-Identifier: Apache-2.0
"""Pictures, sound and video in a chat: as many tokens for all, as their bytes say nothing about these."""

from __future__ import annotations

import hashlib
import re

from vllm_ascend_pd.router.core.pieces import PIECE

BYTES = 4 << 10  # of text that a medium counts as: about 1,000 tokens, as of a picture of medium size
_LEAST = 1 << 10  # bytes of data that are no text: nobody writes so long a word
_WORD = rb"[A-Za-z0-9+/=_\\-]"  # base64 in a JSON string, whose slashes and line ends may be escaped
_MEDIUM = re.compile(rb'"(https?:[^"]{2,2048})"|[",](%b{%d,})' % (_WORD, _LEAST))
_REST = re.compile(rb"%b+" % _WORD)


def measured(messages: memoryview) -> bytes:
    """Return a chat's messages with `BYTES` bytes made of a hash in place of each medium's data, or its address."""
    parts, at = list[bytes](), 0
    while at < len(messages):
        medium = _MEDIUM.search(messages, at, at + PIECE)
        if medium is None:  # one may begin in the last bytes of the piece
            end = len(messages) if at + PIECE >= len(messages) else at + PIECE - 2 * _LEAST - 16
            parts.append(bytes(messages[at:end]))
            at = end
            continue
        begin, end = medium.span(medium.lastindex or 0)
        parts.append(bytes(messages[at:begin]))
        data, at = hashlib.blake2b(messages[begin:end]), end
        while (rest := _REST.match(messages, at, at + PIECE)) is not None:  # the piece ends within it
            data.update(rest[0])
            at = rest.end()
        parts.append(data.hexdigest().encode() * (BYTES // 128))
    return b"".join(parts)
