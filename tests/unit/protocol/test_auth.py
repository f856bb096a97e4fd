# SPDX-License-Identifier: Apache-2.0
"""Authentication: no peer can pose as another, no message is accepted twice, no input breaks a decoder."""

from __future__ import annotations

import contextlib
import hmac
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.protocol.kit import (
    ADDRESSES,
    D,
    ack,
    begin,
    cancel,
    done,
    failed,
    layout_request,
    ready,
    refused,
    reservation,
)
from vllm_ascend_pd.channel.frames import decode_guarded
from vllm_ascend_pd.errors import ConfigError, RemoteProtocolError
from vllm_ascend_pd.protocol.auth import (
    COUNTER_BYTES,
    MAC_BYTES,
    Greeting,
    Secrets,
    Session,
    SessionKey,
    Signer,
    Verifier,
    decode_reservation,
    encode,
    prompt_hash,
    seal,
    sessions,
    unseal,
)
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Memory

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
KEY = b"k" * 32
DIALER, LISTENER = Greeting(b"d" * 32, "prefill-1"), Greeting(b"l" * 32, "decode-1")
MESSAGES = [
    begin(),
    ready(),
    refused(),
    done(checksums=((0, 0, 2**64 - 1),)),
    failed(),
    layout_request(),
    cancel(),
    ack("done", 3),
]


RESERVED = reservation(D, 40)


# ---- sessions


def test_what_one_side_protects_the_other_opens() -> None:
    (dialer,) = sessions(Secrets(NEW), DIALER, LISTENER, as_dialer=True)
    (listener,) = sessions(Secrets(NEW), DIALER, LISTENER, as_dialer=False)
    for index in range(3):
        assert bytes(listener.open(dialer.protect(b"to listener %d" % index))) == b"to listener %d" % index
        assert bytes(dialer.open(listener.protect(b"to dialer %d" % index))) == b"to dialer %d" % index


def test_a_frame_is_not_accepted_in_the_other_direction() -> None:
    (dialer,) = sessions(Secrets(NEW), DIALER, LISTENER, as_dialer=True)
    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        dialer.open(dialer.protect(b"echo"))


@pytest.mark.parametrize(
    ("dialer", "listener", "secret"),
    [
        (Greeting(b"D" * 32, "prefill-1"), LISTENER, NEW),
        (DIALER, Greeting(b"L" * 32, "decode-1"), NEW),
        (Greeting(b"d" * 32, "prefill-2"), LISTENER, NEW),
        (DIALER, Greeting(b"l" * 32, "decode-2"), NEW),
        (DIALER, LISTENER, OTHER),
    ],
    ids=["dialer's nonce", "listener's nonce", "dialer's incarnation", "listener's incarnation", "secret"],
)
def test_a_recorded_frame_is_worth_nothing_in_another_session(
    dialer: Greeting, listener: Greeting, secret: bytes
) -> None:
    frame = sessions(Secrets(NEW), DIALER, LISTENER, as_dialer=True)[0].protect(b"recorded")
    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        sessions(Secrets(secret), dialer, listener, as_dialer=False)[0].open(frame)


def test_where_one_part_ends_and_the_next_begins_is_part_of_the_key() -> None:
    one = SessionKey.derive(NEW, Greeting(b"d" * 16, "ab"), LISTENER)
    other = SessionKey.derive(NEW, Greeting(b"d" * 16 + b"a", "b"), LISTENER)
    assert one.to_listener != other.to_listener


@pytest.mark.parametrize(
    ("dialer_has", "listener_has"), [(Secrets(NEW, OLD), Secrets(OLD, NEW)), (Secrets(OLD), Secrets(NEW, OLD))]
)
def test_two_secrets_are_accepted_while_they_are_rotated(dialer_has: Secrets, listener_has: Secrets) -> None:
    dialer = sessions(dialer_has, DIALER, LISTENER, as_dialer=True)[0]
    frame = dialer.protect(b"hello")
    opened = []
    for candidate in sessions(listener_has, DIALER, LISTENER, as_dialer=False):
        try:
            opened.append((candidate, bytes(candidate.open(frame))))
        except RemoteProtocolError:
            continue
    ((chosen, payload),) = opened
    assert payload == b"hello"
    assert bytes(dialer.open(chosen.protect(b"welcome"))) == b"welcome"


ROTATION = (Secrets(OLD), Secrets(OLD, NEW), Secrets(NEW, OLD), Secrets(NEW))


