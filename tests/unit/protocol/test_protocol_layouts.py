# SPDX-License-Identifier: Apache-2.0
"""Layouts on the wire: decoded as they were encoded; forged ones and those of a later release are refused with a
reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from unit.protocol.kit import P, geometry, reservation
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.geometry.layout import Group, LayerKind, Region
from vllm_ascend_pd.protocol.auth import decode_reservation
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.layouts import EngineLayout, layout_hash, read, written
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.reservation_format import SentReservation, Slice, as_sent

ENDPOINTS = (Endpoint("10.0.0.1", 1), Endpoint("10.0.0.2", 2))
ENGINE = EngineLayout("model/1", P, ENDPOINTS)
STAGES = (("a", "b"), (), ("c",))
OTHER = LayerKind(1, "int8/float32", "", (Region("k", 1, 0, 3, 4), Region("scale", 5, 0, 6, 8)))
UNLIKE: dict[str, Any] = {"stages": STAGES, "others": (OTHER,), "kind_of": (1, 0, 1)}
# An indexer's keys, which each rank of DCP has.
WHOLE: dict[str, Any] = {**UNLIKE, "others": (msgspec.structs.replace(OTHER, whole=True),)}
GROUPED = geometry(2, **UNLIKE, groups=(Group(32, "window", 40), Group(16)), group_index=1)
RESERVATION = reservation(P, 40, 20, endpoints=ENDPOINTS, prompt_length=41)


def encoded(**changes: Any) -> bytes:
    """Return the rig's layout with some fields of its cache changed."""
    changed = msgspec.structs.replace(P, **changes)
    return msgspec.msgpack.encode(msgspec.structs.replace(ENGINE, geometry=changed))


