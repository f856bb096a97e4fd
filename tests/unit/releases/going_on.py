# SPDX-License-Identifier: Apache-2.0
"""Answers that go on at another D, on this vLLM's own scheduler: each function is a scenario, as in program.py."""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from unit.kits.watching import until
from unit.releases.program import ReleasePair, check, prompt, site
from vllm_ascend_pd.decode.scheduler import going_on
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.protocol.continuing import CONTINUE
from vllm_ascend_pd.vllm_patches import first_token
from vllm_ascend_pd.vllm_patches.one_by_one import GIVEN

LENGTH = 100  # of the prompt; blocks have 32 tokens


def given(count: int) -> list[int]:
    return [10 + index % 90 for index in range(count)]


def ask(pair: ReleasePair, name: str, tokens: object, max_tokens: int, said: str | None = None, **more: Any) -> None:
    """Send D a request whose answer so far the router has."""
    text = prompt(name, LENGTH)
    pair.so_far[name] = said or prompt_hash(text), tokens
    pair.decode.add(f"{name}-d", name, text, {**pair.params(name), CONTINUE: True}, max_tokens, **more)


def bring(pair: ReleasePair, name: str) -> None:
    """Give P what D posts, if it posts anything."""

    def reserved() -> bool:
        request = pair.decode.request(f"{name}-d")
        return request is None or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    pair.until(reserved, "D has reserved, or answered")
    if pair.decode.request(f"{name}-d") is not None:
        pair.blocks[name] = pair.decode.blocks_of(f"{name}-d")
        body = pair.reservations.get(timeout=10.0)
        to_p = body.get("prompt_token_ids", prompt(name, LENGTH))
        pair.prefill.add(f"{name}-p", name, to_p, {"do_remote_decode": True, "reservation": body["reservation"]})


def go_on(pair: ReleasePair, name: str, tokens: object, max_tokens: int, said: str | None = None, **more: Any) -> None:
    ask(pair, name, tokens, max_tokens, said, **more)
    bring(pair, name)


def begun_anew(pair: ReleasePair) -> Counter[str]:
    """Return how many answers have begun anew since the last call, by reason."""
    return pair.decode.counted.pop("num_answers_begun_anew", Counter())


def ended(pair: ReleasePair, name: str) -> list[Any]:
    pair.until(lambda: pair.decode.request(f"{name}-d") is None, "D has answered")
    return pair.decode.answers[f"{name}-d"]


def tokens_of(answers: list[Any]) -> list[int]:
    return [token for one in answers for token in one.new_token_ids]


def an_answer_goes_on_behind_what_it_has() -> None:
    """D loads prompt and answer but its last token, puts the answer out first, and samples from there."""
    with site() as pair:
        for count in (1, 2, 28, 29, 70):
            name, tokens = f"r{count}", given(count)
            before = pair.decode.steps
            go_on(pair, name, tokens, count + 3)
            answers = ended(pair, name)
            check([one.new_token_ids for one in answers[:count]] == [[token] for token in tokens], f"{answers[:count]}")
            marks = [one.kv_transfer_params == {GIVEN: True} for one in answers]
            check(marks == [True] * count + [False] * (len(answers) - count), f"{answers}")
            check(answers[0].prefill_stats.num_computed_tokens == 0, f"{answers[0].prefill_stats}")
            check(tokens_of(answers) == [*tokens, 5, 5, 5], f"{tokens_of(answers)}")
            check(str(answers[-1].finish_reason) == "length", f"{answers[-1]}")
            check(pair.decode.steps - before == 3, f"{pair.decode.steps - before} steps")
            check(pair.decode.computed[f"{name}-d"] == 0, "D has computed some of the prompt")
            check(pair.prefill.computed[f"{name}-p"] == LENGTH + count - 1, f"{pair.prefill.computed}")
            wrong = pair.decode.wrong(f"{name}-d", pair.blocks[name], 0, LENGTH + count - 1)
            check(not wrong, f"{name}: {wrong[:3]}")
            report = answers[-1].kv_transfer_params["pd_load"]
            check((report["received"], report["first_token"]) == (LENGTH + count - 1, "given"), f"{report}")


def an_answer_that_had_ended_ends_before_any_load() -> None:
    with site() as pair:
        tokens = given(4)
        go_on(pair, "full", tokens, 4)
        answers = ended(pair, "full")
        check(tokens_of(answers) == tokens and str(answers[-1].finish_reason) == "length", f"{answers}")
        check([one.finish_reason for one in answers[:-1]] == [None] * 3, f"{answers}")
        go_on(pair, "more", given(9), 4)
        answers = ended(pair, "more")
        check(tokens_of(answers) == given(4), f"what comes behind the end is none of the answer: {answers}")
        check(pair.reservations.empty(), "D has asked for KV")


