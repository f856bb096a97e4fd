# SPDX-License-Identifier: Apache-2.0
"""Several groups of layers and windows: blocks wanted of each, their encoding, and what either side frees."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from unit.device.caches import TokenMajorDevice
from unit.kits.loads import book_with
from unit.protocol.kit import D_INCARNATION, geometry, reservation
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.caches import CacheShape, describe
from vllm_ascend_pd.engine import Engine, WorkerFacts, merge_geometries, request_hash
from vllm_ascend_pd.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group, LayerKind, in_execution_order
from vllm_ascend_pd.geometry.match import mismatches, range_fault
from vllm_ascend_pd.geometry.pairing import pairings, pushed
from vllm_ascend_pd.geometry.plan import plan_digest
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.scheduler.first_tokens import FirstTokenSource
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import decode_reservation, seal
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstTokenRequest
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.reservation_format import Slice, as_sent
from vllm_ascend_pd.protocol.versions import WHOLE

WINDOW, ALL, COMPRESSED = Group(16, "window", 20), Group(16), Group(8, "compressed", 4)
PLAIN = geometry(1)
FIRST_LAYER, *LAYERS = PLAIN.layers


def grouped(*groups: Group, tp: int = 1) -> CacheGeometry:
    """A geometry with the first layer in the first group, the others in the second."""
    plain = geometry(tp)
    other = LayerKind(plain.kv_heads, plain.dtype, plain.packing, plain.regions, 1)
    if len(groups) == 1:
        return msgspec.structs.replace(plain, groups=groups)
    return msgspec.structs.replace(plain, groups=groups, others=(other,), kind_of=(0,) + (1,) * len(LAYERS))


TWO = grouped(WINDOW, ALL)


def ids(*blocks: int) -> bytes:
    return np.array(blocks, dtype="<i4").tobytes()


def wanted(d: CacheGeometry = TWO, **changes: Any) -> Reservation:
    """A reservation for 101 tokens: the first 100, and of the window that of token 100, from token 81 in the block
    from 80 on."""
    facts = {"blocks": (ids(8, 9), ids(1, 2, 3, 4, 5, 6, 7)), "prompt_length": 101, "endpoints": (Endpoint("a", 1),)}
    return reservation(d, 100, 0, **{**facts, **changes})


# -- what is wanted


@pytest.mark.parametrize(
    ("first", "end", "begins"),
    [(0, 19, 0), (0, 35, 16), (0, 36, 16), (0, 50, 16), (0, 51, 32), (48, 51, 48), (0, 100, 80)],
)
def test_of_a_window_the_blocks_of_what_the_next_token_looks_at_are_wanted(first: int, end: int, begins: int) -> None:
    assert WINDOW.begins(first, end) == begins
    assert begins == first or begins <= end - 19 < begins + 16, "token `end` looks at itself and 19 before it"
    assert min(group.begins(first, end) for group in TWO.tables) == first
    assert [group.begins(first, end) for group in grouped(WINDOW).tables] == [begins]


def test_a_cache_with_windows_leaves_the_last_token_to_d() -> None:
    assert TWO.recomputes_last and not grouped(ALL, ALL).recomputes_last and not PLAIN.recomputes_last
    assert PLAIN.tables == (ALL,) and [kind.group_index for kind in TWO.kinds] == [0, 1]


def test_layers_are_in_the_order_of_their_numbers() -> None:
    came = ["model.layers.0.attn", "model.layers.2.attn", "model.layers.1.attn", "model.layers.10.attn"]
    assert in_execution_order(came) == [came[0], came[2], came[1], came[3]]
    assert in_execution_order(["l.3.mixer", "l.3.attn"]) == ["l.3.mixer", "l.3.attn"], "of one number: as they come"


# -- two caches


def test_layers_meet_by_name_whatever_their_groups_are_called() -> None:
    other_way = msgspec.structs.replace(
        TWO, groups=(ALL, WINDOW), group_index=1, others=(msgspec.structs.replace(TWO.others[0], group_index=0),)
    )
    assert not mismatches(TWO, other_way) and pushed(TWO, other_way) == set(TWO.layers)
    assert [(pair.p.group_index, pair.d.group_index, pair.layers) for pair in pairings(TWO, other_way)] == [
        (0, 1, {FIRST_LAYER}),
        (1, 0, set(LAYERS)),
    ]


@pytest.mark.parametrize(
    ("d", "says"),
    [
        (grouped(ALL, ALL), "tokens that matter of layer.0: prefill window 20, decode all"),
        (PLAIN, "tokens that matter of layer.0: prefill window 20, decode all"),
        (grouped(Group(16, "window", 21), ALL), "prefill window 20, decode window 21"),
        (msgspec.structs.replace(grouped(Group(32, "window", 20), ALL), block_size=32), "block_size of layer.0"),
    ],
)
def test_groups_that_differ_are_refused_with_the_layer_and_both(d: CacheGeometry, says: str) -> None:
    assert any(says.replace("layer.0", FIRST_LAYER) in str(difference) for difference in mismatches(TWO, d))


def test_blocks_of_p_may_be_longer_in_a_window_and_of_any_length_elsewhere() -> None:
    longer = msgspec.structs.replace(grouped(Group(32, "window", 20), Group(48)), block_size=32)
    assert not mismatches(longer, TWO)
    assert "block_size" in str(mismatches(TWO, longer)[0])


def test_the_plans_digest_tells_groups_apart_and_does_not_know_them_in_a_plain_cache() -> None:
    digests = {plan_digest(p, p, 0, 100, "direct") for p in (PLAIN, TWO, grouped(WINDOW), grouped(ALL, WINDOW))}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("first", "end", "blocks"),
    [(0, 3, []), (0, 4, [0]), (0, 35, [0]), (0, 36, [0, 1]), (32, 100, [1, 2, 3]), (30, 100, [0, 1, 2, 3]), (96, 99, [])],
)  # fmt: skip
def test_of_compressed_layers_the_blocks_of_complete_entries_are_wanted(
    first: int, end: int, blocks: list[int]
) -> None:
    """A block of 8 entries stands for 32 tokens. An entry that begins before `first` is wanted whole."""
    assert list(COMPRESSED.blocks(first, end)) == blocks and COMPRESSED.covers == 32
    kind = grouped(WINDOW, COMPRESSED).kinds[1]
    assert kind.wanted_entries(first, end) == (first // 4, end // 4) and kind.block_size == kind.covers == 8


# -- on the wire


def test_a_reservation_of_several_groups_comes_back_as_it_was_made() -> None:
    made = wanted()
    form = as_sent(made)
    assert [(one.first, one.end, one.index) for one in form.groups] == [(80, 100, 5), (0, 100, 0)]
    assert decode_reservation(msgspec.msgpack.encode(form)) == made


def test_a_prompt_that_fills_no_entry_has_no_block_of_compressed_layers() -> None:
    d = grouped(WINDOW, COMPRESSED)
    assert not range_fault(d, 0, 3, 1, 0) and "needs 0" in range_fault(d, 0, 3, 1, 1)
    made = reservation(d, 3, blocks=(ids(8), b""), prompt_length=4, endpoints=(Endpoint("a", 1),))
    assert decode_reservation(msgspec.msgpack.encode(as_sent(made))) == made
    book = book_with("r", incarnation=D_INCARNATION)
    assert book.wanted("r", 4, 0, recomputes_last=True) == 3
    bind = book.reserve("r", 3, [[8], []], d.tables, 30.0, "u")
    assert [one.tolist() for one in bind.blocks] == [[8], []]


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        ([(80, 100, 5)], "1 slices for 2 groups"),
        ([(80, 100, 5), (0, 99, 0)], "end at 100 and at 99"),
        ([(64, 100, 4), (0, 100, 0)], "begins at 64 where window of 20 tokens of [0, 100)"),
        ([(96, 100, 6), (0, 100, 0)], "begins at 96"),
        ([(80, 100, 4), (0, 100, 0)], "token 80 is not in the block of index 4"),
    ],
)
def test_slices_that_contradict_each_other_are_refused(slices: list[tuple[int, int, int]], says: str) -> None:
    form = msgspec.structs.replace(as_sent(wanted()), groups=tuple(Slice(*numbers, b"") for numbers in slices))
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-002") as caught:
        decode_reservation(msgspec.msgpack.encode(form))
    assert says in caught.value.sentence


@pytest.mark.parametrize(
    ("blocks", "says"),
    [((2, 7), ""), ((7, 2), "needs 2"), ((2,), "blocks of 1 groups"), ((1, 7), "[80, 100) needs 2"), ((2, 6), "[0, 100) needs 7")],
)  # fmt: skip
def test_each_group_has_the_blocks_that_it_needs(blocks: tuple[int, ...], says: str) -> None:
    fault = range_fault(TWO, 0, 100, *blocks)
    assert says in fault and bool(says) == bool(fault)


# -- D


def test_d_reserves_of_each_group_what_is_not_null() -> None:
    book = book_with("r", incarnation=D_INCARNATION)
    assert book.wanted("r", 101, 0, recomputes_last=True) == 100
    tables = [[0, 0, 0, 0, 0, 8, 9], [1, 2, 3, 4, 5, 6, 7, 10]]
    bind = book.reserve("r", 100, tables, TWO.tables, 30.0, "u")
    assert [one.tolist() for one in bind.blocks] == [[8, 9], [1, 2, 3, 4, 5, 6, 7]]
    assert (bind.first, bind.end) == (0, 100)
    book.answered(bind.transfer, Failure("PD-META-006"))
    assert book.fencing_blocks() == 9, "the fence is of all groups' blocks"


def test_where_all_layers_have_windows_the_transfer_begins_with_the_longest() -> None:
    book = book_with("r", incarnation=D_INCARNATION)
    book.wanted("r", 101, 0, recomputes_last=True)
    bind = book.reserve("r", 100, [[0, 0, 0, 0, 0, 8, 9]], grouped(WINDOW).tables, 30.0, "u")
    assert (bind.first, bind.end) == (80, 100)


@pytest.mark.parametrize("table", [[0, 0, 0, 0, 0, 0, 9], [0, 0, 0, 0, 0, 8]], ids=["null", "too short"])
def test_a_vllm_that_keeps_less_than_a_window_is_found_out(table: list[int]) -> None:
    book = book_with("r", incarnation=D_INCARNATION)
    book.wanted("r", 101, 0, recomputes_last=True)
    with pytest.raises(LocalProtocolError, match=r"keeps no block for some of \[80, 100\), of window of 20 tokens"):
        book.reserve("r", 100, [table], grouped(WINDOW).tables, 30.0, "u")


def test_a_prompt_of_which_only_the_last_token_is_missing_is_not_loaded() -> None:
    book = book_with("r", incarnation=D_INCARNATION)
    assert (
        book.wanted("r", 101, 100, recomputes_last=True) == 0 and book.wanted("r", 101, 99, recomputes_last=True) == 1
    )


# -- P


def test_p_tells_its_workers_the_blocks_of_each_group() -> None:
    book = PushBook(model="m", geometry=TWO)
    assert book.take(0.0, NewRequest("r", (101, "h"), "push", wanted(model="m"))) is None
    slice_ = book.scheduled("r", 0, 60, [0, 2, 3, 4], [5, 6, 7, 8], replaces=True)
    assert slice_ is not None and [one.tolist() for one in slice_.new_blocks] == [[0, 2, 3, 4], [5, 6, 7, 8]]
    slice_ = book.scheduled("r", 60, 40, [9], (), replaces=False)
    assert slice_ is not None and [one.tolist() for one in slice_.new_blocks] == [[9], []] and slice_.final


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_length": 100}, "the last is not pushed"),
        ({"blocks": (ids(8, 9),)}, "blocks of 1 groups"),
        ({"blocks": (ids(8), ids(1, 2, 3, 4, 5, 6, 7))}, "needs 2"),
        ({"blocks": (ids(8, 9), b"123")}, "8, 3 bytes of block ids"),
    ],
)
def test_p_refuses_what_its_windows_cannot_give(changes: dict[str, Any], says: str) -> None:
    asked = wanted(model="m", **changes)
    refused = PushBook(model="m", geometry=TWO).take(0.0, NewRequest("r", (asked.prompt_length, "h"), "push", asked))
    assert refused is not None and refused.code == "PD-META-005" and says in refused.sentence


def arrived(
    cache: CacheGeometry,
    seed: FirstTokenRequest | None = None,
    *,
    sends_first: bool = True,
    whole: bool = False,
    **changes: Any,
) -> tuple[PrefillScheduler, Request]:
    """A request that P's scheduler has, with a reservation; of the whole prompt if D begins with P's first token."""
    engine = Engine(PushConfig.parse({}), "i" * 16, "engine", "m", "127.0.0.1", None)
    scheduler = PrefillScheduler(engine, sends_first=sends_first)
    scheduler.attach_workers({(0, 0): WorkerFacts(None, cache)})
    tokens = list(range(101))
    request = Request("r", tokens, SamplingParams(max_tokens=1), None)
    blocks = wanted(cache).blocks if len(cache.tables) == 2 else (ids(1, 2, 3, 4, 5, 6, 7),)
    facts = {"model": "m", "prompt_hash": request_hash(request), "transfer": TransferId("d", 1, "u"), "blocks": blocks}
    asked = wanted(cache, **{**facts, **changes})
    if seed is not None or whole:
        asked = msgspec.structs.replace(asked, end=101, seed=seed, needs=(WHOLE,))
    sealed = seal(asked, None)
    request.kv_transfer_params = {"do_remote_decode": True, "reservation": base64.b64encode(sealed).decode()}
    scheduler.arrived(request)
    return scheduler, request


def test_p_computes_what_is_before_the_last_token() -> None:
    scheduler, request = arrived(TWO)
    assert request.num_prompt_tokens == request.num_tokens == 100 and len(request.prompt_token_ids or ()) == 100
    scheduler.allocated(request)  # later, when it is scheduled: its reservation is already taken
    assert scheduler.book.tracks("r") and (record := scheduler.book.find("r")) is not None and record.refusal is None
    assert request.num_prompt_tokens == 100


def test_p_computes_all_of_what_it_does_not_push_and_of_a_plain_cache() -> None:
    _, request = arrived(TWO, prompt_hash="another")
    assert request.num_prompt_tokens == 101
    scheduler, request = arrived(PLAIN)
    assert request.num_prompt_tokens == 101 and not scheduler.book.knows("r")


def test_p_computes_all_of_a_prompt_whose_d_begins_with_its_token() -> None:
    _, other = arrived(PLAIN)
    seed = FirstTokenSource(None).seed_of(other)
    scheduler, request = arrived(TWO, seed)
    assert request.num_prompt_tokens == 101 and request.max_tokens == 1
    assert scheduler.book.tracks("r") and scheduler.book.ends("r") and not scheduler.book.cuts("r")
    for asked, sends_first, why in (
        (FirstTokenRequest("else"), True, "other sampling"),
        (seed, False, "none of this request's"),
    ):
        scheduler, request = arrived(TWO, asked, sends_first=sends_first)
        record = scheduler.book.find("r")
        refusal = record.refusal if record is not None else None
        assert refusal is not None and refusal.code == "PD-META-033" and why in refusal.sentence
        assert request.num_prompt_tokens == 101 and not scheduler.book.tracks("r")


@pytest.mark.parametrize("sends_first", [True, False])
def test_p_computes_all_of_a_prompt_whose_d_has_the_token_behind_it(sends_first: bool) -> None:
    scheduler, request = arrived(TWO, sends_first=sends_first, whole=True)
    assert request.num_prompt_tokens == 101 and request.max_tokens == 1
    assert scheduler.book.tracks("r") and not scheduler.book.cuts("r")


def test_all_of_a_prompt_is_all_of_it() -> None:
    short = msgspec.structs.replace(wanted(model="m"), needs=(WHOLE,))
    refused = PushBook(model="m", geometry=TWO).take(0.0, NewRequest("r", (101, "h"), "push", short))
    assert refused is not None and "said to be all of them" in refused.sentence
    assert decode_reservation(msgspec.msgpack.encode(as_sent(short))).needs == (WHOLE,)


# -- the engine's tensors


SHAPE = CacheShape(
    32, 2, 2, 16, 1, groups=(Group(32, "window", 64), Group(32)), group_of={"l.0": 0, "l.2": 0, "l.1": 1, "l.3": 1}
)


def test_layers_at_one_address_are_distinguished_by_name() -> None:
    """vLLM passes caches group by group: 0, 2, 1, 3."""
    storage = torch.zeros(2, 8, 32, 2, 16)
    caches = describe({f"l.{i}": storage[n] for i, n in ((0, 0), (2, 1), (1, 0), (3, 1))}, SHAPE, TokenMajorDevice())
    g = caches.geometry
    assert g.layers == ("l.0", "l.1", "l.2", "l.3") and g.groups == SHAPE.groups and g.group_index == 0
    assert [kind.layers for kind in g.kinds] == [("l.0", "l.2"), ("l.1", "l.3")]
    assert caches.bases[0] == caches.bases[1] and caches.bases[2] == caches.bases[3] and len(caches.storages) == 1
    merged = merge_geometries({(0, 0): WorkerFacts(None, g)})
    assert merged == g


def test_a_layer_of_no_group_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="belongs to no group"):
        describe({"l.7": torch.zeros(8, 32, 2, 16)}, SHAPE, TokenMajorDevice())


@pytest.mark.parametrize("groups", [SHAPE.groups, ()], ids=["several groups", "one group"])
def test_a_layer_that_reads_the_cache_of_another_is_not_a_layer(groups: tuple[Group, ...]) -> None:
    """vLLM registers the cache of l.0 and of l.1 under a second name, which is in no group. Groups share an address."""
    one, other = torch.zeros(8, 32, 2, 16), torch.zeros(8, 32, 2, 16)
    lies = {"l.0": one, "l.1": one.view(8, 32, 2, 16) if groups else other}
    lies |= {"l.2": other if groups else other.clone(), "l.3": other.clone()}  # layers of one group share no memory
    shared = {"l.4": lies["l.0"], "l.5": lies["l.1"], "l.6": lies["l.0"]}
    caches = describe({**lies, **shared}, replace(SHAPE, groups=groups), TokenMajorDevice())
    assert caches.geometry.layers == ("l.0", "l.1", "l.2", "l.3")
    assert [base for (base,) in caches.bases] == [lies[name].data_ptr() for name in caches.geometry.layers]


def test_the_title_of_a_layer_says_its_components_and_its_group() -> None:
    states = msgspec.structs.replace(TWO, groups=(ALL, Group(16, "state")))
    assert states.layer_labels == (
        "layer.0 (kv), group 0: all",
        "layer.1 (kv), group 1: state, leaves at the end of the prompt",
    )
    assert (
        TWO.layer_labels[0] == "layer.0 (kv), group 0: window of 20 tokens" and PLAIN.layer_labels[0] == "layer.0 (kv)"
    )