@pytest.mark.parametrize(("one", "other"), [*itertools.pairwise(ROTATION)])
def test_neighbouring_steps_of_a_rotation_understand_each_other(one: Secrets, other: Secrets) -> None:
    """Rotation as in docs/security.md: while engines are restarted one after another, two kinds of them coexist."""
    for ours, theirs in ((one, other), (other, one)):
        assert unseal(seal(RESERVED, ours), theirs) == RESERVED
        frame = sessions(ours, DIALER, LISTENER, as_dialer=True)[0].protect(b"hello")
        opened = 0
        for candidate in sessions(theirs, DIALER, LISTENER, as_dialer=False):
            with contextlib.suppress(RemoteProtocolError):
                opened += bytes(candidate.open(frame)) == b"hello"
        assert opened == 1


def test_a_peer_that_skips_the_first_step_is_refused_meanwhile() -> None:
    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        unseal(seal(RESERVED, Secrets(NEW, OLD)), Secrets(OLD))
    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        unseal(seal(RESERVED, Secrets(OLD)), Secrets(NEW))


def test_a_short_nonce_or_secret_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        SessionKey.derive(NEW, Greeting(b"short", "p"), LISTENER)
    with pytest.raises(ConfigError, match="PD-SEC-001"):
        Secrets(b"short")
    with pytest.raises(ConfigError):
        Secrets(NEW, b"short")


def test_no_secret_and_no_key_is_ever_printed() -> None:
    key = SessionKey.derive(NEW, DIALER, LISTENER)
    for shown in (repr(Secrets(NEW, OLD)), repr(key), str(key), repr(Session(key, as_dialer=True))):
        assert "nnn" not in shown
        assert "ooo" not in shown
        assert repr(key.to_listener)[2:10] not in shown


# ---- counters


def test_a_frame_is_accepted_once() -> None:
    signer, verifier = Signer(KEY), Verifier(KEY)
    frame = signer.sign(b"once")
    assert bytes(verifier.verify(frame)) == b"once"
    with pytest.raises(RemoteProtocolError, match="seen before"):
        verifier.verify(frame)


def test_a_repeated_message_is_signed_anew() -> None:
    signer, verifier = Signer(KEY), Verifier(KEY)
    first, second = signer.sign(b"again"), signer.sign(b"again")
    assert first != second
    assert bytes(verifier.verify(second)) == bytes(verifier.verify(first)) == b"again"


@given(st.permutations(range(40)), st.integers(1, 50))
def test_the_window_accepts_each_counter_at_most_once_in_any_order(arrival: list[int], window: int) -> None:
    signer, verifier = Signer(KEY), Verifier(KEY, window)
    frames = [signer.sign(bytes([number])) for number in range(40)]
    accepted: list[int] = []
    newest = -1
    for number in arrival * 2:
        fresh = number not in accepted and number > newest - window
        try:
            verifier.verify(frames[number])
        except RemoteProtocolError:
            assert not fresh
        else:
            assert fresh
            accepted.append(number)
            newest = max(newest, number)


def test_a_counter_far_ahead_costs_no_memory() -> None:
    verifier, counter = Verifier(KEY), (2**63).to_bytes(COUNTER_BYTES, "big")
    verifier.verify(Signer(KEY).sign(b"near"))
    verifier.verify(b"".join((counter, hmac.digest(KEY, counter + b"far", "sha256"), b"far")))


@given(st.binary(max_size=200), st.data())
def test_a_frame_changed_anywhere_is_refused_and_changes_nothing(payload: bytes, data: st.DataObject) -> None:
    signer, verifier = Signer(KEY), Verifier(KEY)
    frame = signer.sign(payload)
    at = data.draw(st.integers(0, len(frame) - 1))
    changed = bytearray(frame)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        verifier.verify(bytes(changed))
    assert bytes(verifier.verify(frame)) == payload, "the true one is still welcome"


@pytest.mark.parametrize(
    "size", [0, 1, COUNTER_BYTES + MAC_BYTES - 1, COUNTER_BYTES + MAC_BYTES + MAX_MESSAGE_BYTES + 1]
)
def test_a_frame_of_an_impossible_size_is_refused_before_it_is_hashed(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="bytes"):
        Verifier(KEY).verify(bytes(size))


@pytest.mark.parametrize("size", [0, MAX_MESSAGE_BYTES])
def test_the_smallest_and_the_largest_payload_pass(size: int) -> None:
    payload = bytes(size)
    assert Verifier(KEY).verify(Signer(KEY).sign(payload)) == payload


