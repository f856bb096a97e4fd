# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: sections of a page, choice of the block, and every byte that moves.

The reference is a whole model's state, divided among ranks as in vLLM, by slicing tensors.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from unit.device.caches import TokenMajorDevice
from unit.kits.loads import book_with
from unit.protocol.kit import D_INCARNATION, reservation
from vllm_ascend_pd.config import PushConfig, RegroupConfig
from vllm_ascend_pd.device.caches import CacheBytes, Caches, CacheShape, describe
from vllm_ascend_pd.engine import Engine, WorkerFacts, merge_geometries, request_hash
from vllm_ascend_pd.errors import ConfigError, LocalProtocolError
from vllm_ascend_pd.geometry.decide import decide
from vllm_ascend_pd.geometry.digest import cache_digest
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.geometry.match import mismatches, range_fault
from vllm_ascend_pd.geometry.pairing import contributors, exchanged, pairings
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.geometry.states import DELTA_NET, MAMBA2, Recurrent
from vllm_ascend_pd.metadata import PushSlice, PushStart
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.prefill.worker.steps import Steps
from vllm_ascend_pd.protocol.auth import decode_reservation, seal
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.layouts import EngineLayout, read, written
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.reservation_format import as_sent
from vllm_ascend_pd.regroup.core.staging import exchanges_possible

LAYERS = ("l.0.mixer", "l.1.mixer")
HEADS, HEAD, STATE, ROWS, BLOCKS = 4, 8, 6, 3, 5


def whole(recurrence: str, groups: int, layer: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A model's state: the convolution's values of each of its three parts [rows, heads, values], and the
    recurrence's matrices."""
    seeded = torch.Generator().manual_seed(17 * layer + groups)
    small = [torch.randn(ROWS, groups, STATE, generator=seeded) for _ in range(2)]
    large = torch.randn(ROWS, HEADS, HEAD, generator=seeded)
    parts = [large, *small] if recurrence == MAMBA2 else [*small, large]
    return parts, torch.randn(HEADS, HEAD, STATE, generator=seeded).double()


def rank_heads(part: torch.Tensor, axis: int, rank: int, tp: int) -> torch.Tensor:
    """Heads of a rank; of a single head, that one on all ranks."""
    return part if part.shape[axis] < tp else part.chunk(tp, axis)[rank]


def shard(recurrence: str, groups: int, layer: int, rank: int, tp: int, dim_first: bool) -> list[torch.Tensor]:
    """The two states of one rank, as vLLM has them."""
    parts, matrices = whole(recurrence, groups, layer)
    rows = torch.cat([rank_heads(part, 1, rank, tp).flatten(1) for part in parts], 1)
    return [(rows.T if dim_first else rows).contiguous(), rank_heads(matrices, 0, rank, tp).contiguous()]


class RankStates:
    """One rank's caches, empty or with its part of the model's state in one block."""

    def __init__(self, recurrence: str, groups: int, tp: int, rank: int, *, dim_first: bool, apart: bool) -> None:
        self.tp, self.rank = tp, rank
        self.shards = [shard(recurrence, groups, layer, rank, tp, dim_first) for layer in range(len(LAYERS))]
        self.made = self._made(apart)
        shapes = tuple(tuple(one.shape) for one in self.shards[0])
        recurrent = Recurrent(recurrence, shapes, ("float32", "float64"), (4, 8), dim_first, groups)
        shape = CacheShape(
            96, 1, 1, 1, tp,
            groups=(Group(96, "state"),), group_of=dict.fromkeys(LAYERS, 0), states=dict.fromkeys(LAYERS, recurrent),
        )  # fmt: skip
        self.caches = describe(self.made, shape, TokenMajorDevice())

    def _made(self, apart: bool) -> dict[str, Any]:
        if apart:  # as in vllm-ascend: a tensor for each state
            return {
                name: [torch.full((BLOCKS, *one.shape), -1.0, dtype=one.dtype) for one in shards]
                for name, shards in zip(LAYERS, self.shards, strict=True)
            }
        nbytes = [sum(one.nbytes for one in shards) for shards in self.shards]
        pages = torch.full((BLOCKS, max(nbytes) + 24), 7, dtype=torch.int8)  # padded to the page of another group
        return {
            name: pages.clone()[:, :size].unflatten(1, (1, 1, size)) for name, size in zip(LAYERS, nbytes, strict=True)
        }

    def fill(self, block: int) -> RankStates:
        for name, shards in zip(LAYERS, self.shards, strict=True):
            made = self.made[name]
            if isinstance(made, list):
                for tensor, one in zip(made, shards, strict=True):
                    tensor[block] = one
            else:
                made[block, 0, 0] = torch.cat([one.flatten().view(torch.int8) for one in shards])
        return self

    def memory(self) -> list[bytes]:
        tensors = [t for made in self.made.values() for t in (made if isinstance(made, list) else [made])]
        return [bytes(t.untyped_storage()) for t in tensors]  # type: ignore[call-overload]

    def view(self, layer: int, region: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return CacheBytes(self.caches, TokenMajorDevice()).region(layer, region)


def engine(sides: list[RankStates]) -> CacheGeometry:
    return merge_geometries({(0, side.rank): WorkerFacts(None, side.caches.geometry) for side in sides})


def move(p: list[RankStates], d: list[RankStates], p_block: int, d_block: int, step_number: int) -> int:
    """Execute the plans of P's ranks; return how many bytes were moved."""
    ours, theirs, moved = engine(p), engine(d), 0
    for pair in pairings(ours, theirs):
        job = Job(pair.d, 0, 0, 1, np.array([p_block], np.int32), np.array([d_block], np.int32))
        for source in p:
            (plan,) = StepPlanner(pair.p, source.rank).plan([job], step_number)
            for name in sorted(pair.layers):
                here, there = ours.layers.index(name), theirs.layers.index(name)
                for d_rank, spans in plan.by_rank.items():
                    for region, some in enumerate(spans):
                        for src, dst, size in zip(some.src, some.dst, some.size, strict=True):
                            d[d_rank].view(there, region)[dst : dst + size] = source.view(here, region)[
                                src : src + size
                            ]
                            moved += int(size)
    return moved


CASES = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4)]


