# SPDX-License-Identifier: Apache-2.0
"""Program for the interpreter of a previous package: read words from stdin, print what it makes of them.

Each word is decoded as its receiver would, and encoded again.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable

import msgspec

import vllm_ascend_pd
from vllm_ascend_pd.channel.frames import decode_clear, decode_guarded
from vllm_ascend_pd.protocol.auth import seal, seal_first, seal_source, unseal, unseal_first, unseal_source
from vllm_ascend_pd.protocol.versions import OURS, fingerprint, may_pair

try:
    from vllm_ascend_pd.protocol.reports import params_of, read_answer, read_posted
except ModuleNotFoundError:  # commits before cb8f80b have it here
    from vllm_ascend_pd.metaserver.reports import params_of, read_answer, read_posted  # type: ignore[no-redef]

_pack = msgspec.msgpack.encode


def _clear(body: bytes) -> bytes:
    return _pack(decode_clear(memoryview(body)))


def _reservation(body: bytes) -> bytes:
    reservation = unseal(body, None)
    refusal = OURS.refusal(reservation.version, reservation.needs)
    if refusal is not None:
        raise ValueError(str(refusal))
    return seal(reservation, None)


def _answer(body: bytes) -> bytes:
    load, push = read_answer(body)
    report = load if load is not None else push
    assert report is not None
    return msgspec.json.encode({"kv_transfer_params": params_of(report)})


READ: dict[str, Callable[[bytes], bytes]] = {
    "guarded": lambda body: _pack(decode_guarded(body)),
    "clear": _clear,
    "reservation": _reservation,
    "source": lambda body: seal_source(unseal_source(body, None), None),
    "first": lambda body: seal_first(unseal_first(body, None), None),
    "posted": lambda body: msgspec.json.encode(read_posted(body)),
    "answer": _answer,
}


def main() -> None:
    given = json.load(sys.stdin)
    made = {
        name: base64.b64encode(READ[how](base64.b64decode(body))).decode()
        for name, (how, body) in given["words"].items()
    }
    pairs = may_pair(given["fingerprint"], fingerprint(given["model"]))
    print(
        json.dumps(
            {"package": vllm_ascend_pd.__file__, "words": made, "pairs": pairs, "own": fingerprint(given["model"])}
        )
    )


if __name__ == "__main__":
    main()
