# SPDX-License-Identifier: Apache-2.0
"""PushBook: the orders to P's workers, for any sequence of chunks, preemptions, resumptions and ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unit.geometry.kit import geometry
from unit.prefill.kit import BLOCK, D, reservation
from vllm_ascend_pd.errors import PdError, RemoteProtocolError
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.protocol.auth import seal, unseal
from vllm_ascend_pd.protocol.first import FirstTokenRequest
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Endpoint, TransferId

OPAQUE = geometry("opaque", heads=2, tp=2, block=BLOCK)


def admitted(tokens: int = 10, **changes: Any) -> PushBook:
    book = PushBook(model="m", geometry=D)
    assert book.take(0.0, NewRequest("r", (tokens, "h"), "push", reservation(tokens, **changes))) is None
    return book


def after(tokens: int, blocks: list[int]) -> PushBook:
    """A book whose request of 10 tokens has these computed, in a step that is over."""
    book = admitted(10)
    book.scheduled("r", 0, tokens, blocks, replaces=True)
    step(book)
    return book


def step(book: PushBook) -> PrefillStep:
    return book.take_step()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_first_token_is_sent_with_as_many_log_probabilities_as_d_asks_for(count: int) -> None:
    book = admitted(10, seed=FirstTokenRequest("how", 2))
    book.scheduled("r", 0, 10, [1, 2, 3], replaces=True)
    sample = 7, "how", tuple((7 + n, -1.0, 1) for n in range(count))
    first = book.finished(0.0, "r", holds_blocks=True, well=True, why="", sampled=lambda: sample).first
    assert (first is not None) == (count == 3), "two, and the token's own"


# -- the ways of one request


def test_each_step_tells_new_blocks_and_a_token_range_only() -> None:
    book = admitted(1000)
    table = list(range(250))
    total = 0
    for begin in range(0, 1000, 100):
        new = table[begin // BLOCK : (begin + 100) // BLOCK]
        book.scheduled("r", begin, 100, new, replaces=begin == 0)
        meta = step(book)
        (slice_,) = meta.slices
        assert (slice_.before, slice_.after, slice_.final) == (begin, begin + 100, begin == 900)
        assert slice_.new_blocks[0].tolist() == new and slice_.new_blocks[0].dtype == np.int32
        assert len(meta.starts) == (begin == 0) and (meta.geometry is None) == (begin > 0)
        total += len(slice_.new_blocks[0])
    assert total == len(table)


def test_a_prefix_hit_on_prefill_is_part_of_the_first_slice() -> None:
    book = admitted(10)
    book.scheduled("r", 8, 2, [5, 6, 7], replaces=True)
    (slice_,) = step(book).slices
    assert (slice_.before, slice_.after, slice_.final, slice_.restart) == (0, 10, True, False)
    assert slice_.new_blocks[0].tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("first", "ready", "early"), [(0, 8, 8), (4, 8, 8), (0, 4, 4), (8, 8, 0), (0, 0, 0), (0, 99, 8)], ids=str
)
def test_what_earlier_steps_have_computed_leaves_with_the_beginning_of_the_step(
    first: int, ready: int, early: int
) -> None:
    book = admitted(10, first=first)
    book.scheduled("r", 8, 2, [5, 6, 7], replaces=True, ready=ready)
    made = step(book)
    (slice_,) = made.slices
    assert (slice_.before, slice_.after, slice_.final) == (early, 10, True)
    blocks = [p.new_blocks[0].tolist() for p in (*made.computed, slice_)]
    assert blocks == ([[5, 6, 7], []] if early else [[5, 6, 7]]), "the workers hear of each block once"
    assert [(p.before, p.after, p.final, p.restart) for p in made.computed] == [(0, early, False, False)] * bool(early)
    assert (made.before, made.number) == ((1, 2) if early else (0, 1)) and made.starts[0].cached == 8


def test_what_a_preempted_push_finds_again_leaves_layer_by_layer() -> None:
    """Tokens pushed before are pushed again, from the first one on."""
    book = after(6, [1, 2])
    book.preempted("r")
    step(book)
    book.scheduled("r", 4, 6, [3, 4, 5], replaces=True, ready=4)
    made = step(book)
    assert not made.computed and [(p.before, p.after, p.restart) for p in made.slices] == [(0, 10, True)]


def test_a_request_preempted_after_its_last_chunk_is_not_pushed_any_more() -> None:
    """Ranks that have finished it stay finished; the others must not push half of it again."""
    book = after(10, [1, 2, 3])
    book.preempted("r")
    meta = step(book)
    assert meta.preempted == ("push",) and [abort.push for abort in meta.aborts] == ["push"]
    assert book.scheduled("r", 0, 10, [4, 5, 6], replaces=True) is None
    book.preempted("r")
    assert book.finished(0.0, "r", holds_blocks=True, well=False, why="").blocks_held and step(book).empty, (
        "said once; its blocks are held"
    )
    assert book.released("r")


def test_a_preempted_request_starts_over_with_its_new_blocks() -> None:
    book = after(6, [1, 2])
    book.preempted("r")
    assert step(book).preempted == ("push",)
    book.scheduled("r", 0, 6, [11, 12], replaces=True)  # V1 calls it resumed, V2 new: all blocks in both cases
    book.scheduled("r", 6, 4, [13], replaces=False)
    first, second = step(book).slices
    assert (first.before, first.after, first.restart, first.final) == (0, 6, True, False)
    assert (second.before, second.after, second.restart, second.final) == (6, 10, False, True)
    assert [*first.new_blocks[0], *second.new_blocks[0]] == [11, 12, 13]


def test_a_resumption_that_was_not_announced_starts_over() -> None:
    """Older versions name resumed requests only: all blocks for a request that is already known mean a new start."""
    book = after(6, [1, 2])
    book.scheduled("r", 4, 6, [1, 12, 13], replaces=True)
    (slice_,) = step(book).slices
    assert (slice_.before, slice_.after, slice_.restart, slice_.new_blocks[0].tolist()) == (0, 10, True, [1, 12, 13])


@pytest.mark.parametrize("computed", [8, 10])
def test_new_blocks_mean_that_the_old_ones_were_lost(computed: int) -> None:
    """vLLM 0.23 preempts in reset_prefix_cache and names the request only when it comes back."""
    book = after(computed, [1, 2, 3])
    book.scheduled("r", 0, 10, [4, 5, 6], replaces=True)
    meta = step(book)
    assert meta.preempted == ("push",)
    assert [slice_.before for slice_ in meta.slices] == ([0] if computed < 10 else [])
    assert len(meta.aborts) == (computed == 10)  # ranks that had finished would not push their part again


def test_a_request_preempted_and_resumed_in_one_step_starts_over() -> None:
    book = after(6, [1, 2])
    book.preempted("r")
    book.scheduled("r", 0, 10, [7, 8, 9], replaces=True)
    meta = step(book)
    assert meta.preempted == ("push",) and not meta.starts
    assert meta.slices[0].restart and meta.slices[0].before == 0


def test_resuming_onto_a_prefix_hit_pushes_from_the_start() -> None:
    book = after(8, [1, 2])
    book.preempted("r")
    book.scheduled("r", 4, 6, [1, 12, 13], replaces=True)
    (slice_,) = step(book).slices
    assert (slice_.before, slice_.after, slice_.restart) == (0, 10, True)


def test_what_is_computed_beyond_the_reservation_is_not_pushed() -> None:
    book = PushBook(model="m", geometry=D)
    some = reservation(10, end=7, blocks=(np.arange(2, dtype="<i4").tobytes(),))
    assert book.take(0.0, NewRequest("r", (10, "h"), "push", some)) is None
    book.scheduled("r", 0, 8, [1, 2], replaces=True)
    assert book.scheduled("r", 8, 2, [3], replaces=False) is None
    (slice_,) = step(book).slices
    assert slice_.after == 7 and slice_.final


# -- how requests end


def test_blocks_are_held_until_the_workers_report_once() -> None:
    book = admitted(10)
    book.scheduled("r", 0, 10, [1, 2, 3], replaces=True)
    assert book.finished(0.0, "r", holds_blocks=True, well=False, why="").blocks_held
    assert not step(book).aborts
    assert book.open_count() == 1
    assert book.released("r") and not book.released("r")
    assert book.open_count() == 0
    assert step(book).ended == ("push",)


def test_a_request_that_ends_before_its_last_chunk_is_aborted_and_its_blocks_are_held() -> None:
    book = after(6, [1, 2])
    assert book.finished(0.0, "r", holds_blocks=True, well=False, why="the client left").blocks_held
    (abort,) = step(book).aborts
    assert (abort.push, abort.failure.code, abort.failure.detail) == ("push", "PD-XFER-002", "the client left")


@pytest.mark.parametrize("sealed", [False, True])
def test_empty_blocks_at_the_end_are_an_abort(sealed: bool) -> None:
    """vLLM 0.23 ends a request that was preempted in its last step without blocks."""
    book = after(10 if sealed else 6, [1, 2, 3])
    assert not book.finished(0.0, "r", holds_blocks=False, well=False, why="").blocks_held
    assert len(step(book).aborts) == 1
    assert not book.released("r"), "vLLM must not hear of this request"


def test_an_abort_before_the_first_step_tells_the_workers_nothing() -> None:
    book = admitted(10)
    assert not book.finished(0.0, "r", holds_blocks=True, well=False, why="").blocks_held
    assert step(book).empty


def test_requests_without_a_reservation_are_left_alone() -> None:
    book = PushBook(model="m", geometry=D)
    assert book.scheduled("x", 0, 5, [1], replaces=True) is None
    book.preempted("x")
    assert not book.finished(0.0, "x", holds_blocks=True, well=False, why="").blocks_held and not book.released("x")
    assert step(book).empty


# -- what is refused


def test_a_transfer_is_pushed_once_even_if_another_request_asks_again() -> None:
    book = admitted(10)
    refusal = book.take(0.0, NewRequest("s", (10, "h"), "push-2", reservation(10)))
    assert refusal is not None and refusal.code == "PD-META-005"
    book.finished(0.0, "r", holds_blocks=True, well=False, why="")
    assert book.take(0.0, NewRequest("r", (10, "h"), "push-3", reservation(10))) is not None


def test_what_is_remembered_of_old_transfers_is_bounded() -> None:
    book = PushBook(model="m", geometry=D, remembered=3)
    for n in range(10):
        assert book.take(0.0, NewRequest(f"r{n}", (10, "h"), f"push-{n}", reservation(10, n=n))) is None
    refusals = [book.take(0.0, NewRequest(f"x{n}", (10, "h"), "push", reservation(10, n=n))) for n in (7, 8, 9, 6)]
    assert [one is None for one in refusals] == [False, False, False, True], "the last three are remembered"


HUGE = 1 << 40
REFUSED = [
    ("PD-CTRL-003", {"version": PROTOCOL_VERSION + 1}),
    ("PD-GEO-001", {"model": "another"}),
    ("PD-META-005", {"prompt_length": 11}),
    ("PD-META-005", {"prompt_hash": "another"}),
    ("PD-META-005", {"first": 10}),
    ("PD-META-005", {"first": HUGE}),
    ("PD-META-005", {"end": 11}),
    ("PD-META-005", {"end": HUGE}),
    ("PD-META-005", {"blocks": (b"",)}),
    ("PD-META-005", {"blocks": (b"\0" * 8,)}),
    ("PD-META-005", {"blocks": (b"\0" * 13,)}),
    ("PD-META-005", {"endpoints": ()}),
    ("PD-META-005", {"endpoints": (Endpoint("a", 1),) * 3}),
    ("PD-GEO-001", {"geometry": msgspec.structs.replace(D, kv_heads=4)}),
    ("PD-GEO-001", {"geometry": msgspec.structs.replace(D, dtype="float32")}),
    ("PD-GEO-001", {"geometry": msgspec.structs.replace(D, stages=(("another layer",),))}),
    ("PD-GEO-001", {"geometry": msgspec.structs.replace(D, regions=())}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "changes"), REFUSED, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_a_reservation_that_does_not_fit_is_refused_and_leaves_nothing(code: str, changes: dict[str, Any]) -> None:
    book = PushBook(model="m", geometry=D)
    refused = book.take(0.0, NewRequest("r", (10, "h"), "push", reservation(10, **changes)))
    assert refused is not None and refused.code == code
    assert not book.tracks("r") and step(book).empty
    book.finished(0.0, "r", holds_blocks=True, well=True, why="")
    assert book.open_count() == 0
    assert book.take(0.0, NewRequest("r", (10, "h"), "push", reservation(10))) is None


def test_a_refusal_tells_prefills_and_decodes_value_apart() -> None:
    decode = msgspec.structs.replace(D, dtype="float32")
    refused = PushBook(model="m", geometry=D).take(
        0.0, NewRequest("r", (10, "h"), "push", reservation(10, geometry=decode))
    )
    assert (
        refused is not None
        and refused.sentence == PdError("PD-GEO-001", field="dtype", prefill=D.dtype, decode="float32").sentence
    )


def test_a_reservation_of_no_engine_is_refused_where_it_is_decoded() -> None:
    """See test_protocol_layouts.py for the rules of a layout."""
    with pytest.raises(RemoteProtocolError, match="PD-CTRL-002"):
        unseal(seal(reservation(10, transfer=TransferId("d" * 65, 1, "u")), None), None)


def test_a_range_that_starts_inside_an_opaque_block_is_refused() -> None:
    book = PushBook(model="m", geometry=OPAQUE)
    refused = book.take(0.0, NewRequest("r", (10, "h"), "push", reservation(10, first=3, geometry=OPAQUE)))
    assert refused is not None and "opaque" in refused.sentence
    book = PushBook(model="m", geometry=D)
    assert book.take(0.0, NewRequest("r", (10, "h"), "push", reservation(10, first=3))) is None


# -- any sequence


@dataclass
class Tracked:
    """A request as vLLM tracks it."""

    tokens: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    running: bool = False
    started: bool = False
    sealed: bool = False


@dataclass
class Heard:
    """State of a request as a worker derives it from the metadata."""

    end: int
    blocks: list[int] = field(default_factory=list)
    watermark: int = 0
    final: bool = False


class AnySequence(RuleBasedStateMachine):
    """Each step's metadata, applied as by a worker, gives exactly vLLM's block tables and numbers of computed
    tokens."""

    @initialize()
    def begin(self) -> None:
        self.book = PushBook(model="m", geometry=D)
        self.requests: dict[str, Tracked] = {}
        self.heard: dict[str, Heard] = {}
        self.unreleased: set[str] = set()
        self.must_abort: set[str] = set()
        self.aborted: set[str] = set()
        self.n = self.next_block = 0
        self.sizes: list[int] = []

    def running(self, pick: int) -> str | None:
        names = sorted(self.requests)
        return names[pick % len(names)] if names else None

    @rule(tokens=st.integers(1, 40))
    def admit(self, tokens: int) -> None:
        self.n += 1
        name = f"r{self.n}"
        assert (
            self.book.take(0.0, NewRequest(name, (tokens, "h"), f"push-{name}", reservation(tokens, n=self.n))) is None
        )
        self.requests[name] = Tracked(tokens)

    @precondition(lambda self: self.requests)
    @rule(work=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=4))
    def compute(self, work: list[tuple[int, int, int]]) -> None:
        """Run one step: chunks of several requests; a new or resumed one may have a prefix hit."""
        scheduled = {}
        for pick, most, hit in work:
            name = self.running(pick)
            if name is None or name in scheduled or self.requests[name].computed == self.requests[name].tokens:
                continue
            request = self.requests[name]
            whole = not request.running
            if whole:
                request.computed = min(hit, request.tokens - 1) // BLOCK * BLOCK
            count = min(most, request.tokens - request.computed)
            more = -(-(request.computed + count) // BLOCK) - len(request.table)
            new = list(range(self.next_block, self.next_block + more))
            self.next_block += len(new)
            request.table += new
            self.book.scheduled(name, request.computed, count, request.table if whole else new, replaces=whole)
            request.computed += count
            request.running = request.started = True
            request.sealed = request.computed == request.tokens
            scheduled[name] = new
        self.deliver()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 50), idle=st.booleans())
    def preempt(self, pick: int, idle: bool) -> None:
        name = self.running(pick)
        if name is None or not self.requests[name].running:
            return
        request = self.requests[name]
        self.book.preempted(name)
        if request.sealed:
            self.must_abort.add(f"push-{name}")
        request.table, request.computed, request.running, request.sealed = [], 0, False, False
        if idle:
            self.deliver()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 50))
    def finish(self, pick: int) -> None:
        name = self.running(pick)
        if name is None:
            return
        request = self.requests.pop(name)
        blocks_held = self.book.finished(0.0, name, holds_blocks=bool(request.table), well=False, why="").blocks_held
        assert blocks_held == (request.started and bool(request.table))
        if blocks_held:
            self.unreleased.add(name)
        if request.started and not (request.sealed and request.table):
            self.must_abort.add(f"push-{name}")

    @precondition(lambda self: self.unreleased)
    @rule()
    def report(self) -> None:
        name = self.unreleased.pop()
        assert self.book.released(name)
        assert not self.book.released(name)

    def deliver(self) -> None:
        meta = self.book.take_step()
        for start in meta.starts:
            assert start.push not in self.heard, "a push starts once"
            self.heard[start.push] = Heard(start.reservation.end)
        for slice_ in meta.slices:
            heard = self.heard[slice_.push]
            if slice_.restart:
                heard.blocks, heard.watermark, heard.final = [], 0, False
            assert not heard.final and slice_.before == heard.watermark < slice_.after <= heard.end
            assert slice_.push not in self.must_abort, "an aborted push gets nothing more"
            heard.blocks += slice_.new_blocks[0].tolist()
            heard.watermark, heard.final = slice_.after, slice_.final
            assert slice_.final == (slice_.after == heard.end)
            request = self.requests.get(slice_.push.removeprefix("push-"))
            if request is not None and request.running:
                assert heard.blocks == request.table, "the workers' table is the request's"
                assert heard.watermark == request.computed
        for abort in meta.aborts:
            assert abort.push not in self.aborted, "aborted once"
            self.aborted.add(abort.push)
        assert self.aborted == self.must_abort

    @invariant()
    def nothing_is_kept_of_requests_that_are_over(self) -> None:
        if hasattr(self, "book"):
            assert self.book.open_count() == len(self.requests) + len(self.unreleased)


AnySequence.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestAnySequence = AnySequence.TestCase
