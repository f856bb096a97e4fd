# SPDX-License-Identifier: Apache-2.0
"""Properties of routing, retries and circuits, tested with hypothesis."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_ascend_pd
from vllm_ascend_pd.router.core import decisions
from vllm_ascend_pd.router.core.decisions import (
    Admission,
    Circuit,
    CircuitPolicy,
    CircuitState,
    Condition,
    Evidence,
    Gatekeeper,
    RetryBudget,
    RetryPolicy,
    Role,
    condition,
)
from vllm_ascend_pd.router.core.prefixes import Mark
from vllm_ascend_pd.router.fleet import Fleet, Spec
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import NOT_EXECUTED, HttpFailure, post_again
from vllm_ascend_pd.shared.http_session import Origin

BACKOFF = Backoff(0.05, 2.0)
RAND = st.floats(0, 1, exclude_max=True)
LOADS = st.lists(st.tuples(st.floats(0, 1e7), st.floats(0.1, 100), st.integers(0, 8)), min_size=1, max_size=12)
PROMPT = tuple(Mark(b"mark %d" % place, 100_000 * place) for place in range(1, 9))


def fleet_of(loads: Sequence[tuple[float, float, int]], rand: float) -> Fleet:
    """Return D's with these loads, weights, and marks of the prompt in their caches."""
    fleet = Fleet(CircuitPolicy(), prefix_tokens=1 << 30, dice=lambda: rand)
    for place, (load, weight, there) in enumerate(loads):
        instance = fleet.add(Spec(Role.DECODE, Origin("http", f"i{place}", 80), weight), "test")
        instance.load = load
        instance.prompts.add(PROMPT[:there])
    return fleet


# ---- choosing


@given(LOADS, st.floats(0, 1e6), RAND)
def test_the_choice_has_the_least_load_by_weight(
    loads: list[tuple[float, float, int]], cost: float, rand: float
) -> None:
    fleet = fleet_of(loads, rand)
    chosen = fleet.choose(Role.DECODE, cost)
    assert chosen is not None
    assert (chosen.load + cost) / chosen.weight == min((one.load + cost) / one.weight for one in fleet)


@given(st.integers(1, 12))
def test_ties_spread_over_all(count: int) -> None:
    chosen = [fleet_of([(5.0, 1.0, 0)] * count, i / 240).choose(Role.DECODE, 1.0) for i in range(240)]
    names = Counter(one.name for one in chosen if one is not None)
    assert len(names) == count and set(names.values()) <= {240 // count, 240 // count + 1}


def test_no_instance_is_chosen_from_none() -> None:
    assert fleet_of([], 0.5).choose(Role.DECODE, 1.0) is None


@given(LOADS, st.floats(0, 1e6), RAND)
def test_what_one_has_of_the_prompt_costs_nothing_there(
    loads: list[tuple[float, float, int]], cost: float, rand: float
) -> None:
    chosen = fleet_of(loads, rand).choose(Role.DECODE, cost, marks=PROMPT)
    after = [(load + max(0.0, cost - 100_000 * there)) / weight for load, weight, there in loads]
    assert chosen is not None and after[int(chosen.origin.host[1:])] == min(after)


@given(st.integers(1, 4), st.frozensets(st.integers(0, 5)), RAND)
def test_what_was_tried_is_left_out_unless_nothing_else_is_there(
    count: int, tried: frozenset[int], rand: float
) -> None:
    avoid = frozenset(f"i{place}:80" for place in tried)
    chosen = fleet_of([(0.0, 1.0, 0)] * count, rand).choose(Role.DECODE, 1.0, avoid)
    assert chosen is not None and (chosen.name not in avoid or tried.issuperset(range(count)))


# ---- trying again


@given(st.sampled_from(HttpFailure), st.integers(1, 50), st.floats(-1, 100), st.none() | st.floats(-10, 1e6), RAND)
def test_d_repeats_only_what_was_surely_not_executed_and_only_in_time(
    failure: HttpFailure, attempt: int, left: float, retry_after: float | None, rand: float
) -> None:
    delay = post_again(failure, attempt, left, retry_after, rand, BACKOFF)
    if delay is not None:
        assert failure in NOT_EXECUTED and 0 <= delay < left


def test_retry_after_is_respected_within_bounds() -> None:
    assert post_again(HttpFailure.REFUSED, 1, 100.0, 1.5, 0.0, BACKOFF) == 1.5
    assert post_again(HttpFailure.REFUSED, 1, 100.0, 3600.0, 0.0, BACKOFF) == 2.0


@given(st.sampled_from(HttpFailure), st.integers(1, 10), st.booleans(), RAND)
def test_attempts_end(failure: HttpFailure, attempts: int, repeatable: bool, rand: float) -> None:
    policy, budget = RetryPolicy(attempts), RetryBudget()
    made = 1
    while policy.retry_delay(failure, made, repeatable, budget, rand) is not None:
        made += 1
        assert made <= attempts
    assert made == (attempts if repeatable or failure in NOT_EXECUTED else 1)


@given(st.integers(0, 5000))
def test_repeated_work_is_a_bounded_share_of_all_work(requests: int) -> None:
    budget, policy = RetryBudget(share=0.2, max_tokens=200, tokens=200), RetryPolicy(3)
    repeated = 0
    for _ in range(requests):
        budget.request()
        repeated += policy.retry_delay(HttpFailure.BROKEN, 1, True, budget, 0.5) is not None
    assert repeated <= 200 + 0.2 * requests + 1


# ---- circuits

EVENTS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from([*Evidence, "send", "return"]), RAND),
    max_size=60,
)  # fmt: skip


