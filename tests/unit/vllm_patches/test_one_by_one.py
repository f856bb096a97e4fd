# SPDX-License-Identifier: Apache-2.0
"""Given tokens in vLLM's own output processor and queues: one by one, each once, and nothing else is changed."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from typing import Any

import pytest
from vllm import envs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from vllm_ascend_pd.vllm_patches import one_by_one
from vllm_ascend_pd.vllm_patches.first_token import logprob_rows

MARK = {one_by_one.GIVEN: True}


@functools.cache
def tokenizer() -> Any:
    """A tokenizer of bytes: a text of n bytes is n tokens."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("put", "get", "get_nowait"):
        monkeypatch.setattr(RequestOutputCollector, name, getattr(RequestOutputCollector, name))
    assert one_by_one.install() == one_by_one.install() == ""


class FrontEndStream:
    """A request of vLLM's front end, and what its client's task reads."""

    def __init__(self, kind: RequestOutputKind = RequestOutputKind.DELTA, interval: int = 1, **sampling: Any) -> None:
        self.processor = OutputProcessor(tokenizer(), log_stats=False, stream_interval=interval)
        params = SamplingParams(**{"max_tokens": 100, **sampling}, output_kind=kind, detokenize=True)
        request = EngineCoreRequest("r", ids("prompt"), None, params, None, 0.0, None, None, None, external_req_id="r")
        self.queue = RequestOutputCollector(kind, "r")
        self.processor.add_request(request, "prompt", queue=self.queue)

    def put_out(self, text: str, params: dict[str, Any] | None = None, **facts: Any) -> list[str]:
        """Process an output of sampled tokens; return the requests that are aborted in the engine core."""
        return self.process(EngineCoreOutput("r", ids(text), kv_transfer_params=params, **facts))

    def give(self, text: str, last: dict[str, Any] | None = None, **facts: Any) -> list[str]:
        """Process given tokens. `last`: facts of the last output; `facts`: parameters of it beside the mark."""
        return self.process(*given(text, last, **facts))

    def process(self, *outputs: EngineCoreOutput) -> list[str]:
        return self.processor.process_outputs(list(outputs)).reqs_to_abort

    async def next(self) -> Any:
        """Read the next output as vLLM's `generate` does."""
        return self.queue.get_nowait() or await self.queue.get()

    def left(self) -> bool:
        unmerged = getattr(self.queue, "pd_unmerged", None)
        return self.queue.output is not None or bool(unmerged and unmerged.waiting)

    def read(self) -> list[Any]:
        """Read what is there."""

        async def reading() -> list[Any]:
            return [await self.next() for _ in iter(self.left, False)]

        return asyncio.run(reading())


def given(text: str, last: dict[str, Any] | None = None, **params: Any) -> list[EngineCoreOutput]:
    outputs = [EngineCoreOutput("r", [token], kv_transfer_params=dict(MARK)) for token in ids(text)]
    for name, value in (last or {}).items():
        setattr(outputs[-1], name, value)
    outputs[-1].kv_transfer_params = {**MARK, **params}
    return outputs


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_given_tokens_come_one_by_one_and_what_is_sampled_is_merged_behind_them() -> None:
    stream = FrontEndStream()
    stream.give("given")
    stream.put_out("a")
    stream.put_out("b")
    outputs = stream.read()
    assert texts(outputs) == ["g", "i", "v", "e", "n", "ab"]
    assert [output.outputs[0].token_ids for output in outputs] == [*([t] for t in ids("given")), ids("ab")]
    assert all(output.kv_transfer_params is None for output in outputs), "the mark is none of the client's"
    stream.put_out("c")
    stream.put_out("d")
    assert texts(stream.read()) == ["cd"]


def test_a_client_that_reads_at_once_gets_the_same() -> None:
    stream = FrontEndStream()
    stream.give("gi")

    async def reading() -> list[Any]:
        outputs = [await stream.next()]
        stream.put_out("a")  # before the next one is there
        outputs += [await stream.next(), await stream.next()]
        return outputs

    assert texts(asyncio.run(reading())) == ["g", "i", "a"]


