# SPDX-License-Identifier: Apache-2.0
"""An engine that shuts down answers 200 to new requests, with no token and finish_reason "abort".

Found by stopping real engines under load: D waited for KV that was never pushed, and clients got an empty answer
with status 200.
"""

from __future__ import annotations

import httpx
import pytest

from unit.router.cluster import cluster, streamed, texts
from unit.router.fake_engine import words

RIGHT = "".join(words("p", 3))


@pytest.mark.parametrize("stream", [False, True])
def test_a_p_that_shuts_down_fails_the_load_at_once(stream: bool) -> None:
    with cluster() as c:
        c.prefill[0].behaviour.ends = True
        answer = c.complete("p", stream=stream)
        assert (streamed(answer) if stream else texts(answer)[0]) == RIGHT
        (outcome,) = [o for o in c.decode[0].outcomes if o.final]
        assert outcome.kind == "failed" and outcome.failure is not None
        assert outcome.failure.code == "PD-META-006" and "shutting down" in outcome.failure.detail


@pytest.mark.parametrize("stream", [False, True])
def test_a_d_that_shuts_down_gives_no_client_an_empty_answer(stream: bool) -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.ends = True
        for _ in range(6):
            answer = c.complete("p", stream=stream)
            assert answer.status_code == 200
            assert (streamed(answer) if stream else texts(answer)[0]) == RIGHT, "the other D must answer"
        c.decode[1].behaviour.ends = True
        answer = c.complete("p", stream=stream)
        assert answer.status_code == 503 and "shutting down" in answer.text


@pytest.mark.parametrize("stop", ["recomputed", ["x", "recomputed"], ["recomputed"]])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "temperature": 0}], ids=["", "stream", "kept"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_clients_stop_string_is_not_taken_for_a_dropped_request(
    route: str, more: dict[str, object], stop: object
) -> None:
    """vLLM reports the stop string that it found in the field in which vllm-ascend reports a dropped request."""
    asked: dict[str, object] = {"model": "fake", "max_tokens": 3, "stop": stop, **more}
    asked |= {"messages": [{"role": "user", "content": "p"}]} if "chat" in route else {"prompt": "p"}
    with cluster() as c:
        for drops_after in (0, 1):  # as the first event, and within the stream
            c.decode[0].behaviour.drops_after = drops_after
            before = len(c.decode[0].generations())
            alone = httpx.post(f"http://{c.decode[0].address}{route}", json=asked)
            answer = c.http.post(route, json=asked)
            assert answer.status_code == 200 and '"recomputed"' in alone.text
            if "stream" in more:
                assert answer.content == alone.content
            else:
                assert answer.json() == {**alone.json(), "kv_transfer_params": None}
            assert len(c.decode[0].generations()) == before + 2, "it must not be repeated"
        asked["stop"] = "recompute"
        assert c.http.post(route, json=asked).text.count("PD-META-02") == 1, "a dropped request is still one"


def test_a_chats_opening_is_no_answer_yet() -> None:
    with cluster() as c:
        asked = {"model": "fake", "messages": [{"role": "user", "content": "p"}], "max_tokens": 3, "stream": True}
        assert c.http.post("/v1/chat/completions", json=asked).text.endswith("data: [DONE]\n\n")
        c.decode[0].behaviour.ends = True
        answer = c.http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 503 and "shutting down" in answer.text


@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_is_only_its_end_is_no_answer(route: str, usage: bool) -> None:
    """vLLM omits a stream's last piece if no piece came before it: of a request that it ends before its first token
    there is only `data: [DONE]`. Found by SIGTERM to a real D without grace time."""
    with cluster() as c:
        asked: dict[str, object] = {"model": "fake", "max_tokens": 3, "stream": True}
        asked |= {"messages": [{"role": "user", "content": "p"}]} if "chat" in route else {"prompt": "p"}
        if usage:
            asked["stream_options"] = {"include_usage": True}
        assert c.http.post(route, json=asked).text.endswith("data: [DONE]\n\n")
        c.decode[0].behaviour.ends = c.decode[0].behaviour.ends_unsaid = True
        answer = c.http.post(route, json=asked)
        assert answer.status_code == 503 and "shutting down" in answer.text


def test_a_text_that_quotes_the_reason_is_an_answer() -> None:
    from vllm_ascend_pd.router.relay import aborted

    assert aborted(b'{"choices":[{"text":"","finish_reason":"abort"}]}')
    assert not aborted(b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":"stop"}]}')