@settings(max_examples=40, deadline=None)
@given(
    recurrence=st.sampled_from([MAMBA2, DELTA_NET]),
    tps=st.sampled_from(CASES),
    few=st.booleans(),
    dim_first=st.booleans(),
    apart=st.tuples(st.booleans(), st.booleans()),
    blocks=st.tuples(st.integers(1, BLOCKS - 1), st.integers(1, BLOCKS - 1)),
    step_number=st.integers(0, 5),
)
def test_every_rank_of_d_gets_its_part_of_the_state_and_nothing_else_is_written(
    recurrence: str, tps: tuple[int, int], few: bool, dim_first: bool, apart: tuple[bool, bool],
    blocks: tuple[int, int], step_number: int,
) -> None:  # fmt: skip
    groups = 1 if few and recurrence == MAMBA2 else 4
    sides = [
        [RankStates(recurrence, groups, tp, rank, dim_first=dim_first, apart=one) for rank in range(tp)]
        for tp, one in zip(tps, apart, strict=True)
    ]
    p, d = [[side.fill(blocks[0]) for side in sides[0]], sides[1]]
    wanted = [RankStates(recurrence, groups, tps[1], r, dim_first=dim_first, apart=apart[1]) for r in range(tps[1])]
    moved = move(p, d, *blocks, step_number)
    assert [side.memory() for side in d] == [side.fill(blocks[1]).memory() for side in wanted]
    assert moved == sum(one.nbytes for side in d for shards in side.shards for one in shards), "each byte once"