def test_others_run_between_any_two_given_tokens_and_while_they_are_processed() -> None:
    stream, turns, thread_times = FrontEndStream(max_tokens=4000), list[int](), list[float]()
    chunk = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
    text = "given " * 500

    async def handle() -> None:
        """Process all outputs of a step as vLLM's front end does."""
        outputs = given(text)
        for first in range(0, len(outputs), chunk):
            stream.process(*outputs[first : first + chunk])
            await asyncio.sleep(0)

    async def replayed() -> list[Any]:
        thread_times.append(time.thread_time())
        handling = asyncio.create_task(handle())
        reading = asyncio.create_task(read())
        while not reading.done():
            thread_times.append(time.thread_time())
            await asyncio.sleep(0)
        thread_times.append(time.thread_time())
        await handling
        return await reading

    async def read() -> list[Any]:
        outputs = []
        while len(outputs) < len(ids(text)):
            outputs.append(await stream.next())
            turns.append(len(thread_times))
        return outputs

    assert "".join(texts(asyncio.run(replayed()))) == text
    print(f"the loop was held for at most {1000 * max(b - a for a, b in itertools.pairwise(thread_times)):.1f} ms")
    assert len(set(turns)) == len(turns) == len(text), "two outputs were read in one turn of the loop"


def test_outputs_of_other_requests_are_merged_as_ever() -> None:
    stream = FrontEndStream()
    stream.put_out("sampled")
    stream.put_out("a")
    assert texts(stream.read()) == ["sampleda"]
    assert not hasattr(stream.queue, "pd_unmerged")


def test_behind_given_tokens_that_came_by_intervals_sampled_ones_are_merged_too() -> None:
    stream = FrontEndStream(interval=3)
    stream.give("given to")
    for token in "ken and more":
        stream.put_out(token)
    assert texts(stream.read()) == ["g", "ive", "n t", "oken and mor"]


def test_a_character_of_several_tokens_is_whole() -> None:
    stream = FrontEndStream()
    stream.give("aé€b")
    assert "".join(texts(stream.read())) == "aé€b"


def test_a_stop_string_among_given_tokens_ends_the_request() -> None:
    stream = FrontEndStream(stop=["ve"])
    assert stream.give("given") == ["r"], "the engine core does not know of it"
    outputs = stream.read()
    assert "".join(texts(outputs)) == "gi"
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "ve")


def test_a_stop_string_that_begins_among_given_tokens_ends_behind_them() -> None:
    stream = FrontEndStream(stop=["enough"])
    stream.give("given en")
    stream.put_out("ou")
    assert stream.put_out("gh!") == ["r"]
    assert "".join(texts(stream.read())) == "given "


def test_the_last_of_them_has_how_the_request_ended() -> None:
    stream = FrontEndStream()
    stream.give("end", {"finish_reason": FinishReason.LENGTH}, pd_load={})
    outputs = stream.read()
    assert [output.finished for output in outputs] == [False, False, True]
    assert outputs[-1].outputs[0].finish_reason == "length" and outputs[-1].kv_transfer_params == {"pd_load": {}}


def test_each_has_its_row_of_log_probabilities() -> None:
    stream = FrontEndStream(logprobs=2)
    outputs = given("giv")
    for output in outputs:
        output.new_logprobs = logprob_rows([[(output.new_token_ids[0], 0.0, 1)] * 3])
    stream.process(*outputs)
    logprobs = [output.outputs[0].logprobs for output in stream.read()]
    assert [list(row) for (row,) in logprobs] == [[token] for token in ids("giv")]


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
def test_a_whole_answer_has_them_all_once(kind: RequestOutputKind) -> None:
    stream = FrontEndStream(kind)
    stream.give("giv")
    stream.put_out("en", finish_reason=FinishReason.LENGTH)
    outputs = stream.read()
    assert outputs[-1].outputs[0].text == "given" and list(outputs[-1].outputs[0].token_ids) == ids("given")


def test_an_error_is_raised_whatever_waits() -> None:
    stream = FrontEndStream()
    stream.give("given")
    stream.processor.propagate_error(RuntimeError("the engine is dead"))
    with pytest.raises(RuntimeError, match="dead"):
        stream.read()


def test_a_request_that_is_gone_is_passed_over() -> None:
    stream = FrontEndStream()
    stream.processor.abort_requests(["r"], internal=True)
    stream.read()
    assert stream.give("given") == [] and stream.read() == []
