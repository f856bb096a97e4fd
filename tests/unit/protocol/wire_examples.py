# SPDX-License-Identifier: Apache-2.0
"""An example of everything that one process says to another, in the form of this release."""

from __future__ import annotations

import msgspec

from unit.channel.kit import LOOPBACK
from unit.protocol.kit import ack, begin, cancel, done, failed, layout_request, ready, refused, renew, reservation
from vllm_ascend_pd.channel.frames import (
    Clear,
    Goodbye,
    Guarded,
    Hello,
    Leaving,
    Proof,
)
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group, LayerKind, Region
from vllm_ascend_pd.protocol.auth import (
    seal,
    seal_first,
    seal_source,
)
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken, FirstTokenRequest
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Offer, Source, SourceId, Unwanted, Waits
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.reports import LoadReport, PushReport, params_of

GEOMETRY = CacheGeometry(
    block_size=16,
    kv_heads=2,
    tp_size=1,
    dtype="float16",
    packing="",
    regions=(Region("kv", 4096, 2048, 128, 128),),
    stages=(("l.0", "l.1"),),
)
RESERVATION = reservation(
    GEOMETRY, 20, transfer=TransferId("decode-1", 7, "u-7"), model="m", endpoints=(Endpoint(LOOPBACK, 9),)
)
OTHER = LayerKind(1, "int8/float32", "", (Region("k", 4096, 0, 128, 128), Region("scale", 128, 0, 4, 4)), 1)
KINDS = msgspec.structs.replace(GEOMETRY, drafter="d", drafts=("l.1",), others=(OTHER,), kind_of=(0, 1))
GROUPED = msgspec.structs.replace(KINDS, groups=(Group(16), Group(16, "window", 20)))
WHOLE = msgspec.structs.replace(OTHER, group_index=0, whole=True)
DIVIDED = msgspec.structs.replace(KINDS, tp_size=4, dcp=2, interleave=8, others=(WHOLE,))
CACHES = {
    "grouped": reservation(GROUPED, 20, blocks=(b"\1\0\0\0\2\0\0\0", b"\3\0\0\0\4\0\0\0")),
    "divided": reservation(DIVIDED, 20, blocks=(b"\1\0\0\0",)),
}
SEEDED = msgspec.structs.replace(RESERVATION, seed=FirstTokenRequest("how", 1))
FIRST = FirstToken(
    transfer=RESERVATION.transfer,
    push="prefill-1.x",
    position=20,
    token=77,
    digest="how",
    logprobs=((77, -0.5, 1), (78, -1.5, 2)),
)
MESSAGES: dict[str, Message] = {
    "begin": begin(),
    "renew": renew(),
    "ready": ready(),
    "refused": refused(),
    "done": done(checksums=((0, 0, 2**64 - 1),)),
    "failed": failed(),
    "which": layout_request(),
    "cancel": cancel(),
    "ack": ack("done", 3),
}
SOURCE_ID = SourceId("prefill-1", 4, "u-4")
BESIDE: dict[str, Guarded] = {  # what schedulers say, and the channel itself
    "offer": Offer(RESERVATION.transfer, seal(RESERVATION, None), SOURCE_ID, "x-1"),
    "waits": Waits(RESERVATION.transfer),
    "bound": Bound(RESERVATION.transfer, "prefill-1.x", ended=True, first=FIRST),
    "gone": Gone(RESERVATION.transfer, Failure("PD-META-027", "over")),
    "unwanted": Unwanted("decode-1", SOURCE_ID, "x-1"),
    "proof": Proof(),
    "leaving": Leaving(quiet=True),
}
CLEAR: dict[str, Clear] = {
    "hello": Hello(2, "prefill-1", bytes(range(32)), guarded=True, name="p", oldest=2, features=("seed",)),
    "goodbye": Goodbye("PD-CTRL-003", "another version"),
}
SOURCE = Source(2, SOURCE_ID, Endpoint(LOOPBACK, 9), 20, "h", 30.0)
LOAD = LoadReport(
    "decode-1/7/u-7", "t", "decode-1", 16, 4, "PD-XFER-001", "prefill-1", "0123456789ab.v2-2", "prefill", 8
)
PUSH = PushReport("prefill-1", "PD-META-005", "not mine", "0123456789ab.v2-2", "c2VhbGVk", sends_first=True)


def written() -> list[tuple[str, str, bytes]]:
    """Return an example of everything that one process says to another: its name, how it is read, its bytes."""
    guarded = [(name, "guarded", msgspec.msgpack.encode(message)) for name, message in (MESSAGES | BESIDE).items()]
    clear = [(name, "clear", msgspec.msgpack.encode(message)) for name, message in CLEAR.items()]
    sealed = [
        (name, "reservation", seal(one, None))
        for name, one in {"reservation": RESERVATION, "seeded": SEEDED, **CACHES}.items()
    ]
    sealed += [("first", "first", seal_first(FIRST, None)), ("source", "source", seal_source(SOURCE, None))]
    reports = [("load", "posted", msgspec.json.encode(LOAD))]
    for name, report in (("load in an answer", LOAD), ("push in an answer", PUSH)):
        reports.append((name, "answer", msgspec.json.encode({"kv_transfer_params": params_of(report)})))
    return [*guarded, *clear, *sealed, *reports]