def a_failed_load_is_computed_behind_the_same_answer() -> None:
    with site(policy="recompute") as pair:
        pair.outcome, tokens = "failed", given(40)
        go_on(pair, "alone", tokens, 42)
        answers = ended(pair, "alone")
        check(tokens_of(answers) == [*tokens, 5, 5], f"{tokens_of(answers)}")
        check(pair.decode.computed["alone-d"] == LENGTH, f"{pair.decode.computed}")


def an_answer_that_is_not_this_prompt_s_is_begun_anew() -> None:
    with site() as pair:
        forged: Mapping[str, tuple[object, str | None, str]] = {
            "other": (given(4), prompt_hash([1, 2, 3]), "PD-META-003"),
            "none": ([], None, ""),
            "text": ("abc", None, "PD-META-002"),
            "true": ([True], None, "PD-META-002"),
            "big": ([1 << 40], None, "PD-META-002"),
            "unknown": ([1 << 30], None, "tokens"),
            "negative": ([-1], None, "PD-META-002"),
            "long": (given(157), None, "tokens"),
        }
        for name, (tokens, said, reason) in forged.items():
            go_on(pair, name, tokens, 2, said)
            answers = ended(pair, name)
            check(tokens_of(answers) == [5, 5], f"{name}: {tokens_of(answers)}")
            counted = begun_anew(pair)
            check(counted == ({reason: 1} if reason else {}), f"{name}: {counted}")


def a_client_gives_no_tokens() -> None:
    """Neither in the request, nor by a metaserver of its own; and without a ticket nothing is asked for."""
    with site() as pair:
        ticket, elsewhere = pair.params("own"), {**pair.params("elsewhere"), "metaserver": "http://127.0.0.1:9"}
        pair.so_far = {name: (prompt_hash(prompt(name, LENGTH)), given(4)) for name in ("alone", "own", "elsewhere")}
        forged = {"prompt": prompt_hash(prompt("own", LENGTH)), "tokens": given(4)}
        for name, params in {
            "alone": {CONTINUE: True},
            "own": {**ticket, CONTINUE: forged},
            "elsewhere": {**elsewhere, CONTINUE: True},
        }.items():
            pair.decode.add(f"{name}-d", name, prompt(name, LENGTH), params, 2)
            if name == "own":
                bring(pair, name)
            check(tokens_of(ended(pair, name)) == [5, 5], f"{name} has given an engine its answer")
        check(not pair.questions, f"{pair.questions}")


def aborted_while_it_goes_on_leaves_nothing() -> None:
    with site() as pair:
        connector = pair.decode.scheduler.connector
        for name, reached in (
            ("early", lambda: True),
            ("asked", lambda: pair.questions[-1:] and pair.questions[-1]["ticket"] == "asked"),
            ("put out", lambda: "put out-d" in pair.decode.answers),
            ("loading", lambda: not pair.reservations.empty()),
        ):
            pair.speaks.clear() if name == "asked" else pair.speaks.set()
            ask(pair, name, given(4), 8)
            pair.until(reached, f"{name}")
            pair.decode.scheduler.finish_requests(f"{name}-d", RequestStatus.FINISHED_ABORTED)
            pair.until(lambda name=name: pair.decode.request(f"{name}-d") is None, "D is done with it")  # type: ignore[misc]
            left = connector.scheduler_role.beginnings.going_on
            check(not left.open() and not left._told, f"{name}: something is left")
            pair.until(lambda: not connector.scheduler_role.nap_budget(), "nothing is waited for")
            pair.speaks.set()
        check(tokens_of(pair.decode.answers["put out-d"]) == given(4), f"{pair.decode.answers}")
        check("asked-d" not in pair.decode.answers, "it was put out after its end")


def a_router_that_says_nothing_is_not_waited_for_long() -> None:
    with site() as pair:
        usual, going_on.ANSWER_S = going_on.ANSWER_S, 0.3
        try:
            pair.speaks.clear()
            go_on(pair, "mute", given(4), 2)
        finally:
            pair.speaks.set()
            going_on.ANSWER_S = usual
        check(tokens_of(ended(pair, "mute")) == [5, 5], f"{pair.decode.answers}")
        counted = begun_anew(pair)
        check(sum(counted.values()) == 1 and set(counted) <= {"late", "PD-XFER-001"}, f"{counted}")


