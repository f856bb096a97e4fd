# SPDX-License-Identifier: Apache-2.0
"""P's book of sources and targets: every order of arrival, and the fate of those that find no counterpart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from unit.prefill.kit import D, reservation
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.in_flight import Chunk
from vllm_ascend_pd.prefill.scheduler.core.request import Holding, NewRequest, RequestEvent, RequestState
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Offer, SourceId, Waits

HOLDING = Holding(sources=2, blocks=10, hold_s=120.0, meet_s=30.0)
PROMPT = (10, "h")


class PrefillBooks:
    """A book, and one D that sends offers."""

    def __init__(self, holding: Holding = HOLDING) -> None:
        self.book = PushBook("p", holding, model="m", geometry=D)

    def offer(self, n: int = 1, now: float = 0.0, **offer: Any) -> list[Any]:
        made = reservation(10, n=n)
        self.book.offer(now, "d", Offer(made.transfer, b"", **offer), made)
        return self.said()

    def said(self) -> list[Any]:
        return [message for _, message in self.book.take_messages()]

    def source(self, request: str = "r", now: float = 0.0, meets: str = "name", prompt: Any = PROMPT) -> SourceId:
        assert self.book.take(now, NewRequest(request, prompt, f"push-{request}", meets=meets, uuid="u")) is None
        record = self.book.find(request)
        assert record is not None and record.source is not None
        return record.source

    def compute(self, request: str = "r", begin: int = 0, count: int = 10, blocks: Any = (1, 2, 3)) -> None:
        self.book.step([Chunk(request, begin, count, [blocks], replaces=begin == 0)], {}.__getitem__)

    def end(self, request: str = "r", now: float = 0.0, well: bool = True) -> bool:
        return self.book.finished(now, request, holds_blocks=True, well=well, why="it ended").blocks_held

    def step(self) -> PrefillStep:
        return self.book.take_step()


def code(message: Any) -> str:
    assert isinstance(message, Gone)
    return message.failure.code


def pushed(step: PrefillStep) -> list[tuple[int, int, bool, list[int]]]:
    return [(p.before, p.after, p.final, p.new_blocks[0].tolist()) for p in (*step.computed, *step.slices)]


# -- the three orders


def test_a_source_that_has_ended_is_pushed_whole_and_its_blocks_go_back_once() -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    assert p.end() and p.book.counts()["held"] == 1
    assert p.step().empty
    assert p.offer(source=source) == [Bound(TransferId("d", 1, "u1"), "push-r", ended=True)]
    step = p.step()
    assert [(start.request_id, start.ended) for start in step.starts] == [("r", True)]
    assert pushed(step) == [(0, 10, True, [1, 2, 3])] and step.before == step.number - 1 > 0
    assert p.book.released("r") and not p.book.released("r")
    assert p.step().ended == ("push-r",) and not any(p.book.counts().values())


def test_a_source_that_runs_is_pushed_as_far_as_it_is_and_then_layer_by_layer() -> None:
    p = PrefillBooks()
    p.source()
    p.compute(count=4, blocks=(1,))
    assert p.offer(meets="name") == [Bound(TransferId("d", 1, "u1"), "push-r", ended=False)]
    p.compute(begin=4, count=6, blocks=(2, 3))
    step = p.step()
    assert pushed(step) == [(0, 4, False, [1]), (4, 10, True, [2, 3])]
    assert len(step.starts) == 1 and not step.starts[0].ended
    assert p.end() and p.said() == [Bound(TransferId("d", 1, "u1"), "push-r", ended=True)]
    assert p.book.released("r")


@pytest.mark.parametrize("bound", [False, True], ids=["held", "bound"])
def test_a_later_request_with_the_id_of_one_that_is_held_changes_nothing_of_it(bound: bool) -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    assert p.end()
    if bound:
        p.offer(source=source)
    p.compute(count=4, blocks=(7,))
    p.compute(begin=4, count=4, blocks=(8,))
    other = Chunk("other", 8, 1, [[7, 8, 9]], replaces=True)
    assert p.book.flight.ready(other, [[7, 8, 9]], D.tables) == 4, "this step fills block 8"
    if not bound:
        p.offer(source=source)
    assert pushed(p.step()) == [(0, 10, True, [1, 2, 3])]
    assert p.book.released("r")
    p.compute(begin=8, count=4, blocks=(9,))
    assert p.book.flight.ready(Chunk("other", 12, 1, [], True), [[7, 8, 9]], D.tables) == 8
    assert not p.end() and p.book.open_count() == 0


def test_a_later_request_that_ends_first_leaves_nothing() -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    assert p.end()
    p.compute(count=4, blocks=(7,))
    assert not p.end() and p.book.counts()["held"] == 1
    p.offer(source=source)
    assert p.book.released("r") and p.book.open_count() == 0


def test_what_is_preempted_under_the_id_of_a_request_that_has_ended_takes_no_push_back() -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    p.end()
    p.offer(source=source)
    p.book.preempted("r")
    step = p.step()
    assert pushed(step) == [(0, 10, True, [1, 2, 3])] and len(step.starts) == 1 and not step.preempted


def test_a_target_waits_for_its_source_and_nothing_is_computed_without_it() -> None:
    p = PrefillBooks()
    assert p.offer(meets="name") == [Waits(TransferId("d", 1, "u1"))]
    assert p.offer(meets="name") == [Waits(TransferId("d", 1, "u1"))]
    p.source()
    assert p.said() == [Bound(TransferId("d", 1, "u1"), "push-r", ended=False)]
    p.compute()
    step = p.step()
    assert pushed(step) == [(0, 10, True, [1, 2, 3])] and not step.computed and len(step.starts) == 1


# -- asked again, taken, never


def test_a_d_that_asks_again_hears_the_same_also_when_all_is_over() -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    p.end()
    first = p.offer(source=source)
    p.step()
    p.book.released("r")
    assert p.offer(source=source) == first


@pytest.mark.parametrize("ended", [False, True])
def test_a_source_is_bound_once(ended: bool) -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    if ended:
        p.end()
    p.offer(source=source)
    (answer,) = p.offer(n=2, source=source)
    assert code(answer) == "PD-META-027"
    assert len(p.step().starts) == 1


def test_a_source_of_another_incarnation_is_gone() -> None:
    p = PrefillBooks()
    p.source()
    (answer,) = p.offer(source=SourceId("p of before", 1, "u"))
    assert code(answer) == "PD-META-027" and p.step().empty


def test_what_is_not_fetched_goes_back_by_itself() -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    p.end(now=5.0)
    p.book.tick(124.9)
    assert p.step().empty and p.book.next_wake() == 125.0
    p.book.tick(125.0)
    assert p.step().freed == ("r",) and p.book.released("r") and not p.book.released("r")
    (answer,) = p.offer(source=source)
    assert code(answer) == "PD-META-027"


def test_an_engine_that_pauses_holds_nothing_for_long_and_one_that_goes_on_does() -> None:
    p = PrefillBooks()
    for request, now in (("r", 1.0), ("s", 2.0), ("t", 3.0)):
        if request == "s":
            p.book.limit(now, 15.0)
        elif request == "t":
            p.book.limit(now, 120.0)
        p.source(request, meets="")
        p.compute(request, blocks=(1,))
        assert p.end(request, now) is (request != "t"), "two are held at most"
        p.book.limit(now, p.book.hold_s)
    p.book.tick(16.9)
    assert p.step().empty
    p.book.tick(17.0)
    assert p.step().freed == ("r", "s")
    p.source("u")
    p.compute("u")
    assert p.end("u", 20.0) and p.book.next_wake() == 140.0


def test_a_reset_frees_what_is_held_and_nothing_that_is_bound_or_runs() -> None:
    p = PrefillBooks()
    held_source, bound = p.source("held", meets=""), p.source("bound", meets="")
    p.source("runs")
    for request in ("held", "bound"):
        p.compute(request)
    p.end("held")
    p.offer(source=bound)
    p.book.reset()
    step = p.step()
    assert step.freed == ("held",) and [start.request_id for start in step.starts] == ["bound"]
    (answer,) = p.offer(n=2, source=held_source)
    assert code(answer) == "PD-META-027"
    p.compute("runs")
    assert p.end("runs")


@pytest.mark.parametrize("by", ["source", "name"])
@pytest.mark.parametrize("ended", [False, True])
def test_what_d_does_not_want_is_not_held(by: str, ended: bool) -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    blocks_held = ended and p.end()
    p.book.unwanted(source if by == "source" else None, "name")
    if not ended:
        assert not p.end(), "nothing is held then"
    assert p.step().freed == (("r",) if blocks_held else ())
    p.book.unwanted(source, "")
    assert not any(p.book.counts().values()) and p.book.released("r") is blocks_held


def test_what_is_bound_is_wanted() -> None:
    p = PrefillBooks()
    source = p.source()
    p.compute()
    p.offer(source=source)
    p.book.unwanted(source, "")
    assert len(p.step().starts) == 1


def test_a_target_that_meets_no_source_gets_that_answer() -> None:
    p = PrefillBooks()
    p.offer(now=1.0, meets="name")
    p.book.tick(31.0)
    (answer,) = p.said()
    assert code(answer) == "PD-META-026" and not any(p.book.counts().values())


def test_a_source_that_does_not_fit_is_kept_for_one_that_does() -> None:
    p = PrefillBooks()
    p.source(prompt=(10, "another"))
    p.compute()
    (answer,) = p.offer(meets="name")
    assert code(answer) == "PD-META-005"
    assert p.end() and p.book.counts()["held"] == 1


def test_a_target_that_waited_for_another_prompt_is_answered_and_the_source_kept() -> None:
    p = PrefillBooks()
    p.offer(meets="name")
    p.source(prompt=(11, "h"))
    (answer,) = p.said()
    assert code(answer) == "PD-META-005" and p.book.counts()["targets"] == 0
    p.compute(count=11)
    assert p.end()


def test_a_name_is_used_once() -> None:
    p = PrefillBooks()
    first, second = p.source("r"), p.source("s")
    p.compute("r")
    p.compute("s")
    p.offer(meets="name")
    assert [start.request_id for start in p.step().starts] == ["r"]
    p.end("s")
    assert isinstance(p.offer(n=2, source=second)[0], Bound) and first != second


# -- bounds


def test_no_more_is_held_than_is_allowed_and_all_of_it_comes_back() -> None:
    p = PrefillBooks()
    for request in "abc":
        p.source(request, meets="")
        p.compute(request)
    assert [p.end(request) for request in "abc"] == [True, True, False]
    assert p.book.find("c") is None
    p.book.tick(120.0)
    assert p.step().freed == ("a", "b")
    assert p.book.released("a") and p.book.released("b") and p.book.open_count() == 0


def test_blocks_are_bounded_too() -> None:
    p = PrefillBooks(Holding(sources=100, blocks=5))
    for request in "ab":
        p.source(request, meets="")
        p.compute(request)
    assert [p.end(request) for request in "ab"] == [True, False]


def test_no_more_targets_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ascend_pd.prefill.scheduler.core.book.MAX_WAITING", 2)
    p = PrefillBooks()
    answers = [p.offer(n=n, meets=f"name-{n}")[0] for n in (1, 2, 3)]
    assert [type(answer) for answer in answers] == [Waits, Waits, Gone]
    assert code(answers[2]) == "PD-META-028"


# -- ends of either side


@pytest.mark.parametrize("stepped", [False, True])
def test_a_request_that_is_aborted_takes_its_push_with_it(stepped: bool) -> None:
    p = PrefillBooks()
    p.source()
    p.compute(count=4)
    p.offer(meets="name")
    if stepped:
        p.step()
    assert p.end(well=False) is stepped, "blocks that no worker reads are free at once"
    assert code(p.said()[0]) == "PD-XFER-002"
    step = p.step()
    assert not step.starts and not step.computed and len(step.aborts) == stepped


def test_blocks_lost_before_a_step_announced_the_push_are_not_read() -> None:
    p = PrefillBooks()
    p.source()
    p.compute(count=4, blocks=(1,))
    p.offer(meets="name")
    p.book.preempted("r")
    step = p.step()
    assert step.empty
    p.compute(blocks=(7, 8, 9))
    step = p.step()
    assert pushed(step) == [(0, 10, True, [7, 8, 9])] and len(step.starts) == 1 and not step.preempted


def test_a_source_that_was_preempted_forgets_its_blocks() -> None:
    p = PrefillBooks()
    p.source()
    p.compute(count=4, blocks=(1,))
    p.book.preempted("r")
    p.compute(blocks=(7, 8, 9))
    p.offer(meets="name")
    assert pushed(p.step()) == [(0, 10, True, [7, 8, 9])]


def test_a_source_that_is_met_while_it_is_preempted_has_nothing_to_push() -> None:
    p = PrefillBooks()
    p.source()
    p.compute(count=4, blocks=(1,))
    p.book.preempted("r")
    p.offer(meets="name")
    assert p.step().empty
    p.compute(blocks=(7, 8, 9))
    assert pushed(p.step()) == [(0, 10, True, [7, 8, 9])]


@pytest.mark.parametrize("how", ["withdrawn", "dead"])
def test_a_target_whose_d_is_gone_waits_no_longer(how: str) -> None:
    p = PrefillBooks()
    p.offer(meets="name")
    if how == "dead":
        p.book.gone("d")
    else:
        p.book.withdrawn("another d", TransferId("d", 1, "u1"))
        assert p.book.counts()["waiting"] == 1, "only the D that offered may withdraw"
        p.book.withdrawn("d", TransferId("d", 1, "u1"))
    assert not any(p.book.counts().values())
    p.source()
    p.compute()
    assert p.step().empty


def test_every_state_but_over_has_a_cell_for_every_offer() -> None:
    """No state may raise on anything that a message can cause."""
    e, s = RequestEvent, RequestState
    two = {e.OFFER_AGAIN, e.OFFER_TAKEN}
    one = {e.OFFER, e.OFFER_UNFIT}
    bound = (s.WAITING, s.BOUND, s.PUSHING, s.SEALED, s.LOST, s.FAILED)
    offers = {s.OVER: {e.OFFER, e.OFFER_UNKNOWN, e.OFFER_TOO_MANY}, s.COLLECTING: one, s.HELD: one}
    offers |= dict.fromkeys(bound, two)
    for state in RequestState:  # no D finds a request in another state
        assert offers.get(state, set()) <= set(PushBook.table[state])


class AnyOrder(RuleBasedStateMachine):
    """In any order of events a source goes to one target at most, and blocks are released once."""

    def __init__(self) -> None:
        super().__init__()
        self.p = PrefillBooks()
        self.now = 0.0
        self.sources: dict[str, SourceId] = {}
        self.running: set[str] = set()
        self.unreleased: set[str] = set()
        self.bound: dict[str, str] = {}
        self.n = 0

    @rule(name=st.sampled_from(["x", "y", ""]))
    def scheduled(self, name: str) -> None:
        request = f"r{len(self.sources)}"
        self.sources[request] = self.p.source(request, self.now, name)
        self.running.add(request)
        self._heard()

    @rule(data=st.data())
    def computed(self, data: st.DataObject) -> None:
        if self.running:
            request = data.draw(st.sampled_from(sorted(self.running)))
            self.p.compute(request)
            self._step()

    @rule(data=st.data())
    def preempted(self, data: st.DataObject) -> None:
        if self.running:
            request = data.draw(st.sampled_from(sorted(self.running)))
            self.p.book.preempted(request)

    @rule(data=st.data(), well=st.booleans())
    def ended(self, data: st.DataObject, well: bool) -> None:
        if self.running:
            request = data.draw(st.sampled_from(sorted(self.running)))
            self.running.discard(request)
            if self.p.end(request, self.now, well):
                self.unreleased.add(request)
            self._heard()

    @rule(data=st.data(), repeat=st.booleans())
    def offered(self, data: st.DataObject, repeat: bool) -> None:
        self.n += not repeat
        names: list[dict[str, Any]] = [{"meets": "x"}, {"meets": "y"}]
        names += [{"source": source} for source in self.sources.values()]
        made = reservation(10, n=max(1, self.n))
        offer = Offer(made.transfer, b"", **data.draw(st.sampled_from(names)))
        self.p.book.offer(self.now, "d", offer, made)
        self._heard()

    @rule(data=st.data())
    def unwanted(self, data: st.DataObject) -> None:
        if self.sources:
            self.p.book.unwanted(data.draw(st.sampled_from(list(self.sources.values()))), "")
            self._step()

    @rule()
    def reset(self) -> None:
        self.p.book.reset()
        assert not self.p.book.counts()["held"]
        self._step()

    @rule(hold_s=st.sampled_from([15.0, 120.0]))
    def limited(self, hold_s: float) -> None:
        self.p.book.limit(self.now, hold_s)

    @rule(seconds=st.sampled_from([1.0, 31.0, 130.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.p.book.tick(self.now)
        self._heard()
        self._step()

    @rule(data=st.data())
    def reported(self, data: st.DataObject) -> None:
        """Report the end from the workers for everything that their steps named as ended."""
        self._step()
        releasing = [
            r
            for r in sorted(self.unreleased)
            if self.p.book.open_count() and self.p.book.find(r).state is RequestState.RELEASING
        ]
        if releasing:
            request = data.draw(st.sampled_from(releasing))
            assert self.p.book.released(request) and not self.p.book.released(request)
            self.unreleased.discard(request)

    def _heard(self) -> None:
        for message in self.p.said():
            if isinstance(message, Bound):
                transfer = str(message.transfer)
                assert self.bound.setdefault(message.push, transfer) == transfer, "a source is bound once"
        pushes = list(self.bound.values())
        assert len(pushes) == len(set(pushes)), "and so is a target"

    def _step(self) -> None:
        step = self.p.step()
        for request in step.freed:
            assert request in self.unreleased
        for start in step.starts:
            assert start.push in self.bound

    @invariant()
    def bounded(self) -> None:
        counts = self.p.book.counts()
        assert counts["held"] <= HOLDING.sources and counts["held_blocks"] <= HOLDING.blocks

    def teardown(self) -> None:
        for request in sorted(self.running):
            if self.p.end(request, self.now, well=False):
                self.unreleased.add(request)
        self.p.book.tick(self.now + 1000.0)
        self._step()
        for request in sorted(self.unreleased):
            assert self.p.book.released(request), "every block comes back"
        assert not any(self.p.book.counts().values()) and not self.p.book.open_count()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
