# SPDX-License-Identifier: Apache-2.0
"""Different releases that meet: those that pair, messages of refusals, and fields that an older one may ignore."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from unit.channel.kit import AnsweringListener, RawConnection, RecordingDialer, still_works, until
from unit.protocol.kit import begin, renew
from unit.protocol.wire_examples import (
    BESIDE,
    CACHES,
    CLEAR,
    FIRST,
    GEOMETRY,
    LOAD,
    MESSAGES,
    PUSH,
    RESERVATION,
    SEEDED,
    SOURCE,
    written,
)
from vllm_ascend_pd.channel.frames import (
    Clear,
    Guarded,
    decode_clear,
    decode_guarded,
)
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.protocol.auth import (
    encode,
    seal,
    unseal,
    unseal_first,
    unseal_source,
)
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION
from vllm_ascend_pd.protocol.messages import Message, Reservation
from vllm_ascend_pd.protocol.reports import read_answer, read_posted
from vllm_ascend_pd.protocol.versions import MAX_FINGERPRINT, OURS, Release, fingerprint, may_pair

RECORDED = json.loads((Path(__file__).parent / "wire_recorded.json").read_text())


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in MESSAGES.values()} == set(get_args(Message))
    assert {type(message) for message in (MESSAGES | BESIDE).values()} == set(get_args(Guarded))
    assert {type(message) for message in CLEAR.values()} == set(get_args(Clear))


def recorded(version: int, what: str) -> bytes:
    return base64.b64decode(RECORDED[str(version)][what])


def admitted(reservation: Reservation) -> str:
    refusal = PushBook(model="m").take(0.0, NewRequest("r", (20, "h"), "push", reservation))
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
    for listeners, dialers in ((one, other), (other, one)):
        async with AnsweringListener(release=listeners) as answering, RecordingDialer(release=dialers) as dialing:
            dialing.say(answering.endpoint)
            await until(lambda dialing=dialing: dialing.answers or dialing.unreachable)
            assert bool(dialing.answers) is pair
            if not pair:
                why = f"Protocol version {dialers} of the peer is not {listeners}. Install the same version on both engines."
                assert dialing.unreachable[0] == f"PD-CTRL-003: {why}"
                assert not answering.heard and not answering.events


async def test_version_1_is_refused_in_a_sentence_where_it_calls_and_where_it_reserves() -> None:
    async with AnsweringListener() as answering:
        async with RawConnection(answering) as raw:
            raw.send(recorded(1, "hello"))
            refusal = await raw.goodbye()
        assert (refusal.code, refusal.detail) == (
            "PD-CTRL-003",
            "Protocol version 1 of the peer is not 2. Install the same version on both engines.",
        )
        await still_works(answering)
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-003: Protocol version 1 of the peer is not 2"):
        unseal(recorded(1, "reservation"), None)


@pytest.mark.parametrize("read", [unseal, unseal_source, unseal_first])
@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION + 1])
def test_what_is_sealed_may_have_other_fields_in_another_version(
    read: Callable[[bytes, None], object], version: int
) -> None:
    sealed = b"PDR\x00" + msgspec.msgpack.encode({"version": version, "layout": b"", "groups": []})
    with pytest.raises(RemoteProtocolError, match=f"Protocol version {version} of the peer is not {OURS}") as caught:
        read(sealed, None)
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
    assert all(unseal(recorded(2, name), None) == one for name, one in CACHES.items())
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
def test_a_fingerprint_says_which_engines_can_be_a_pair(one: str, other: str, wanted: bool) -> None:
    assert may_pair(one, other) is may_pair(other, one) is wanted
    assert len(one) <= MAX_FINGERPRINT