def refusal(layout: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        read(layout)
    return caught.value


def region(**changes: Any) -> tuple[Region, ...]:
    """Return the rig's regions, with the first one changed."""
    return (msgspec.structs.replace(P.regions[0], **changes), *P.regions[1:])


@pytest.mark.parametrize(
    "layout",
    [
        ENGINE,
        EngineLayout("", geometry(1), ()),
        EngineLayout("m", geometry(3, stages=STAGES, kv_heads=1)),
        EngineLayout("m", geometry(2, regions=(Region("k", 1, 2, 3, 4), Region("v", 5, 6, 0, 8)))),
        EngineLayout(
            "m", geometry(2, regions=(Region("k", 1, 2, 3, 4), Region("v", 5, 6, 0, 8)), dtype="int8/float32")
        ),
        EngineLayout("m", geometry(2, stages=STAGES, drafter="d", drafts=("c",))),
        EngineLayout("m", geometry(2, **UNLIKE)),
        EngineLayout("m", geometry(2, groups=(Group(16, "window", 40),))),
        EngineLayout("m", GROUPED),
        EngineLayout("m", geometry(4, kv_heads=2, dcp=2, interleave=4)),
        EngineLayout("m", geometry(4, kv_heads=1, stages=STAGES, dcp=2, pcp=3, interleave=16), ()),
        EngineLayout("m", geometry(2, kv_heads=4, pcp=2, interleave=8)),
        EngineLayout("m", geometry(4, kv_heads=2, dcp=2, interleave=4, **UNLIKE)),
        EngineLayout("m", geometry(4, kv_heads=1, dcp=4, interleave=4, **WHOLE)),
    ],
)
def test_what_is_read_is_what_was_written(layout: EngineLayout) -> None:
    assert read(written(layout)) == layout
    assert layout_hash(written(layout)) == layout_hash(msgspec.msgpack.encode(layout))


def test_fields_of_a_layout_that_a_later_release_adds_are_ignored() -> None:
    plain = msgspec.msgpack.decode(written(EngineLayout("m", GROUPED, ENDPOINTS)))
    geometry = plain["geometry"]
    for array in (geometry["groups"][0], geometry["regions"][0], plain["endpoints"][0]):
        array.append("later")
    for fields in (plain, geometry, geometry["others"][0]):
        fields["later"] = [1]
    assert read(msgspec.msgpack.encode(plain)) == EngineLayout("m", GROUPED, ENDPOINTS)


def test_a_reservation_comes_back_as_it_was_made() -> None:
    assert decode_reservation(msgspec.msgpack.encode(as_sent(RESERVATION))) == RESERVATION


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"groups": (Group(16, "chunk", 128),)}, "matters"),
        ({"groups": (Group(16), Group(16, "half"))}, "matters"),
        ({"kv_heads": 1, "dcp": 2, "groups": (Group(16, "window", 40),)}, "world"),
        ({"kv_heads": 1, "pcp": 2, "groups": (Group(16), Group(16))}, "world"),
        ({"kv_heads": 1, "dcp": 2, "pcp": 2, **WHOLE}, "world"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_nothing_fills_yet_is_refused_by_its_name(changes: dict[str, Any], word: str) -> None:
    error = refusal(encoded(**changes))
    assert error.code == "PD-CTRL-004" and repr(word) in error.sentence


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": ()}, "no stage"),
        ({"regions": ()}, "a kind without a component"),
        ({**UNLIKE, "others": (msgspec.structs.replace(OTHER, regions=()),)}, "a kind without a component"),
        ({"stages": ((),) * 1024, "tp_size": 5}, "5120 workers"),
        ({"tp_size": 1024, "pcp": 1024, "kv_heads": 1}, "1048576 workers"),
        ({"dcp": 2}, "tokens in 2 parts for 2 workers"),
        ({"kv_heads": 2, "dcp": 2, **UNLIKE}, "tokens in 2 parts for 6 workers"),
        ({"kv_heads": 1, "dcp": 2, **WHOLE, "others": (msgspec.structs.replace(OTHER, kv_heads=4, whole=True),)}, "tokens in 2 parts for 6 workers"),
        ({"kv_heads": 1, "dcp": 2, "interleave": 32}, "blocks of 16 tokens in runs of 32"),
        ({"pcp": 2, "interleave": 32}, "blocks of 16 tokens in runs of 32"),
        ({"interleave": 4}, "blocks of 16 tokens in runs of 4"),
        (WHOLE, "whole where nothing is divided"),
        ({"group_index": 1}, "of a group that is not there"),
        ({**UNLIKE, "others": (msgspec.structs.replace(OTHER, group_index=1),)}, "of a group that is not there"),
        ({"groups": (Group(16, "window", 40),), "group_index": 1}, "of a group that is not there"),
        ({"groups": (Group(16),)}, "not those of its groups"),
        ({"groups": (Group(32, "window", 40),)}, "not those of its groups"),
        ({"groups": (Group(16, "state"),)}, "not those of its groups"),
        ({"groups": (Group(16, "window", 1),)}, "a window of no tokens"),
        ({"groups": (Group(16), Group(16, "all", 3))}, "a window of no tokens"),
        ({"groups": (Group(16, "compressed", 1),)}, "an entry for one token"),
        ({**UNLIKE, "kind_of": ()}, "the kinds of 0 layers of 3"),
        ({**UNLIKE, "kind_of": (0, 1, 0, 1)}, "the kinds of 4 layers of 3"),
        ({"kind_of": (0, 0)}, "the kinds of 2 layers of 2"),
        ({**UNLIKE, "kind_of": (0, 1, 2)}, "a layer is of a kind that is not there"),
        ({**UNLIKE, "kind_of": (0, 0, 0)}, "of one of its kinds there is no layer"),
        ({**UNLIKE, "kind_of": (1, 1, 1)}, "of one of its kinds there is no layer"),
        ({"stages": (tuple(map(str, range(4096))),), "regions": P.regions * 5}, "4096 layers of 5"),
        ({"stages": (tuple(map(str, range(4096))), ("a",))}, "4097 layers"),
        ({"stages": (("a",), ("a",))}, "two of its layers"),
        ({"drafter": "d"}, "a draft model"),
        ({"drafts": P.layers[:1]}, "a draft model"),
        ({"drafter": "d", "drafts": ("elsewhere",)}, "draft layers"),
        ({"drafter": "d", "drafts": P.layers[::-1]}, "draft layers"),
        ({"drafter": "d", "drafts": P.layers[:1] * 2}, "draft layers"),
        ({"stages": ((),) * 1025}, "stages"),
        ({"tp_size": 1025}, "tp_size"),
        ({"tp_size": 0}, "tp_size"),
        ({"kv_heads": 65537}, "kv_heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"dcp": 0}, "dcp"),
        ({"pcp": 1 << 40}, "pcp"),
        ({"interleave": 0}, "interleave"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": (1 << 20) + 1}, "block_size"),
        ({"groups": (Group(0),)}, "groups"),
        ({"groups": (Group((1 << 20) + 1),)}, "groups"),
        ({"groups": (Group(16),) * 65}, "groups"),
        ({"group_index": -1}, "group_index"),
        ({"stages": (tuple(map(str, range(4097))),)}, "stages"),
        ({"stages": (("x" * 257,),)}, "stages"),
        ({"kind_of": (256,)}, "kind_of"),
        ({"kind_of": (0,) * 4097}, "kind_of"),
        ({"others": (OTHER,) * 256}, "others"),
        ({"others": (msgspec.structs.replace(OTHER, group_index=64),)}, "others"),
        ({"regions": P.regions * 17}, "regions"),
        ({"regions": region(head_stride=-1)}, "regions"),
        ({"regions": region(block_stride=(1 << 31) + 1)}, "regions"),
        ({"packing": "x" * 257}, "packing"),
        ({"drafter": "x" * 1025}, "drafter"),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused_before_anything_is_planned(changes: dict[str, Any], says: str) -> None:
    error = refusal(encoded(**changes))
    assert error.code == "PD-CTRL-002" and "layout: " in error.sentence and says in error.sentence


@pytest.mark.parametrize("field", ["geometry", "model", "endpoints"])
def test_a_model_or_a_peer_that_cannot_be_is_refused(field: str) -> None:
    plain: dict[str, Any] = msgspec.msgpack.decode(written(ENGINE))
    wrong = {"geometry": 1, "model": "x" * 1025, "endpoints": [["a", 1]] * 4097}
    error = refusal(msgspec.msgpack.encode({**plain, field: wrong[field]}))
    assert error.code == "PD-CTRL-002" and f"$.{field}" in error.sentence


def forms(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(as_sent(RESERVATION), **changes))


def slices(*rows: Sequence[Any]) -> tuple[Slice, ...]:
    return tuple(Slice(*values) for values in rows)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"groups": ()}, "PD-CTRL-002", "0 slices for one group"),
        ({"groups": slices((0, 16, 0, b""), (0, 16, 0, b""))}, "PD-CTRL-002", "2 slices for one group"),
        ({"groups": slices((20, 40, 0, b""))}, "PD-CTRL-002", "token 20 is not in the block of index 0"),
        ({"layout": b""}, "PD-CTRL-002", "layout: "),
        ({"layout": encoded(groups=(Group(16), Group(16)))}, "PD-CTRL-002", "1 slices for 2 groups"),
        ({"layout": encoded(groups=(Group(16, "chunk", 128),))}, "PD-CTRL-004", "'matters'"),
    ],
)
def test_a_reservation_that_says_more_or_less_is_refused(changes: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_reservation(forms(**changes))
    assert caught.value.code == code and says in caught.value.sentence


def test_a_reservation_has_no_field_that_is_not_sent() -> None:
    assert set(SentReservation.__struct_fields__) - {"layout", "groups"} <= set(Reservation.__struct_fields__)
