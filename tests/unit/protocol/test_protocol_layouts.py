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
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group, Region
from vllm_ascend_pd.geometry.layout import LayerKind as Unlike
from vllm_ascend_pd.protocol.auth import decode_reservation
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.layouts import (
    EngineLayout,
    Kind,
    Layer,
    Layout,
    Sharding,
    Worker,
    layout_hash,
    layout_of,
    read,
    written,
)
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.reservation_format import SentReservation, Slice, as_sent

ENDPOINTS = (Endpoint("10.0.0.1", 1), Endpoint("10.0.0.2", 2))
ENGINE = EngineLayout("model/1", P, ENDPOINTS)
LAYOUT = layout_of(ENGINE)
STAGES = (("a", "b"), (), ("c",))
UNLIKE = Unlike(1, "int8/float32", "", (Region("k", 1, 0, 3, 4), Region("scale", 5, 0, 6, 8)), ("a", "c"))
WHOLE = msgspec.structs.replace(UNLIKE, whole=True)  # an indexer's keys, which each rank of DCP has
GROUPED = geometry(
    2,
    stages=STAGES,
    others=(msgspec.structs.replace(UNLIKE, group=0),),
    groups=(Group(32, "window", 40), Group(16)),
    group=1,
)
RESERVATION = reservation(P, 40, 20, endpoints=ENDPOINTS, prompt_length=41)


def encoded(layout: Layout, **changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(layout, **changes))


def refusal(layout: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        read(layout)
    return caught.value


def component(**changes: Any) -> tuple[Kind, ...]:
    """Return the rig's kinds, with the first component changed."""
    first, *more = LAYOUT.kinds[0].components
    return (Kind((msgspec.structs.replace(first, **changes), *more)),)


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
        EngineLayout("m", geometry(2, stages=STAGES, others=(UNLIKE,))),
        EngineLayout("m", geometry(2, groups=(Group(16, "window", 40),))),
        EngineLayout("m", GROUPED),
        EngineLayout("m", geometry(4, kv_heads=2, dcp=2, interleave=4)),
        EngineLayout("m", geometry(4, kv_heads=1, stages=STAGES, dcp=2, pcp=3, interleave=16), ()),
        EngineLayout("m", geometry(2, kv_heads=4, pcp=2, interleave=8)),
        EngineLayout("m", geometry(4, kv_heads=2, dcp=2, interleave=4, stages=STAGES, others=(UNLIKE,))),
        EngineLayout("m", geometry(4, kv_heads=1, dcp=4, interleave=4, stages=STAGES, others=(WHOLE,))),
    ],
)
def test_what_is_read_is_what_was_written(layout: EngineLayout) -> None:
    assert read(written(layout)) == layout
    assert layout_hash(written(layout)) == layout_hash(encoded(layout_of(layout)))


