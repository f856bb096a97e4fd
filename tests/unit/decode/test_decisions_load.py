# SPDX-License-Identifier: Apache-2.0
"""TokenBook and the ticket: requests that load remote KV, what D's workers are sent of them, and what is done for them,
for any sequence of events."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unit.kits.loads import TICKET, arrive, book_with
from vllm_ascend_pd.decode.scheduler.core.book import AWAITED, OPEN
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.load import LoadEffect, LoadState, Wanted
from vllm_ascend_pd.decode.scheduler.core.routes import Ticket, read_ticket
from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.geometry.layout import Group
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.protocol.dialects import Meet
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId

URL = "http://127.0.0.1:9"
ALLOWED = frozenset({URL})
GOOD = {"do_remote_prefill": True, "metaserver": URL, "ticket": "t"}


def loaded(tokens: int = 10, computed: int = 0) -> tuple[TokenBook, TransferId]:
    book = book_with("r")
    assert book.wanted("r", tokens, computed) == tokens - computed
    return book, book.reserve("r", tokens - computed, [list(range(50, 60))], [Group(4)], 30.0, "u").transfer


def received(book: TokenBook, name: str = "r") -> TransferId | None:
    load = book.received(1.0, name)
    return load.transfer if load is not None else None


# -- tickets


def test_a_ticket_of_an_allowed_metaserver_is_taken() -> None:
    assert read_ticket(GOOD, ALLOWED) == Ticket(URL, "t", False)
    assert read_ticket({**GOOD, "metaserver": URL + "/", "send_tokens": True}, ALLOWED) == Ticket(URL, "t", True)


VIRTUAL = {"do_remote_prefill": True, "do_virtual": True, "remote_engine_id": "e", "remote_host": "h", "remote_port": 1}


@pytest.mark.parametrize(
    "params",
    [
        *(None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}, {"do_remote_prefill": "yes"}),
        *(VIRTUAL, {**GOOD, "do_virtual": True}),  # a warm-up names no prefill: D computes it
    ],
)
def test_a_request_that_means_no_remote_prefill_gets_none_and_no_complaint(params: Any) -> None:
    assert read_ticket(params, ALLOWED) is None


FORGED = [
    {"metaserver": "http://10.0.0.1:80"},
    {"metaserver": URL + "/other"},
    {"metaserver": URL + ".evil.example"},
    {"metaserver": "http://127.0.0.1:9@evil.example"},
    {"metaserver": None},
    {"metaserver": 7},
    {"metaserver": [URL]},
    {"ticket": None},
    {"ticket": ""},
    {"ticket": "t" * 257},
    {"ticket": {"a": 1}},
]


@pytest.mark.parametrize("changes", FORGED, ids=str)
def test_a_forged_ticket_is_prefilled_locally_with_the_reason(changes: dict[str, Any]) -> None:
    assert isinstance(read_ticket({**GOOD, **changes}, ALLOWED), PdError | str)
    assert isinstance(read_ticket({**GOOD, **changes}, frozenset()), PdError | str)


def test_a_metaserver_that_is_not_listed_is_named_with_its_code() -> None:
    refused = read_ticket({**GOOD, "metaserver": "http://10.9.9.9:8000" + "/x" * 1000}, ALLOWED)
    assert isinstance(refused, PdError) and refused.code == "PD-META-001"
    assert "http://10.9.9.9:8000" in str(refused) and len(str(refused)) < 500


# -- one load


def test_asking_is_free_and_one_token_is_not_worth_it() -> None:
    book = book_with("r", "one")
    assert [book.wanted("r", 10, computed) for computed in (0, 0, 4, 8, 9, 10)] == [10, 10, 6, 2, 0, 0]
    assert book.wanted("one", 1, 0) == book.wanted("one", 1, 0, states=True) == 0
    # With one token comes the state, without which D would compute all of them; it cannot if D must compute the last.
    assert [book.wanted("r", 10, computed, states=True) for computed in (9, 10)] == [1, 0]
    assert [book.wanted("r", 10, computed, single=True) for computed in (9, 10)] == [1, 0]
    assert book.wanted("r", 10, 9, states=True, recomputes_last=True) == 0
    assert book.take_step(None, None).empty and book.count(*OPEN) == 0


def test_how_the_kv_comes_is_read_once() -> None:
    book = book_with("r")
    assert book.route("r", lambda: None) is TICKET
    assert book.route("local", lambda: None) is None and book.route("local", lambda: TICKET) is None
    assert book.wanted("local", 10, 0) == book.wanted("unknown", 10, 0) == 0


def test_a_load_happens_once_for_each_request() -> None:
    book, transfer = loaded()
    assert book.wanted("r", 10, 0) == 0, "asked again while it loads"
    assert received(book) == transfer
    assert book.wanted("r", 10, 0) == 0, "asked again after the load: preempted, recomputed, or one token short"
    with pytest.raises(LocalProtocolError):
        book.reserve("r", 10, [[1, 2, 3]], [Group(4)], 30.0, "u2")


def test_only_what_was_asked_for_can_be_reserved() -> None:
    book = book_with("r")
    with pytest.raises(LocalProtocolError):
        book.reserve("r", 5, [[1, 2]], [Group(4)], 30.0, "u")
    book.wanted("r", 10, 0)
    with pytest.raises(LocalProtocolError):
        book.reserve("r", 0, [[1, 2]], [Group(4)], 30.0, "u")


@given(st.integers(1, 64), st.integers(0, 300), st.integers(2, 300), st.integers(0, 5))
@settings(max_examples=200)
def test_a_reservation_names_exactly_the_blocks_of_its_tokens(size: int, computed: int, more: int, spare: int) -> None:
    """vLLM may take fewer tokens than it was offered, and may have allocated more blocks than the prompt needs."""
    book = book_with("r")
    tokens = computed + more
    book.wanted("r", tokens, computed)
    table = list(range(1000, 1000 - (-tokens // size) + spare))
    count = max(1, more - spare)
    bind = book.reserve("r", count, [table], [Group(size)], 30.0, "u")
    assert (bind.first, bind.end) == (computed, computed + count)
    assert bind.blocks[0].tolist() == [
        table[t // size] for t in range(bind.first, bind.end) if t == bind.first or t % size == 0
    ]


def test_the_last_answer_about_computed_tokens_counts() -> None:
    """The prefix cache may have grown between two calls."""
    book = book_with("r")
    book.wanted("r", 20, 4)
    book.wanted("r", 20, 8)
    assert book.reserve("r", 12, [list(range(5))], [Group(4)], 30.0, "u").first == 8


def test_each_step_tells_what_is_new_only() -> None:
    book, transfer = loaded()
    step = book.take_step(("127.0.0.1", 5), None)
    assert [bind.transfer for bind in step.binds] == [transfer] and step.wake == ("127.0.0.1", 5)
    assert step.incarnation == "d"
    assert book.take_step(None, None).empty
    book.answered(transfer)
    assert book.take_step(None, None).settles == (transfer,)
    assert received(book) == transfer
    assert book.take_step(None, None).overs == (transfer,)
    assert book.take_step(None, None).empty


# -- bad ends


def test_the_first_word_of_the_metaserver_counts() -> None:
    book, transfer = loaded()
    book.take_step(None, None)
    book.answered(transfer)
    book.answered(transfer, Failure("PD-META-002", "too late"))
    book.answered(transfer)
    step = book.take_step(None, None)
    assert step.settles == (transfer,) and not step.cancels
    book.answered(TransferId("d", 99, "u"))
    book.answered(TransferId("other", 1, "u"), Failure("PD-META-002", ""))
    assert book.take_step(None, None).empty, "words about unknown transfers change nothing"


def test_a_failed_call_cancels_and_the_request_goes_on_only_when_the_workers_say_so() -> None:
    book, transfer = loaded()
    book.take_step(None, None)
    book.answered(transfer, Failure("PD-META-002", "down"))
    book.answered(transfer)
    step = book.take_step(None, None)
    (cancel,) = step.cancels
    assert not step.settles, "what a failed call says later does not count"
    assert (cancel.transfer, cancel.failure.code, cancel.failure.detail) == (transfer, "PD-META-002", "down")
    assert book.count(*OPEN) == book.count(*AWAITED) == 1, "the request waits for the end of the load"
    assert received(book) == transfer and book.count(*OPEN) == 0


def test_a_request_that_ends_while_it_loads_keeps_its_blocks_until_they_are_fenced() -> None:
    book, transfer = loaded()
    book.take_step(None, None)
    book.request_finished("r")
    assert (book.count(*OPEN), book.count(*AWAITED)) == (1, 0), "nothing waits for it any more"
    book.request_finished("r")  # vLLM may say it again after a failed load
    assert [cancel.transfer for cancel in book.take_step(None, None).cancels] == [transfer]
    assert received(book) == transfer, "vLLM waits for this report before it frees the blocks"
    assert received(book) is None, "and would stop over a second one"


def test_a_request_that_ends_before_it_was_allocated_leaves_nothing() -> None:
    book = book_with("r")
    book.wanted("r", 10, 0)
    book.request_finished("r")
    book.request_finished("r")
    assert book.take_step(None, None).empty and book.count(*LoadState) == 0


def test_reports_about_unknown_requests_are_swallowed() -> None:
    assert received(TokenBook("d"), "unknown") is None


MEET = Meet(Endpoint("p", 1), name="r")


def acts(book: TokenBook) -> list[LoadEffect]:
    return [effect for effect, _ in book.take_effects()]


def test_a_p_that_waits_for_an_offer_is_told_once_that_none_comes() -> None:
    for computed_here in (True, False):
        book = TokenBook("d")
        book.route("r", lambda: MEET)
        if computed_here:
            book.loads_nothing("r")
            assert acts(book) == [LoadEffect.NOT_FETCHED] and book.wanted("r", 10, 0) == 0
            book.loads_nothing("r")
        book.request_finished("r")
        assert acts(book) == [LoadEffect.NOT_FETCHED] * (not computed_here)
    book, _ = loaded()
    assert received(book) is not None
    book.loads_nothing("r")  # it has lost its blocks in the middle of the answer
    book.request_finished("r")
    assert acts(book) == [LoadEffect.OVER]


@pytest.mark.parametrize(
    ("route", "code", "fails", "done"),
    [
        (TICKET, "", False, [LoadEffect.OVER]),
        (TICKET, "PD-XFER-004", False, [LoadEffect.HANG_UP, LoadEffect.OVER]),
        (TICKET, "PD-XFER-004", True, [LoadEffect.HANG_UP, LoadEffect.OVER]),
        (MEET, "", False, [LoadEffect.HANG_UP, LoadEffect.OVER]),
    ],
)
def test_the_end_of_a_load_is_reported_once_and_ends_what_is_of_no_use(
    route: Any, code: str, fails: bool, done: list[LoadEffect]
) -> None:
    book = TokenBook("d", fails=fails)
    book.route("r", lambda: route)
    book.wanted("r", 10, 0)
    book.reserve("r", 10, [[1, 2, 3]], [Group(4)], 30.0, "u")
    book.ended([LoadEnd("r", Failure(code) if code else None, "p.1")])
    assert received(book) is not None and acts(book) == done
    assert book.withholds("r") is fails is (book.due_s(1.0) == 0.0), "vLLM is woken for what it learns by `take`"
    assert [start.fails for start in book.take(1.0)] == [True] * fails and not book.withholds("r")
    assert book.due_s(1.0) == math.inf
    book.request_finished("r")
    assert acts(book) == [] and book.count(*LoadState) == 0


# -- any sequence


class AnyLoads(RuleBasedStateMachine):
    """Each transfer is bound once, cancelled or settled at most once, ended once, and always in this order.

    What vLLM is not told at once it is told once.
    """

    @initialize()
    def begin(self) -> None:
        self.book = TokenBook("d")
        self.n, self.withheld = 0, set[str]()
        self.asked: dict[str, int] = {}
        self.live: set[str] = set()  # requests that are known to vLLM
        self.loads: dict[str, TransferId] = {}  # request → open transfer
        self.loaded: set[str] = set()
        self.heard: dict[TransferId, list[str]] = {}
        self.all: list[TransferId] = []

    def pick(self, names: set[str], which: int) -> str | None:
        ordered = sorted(names)
        return ordered[which % len(ordered)] if ordered else None

    @rule(tokens=st.integers(1, 30), computed=st.integers(0, 30))
    def arrive(self, tokens: int, computed: int) -> None:
        self.n += 1
        name = f"r{self.n}"
        self.live.add(name)
        arrive(self.book, name)
        self.ask(name, tokens, min(computed, tokens))

    def ask(self, name: str, tokens: int, computed: int) -> None:
        wanted = self.book.wanted(name, tokens, computed)
        left = tokens - computed
        assert wanted == (0 if name in self.loads or name in self.loaded or left <= 1 else left)
        if wanted:
            self.asked[name] = wanted

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 30), tokens=st.integers(1, 30))
    def ask_again(self, which: int, tokens: int) -> None:
        name = self.pick(self.live, which)
        if name is not None:
            self.ask(name, tokens, 0)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30), first=st.booleans())
    def allocate(self, which: int, first: bool) -> None:
        name = self.pick(set(self.asked), which)
        if name is None:
            return
        count = self.asked.pop(name)
        bind = self.book.reserve(name, count, [list(range(100))], [Group(4)], 30.0, f"u-{name}")
        assert not self.all or bind.transfer.n > self.all[-1].n, "numbers rise"
        self.all.append(bind.transfer)
        self.loads[name] = bind.transfer
        if first:
            self.book.ask(name, Wanted(bind.transfer, count, "how", None, 100))

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 30), ok=st.booleans())
    def outcome(self, which: int, ok: bool) -> None:
        transfer = self.all[which % len(self.all)]
        self.book.answered(transfer, None if ok else Failure("PD-META-002"))

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 30), position=st.integers(1, 30))
    def token(self, which: int, position: int) -> None:
        transfer = self.all[which % len(self.all)]
        self.book.token(transfer, FirstToken(transfer=transfer, push="", position=position, token=7, digest="how"))

    @rule(late=st.booleans())
    def begin_held(self, late: bool) -> None:
        for start in self.book.take(9.0 if late else 1.0):
            assert start.request_id in self.withheld, "each once"
            assert start.why == "aborted" or start.request_id in self.live
            self.withheld.discard(start.request_id)
        assert not (late and self.withheld)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 30))
    def finish(self, which: int) -> None:
        name = self.pick(self.live, which)
        if name is None:
            return
        self.book.request_finished(name)
        self.asked.pop(name, None)
        if name not in self.loads:
            self.loaded.discard(name)
        self.live.discard(name)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 30))
    def report(self, which: int) -> None:
        name = self.pick(set(self.loads), which)
        if name is None:
            return
        self.step()
        assert received(self.book, name) == self.loads.pop(name)
        assert received(self.book, name) is None
        if name in self.live:
            self.loaded.add(name)
        if self.book.withholds(name):
            self.withheld.add(name)

    @rule()
    def step(self) -> None:
        step = self.book.take_step(None, None)
        for bind in step.binds:
            assert self.heard.setdefault(bind.transfer, []) == []
            self.heard[bind.transfer].append("bind")
        for kind, transfers in (
            ("cancel", [cancel.transfer for cancel in step.cancels]),
            ("settle", step.settles),
            ("over", step.overs),
        ):
            for transfer in transfers:
                words = self.heard[transfer]
                assert words and kind not in words and "over" not in words, (kind, words)
                words.append(kind)
        assert self.book.take_step(None, None).empty

    @invariant()
    def what_is_open_is_what_loads(self) -> None:
        if hasattr(self, "book"):
            assert self.book.count(*OPEN) == len(self.loads)

    @invariant()
    def nothing_is_left_of_what_has_ended(self) -> None:
        if hasattr(self, "book"):
            assert self.book.count(*LoadState) == len(self.live | self.loads.keys() | self.withheld)


AnyLoads.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestAnySequence = AnyLoads.TestCase