def sides(p_tp: int = 1, d_tp: int = 1, groups: int = 1, **more: Any) -> tuple[CacheGeometry, CacheGeometry]:
    given = {"dim_first": False, "apart": False, **more}
    p, d = (
        engine([RankStates(MAMBA2, groups, tp, rank, **given) for rank in range(tp)])  # type: ignore[arg-type]
        for tp in (p_tp, d_tp)
    )
    return p, d


def test_a_layer_becomes_its_sections() -> None:
    (g, _), (two, _) = sides(), sides(2)
    names = ("l.0.mixer/heads", "l.0.mixer/groups", "l.1.mixer/heads", "l.1.mixer/groups")
    assert g.layers == names and set(g.states) == set(names) and g.recomputes_last and not g.opaque
    heads, groups = g.kinds
    assert [region.name for region in heads.regions] == ["conv.x.0", "conv.x.1", "conv.x.2", "recurrence"]
    assert [region.name for region in groups.regions] == [f"conv.{part}.{i}" for part in "BC" for i in range(ROWS)]
    assert (heads.kv_heads, groups.kv_heads, heads.block_size) == (HEADS, 1, 1)
    assert heads.dtype == "float32/float32/float32/float64" and groups.dtype == "float32"
    assert [len(kind.head_range(1)) for kind in two.kinds] == [HEADS // 2, 1]


def test_of_one_group_on_each_rank_the_model_says_whether_it_is_for_all() -> None:
    shapes = ((ROWS, 2 * HEAD + 2 * STATE), (2, HEAD, STATE))
    state = Recurrent(MAMBA2, shapes, ("float32", "float32"), (4, 4), dim_first=False, groups=2)
    assert [section.heads for section in state.sections("l", 2)] == [4, 2]
    assert [section.heads for section in msgspec.structs.replace(state, groups=1).sections("l", 2)] == [4, 1]
    with pytest.raises(ConfigError, match=r"PD-GEO-003.*an unknown number in the model"):
        msgspec.structs.replace(state, groups=0).sections("l", 2)


@pytest.mark.parametrize(
    "shapes",
    [((3, 40),), ((3, 40), (4, 8)), ((3, 32), (4, 8, 6)), ((3, 47), (4, 8, 6)), ((3, 45), (4, 8, 6))],
)
def test_shapes_that_do_not_add_up_stop_the_start(shapes: tuple[tuple[int, ...], ...]) -> None:
    state = Recurrent(MAMBA2, shapes, ("float32", "float32"), (4, 4), dim_first=False)
    with pytest.raises(ConfigError, match="PD-GEO-003"):
        state.sections("l", 1)


@pytest.mark.parametrize("shape", [(BLOCKS, 1, 1, 100), (BLOCKS, 8, 8)], ids=str)
def test_tensors_that_hold_no_such_state_stop_the_start(shape: tuple[int, ...]) -> None:
    recurrent = Recurrent(MAMBA2, ((3, 44), (4, 8, 6)), ("float32", "float32"), (4, 4), dim_first=False)
    cache = CacheShape(96, 1, 1, 1, 1, groups=(Group(96, "state"),), group_of={"l": 0}, states={"l": recurrent})
    with pytest.raises(ConfigError, match="for states of"):
        describe({"l": torch.zeros(shape, dtype=torch.int8)}, cache, TokenMajorDevice())


# -- two caches


def test_the_layout_and_a_reservation_come_back_as_they_were_sent() -> None:
    g, _ = sides(2)
    assert read(written(EngineLayout("m", g))).geometry == g
    r = wanted(g, endpoints=(Endpoint("a", 1), Endpoint("a", 2)))
    form = as_sent(r)
    assert [(one.first, one.end, one.index) for one in form.groups] == [(99, 100, 1)]
    assert decode_reservation(msgspec.msgpack.encode(form)) == r


def test_blocks_may_be_of_any_length_and_rows_must_be_alike() -> None:
    p, d = sides()
    longer = msgspec.structs.replace(d, groups=(Group(4096, "state"),))
    assert not mismatches(p, longer)
    all_tokens = msgspec.structs.replace(d, groups=(Group(1),))
    assert "tokens that matter of l.0.mixer/heads: prefill state, decode all" in map(str, mismatches(p, all_tokens))
    _, dim_first = sides(dim_first=True)
    differences = mismatches(p, dim_first)
    assert differences[0].field == "regions of l.0.mixer/heads" and differences[0].decode == "conv.x, recurrence", (
        differences
    )


def test_states_are_not_exchanged_among_the_ranks_of_p() -> None:
    p, d = sides(2, 1)
    assert not exchanged(p, d) and not decide(p, d, "always").regroup
    assert not exchanges_possible(RegroupConfig(regroup="always"), p, 2)
    assert contributors(p, d, 0) == ((0, 0), (0, 1))


@pytest.mark.parametrize(("blocks", "says"), [(1, ""), (0, "0 blocks are named"), (2, "2 blocks are named")])
def test_of_a_state_one_block_is_named(blocks: int, says: str) -> None:
    g, _ = sides()
    fault = range_fault(g, 0, 100, blocks)
    assert says in fault and bool(says) == bool(fault)


# -- D


def wanted(d: CacheGeometry, **changes: Any) -> Reservation:
    """A reservation for 101 tokens: the state after 100."""
    ids = np.array([9], dtype="<i4").tobytes()
    facts = {"blocks": (ids,), "prompt_length": 101, "endpoints": (Endpoint("a", 1),)}
    return reservation(d, 100, 99, **{**facts, **changes})


@pytest.mark.parametrize(
    ("end", "table", "block"), [(100, [0, 7], 7), (96, [5, 6], 5), (97, [5, 6], 6), (95, [5], 5), (192, [0, 6, 0], 6)]
)
def test_d_reserves_the_block_of_the_last_token_that_it_counts_as_computed(
    end: int, table: list[int], block: int
) -> None:
    book = book_with("r", incarnation=D_INCARNATION)
    book.wanted("r", end + 1, 0, recomputes_last=True)
    bind = book.reserve("r", end, [table], (Group(96, "state"),), 30.0, "u")
    assert [one.tolist() for one in bind.blocks] == [[block]] and (bind.first, bind.end) == (end - 1, end)


@pytest.mark.parametrize("table", [[7, 0], [7]], ids=["null", "too short"])
def test_a_vllm_that_keeps_no_block_for_the_state_is_found_out(table: list[int]) -> None:
    book = book_with("r", incarnation=D_INCARNATION)
    book.wanted("r", 101, 0, recomputes_last=True)
    with pytest.raises(LocalProtocolError, match=r"keeps no block for some of \[99, 100\), of state"):
        book.reserve("r", 100, [table], (Group(96, "state"),), 30.0, "u")


# -- P


def slices_of_steps(*steps: tuple[int, int, list[int]]) -> list[PushSlice | None]:
    g, _ = sides()
    book = PushBook(model="m", geometry=g)
    assert book.take(0.0, NewRequest("r", (101, "h"), "push", wanted(g, model="m"))) is None
    return [book.scheduled("r", computed, count, table, replaces=not computed) for computed, count, table in steps]


def test_workers_hear_of_a_states_block_once_after_the_last_chunk() -> None:
    first, last = slices_of_steps((0, 96, [4]), (96, 4, [0, 5]))
    assert first is not None and last is not None and last.final and not first.final
    (at_once,) = slices_of_steps((0, 100, [0, 5, 6]))  # vLLM keeps a spare block behind it
    assert at_once is not None
    assert [[ids.tolist() for ids in slice_.new_blocks] for slice_ in (first, last, at_once)] == [[[]], [[5]], [[5]]]


def test_of_a_state_that_is_further_no_block_is_reported() -> None:
    """P has computed the last token of the prompt too: the state that D wants is gone."""
    (slice_,) = slices_of_steps((0, 101, [0, 5]))
    assert slice_ is not None and slice_.final and [ids.tolist() for ids in slice_.new_blocks] == [[]]


@pytest.mark.parametrize(("blocks", "lost"), [([], True), ([0], True), ([5], False)], ids=str)
def test_a_push_whose_state_has_no_block_is_lost_on_every_rank(blocks: list[int], lost: bool) -> None:
    g, _ = sides()
    push = Push.of(PushStart("r", "push", wanted(g)), g, pairings(g, g), (), ())
    slice_ = PushSlice("push", 96, 100, (np.array(blocks, np.int32),), restart=False, final=True)
    push.extend(1, slice_)
    assert [push.lost(index, 0, 1) for index in range(len(push.pairings))] == [lost, lost]


def arrived(cache: CacheGeometry, **sampling: Any) -> tuple[PrefillScheduler, Request]:
    scheduler = PrefillScheduler(Engine(PushConfig.parse({}), "i" * 16, "engine", "m", "127.0.0.1", None))
    scheduler.attach_workers({(0, 0): WorkerFacts(None, cache)})
    request = Request("r", list(range(101)), SamplingParams(max_tokens=7, **sampling), None)
    asked = wanted(cache, model="m", prompt_hash=request_hash(request), transfer=TransferId("d", 1, "u"))
    sealed = base64.b64encode(seal(asked, None)).decode()
    request.kv_transfer_params = {"do_remote_decode": True, "reservation": sealed}
    scheduler.arrived(request)
    return scheduler, request


def output(computed: int, count: int, table: list[int], *, new: list[int] | None, drafts: int = 0) -> Any:
    """A scheduler output of vLLM's: `new` are the blocks sent to workers, the table holds the real ones."""
    block_state = SimpleNamespace(get_block_ids=lambda request_id: (table,))
    fresh = SimpleNamespace(req_id="r", num_computed_tokens=computed, block_ids=(new,))
    cached = SimpleNamespace(
        req_ids=["r"] if computed else [],
        new_block_ids=[(new,) if new else None] if computed else [],
        num_computed_tokens=[computed] if computed else [],
        resumed_req_ids=set(),
    )
    return SimpleNamespace(
        preempted_req_ids=(),
        finished_req_ids=set(),
        num_scheduled_tokens={"r": count + drafts},
        scheduled_spec_decode_tokens={"r": [-1] * drafts} if drafts else {},
        scheduled_new_reqs=[] if computed else [fresh],
        scheduled_cached_reqs=cached,
        kv_connector_block_state=block_state,
    )


def test_p_takes_the_table_as_it_is_not_as_it_grew() -> None:
    """In mode `align` entries of the table move: the blocks sent to workers are not where the state is now."""
    g, _ = sides()
    scheduler, request = arrived(g)
    assert request.num_prompt_tokens == 100 and request.max_tokens == 1, "no token more, and none decoded behind it"
    first = scheduler.build_step(output(0, 96, [4], new=[4]))
    last = scheduler.build_step(output(96, 4, [0, 5], new=[8]))
    assert [[ids.tolist() for ids in step.slices[0].new_blocks] for step in (first, last)] == [[[]], [[5]]]


def test_drafts_that_vllm_adds_to_a_prompts_last_token_are_not_the_prompts() -> None:
    """From 0.30 on a single token behind a cached prefix is scheduled as a decode, with placeholders for drafts."""
    scheduler, _ = arrived(sides()[0])
    scheduler.build_step(output(0, 99, [0, 5], new=[4]))
    last = scheduler.build_step(output(99, 1, [0, 5, 6, 7, 8], new=[6, 7, 8], drafts=3))
    (pushed,) = last.slices
    assert (pushed.after, pushed.final, [ids.tolist() for ids in pushed.new_blocks]) == (100, True, [[5]])


@pytest.mark.parametrize("drafter", ["", "method=mtp heads=2"], ids=["alone", "drafts"])
def test_behind_a_shorter_prompt_a_drafter_gets_the_token_that_was_taken_off(drafter: str) -> None:
    """It makes its KV at the last position from the next token, which is the sampled one."""
    g, _ = sides()
    grammar = StructuredOutputsParams(regex="a")
    for sampling, forced in (
        ({"temperature": 1.0, "logit_bias": {3: 5.0}, "min_tokens": 2, "bad_words": ["x"]}, bool(drafter)),
        ({"structured_outputs": grammar}, False),
    ):
        _, request = arrived(
            msgspec.structs.replace(g, drafter=drafter, drafts=g.layers[-1:] if drafter else ()), **sampling
        )
        params = request.sampling_params
        assert params is not None and request.num_prompt_tokens == 100
        if forced:
            kept = params.allowed_token_ids, params.temperature, params.logit_bias, params.min_tokens, params.bad_words
            assert kept == ([100], 0.0, None, 0, [])
        else:
            assert params == SamplingParams(max_tokens=7, **sampling)


def test_a_state_is_announced_when_the_step_is_over() -> None:
    said: list[Any] = []
    plan = SimpleNamespace(number=1, before=None, direct=True, exchanges=(), catch_ups=(), pushes=(), final=())
    plans = SimpleNamespace(begin=lambda now, step: plan)
    core = SimpleNamespace(plans=plans, uncomputed=lambda *facts: said.append(facts))
    deciding: Any = lambda: HeldCore(core)  # noqa: E731
    names = ("l.0/heads", "l.0.attn", "l.1/heads")
    steps = Steps(names, deciding, object, said.append, lambda: 0.0, None, states=("l.0/heads", "l.1/heads"))  # type: ignore[arg-type,return-value]
    steps.begin(SimpleNamespace(empty=False, slices=(1,)))  # type: ignore[arg-type]
    steps.computed("l.0.attn")
    assert [one.layer for one in said] == [1]
    steps.end()
    assert [one.layer for one in said[1:-1]] == [0, 2] and said[-1].step == 1


class HeldCore:
    def __init__(self, core: Any) -> None:
        self.core = core

    def __enter__(self) -> Any:
        return self.core

    def __exit__(self, *error: object) -> None: ...


# -- sums


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_the_sums_of_what_p_reads_are_those_of_what_d_has(tps: tuple[int, int]) -> None:
    p, d = ([RankStates(MAMBA2, 1, tp, rank, dim_first=False, apart=False) for rank in range(tp)] for tp in tps)
    for side in p:
        side.fill(4)
    move(p, d, 4, 2, 1)
    ours, theirs = engine(p), engine(d)
    for pair in pairings(ours, theirs):
        job = Job(pair.d, 0, 0, 1, np.array([4], np.int32), np.array([2], np.int32))
        for name in pair.layers:
            index = ours.layers.index(name)
            total = [np.zeros(len(pair.p.regions), dtype=object) for _ in d]
            for source in p:
                (plan,) = StepPlanner(pair.p, source.rank).plan([job], 1)
                for d_rank, part in plan.deliveries.items():
                    sums = digest(source.caches, index, pair.p, source.rank, range(*part.heads), 4)
                    total[d_rank] = total[d_rank] + np.array(sums, dtype=object)
            for side in d:
                d_sums = digest(side.caches, index, pair.d, side.rank, pair.d.head_range(side.rank), 2)
                assert [int(one) % (1 << 64) for one in total[side.rank]] == list(d_sums)


def digest(caches: Caches, layer: int, kind: CacheGeometry, rank: int, heads: range, block: int) -> tuple[int, ...]:
    memory = CacheBytes(caches, TokenMajorDevice())
    return cache_digest(
        lambda region: memory.region(layer, region), kind, rank, heads, range(1), np.array([block], np.int32)
    )
