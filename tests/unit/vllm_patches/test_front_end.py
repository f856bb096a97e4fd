# SPDX-License-Identifier: Apache-2.0
"""vLLM's front end is prepared for tokens of others where its configuration asks for them, and nowhere else."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_ascend_pd import plugin
from vllm_ascend_pd.vllm_patches import front_end, token_reports

PLACES = (
    *((RequestOutputCollector, name) for name in ("put", "get", "get_nowait")),
    (OpenAIServingResponses, "create_responses"),
    (AnthropicServingMessages, "create_messages"),
)
OURS, OTHER = plugin.CONNECTOR, "MooncakeConnector"


def transfer(connector: str, role: str, **extra: Any) -> Any:
    return SimpleNamespace(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)


def inside(**one: Any) -> Any:
    return transfer("MultiConnector", "kv_both", connectors=[{"kv_connector": OTHER, "kv_role": "kv_both"}, one])


@pytest.fixture(autouse=True)
def as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every change back, and register the plug-in as vLLM does in a server, before there is a configuration."""
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))

    def __init__(self: Any, vllm_config: Any, renderer: Any = None) -> None: ...  # noqa: N807

    monkeypatch.setattr(InputProcessor, "__init__", __init__)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace())
    plugin.register()
    plugin.register()


def changed() -> set[str]:
    return {name for owner, name in PLACES if hasattr(getattr(owner, name), "__wrapped__")}


@pytest.mark.parametrize(
    "given",
    [
        transfer(OURS, "kv_consumer"),
        transfer(OURS, "kv_consumer", first_token="auto"),
        inside(kv_connector=OURS, kv_role="kv_consumer", kv_connector_extra_config={"first_token": "auto"}),
        inside(kv_connector=OURS, kv_role="kv_consumer"),
    ],
)
def test_a_d_that_takes_tokens_of_others_is_prepared(given: Any) -> None:
    assert changed() == set()
    InputProcessor(vllm_config=SimpleNamespace(kv_transfer_config=given))  # type: ignore[arg-type]
    assert changed() == {name for _, name in PLACES}


@pytest.mark.parametrize(
    "given",
    [
        None,
        transfer(OTHER, "kv_consumer"),
        transfer(OURS, "kv_producer"),
        transfer(OURS, "kv_consumer", first_token="off"),
        inside(kv_connector=OTHER, kv_role="kv_consumer"),
        inside(kv_connector=OURS, kv_role="kv_producer"),
        inside(kv_connector=OURS, kv_role="kv_consumer", kv_connector_extra_config={"first_token": "off"}),
    ],
)
def test_nothing_of_any_other_engine_is_changed(given: Any) -> None:
    InputProcessor(SimpleNamespace(kv_transfer_config=given))  # type: ignore[arg-type]
    assert changed() == set()


def test_an_engine_without_a_server_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.async_llm")
    InputProcessor(SimpleNamespace(kv_transfer_config=transfer(OURS, "kv_consumer")))  # type: ignore[arg-type]
    assert changed() == {"put", "get", "get_nowait"}


def test_a_server_that_is_another_one_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_reports, "wrap_servers", lambda: "it is another one")
    InputProcessor(SimpleNamespace(kv_transfer_config=transfer(OURS, "kv_consumer")))  # type: ignore[arg-type]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith("streams of responses and messages do not go on elsewhere: it is another one")


def without_input_processor(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "vllm.v1.engine.input_processor", None)


def with_another_queue(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(RequestOutputCollector, "get_nowait")


def in_rust(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("VLLM_USE_RUST_FRONTEND", "1")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (without_input_processor, "this vLLM has vllm.v1.engine.input_processor elsewhere"),
        (with_another_queue, "this vLLM's queues of outputs differ"),
        (in_rust, "vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND) takes no changes from here"),
    ],
)
def test_a_front_end_that_cannot_be_changed_is_said_in_both_processes(
    other: Callable[[pytest.MonkeyPatch], None],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the engine core an answer that goes on begins anew then (tests/unit/test_connector.py)."""
    other(monkeypatch)
    plugin.register()
    if other is with_another_queue:  # which no other engine is told of
        assert "queues" not in caplog.text
        InputProcessor(SimpleNamespace(kv_transfer_config=transfer(OURS, "kv_consumer")))  # type: ignore[arg-type]
    assert f"no answer goes on token by token: {why}" in caplog.text
    assert front_end.unfit() == why