def run(circuit: Circuit, events: list[tuple[float, object, float]]) -> float:
    now, trial = 0.0, 0
    for gap, event, rand in events:
        now += gap
        if event == "send":
            if circuit.admits(now):
                trial = circuit.sent(now) or trial
        elif event == "return":
            circuit.returned(now, trial)
        elif isinstance(event, Evidence):
            circuit.record(now, event, rand)
    return now


def test_the_table_knows_every_evidence_in_every_state() -> None:
    assert set(decisions.CIRCUIT) == set(CircuitState)
    assert all(set(row) == set(Evidence) for row in decisions.CIRCUIT.values())


@given(EVENTS)
def test_an_open_circuit_admits_nothing_but_one_trial(events: list[tuple[float, object, float]]) -> None:
    circuit = Circuit()
    now = run(circuit, events)
    if circuit.state in (CircuitState.UNREACHABLE, CircuitState.TRIAL):
        assert not circuit.admits(now) and not circuit.admits(now + 1e6)
    if circuit.state is CircuitState.WEDGED:
        assert not circuit.admits(circuit.until - 0.001)
        assert circuit.admits(circuit.until)
        circuit.sent(circuit.until)
        assert not circuit.admits(circuit.until + 1e6)


@given(EVENTS)
def test_a_circuit_can_always_close_again_and_soon(events: list[tuple[float, object, float]]) -> None:
    circuit = Circuit(CircuitPolicy(wedged=Backoff(1.0, 30.0, floor=0.8)))
    now = run(circuit, events)
    if circuit.state is CircuitState.TRIAL:
        circuit.returned(now, circuit.trials)
    circuit.record(now, Evidence.PROBE_OK, 0.5)
    assert circuit.admits(now + 30.0)
    circuit.sent(now + 30.0)
    circuit.record(now + 30.0, Evidence.SERVED, 0.5)
    assert circuit.state is CircuitState.CLOSED and circuit.failures == 0


@given(st.lists(st.sampled_from([Evidence.BROKE, Evidence.UNREACHED, Evidence.SERVED]), max_size=50), st.integers(1, 6))
def test_only_consecutive_failures_of_one_kind_open_it(evidence: list[Evidence], threshold: int) -> None:
    circuit = Circuit(CircuitPolicy(threshold=threshold))
    runs = {Evidence.BROKE: 0, Evidence.UNREACHED: 0}
    for what in evidence:
        circuit.record(0.0, what, 0.5)
        if what is Evidence.SERVED:
            runs = dict.fromkeys(runs, 0)
        else:
            runs[what] += 1
        if circuit.open:
            assert max(runs.values()) >= threshold
            return
        assert max(runs.values()) < threshold


def test_a_good_probe_does_not_close_what_requests_have_opened() -> None:
    circuit = Circuit(CircuitPolicy(threshold=2))
    for evidence in (Evidence.BROKE, Evidence.PROBE_OK, Evidence.BROKE, Evidence.PROBE_OK):
        circuit.record(0.0, evidence, 0.5)
    assert circuit.state is CircuitState.WEDGED


def test_an_unreachable_one_is_back_with_the_first_good_probe() -> None:
    circuit = Circuit()
    for _ in range(3):
        circuit.record(0.0, Evidence.PROBE_FAILED, 0.5)
    assert circuit.state is CircuitState.UNREACHABLE
    circuit.record(1.0, Evidence.PROBE_OK, 0.5)
    assert circuit.admits(1.0)


def test_failed_trials_take_longer_and_longer_up_to_a_bound() -> None:
    circuit = Circuit(CircuitPolicy(threshold=1, wedged=Backoff(1.0, 8.0, floor=0.8)))
    now, stays = 0.0, []
    for _ in range(6):
        circuit.sent(now)
        circuit.record(now, Evidence.BROKE, 0.99999)
        stays.append(round(circuit.until - now))
        now = circuit.until
    assert stays == [1, 2, 4, 8, 8, 8]