def a_request_for_which_vllm_does_not_wait_is_begun_anew() -> None:
    """D's answer to vLLM counts for nothing if the request may not read the prefix cache; vLLM 0.30 waits for it."""
    with site() as pair:
        pair.speaks.clear()
        ask(pair, "early", given(4), 6, skip_reading_prefix_cache=True)
        if "skip_reading_prefix_cache" not in inspect.getsource(Scheduler.schedule):
            pair.speaks.set()
            bring(pair, "early")
            check(tokens_of(ended(pair, "early")) == [*given(4), 5, 5], f"{pair.decode.answers}")
            check(not begun_anew(pair), "it goes on")
            return
        request, role = pair.decode.request("early-d"), pair.decode.scheduler.connector.scheduler_role
        pair.until(lambda: request.num_output_tokens, "vLLM has run it")
        pair.speaks.set()
        until(lambda: role._outcomes, "the router has answered")
        check(tokens_of(ended(pair, "early")) == [5] * 6, f"{pair.decode.answers}")
        counted = begun_anew(pair)
        check(counted == {"scheduler": 1}, f"{counted}")


class AnyButOne:
    """Grammar of any tokens but one, which keeps those that it was advanced over."""

    def __init__(self, refused: int) -> None:
        self.refused, self.accepted = refused, list[int]()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return self.refused not in tokens


def blocks_of_given_tokens_are_cached() -> None:
    """A later request finds what P has brought of the answer in D's prefix cache."""
    with site() as pair:
        go_on(pair, "first", given(70), 72)
        check(tokens_of(ended(pair, "first")) == [*given(70), 5, 5], f"{pair.decode.answers}")
        pair.decode.add("again-d", "first", [*prompt("first", LENGTH), *given(70)], {}, 1)
        ended(pair, "again")
        check(pair.decode.computed["again-d"] == 10, f"five blocks of 32 are cached: {pair.decode.computed}")


def a_grammar_is_advanced_over_the_answer() -> None:
    """It is so only once it is compiled, and the answer is not asked for before: not at all where none takes tokens."""
    untaken = first_token.other_grammars()
    with site() as pair:
        for name, refused in (("fits", 99), ("unfit", 11)):
            tokens, shape = given(4), StructuredOutputsParams(regex="any")
            ask(pair, name, tokens, 6, structured_outputs=shape)
            request, before = pair.decode.request(f"{name}-d"), len(pair.questions)
            for _ in range(3):
                pair.decode.step()
            check(len(pair.questions) == before, "asked for before its grammar is compiled")
            request.structured_output_request._grammar = grammar = AnyButOne(refused)
            bring(pair, name)
            answers = ended(pair, name)
            if untaken:
                check(tokens_of(answers) == [5] * 6 and not pair.questions, f"{pair.decode.answers}")
                check(begun_anew(pair) == {"request": 1}, "not counted")
            elif name == "unfit":
                check(tokens_of(answers) == tokens[:2] and str(answers[-1].finish_reason) == "error", f"{answers}")
                check(pair.reservations.empty(), "D has asked for KV")
            else:
                check(tokens_of(answers) == [*tokens, 5, 5], f"{pair.decode.answers}")
                check(grammar.accepted == [*tokens, 5, 5], f"{grammar.accepted}")


def log_probabilities_have_a_row_for_each_token() -> None:
    with site() as pair:
        asked: dict[str, tuple[dict[str, Any], int]] = {  # and tokens in a row
            "none": ({}, 0),
            "own": ({"logprobs": 0}, 1),
            "two": ({"logprobs": 2}, 3),
            "named": ({"logprob_token_ids": [7, 8, 9]}, 4),
        }
        for name, (wanted, width) in asked.items():
            tokens = given(3)
            go_on(pair, name, tokens, 3, **wanted)
            rows = [one.new_logprobs for one in ended(pair, name)]
            token_ids = [None if row is None else row.logprob_token_ids.tolist() for row in rows]
            check(token_ids == [[[token] * width] if width else None for token in tokens], f"{name}: {rows}")


SCENARIOS: tuple[Callable[[], None], ...] = (
    an_answer_goes_on_behind_what_it_has,
    an_answer_that_had_ended_ends_before_any_load,
    a_failed_load_is_computed_behind_the_same_answer,
    an_answer_that_is_not_this_prompt_s_is_begun_anew,
    a_client_gives_no_tokens,
    a_router_that_says_nothing_is_not_waited_for_long,
    aborted_while_it_goes_on_leaves_nothing,
    a_request_for_which_vllm_does_not_wait_is_begun_anew,
    blocks_of_given_tokens_are_cached,
    a_grammar_is_advanced_over_the_answer,
    log_probabilities_have_a_row_for_each_token,
)


def main() -> None:
    for scenario in SCENARIOS:
        if sys.argv[1:] and scenario.__name__ not in sys.argv[1:]:
            continue
        error = ""
        try:
            scenario()
        except Exception:  # noqa: BLE001 (the test that started this fails with it)
            error = traceback.format_exc()
        print(json.dumps({"name": scenario.__name__, "error": error}), flush=True)


if __name__ == "__main__":
    main()
