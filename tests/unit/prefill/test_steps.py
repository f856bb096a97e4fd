# SPDX-License-Identifier: Apache-2.0
"""The event of each layer: recorded when its cache is written, if the engine says so, else when its hook fires."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.prefill.worker.core.planning import StepPlan
from vllm_ascend_pd.prefill.worker.steps import Steps

LAYERS = ("layers.0.attn", "layers.1.attn", "layers.2.attn")


def events(
    calls: Callable[[Steps], None], *, direct: bool = True, layers: tuple[str, ...] = LAYERS
) -> tuple[dict[int, int], int]:
    """Return each layer's event, by number in the order of their recording, and how many were recorded."""
    push: Any = object()
    plan = StepPlan(1, direct=[push] if direct else [])
    plans, offers = SimpleNamespace(begin=lambda now, step: plan), SimpleNamespace(uncomputed=lambda *_: None)
    core = SimpleNamespace(plans=plans, offers=offers)
    said: list[Any] = []
    numbers = count(1)
    record: Any = lambda: next(numbers)  # noqa: E731
    steps = Steps(layers, lambda: nullcontext(core), record, said.append, lambda: 0.0, None)  # type: ignore[arg-type,return-value]
    steps.written("")  # of a forward without requests
    steps.begin(SimpleNamespace(empty=False, slices=(1,)))  # type: ignore[arg-type]
    calls(steps)
    return {one.layer: one.event for one in said if hasattr(one, "layer")}, next(numbers) - 1


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_has_the_event_of_its_written_cache(named: bool) -> None:
    def calls(steps: Steps) -> None:
        for name in LAYERS:
            steps.written(name if named else "")
            steps.computed(name)

    assert events(calls) == ({0: 1, 1: 2, 2: 3}, 3)


def test_a_layer_that_does_not_say_so_has_the_event_of_its_hook() -> None:
    def calls(steps: Steps) -> None:
        steps.written("")
        for name in LAYERS:
            steps.computed(name)

    assert events(calls) == ({0: 1, 1: 2, 2: 3}, 3)


@pytest.mark.parametrize("between", ["", "layers.0.other"])
def test_an_event_is_not_kept_over_the_hook_of_a_layer_that_is_not_pushed(between: str) -> None:
    def calls(steps: Steps) -> None:
        steps.written("")
        steps.computed(between)
        for name in LAYERS:
            steps.computed(name)

    assert events(calls) == ({0: 2, 1: 3, 2: 4}, 4)


def test_the_last_of_several_writes_of_a_layer_counts() -> None:
    def calls(steps: Steps) -> None:
        for name in LAYERS:
            steps.written("")
            steps.written("")
            steps.computed(name)

    assert events(calls) == ({0: 2, 1: 4, 2: 6}, 6)


def test_a_written_cache_of_another_name_is_another_layers() -> None:
    def calls(steps: Steps) -> None:
        steps.written(LAYERS[1])
        for name in LAYERS:
            steps.computed(name)

    assert events(calls) == ({0: 2, 1: 3, 2: 4}, 4)


def test_an_event_is_not_kept_over_the_end_of_a_step() -> None:
    def calls(steps: Steps) -> None:
        for name in LAYERS[:2]:
            steps.computed(name)
        steps.written("")
        steps.end()

    assert events(calls)[0] == {0: 1, 1: 2, 2: 4}


def test_nothing_is_recorded_where_nothing_leaves() -> None:
    def calls(steps: Steps) -> None:
        for name in LAYERS:
            steps.written(name)
            steps.computed(name)

    assert events(calls, direct=False) == ({}, 0)


def test_one_hook_completes_all_caches_of_its_attention_which_may_have_none_itself() -> None:
    """DeepSeek-V4: a window alone, and compressed latents with all that belongs to them."""
    whole = ("swa_cache", "attn", "compressor.state_cache", "indexer.k_cache", "indexer.compressor.state_cache")
    layers = ("layers.0.self_attn.swa_cache", *(f"layers.1.self_attn.{name}" for name in whole))

    def calls(steps: Steps) -> None:
        for number in (0, 1):
            steps.written(f"layers.{number}.self_attn.attn")
            steps.written(f"layers.{number}.self_attn.attn")  # once for prefills, once for decodes
            steps.computed(f"layers.{number}.self_attn.attn")

    assert events(calls, layers=layers) == ({0: 2, **dict.fromkeys(range(1, 6), 4)}, 4)