def test_a_reservation_comes_back_as_it_was_made() -> None:
    assert decode_reservation(msgspec.msgpack.encode(as_sent(RESERVATION))) == RESERVATION


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"groups": (Group(16, "chunk", 128),)}, "matters"),
        ({"groups": (Group(16), Group(16, "half"))}, "matters"),
        (
            {"kinds": (Kind((*LAYOUT.kinds[0].components, *component(held=Sharding(4, world=2))[0].components)),)},
            "world",
        ),
        ({"kinds": component(held=Sharding(1, world=2)), "groups": (Group(16, "window", 40),)}, "world"),
        ({"kinds": component(held=Sharding(0))}, "replicated"),
        (
            {"kinds": (Kind(component()[0].components + component(name="v", held=Sharding(2))[0].components),)},
            "components",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_nothing_fills_yet_is_refused_by_its_name(changes: dict[str, Any], word: str) -> None:
    found = refusal(encoded(LAYOUT, **changes))
    assert found.code == "PD-CTRL-004" and repr(word) in found.sentence


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kinds": ()}, "no kind"),
        ({"kinds": (Kind(()),)}, "no kind"),
        ({"groups": ()}, "no kind"),
        ({"workers": ()}, "no kind"),
        ({"workers": LAYOUT.workers[::-1]}, "tokens in 1 parts for 2 workers"),
        ({"workers": LAYOUT.workers[1:]}, "its workers"),
        ({"workers": (*LAYOUT.workers, Worker(2, 1))}, "its workers"),
        ({"workers": (Worker(0, 0), Worker(0, 0, 1))}, "tokens in 1 parts for 2 workers"),
        ({"workers": (*(Worker(0, 0) for _ in range(4095)), Worker(4096, 1023))}, "its workers"),
        ({"workers": (Worker(0, 0), Worker(0, 1, 1))}, "its workers"),
        ({"kinds": component(held=Sharding(4, world=2))}, "tokens in 2 parts for 2 workers"),
        ({"kinds": component(held=Sharding(1, world=2)), "workers": (Worker(0, 0), Worker(0, 1))}, "its workers"),
        ({"kinds": component(held=Sharding(1, 2, 32)), "workers": (Worker(0, 0), Worker(0, 1, 1))}, "blocks of 16 tokens in runs of 32"),
        ({"layers": (Layer("a", 1, 0, 0),)}, "a layer is of a kind"),
        ({"layers": (Layer("a", 0, 1, 0),)}, "a layer is of a kind"),
        ({"layers": (Layer("a", 0, 0, 0), Layer("b", 0, 1, 0)), "groups": LAYOUT.groups * 2}, "of several groups"),
        ({"groups": (Group(16, "window", 1),)}, "a window of no tokens"),
        ({"groups": (Group(16, "all", 3),)}, "a window of no tokens"),
        ({"groups": (Group(16, "compressed", 1),)}, "an entry for one token"),
        ({"layers": (Layer("a", 0, 0, 1),)}, "a layer is of a kind"),
        ({"layers": tuple(Layer(str(n), 0, 0, 0) for n in range(4096)), "kinds": (Kind(component()[0].components * 5),)}, "4096 layers of 5"),
        ({"kinds": LAYOUT.kinds * 2}, "of one of its kinds"),
        ({"layers": (Layer("a", 0, 0, 0), Layer("a", 0, 0, 0))}, "two of its layers"),
        ({"drafter": "d"}, "a draft model"),
        ({"drafts": (0,)}, "draft layers"),
        ({"drafter": "d", "drafts": (9,)}, "draft layers"),
        ({"drafter": "d", "drafts": (0, 0)}, "draft layers"),
        ({"model": "x" * 1025}, "model"),
        ({"workers": tuple(Worker(0, rank) for rank in range(1024)) * 5}, "workers"),
        ({"workers": (Worker(0, 1 << 40),)}, "workers"),
        ({"groups": (Group(0),)}, "groups"),
        ({"groups": (Group((1 << 20) + 1),)}, "groups"),
        ({"layers": tuple(Layer(str(n), 0, 0, 0) for n in range(4097))}, "layers"),
        ({"layers": (Layer("x" * 257, 0, 0, 0),)}, "layers"),
        ({"kinds": (Kind(component()[0].components * 17),)}, "kinds"),
        ({"kinds": component(held=Sharding(65537))}, "kinds"),
        ({"kinds": component(head_stride=-1)}, "kinds"),
        ({"kinds": component(block_stride=(1 << 31) + 1)}, "kinds"),
        ({"kinds": component(packing="x" * 65)}, "kinds"),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused_before_anything_is_planned(changes: dict[str, Any], says: str) -> None:
    found = refusal(encoded(LAYOUT, **changes))
    assert found.code == "PD-CTRL-002" and "layout: " in found.sentence and says in found.sentence


def test_whole_layers_beside_pcp_are_refused() -> None:
    sizes: dict[str, Any] = {"kv_heads": 1, "dcp": 2, "pcp": 2, "interleave": 4, "stages": STAGES, "others": (WHOLE,)}
    assert refusal(written(EngineLayout("m", geometry(2, **sizes), ()))).code == "PD-CTRL-004"


def test_layers_out_of_the_order_of_the_stages_are_refused() -> None:
    layers = (Layer("a", 0, 0, 1), Layer("b", 0, 0, 0))
    workers = tuple(Worker(stage, rank) for stage in range(2) for rank in range(2))
    assert "order of the stages" in refusal(encoded(LAYOUT, layers=layers, workers=workers)).sentence


def forms(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(as_sent(RESERVATION), **changes))


def slices(*found: Sequence[Any]) -> tuple[Slice, ...]:
    return tuple(Slice(*values) for values in found)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"groups": ()}, "PD-CTRL-002", "0 slices for one group"),
        ({"groups": slices((0, 16, 0, b""), (0, 16, 0, b""))}, "PD-CTRL-002", "2 slices for one group"),
        ({"groups": slices((20, 40, 0, b""))}, "PD-CTRL-002", "token 20 is not in the block of index 0"),
        ({"layout": b""}, "PD-CTRL-002", "layout: "),
        ({"layout": encoded(LAYOUT, groups=LAYOUT.groups * 2)}, "PD-CTRL-002", "1 slices for 2 groups"),
        ({"layout": encoded(LAYOUT, groups=(Group(16, "chunk", 128),))}, "PD-CTRL-004", "'matters'"),
    ],
)
def test_a_reservation_that_says_more_or_less_is_refused(changes: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_reservation(forms(**changes))
    assert caught.value.code == code and says in caught.value.sentence


def test_every_field_of_a_layout_has_its_place_in_the_geometry() -> None:
    """A field added to the geometry would otherwise be lost on the wire."""
    planned = set(CacheGeometry.__struct_fields__)
    assert planned == {
        "block_size",
        "kv_heads",
        "tp_size",
        "dtype",
        "packing",
        "regions",
        "stages",
        "drafter",
        "dcp",
        "pcp",
        "interleave",
        "drafts",
        "others",
        "groups",
        "group",
    }
    assert set(SentReservation.__struct_fields__) - {"layout", "groups"} <= set(Reservation.__struct_fields__)