def test_a_trial_whose_client_left_makes_room_for_another() -> None:
    circuit = Circuit(CircuitPolicy(threshold=1))
    old = circuit.sent(0.0)
    circuit.record(0.0, Evidence.BROKE, 0.5)
    trial = circuit.sent(10.0)
    assert not circuit.admits(10.0)
    circuit.returned(10.5, old)  # an earlier request, not the trial
    assert not circuit.admits(10.5)
    circuit.returned(11.0, trial)
    assert circuit.admits(11.0) and circuit.sent(11.0)
    circuit.returned(11.5, trial)
    assert not circuit.admits(11.5)


@pytest.mark.parametrize(
    ("evidence", "answered", "draining", "shown"),
    [
        ([], False, False, Condition.STARTING),
        ([Evidence.PROBE_FAILED] * 5, False, False, Condition.STARTING),
        ([Evidence.PROBE_OK], True, False, Condition.READY),
        ([Evidence.BROKE], True, False, Condition.SUSPECT),
        ([Evidence.BROKE] * 3, True, False, Condition.DOWN),
        ([Evidence.PROBE_FAILED] * 3, True, False, Condition.DOWN),
        ([Evidence.PROBE_FAILED] * 3, True, True, Condition.DRAINING),
    ],
)
def test_what_an_operator_sees(
    evidence: list[Evidence], answered: bool, draining: bool, shown: Condition
) -> None:  # fmt: skip
    circuit = Circuit()
    for what in evidence:
        circuit.record(0.0, what, 0.5)
    assert condition(circuit, answered, draining) is shown


# ---- admission


@given(st.integers(1, 5), st.integers(0, 5), st.lists(st.sampled_from(["ask", "leave", "give up"]), max_size=80))
def test_never_more_run_or_wait_than_allowed_and_no_place_is_lost(running: int, waiting: int, steps: list[str]) -> None:
    keeper = Gatekeeper(running, waiting)
    now_running = now_waiting = 0
    for step in steps:
        if step == "ask":
            said = keeper.ask()
            now_running += said is Admission.NOW
            now_waiting += said is Admission.QUEUE
            if said is Admission.OVERLOADED:
                assert (now_running, now_waiting) == (running, waiting)
            if said is not Admission.NOW:
                assert now_running == running
        elif step == "leave" and now_running:
            if keeper.leave():
                now_waiting -= 1
            else:
                now_running -= 1
        elif step == "give up" and now_waiting:
            keeper.give_up()
            now_waiting -= 1
        assert (keeper.running, keeper.waiting) == (now_running, now_waiting)
        assert now_running <= running and now_waiting <= waiting


PACKAGE = Path(vllm_ascend_pd.__file__).parent
# Modules that end a load or a push with a code. Codes that stop an engine's start (ConfigError) are never reported.
TELLING = ("protocol/*.py", "prefill/**/*.py", "decode/**/*.py", "router/reserve.py")
AGAINST_NEITHER = {
    *("PD-XFER-002", "PD-XFER-008", "PD-XFER-009"),  # given up; P's first token is lost; D gave its blocks back
    "PD-XFER-010",  # no load, or one that is long over
    *("PD-META-003", "PD-META-004", "PD-META-005"),  # the metaserver, D's queue or the prompt is the reason
    "PD-META-006",  # P's leg failed, which was counted where it happened
    *("PD-META-026", "PD-META-027", "PD-META-028", "PD-META-029", "PD-META-030", "PD-META-031"),  # another router's
    "PD-META-024",  # a question for an answer so far was refused: it is no load
    "PD-META-033",  # the two are started with other settings for the first token
    "PD-GEO-004",  # the prompt ends where P's draft model does not run
    *("PD-CTRL-001", "PD-XFER-007"),  # these stop the start, or end the engine: no report has them
}


def codes_reported() -> dict[str, str]:
    """Map each code in the text of the modules that can put one into a report to one of these modules."""
    module_of: dict[str, str] = {}
    for path in sorted(path for pattern in TELLING for path in PACKAGE.glob(pattern)):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        starts = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ConfigError"]
        of_starts = {id(node) for call in starts for node in ast.walk(call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in of_starts:
                module_of.update(
                    dict.fromkeys(re.findall(r"PD-[A-Z]+-[0-9]{3}", node.value), str(path.relative_to(PACKAGE)))
                )
    return module_of


def test_every_code_that_a_report_can_carry_has_its_verdict() -> None:
    codes = codes_reported()
    assert {"PD-WIRE-005", "PD-XFER-001", "PD-META-006"} <= codes.keys(), "the search finds what is known to be there"
    assert codes.keys() - AGAINST_NEITHER == decisions.AGAINST_PAIR, "each code counts against the pair or neither"
    assert codes.keys() > AGAINST_NEITHER and decisions.AGAINST_PREFILL.keys() < decisions.AGAINST_PAIR
