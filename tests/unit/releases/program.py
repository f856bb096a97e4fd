# SPDX-License-Identifier: Apache-2.0
"""Program that runs on a release of vLLM: each function is a scenario. Prints one JSON line for each: name and error.

Started by test_releases.py with the expected version, in the environment that tests/environment.sh makes, for either
model runner.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integration"))

import vllm
from fake_metaserver import fake_metaserver

from tools.support.process import free_port
from unit.admission.vllm_configs import LAYERS
from unit.decode import worker_batch
from unit.releases import second_batch
from unit.releases.engine import BLOCK, BLOCKS, WORKER_HOOKS, ReleaseEngine
from vllm_ascend_pd.vllm_patches import compat

SECOND = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
SHORT_TIMES = {"transfer_timeout_s": 5.0, "quiet_extra_s": 2.0, "lease_s": 3.0, "margin_s": 0.5}
LINES = {
    "prefilled": {"event": "prefilled"},
    "failed": {"event": "failed", "code": "PD-META-004", "detail": "the prefill engine is gone"},
}


class ReleasePair:
    """A P and a D. `outcome`: end of the metaserver's answer."""

    def __init__(self, url: str, p_tp: int, d_tp: int, policy: str, d_blocks: int) -> None:
        self.url = url
        self.reservations: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.outcome = "prefilled"
        self.firsts: dict[str, queue.SimpleQueue[str]] = defaultdict(queue.SimpleQueue)  # P's, sealed, by ticket
        self.prefill = ReleaseEngine("kv_producer", p_tp, SHORT_TIMES, chunk=96)
        self.decode = ReleaseEngine(
            "kv_consumer", d_tp, {"metaserver_urls": [url], **SHORT_TIMES}, policy, blocks=d_blocks
        )
        self.blocks: dict[str, list[int]] = {}
        self.so_far: dict[str, tuple[str, object]] = {}  # hash of the prompt, and the answer so far, by ticket
        self.questions: list[dict[str, Any]] = []  # for answers so far
        self.speaks = threading.Event()  # they are answered
        self.speaks.set()

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        if "prompt" in body:
            return self._so_far(body)
        if "reservation" not in body:
            return 200, []  # a load report
        self.reservations.put(body)
        if self.outcome == "first token":
            first = self.firsts[body["ticket"]].get(timeout=10.0)
            return 200, [{"event": "accepted", "prefill": "here"}, {**LINES["prefilled"], "first": first}]
        return 200, [{"event": "accepted", "prefill": "here"}, LINES[self.outcome]]

    def _so_far(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        self.questions.append(body)
        self.speaks.wait(20.0)
        if body["ticket"] not in self.so_far:
            return 404, []
        prompt, tokens = self.so_far[body["ticket"]]
        return (409, []) if prompt != body["prompt"] else (200, [{"tokens": tokens}])

    def params(self, name: str) -> dict[str, Any]:
        return {"do_remote_prefill": True, "metaserver": self.url, "ticket": name}

    def ask(self, name: str, tokens: list[int], max_tokens: int = 3) -> dict[str, Any]:
        """Add the request to D, which reserves; return what the metaserver got."""
        self.decode.add(f"{name}-d", name, tokens, self.params(name), max_tokens)
        self.decode.step()
        self.blocks[name] = self.decode.blocks_of(f"{name}-d")
        return self.reservations.get(timeout=10.0)

    def send(self, name: str, tokens: list[int], max_tokens: int = 3) -> None:
        body = self.ask(name, tokens, max_tokens)
        self.prefill.add(f"{name}-p", name, tokens, {"do_remote_decode": True, "reservation": body["reservation"]})

    def until(self, reached: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not reached: {what}; D received {self.decode.received}, P sent {self.prefill.sent}"
                )
            self.prefill.step()
            self.decode.step()
            time.sleep(0.002)


@contextmanager
def site(p_tp: int = 2, d_tp: int = 1, policy: str = "fail", d_blocks: int = BLOCKS) -> Iterator[ReleasePair]:
    port = free_port()
    made = ReleasePair(f"http://127.0.0.1:{port}", p_tp, d_tp, policy, d_blocks)
    with fake_metaserver(port, made.answer):
        free = made.prefill.free_blocks, made.decode.free_blocks
        yield made
        made.until(lambda: (made.prefill.free_blocks, made.decode.free_blocks) == free, "all blocks are free again")
        for engine in (made.decode, made.prefill):
            engine.close()


def prompt(name: str, length: int) -> list[int]:
    seed = sum(name.encode())
    return [3 + (seed + 7 * i) % 100 for i in range(length)]


def check(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


# ---- scenarios


def _chunked(p_tp: int, d_tp: int) -> None:
    with site(p_tp, d_tp) as pair:
        lengths = {f"r{length}": length for length in (2, BLOCK, BLOCK + 1, 100, 200, 250)}
        for name, length in lengths.items():
            pair.send(name, prompt(name, length))
        pair.until(lambda: len(pair.decode.received) == len(lengths), "everything is received")
        for name, length in lengths.items():
            wrong = pair.decode.wrong(f"{name}-d", pair.blocks[name], 0, length)
            check(not wrong, f"{name}: {wrong[:3]}")
        pair.until(lambda: len(pair.prefill.sent) == len(lengths), "everything is sent")
        pair.until(lambda: all(pair.decode.request(f"{name}-d") is None for name in lengths), "D has answered")
        # vLLM computes only the last token of a prompt that was loaded whole.
        check(all(pair.decode.computed[f"{name}-d"] == 1 for name in lengths), f"D computed {pair.decode.computed}")
        check(sorted(pair.decode.received) == sorted(f"{name}-d" for name in lengths), "an id was reported twice")
        check(sorted(pair.prefill.sent) == sorted(f"{name}-p" for name in lengths), "an id was reported twice")


def chunks_from_2_to_1() -> None:
    """Two requests share a step, prompts take several; hooks without names, tuple caches."""
    _chunked(2, 1)


def chunks_from_1_to_2() -> None:
    _chunked(1, 2)


def chunks_from_4_to_2() -> None:
    _chunked(4, 2)


def a_layer_in_a_graph() -> None:
    """Without its hook a layer is not pushed, like one that was not computed: D computes the prompts itself."""
    with site(policy="recompute") as pair:
        pair.prefill.missing_hook = 1
        lengths = {f"r{length}": length for length in (BLOCK + 1, 200)}
        for name, length in lengths.items():
            pair.send(name, prompt(name, length))
        pair.until(lambda: all(pair.decode.request(f"{name}-d") is None for name in lengths), "D has answered")
        check({name: pair.decode.computed[f"{name}-d"] for name in lengths} == lengths, f"{pair.decode.computed}")


def hooks_in_the_order_of_0_23() -> None:
    """Hooks: start_load_kv before the layers; get_finished, not get_transfer_results; no wait_for_save in an empty
    step."""
    if not vllm.__version__.startswith("0.23.") or SECOND:
        return
    check(not compat.HAS_TRANSFER_RESULTS, "this vLLM has get_transfer_results: it is not 0.23")
    with site() as pair:
        pair.send("one", prompt("one", 50))
        worker = pair.prefill.workers[0]
        worker.called.clear()
        pair.prefill.step()
        layers = ["wait_for_layer_load", "save_kv_layer"] * len(LAYERS)
        rest = [
            "get_finished",
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ]
        begin = ["handle_preemptions", "bind_connector_metadata", "start_load_kv"]
        check(worker.called == [*begin, *layers, "wait_for_save", *rest], f"a step: {worker.called}")
        worker.called.clear()
        pair.prefill.step()
        check(worker.called == [*begin, *rest], f"a step without tokens: {worker.called}")
        check(set(worker.called) <= set(WORKER_HOOKS), "an unknown hook")
        pair.until(lambda: pair.decode.received == ["one-d"], "it is received")
        check(not pair.decode.wrong("one-d", pair.blocks["one"], 0, 50), "wrong bytes")


def a_prefix_on_prefill_is_pushed_too() -> None:
    with site() as pair:
        head = prompt("head", 4 * BLOCK)
        pair.prefill.add("warm", "shared", head, {})  # on P alone
        pair.until(lambda: pair.prefill.request("warm") is None, "P has computed it")
        tokens = [*head, *prompt("tail", 20)]
        pair.send("shared", tokens)
        pair.until(lambda: pair.decode.received == ["shared-d"], "it is received")
        # P's cached prefix is from `content("shared")` too: pushing computed tokens only would leave it out.
        check(not pair.decode.wrong("shared-d", pair.blocks["shared"], 0, len(tokens)), "wrong bytes")


def preempted_pushes_begin_again() -> None:
    with site() as pair:
        tokens = prompt("long", 250)
        pair.send("long", tokens)
        pair.prefill.step()  # 96 of 250 tokens
        check(pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True), "P did not preempt")
        worker = pair.prefill.workers[1]
        worker.called.clear()
        pair.until(lambda: pair.decode.received == ["long-d"], "it is received")
        check(worker.called[0] == "handle_preemptions", f"{worker.called[:3]}")
        check(not pair.decode.wrong("long-d", pair.blocks["long"], 0, len(tokens)), "wrong bytes")


def aborted_on_prefill_fails_on_decode() -> None:
    """request_finished comes without blocks if the request was preempted before: D is notified."""
    from vllm.v1.request import RequestStatus

    with site(policy="fail") as pair:
        pair.send("gone", prompt("gone", 250))
        pair.prefill.step()
        pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.prefill.scheduler.finish_requests("gone-p", RequestStatus.FINISHED_ABORTED)
        pair.until(lambda: "gone-d" in pair.decode.answers, "D has answered")
        reason = pair.decode.answers["gone-d"][-1].finish_reason
        check(str(reason) == "error", f"it ended with {reason}")


def aborted_on_decode_gives_the_blocks_back() -> None:
    from vllm.v1.request import RequestStatus

    with site() as pair:
        pair.send("left", prompt("left", 200))
        pair.prefill.step()
        pair.decode.scheduler.finish_requests("left-d", RequestStatus.FINISHED_ABORTED)
        pair.until(lambda: pair.prefill.request("left-p") is None, "P is done with it")


def _failed(policy: str) -> tuple[list[Any], int]:
    with site(policy=policy) as pair:
        pair.outcome = "failed"
        pair.ask("lost", prompt("lost", 100))
        pair.until(lambda: pair.decode.request("lost-d") is None, "D is done with it")
        check(pair.decode.received == ["lost-d"], f"{pair.decode.received}")
        return pair.decode.answers["lost-d"], pair.decode.computed["lost-d"]


def failed_loads_fail_as_configured() -> None:
    """vLLM 0.23 takes failed loads as block ids."""
    answers, computed = _failed("fail")
    check(str(answers[-1].finish_reason) == "error" and computed == 0, f"{answers}, {computed} tokens computed")


def failed_loads_are_recomputed_as_configured() -> None:
    answers, computed = _failed("recompute")
    check(computed == 100, f"{computed} of 100 tokens were computed")
    tokens = [token for one in answers for token in one.new_token_ids]
    check(len(tokens) == 3 and str(answers[-1].finish_reason) == "length", f"{answers}")


def _pass_token(pair: ReleasePair, name: str) -> None:
    pair.firsts[name].put(pair.prefill.answers[f"{name}-p"][-1].kv_transfer_params["pd_push"]["first"])


def first_tokens_are_p_s() -> None:
    """D computes one token less of each, and none if the first token ends the request."""
    with site() as pair:
        pair.outcome, pair.prefill.token = "first token", 9
        for name, max_tokens in (("three", 3), ("one", 1)):
            pair.send(name, prompt(name, 100), max_tokens)
            before = pair.decode.steps
            pair.until(lambda name=name: f"{name}-p" in pair.prefill.answers, "P has answered")  # type: ignore[misc]
            _pass_token(pair, name)
            pair.until(lambda name=name: pair.decode.request(f"{name}-d") is None, "D has answered")  # type: ignore[misc]
            answers = pair.decode.answers[f"{name}-d"]
            tokens = [token for one in answers for token in one.new_token_ids]
            check(tokens == [9, 5, 5][:max_tokens], f"{tokens}")
            check(pair.decode.steps - before == max_tokens - 1, f"{pair.decode.steps - before} steps")
            check(str(answers[-1].finish_reason) == "length", f"{answers[-1]}")
            check(answers[-1].kv_transfer_params["pd_load"]["first_token"] == "prefill", f"{answers[-1]}")
            check(answers[0].prefill_stats.num_computed_tokens == 0, f"{answers[0].prefill_stats}")
            check(not pair.decode.wrong(f"{name}-d", pair.blocks[name], 0, 100), "wrong bytes")


def a_worker_s_batch_takes_the_token_as_an_output() -> None:
    """The second model runner's gets it beside the prompt, as of a request that goes on after a preemption."""
    with site() as pair:  # worker classes are wrapped when they are created
        if SECOND:
            pair.outcome, pair.prefill.token, tokens = "first token", 9, prompt("new", 100)
            pair.send("new", tokens)
            pair.until(lambda: "new-p" in pair.prefill.answers, "P has answered")
            _pass_token(pair, "new")
            pair.until(lambda: pair.decode.request("new-d") is None, "D has answered")
            check(not (wrong := second_batch.wrong(pair.decode.taken_in["new-d"], tokens, [9])), wrong)
            return
        for token, outputs, there in ((None, [], []), (9, [], [9]), (9, [9, 8], [9, 8])):
            check(not (wrong := worker_batch.wrong(token, outputs, there)), wrong)


def first_tokens_that_do_not_come_are_computed() -> None:
    with site() as pair:
        pair.outcome, pair.prefill.token = "first token", 9
        for name, first in (("mute", ""), ("false", "bm9uc2Vuc2U=")):
            pair.send(name, prompt(name, 100))
            pair.firsts[name].put(first)
            pair.until(lambda name=name: pair.decode.request(f"{name}-d") is None, "D has answered")  # type: ignore[misc]
            answers = pair.decode.answers[f"{name}-d"]
            check([token for one in answers for token in one.new_token_ids] == [5, 5, 5], f"{answers}")
            whose = answers[-1].kv_transfer_params["pd_load"]["first_token"]
            check(whose == ("refused" if first else "not sent"), whose)


def aborted_while_held_gives_the_blocks_back() -> None:
    """The KV has arrived, the token has not, and the client disconnects."""
    from vllm.v1.request import RequestStatus

    with site() as pair:
        pair.outcome = "first token"
        book = pair.decode.scheduler.connector.step_hooks[0]._book
        book._wait_s[False] = 60.0
        pair.send("left", prompt("left", 100))
        pair.until(lambda: book.withholds("left-d"), "D holds it")
        check(pair.decode.request("left-d").status == RequestStatus.WAITING_FOR_REMOTE_KVS, "vLLM has heard of it")
        pair.decode.scheduler.finish_requests("left-d", RequestStatus.FINISHED_ABORTED)
        pair.until(lambda: pair.decode.request("left-d") is None, "D is done with it")
        pair.firsts["left"].put("")


def _full(lengths: dict[str, int]) -> dict[str, int]:
    """Send prompts that fill D. Return how many tokens of each D computed itself, once all are answered."""
    with site(policy="fail", d_blocks=1 + sum(-(-length // BLOCK) for length in lengths.values())) as pair:
        pair.outcome, pair.prefill.token = "first token", 9
        for name, length in lengths.items():
            pair.send(name, prompt(name, length))
        first, *others = lengths
        pair.until(lambda: f"{first}-p" in pair.prefill.answers, "P has answered one")
        _pass_token(pair, first)
        pair.until(lambda: pair.decode.answers.get(f"{first}-d"), "D has begun it")
        for name in others:
            pair.until(lambda name=name: f"{name}-p" in pair.prefill.answers, "P has answered")  # type: ignore[misc]
            _pass_token(pair, name)
        for name in lengths:
            pair.until(lambda name=name: pair.decode.request(f"{name}-d") is None, f"D has answered {name}")  # type: ignore[misc]
            tokens = [token for one in pair.decode.answers[f"{name}-d"] for token in one.new_token_ids]
            check(tokens == [9, 5, 5], f"{name}: {tokens}")
        return {name: pair.decode.computed[f"{name}-d"] for name in lengths}


def loaded_requests_that_hold_all_blocks_go_on() -> None:
    """A prompt of whole blocks needs another one behind P's token. The last request of the queue gives up its own."""
    whole, part = 7 * BLOCK, 7 * BLOCK + 5
    computed = _full({"whole": whole, "part": part})
    check(computed["whole"] == 0 and computed["part"] > 0, f"computed on D: {computed}")
    computed = _full({"part": part, "whole": whole})
    check(computed == {"whole": 0, "part": 0}, f"computed on D: {computed}")
    computed = _full({"one": whole, "two": whole})
    check(computed["one"] == 0 and computed["two"] > 0, f"computed on D: {computed}")
    computed = _full({"one": whole, "two": whole, "three": part})
    check(
        computed["one"] == 0 and len([count for count in computed.values() if count]) == 1, f"computed on D: {computed}"
    )


SCENARIOS: tuple[Callable[[], None], ...] = (
    chunks_from_2_to_1,
    chunks_from_1_to_2,
    chunks_from_4_to_2,
    a_layer_in_a_graph,
    hooks_in_the_order_of_0_23,
    a_prefix_on_prefill_is_pushed_too,
    preempted_pushes_begin_again,
    aborted_on_prefill_fails_on_decode,
    aborted_on_decode_gives_the_blocks_back,
    failed_loads_fail_as_configured,
    failed_loads_are_recomputed_as_configured,
    first_tokens_are_p_s,
    a_worker_s_batch_takes_the_token_as_an_output,
    first_tokens_that_do_not_come_are_computed,
    aborted_while_held_gives_the_blocks_back,
    loaded_requests_that_hold_all_blocks_go_on,
)


def main() -> None:
    version, *wanted = sys.argv[1:]
    there = vllm.__version__.split("+")[0]
    print(json.dumps({"name": "version", "error": "" if there == version else f"vLLM {there} is there"}))
    for scenario in SCENARIOS:
        if wanted and scenario.__name__ not in wanted:
            continue
        try:
            scenario()
            error = ""
        except Exception:  # noqa: BLE001 (the test that asked for it fails with it)
            error = traceback.format_exc()
        print(json.dumps({"name": scenario.__name__, "error": error}), flush=True)


if __name__ == "__main__":
    main()
