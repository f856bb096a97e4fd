# SPDX-License-Identifier: Apache-2.0
"""Different releases that meet: those that pair, messages of refusals, and fields that an older one may ignore."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from unit.channel.test_channel_hostile import Raw, still_works
from unit.kits.channel import LOOPBACK, Ear, Mouth, until
from unit.kits.protocol import ack, begin, cancel, done, failed, ready, refused, renew, reservation, which
from vllm_ascend_pd.channel.frames import (
    Clear,
    Goodbye,
    Guarded,
    Hello,
    Leaving,
    Proof,
    decode_clear,
    decode_guarded,
)
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.prefill.decisions import PushBook
from vllm_ascend_pd.protocol.auth import (
    encode,
    seal,
    seal_first,
    seal_source,
    unseal,
    unseal_first,
    unseal_source,
)
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import First, Seed
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Offer, Source, SourceId, Unwanted, Waits
from vllm_ascend_pd.protocol.messages import Message, Reservation
from vllm_ascend_pd.protocol.reports import LoadReport, PushReport, params_of, read_answer, read_posted
from vllm_ascend_pd.protocol.versions import MAX_FINGERPRINT, OURS, Release, fingerprint, may_pair

RECORDED = json.loads((Path(__file__).parent / "wire_recorded.json").read_text())
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
SEEDED = msgspec.structs.replace(RESERVATION, seed=Seed("how", 1))
FIRST = First(
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
    "which": which(),
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
        (name, "reservation", seal(one, None)) for name, one in (("reservation", RESERVATION), ("seeded", SEEDED))
    ]
    sealed += [("first", "first", seal_first(FIRST, None)), ("source", "source", seal_source(SOURCE, None))]
    reports = [("load", "posted", msgspec.json.encode(LOAD))]
    for name, report in (("load in an answer", LOAD), ("push in an answer", PUSH)):
        reports.append((name, "answer", msgspec.json.encode({"kv_transfer_params": params_of(report)})))
    return [*guarded, *clear, *sealed, *reports]


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in MESSAGES.values()} == set(get_args(Message))
    assert {type(message) for message in (MESSAGES | BESIDE).values()} == set(get_args(Guarded))
    assert {type(message) for message in CLEAR.values()} == set(get_args(Clear))


def recorded(version: int, what: str) -> bytes:
    return base64.b64decode(RECORDED[str(version)][what])


def admitted(reservation: Reservation) -> str:
    refusal = PushBook(model="m").admit("r", reservation, 20, "h", "push")
    return "" if refusal is None else str(refusal)


@pytest.mark.parametrize(
    ("one", "other", "pair"),
    [
        (Release(2, 2), Release(2, 2), True),
        (Release(3, 2), Release(2, 2), True),
        (Release(3, 2), Release(4, 3), True),
        (Release(2, 2), Release(3, 3), False),
        (Release(2, 2), Release(1, 1), False),
    ],
    ids=str,
)
async def test_two_releases_pair_if_there_is_a_version_that_both_speak(
    one: Release, other: Release, pair: bool
) -> None:
    for ears, mouths in ((one, other), (other, one)):
        async with Ear(release=ears) as ear, Mouth(release=mouths) as mouth:
            mouth.say(ear.endpoint)
            await until(lambda mouth=mouth: mouth.answers or mouth.unreachable)
            assert bool(mouth.answers) is pair
            if not pair:
                why = f"Protocol version {mouths} of the peer is not {ears}. Install the same version on both engines."
                assert mouth.unreachable[0] == f"PD-CTRL-003: {why}"
                assert not ear.heard and not ear.events


async def test_version_1_is_refused_in_a_sentence_where_it_calls_and_where_it_reserves() -> None:
    async with Ear() as ear:
        async with Raw(ear) as raw:
            raw.send(recorded(1, "hello"))
            refusal = await raw.goodbye()
        assert (refusal.code, refusal.detail) == (
            "PD-CTRL-003",
            "Protocol version 1 of the peer is not 2. Install the same version on both engines.",
        )
        await still_works(ear)
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-003: Protocol version 1 of the peer is not 2"):
        unseal(recorded(1, "reservation"), None)


@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION + 1])
def test_a_reservation_of_another_version_may_have_other_fields(version: int) -> None:
    sealed = b"PDR\x00" + msgspec.msgpack.encode({"version": version, "layout": b"", "groups": []})
    with pytest.raises(RemoteProtocolError, match=f"Protocol version {version} of the peer is not {OURS}") as caught:
        unseal(sealed, None)
    assert caught.value.code == "PD-CTRL-003"


def test_a_reservation_without_its_fields_is_no_matter_of_versions() -> None:
    for body in ({"version": PROTOCOL_VERSION}, {"layout": b""}, {"version": "x"}):
        with pytest.raises(RemoteProtocolError) as caught:
            unseal(b"PDR\x00" + msgspec.msgpack.encode(body), None)
        assert caught.value.code == "PD-CTRL-002"


def test_what_a_reservation_needs_is_refused_by_its_name() -> None:
    assert admitted(RESERVATION) == ""
    wants = msgspec.structs.replace(RESERVATION, needs=("sections",))
    assert admitted(unseal(seal(wants, None), None)) == (
        "PD-CTRL-004: A message needs 'sections', which this release does not know. Upgrade this engine first."
    )
    assert Release(features=("sections",)).refusal(PROTOCOL_VERSION, ("sections",)) is None


def test_what_a_reservation_needs_is_bounded() -> None:
    def sealed(words: int) -> bytes:
        return seal(msgspec.structs.replace(RESERVATION, needs=tuple(f"n{n}" for n in range(words))), None)

    assert admitted(unseal(sealed(64), None)).startswith("PD-CTRL-004")
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-002"):
        unseal(sealed(65), None)


def grown(plain: Any) -> Any:
    """The same of a later release: a field more in each map, an element more in each array of fixed length."""
    return {**{key: grown(value) for key, value in plain.items()}, "later": [1]} if isinstance(plain, dict) else plain


@pytest.mark.parametrize("name", MESSAGES | BESIDE)
def test_fields_that_a_later_release_adds_are_ignored(name: str) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode((MESSAGES | BESIDE)[name]))
    for field in ("transfer", "contributor", "failure", "addresses", "source"):
        if isinstance(plain.get(field), list):
            plain[field] = [*plain[field], "later"]
    assert decode_guarded(msgspec.msgpack.encode(grown(plain))) == (MESSAGES | BESIDE)[name]


@pytest.mark.parametrize("name", MESSAGES | BESIDE)
def test_what_a_released_version_wrote_is_read_for_ever(name: str) -> None:
    assert decode_guarded(recorded(2, name)) == (MESSAGES | BESIDE)[name]


@pytest.mark.parametrize("name", CLEAR)
def test_what_a_released_version_wrote_in_the_clear_is_read_for_ever(name: str) -> None:
    assert decode_clear(memoryview(recorded(2, name))) == CLEAR[name]


def test_what_is_recorded_is_all_that_there_is() -> None:
    assert RECORDED["2"].keys() == {name for name, _, _ in written()}
    assert unseal_source(recorded(2, "source"), None) == SOURCE
    assert read_posted(recorded(2, "load")) == LOAD
    assert read_answer(recorded(2, "load in an answer")) == (LOAD, None)
    assert read_answer(recorded(2, "push in an answer")) == (None, PUSH)
    assert unseal(recorded(2, "reservation"), None) == RESERVATION
    assert unseal(recorded(2, "seeded"), None) == SEEDED
    assert unseal_first(recorded(2, "first"), None) == FIRST


def test_to_go_on_costs_a_small_message_however_many_layers_there_are() -> None:
    stages = (tuple(f"model.layers.{n}.self_attn.attn" for n in range(61)),)
    geometry = msgspec.structs.replace(GEOMETRY, stages=stages)
    whole, by_name = (len(encode(begin(geometry=geometry, **changes))) for changes in ({}, {"layout_bytes": b""}))
    assert len(encode(renew())) < 250 < by_name < 500 < 2000 < whole


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (fingerprint("m", Release(2, 2)), fingerprint("m", Release(2, 2)), True),
        (fingerprint("m", Release(2, 2)), fingerprint("m", Release(3, 2)), True),
        (fingerprint("m", Release(2, 1)), fingerprint("m", Release(4, 3)), False),
        (fingerprint("m", OURS), fingerprint("n", OURS), False),
        (fingerprint("m", OURS), "", True),
        (fingerprint("m", OURS), "another release's words", True),
    ],
    ids=["equal", "the next release", "too far apart", "another model", "not given", "not understood"],
)
def test_a_fingerprint_says_who_can_be_a_pair(one: str, other: str, wanted: bool) -> None:
    assert may_pair(one, other) is may_pair(other, one) is wanted
    assert len(one) <= MAX_FINGERPRINT
