# SPDX-License-Identifier: Apache-2.0
"""vLLM's front end is prepared for tokens of others where its configuration asks for them, and nowhere else."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_ascend_pd import plugin
from vllm_ascend_pd.vllm_patches import one_by_one, token_reports

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


def test_what_is_another_one_there_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(one_by_one, "install", lambda: "it is another one")
    monkeypatch.setattr(token_reports, "wrap_servers", lambda: "that too")
    InputProcessor(SimpleNamespace(kv_transfer_config=transfer(OURS, "kv_consumer")))  # type: ignore[arg-type]
    said = {record.message.partition(": ")[2] for record in caplog.records if record.levelname == "WARNING"}
    assert said == {
        "answers that go on do not come token by token: it is another one",
        "streams of responses and messages do not go on elsewhere: that too",
    }


def test_a_release_without_it_serves_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.input_processor", None)
    plugin.register()
    assert "no answer goes on token by token: this vLLM has vllm.v1.engine.input_processor elsewhere" in caplog.text
