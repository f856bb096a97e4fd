# SPDX-License-Identifier: Apache-2.0
"""A D that computes no prompts: what nothing is loaded for ends with an error, once, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.decode.scheduler.no_prompts import NoPrompts
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.vllm_patches import step_hooks


class EndingScheduler:
    def __init__(self, *requests: Any) -> None:
        self.requests = {request.request_id: request for request in requests}


def asked(name: str, tokens: int, *, finished: bool = False) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens, client_index=0, is_finished=lambda: finished)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    added: list[str] = []

    def end(scheduler: EndingScheduler, request: Any) -> str:
        del scheduler.requests[request.request_id]
        return f"error of {request.request_id}"

    monkeypatch.setattr(step_hooks, "end", end)
    monkeypatch.setattr(step_hooks, "add", lambda _outputs, client, output: added.append(f"{client}: {output}"))
    return added


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (2, 0), (300, 128), (300, 0)])
def test_what_it_would_have_to_compute_ends_after_the_step(ended: list[str], tokens: int, computed: int) -> None:
    told: list[str] = []
    one, scheduler = NoPrompts(told.append), EndingScheduler(asked("a", tokens))
    assert one.refuses(scheduler.requests["a"], computed, 0)
    assert not ended
    one.after(scheduler, {})
    one.after(scheduler, {})
    assert ended == ["0: error of a"] and told == ["a"]


def test_the_next_token_alone_is_computed_as_a_decode_is(ended: list[str]) -> None:
    one = NoPrompts(lambda _: None)
    assert not one.refuses(asked("a", 129), 128, 0) and not one.refuses(asked("a", 129), 0, 128)
    one.after(EndingScheduler(asked("a", 129)), {})
    assert not ended


def test_what_has_ended_meanwhile_does_not_end_again(ended: list[str]) -> None:
    told: list[str] = []
    one = NoPrompts(told.append)
    for name in ("gone", "over"):
        assert one.refuses(asked(name, 5), 0, 0)
    one.after(EndingScheduler(asked("over", 5, finished=True)), {})
    assert not ended and not told


def test_a_session_whose_prompt_grows_ends(ended: list[str]) -> None:
    one, session = NoPrompts(lambda _: None), asked("a", 129)
    session.resumable = True
    assert one.refuses(session, 0, 128) and one.refuses(session, 128, 0)
    one.after(EndingScheduler(session), {})
    assert ended == ["0: error of a"]


def test_no_step_computes_a_part_of_a_prompt() -> None:
    one = NoPrompts(lambda _: None)
    one.check(SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1}))
    with pytest.raises(LocalProtocolError, match="b has 2 tokens"):
        one.check(SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 2}))
