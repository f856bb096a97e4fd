# SPDX-License-Identifier: Apache-2.0
"""Choosing and preparing a transfer engine: lazily, with the environment that our guarantees need, or a clear
refusal."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd.config import WireConfig
from vllm_ascend_pd.errors import ConfigError, PdError
from vllm_ascend_pd.transport import package
from vllm_ascend_pd.transport.create import create_target


def test_tcp_is_forced_and_the_timeout_is_ours() -> None:
    environ = {"MC_TRANSFER_TIMEOUT": "99"}
    package.prepare_environment(environ, "tcp", 7.5)
    assert environ["MC_FORCE_TCP"] == "1"
    assert environ["MC_TRANSFER_TIMEOUT"] == "8"
    assert environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"


def test_what_the_operator_set_is_kept_where_no_promise_depends_on_it() -> None:
    environ = {"MC_LOG_LEVEL": "INFO", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "77"}
    package.prepare_environment(environ, "tcp", 30)
    assert (environ["MC_LOG_LEVEL"], environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]) == ("INFO", "77")


@pytest.mark.parametrize(
    "protocol, name, value",
    [("tcp", "MC_TCP_PROTO", "1"), ("ascend", "MC_FORCE_TCP", "1"), ("rdma", "MC_FORCE_TCP", "yes")],
)
def test_settings_that_break_a_promise_stop_the_start(protocol: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        package.prepare_environment({name: value}, protocol, 30)
    assert caught.value.code == "PD-CONF-003"


def test_ascends_timeouts_end_before_mooncake_gives_up_whatever_is_set() -> None:
    for budget, connect, transfer in ((30, "3000", "10000"), (10, "1000", "3333"), (0.5, "50", "166")):
        environ = {"MC_TCP_PROTO": "1"}  # for tcp only
        package.prepare_environment(environ, "ascend", budget)
        assert (environ["ASCEND_CONNECT_TIMEOUT"], environ["ASCEND_TRANSFER_TIMEOUT"]) == (connect, transfer)
        assert 2 * (int(connect) + int(transfer)) < budget * 1000
    kept = {"ASCEND_CONNECT_TIMEOUT": "4000", "ASCEND_TRANSFER_TIMEOUT": "10999"}
    environ = dict(kept)
    package.prepare_environment(environ, "ascend", 30)
    assert kept.items() <= environ.items()


@pytest.mark.parametrize("timeouts", [("5000", "10000"), ("", "12000"), ("soon", ""), ("-1", ""), ("0", "")])
def test_timeouts_with_which_mooncake_would_give_up_too_early_stop_the_start(timeouts: tuple[str, str]) -> None:
    environ = {f"ASCEND_{name}_TIMEOUT": v for name, v in zip(("CONNECT", "TRANSFER"), timeouts, strict=True) if v}
    with pytest.raises(ConfigError, match="ASCEND_CONNECT_TIMEOUT") as caught:
        package.prepare_environment(environ, "ascend", 30)
    assert caught.value.code == "PD-CONF-003" and ("below" in str(caught.value) or "milliseconds" in str(caught.value))
    package.prepare_environment(environ, "tcp", 30)


def test_versions_compare_by_their_numbers() -> None:
    ordered = ["0.3.9", "0.3.11.post1", "0.3.13", "0.3.13.post1", "0.3.13.post2+local9", "0.4.0"]
    assert sorted(ordered, key=package.version_key) == ordered


@pytest.mark.parametrize("name", package.DISTRIBUTIONS)
def test_any_distribution_of_the_engine_is_found_where_it_is_the_only_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NPU host has only `mooncake-transfer-engine-npu`: the names tried before it are not installed there."""
    about = tmp_path / f"{name.replace('-', '_')}-0.3.13.post1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3.13.post1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert package.installed_version() == (name, "0.3.13.post1")
    shutil.rmtree(about)
    assert package.installed_version() is None, "an engine that no package has installed"


def test_an_engine_that_is_too_old_for_tcp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake")
    monkeypatch.setattr(package, "installed_version", lambda: ("mooncake-transfer-engine-npu", "0.3.11.post1"))
    with pytest.raises(PdError, match=r"0\.3\.11\.post1 is too old for tcp") as caught:
        package.load("tcp")
    assert caught.value.code == "PD-WIRE-001"
    package.load("ascend")


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(PdError, match=r"mooncake\.engine") as caught:
        create_target(WireConfig(mooncake_protocol="tcp"), "127.0.0.1")
    assert caught.value.code == "PD-WIRE-001"


def test_nothing_is_imported_before_it_is_chosen() -> None:
    program = (
        "import sys, vllm_ascend_pd.transport.create as c, vllm_ascend_pd.transport.wire\n"
        "from vllm_ascend_pd.config import WireConfig\n"
        "c.create_target(WireConfig(transport='memory'), 'x').close()\n"
        "print([m for m in ('mooncake', 'torch', 'torch_npu') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