# ---- reservations


def test_a_reservation_survives_its_envelope() -> None:
    assert unseal(seal(RESERVED, Secrets(NEW)), Secrets(NEW)) == RESERVED
    assert unseal(seal(RESERVED, None), None) == RESERVED


def test_reservations_are_opened_with_either_secret_and_with_no_other() -> None:
    sealed = seal(RESERVED, Secrets(OLD))
    assert unseal(sealed, Secrets(NEW, OLD)) == RESERVED
    with pytest.raises(RemoteProtocolError, match="PD-SEC-003"):
        unseal(sealed, Secrets(NEW, OTHER))


def test_an_unsigned_reservation_is_refused_where_a_secret_is_configured_and_the_other_way_round() -> None:
    with pytest.raises(RemoteProtocolError, match="not signed"):
        unseal(seal(RESERVED, None), Secrets(NEW))
    with pytest.raises(RemoteProtocolError, match="no secret_file"):
        unseal(seal(RESERVED, Secrets(NEW)), None)


@given(st.data())
def test_a_sealed_reservation_changed_anywhere_is_refused(data: st.DataObject) -> None:
    sealed = bytearray(seal(RESERVED, Secrets(NEW)))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError):
        unseal(bytes(sealed), Secrets(NEW))


# ---- decoders


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_wire(message: object) -> None:
    assert decode_guarded(encode(message)) == message  # type: ignore[arg-type]


@settings(max_examples=500)
@given(st.binary(max_size=400))
def test_random_bytes_never_break_a_decoder(payload: bytes) -> None:
    for decode in (decode_guarded, decode_reservation):
        with pytest.raises(RemoteProtocolError, match="PD-CTRL-002"):
            decode(payload)


@settings(max_examples=500)
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_either_refused_or_messages(message: object, data: st.DataObject) -> None:
    payload = bytearray(encode(message))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_guarded(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    except RemoteProtocolError:
        return
    assert type(decoded) in {type(m) for m in MESSAGES}


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=9), x),
        max_leaves=20,
    )
)
def test_other_peoples_msgpack_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-002"):
        decode_guarded(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa4type" * 1000,
    ],
    ids=["array", "map", "bytes", "nested", "nested maps"],
)
def test_claims_of_great_size_cost_nothing(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_guarded(payload)


def test_a_message_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode_reservation(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"push": "x" * 65},
        {"d_rank": -1},
        {"seq": -1},
        {"seq": 2**62},
        {"quiet_s": -1.0},
        {"quiet_s": 1e9},
        {"layout": "x" * 65},
        {"known_memory": "x" * 65},
        {"quiet_s": float("nan")},
        {"contributor": Contributor(-1, 0)},
        {"contributor": Contributor(0, 1 << 16)},
        {"transfer": TransferId("decode-1", -1, "u")},
        {"transfer": TransferId("decode-1", 1, "u" * 65)},
        {"transfer": TransferId("d" * 65, 1, "u")},
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-002"):
        decode_guarded(encode(begin(**changes)))


def test_more_addresses_than_any_cache_has_are_refused() -> None:
    for bases in (((0,),) * 4097, ((0,) * 65,)):
        with pytest.raises(RemoteProtocolError, match="PD-CTRL-002"):
            decode_guarded(encode(ready(addresses=Memory("s", (1,), bases))))


def test_addresses_travel_with_ready() -> None:
    decoded = decode_guarded(encode(ready()))
    assert decoded.addresses == ADDRESSES  # type: ignore[union-attr]


# ---- prompts


def test_equal_prompts_have_equal_hashes_and_everything_that_decides_the_kv_counts() -> None:
    tokens = list(range(1000))
    same = {prompt_hash(tokens), prompt_hash(tuple(tokens)), prompt_hash(tokens, None, None, ())}
    assert len(same) == 1
    others = [
        prompt_hash(tokens[:-1]),
        prompt_hash([*tokens[:-1], 0]),
        prompt_hash(tokens, lora="a"),
        prompt_hash(tokens, lora=""),
        prompt_hash(tokens, cache_salt="a"),
        prompt_hash(tokens, cache_salt=""),
        prompt_hash(tokens, mm_hashes=["a"]),
        prompt_hash(tokens, mm_hashes=["a", "b"]),
        prompt_hash(tokens, mm_hashes=["ab"]),
    ]
    assert len({*same, *others}) == 1 + len(others)
    assert all(len(text) == 64 for text in others)
