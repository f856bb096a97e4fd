# SPDX-License-Identifier: Apache-2.0
"""The metaserver's settings: each flag reaches its setting, and a value outside its range is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.command import settings_of
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, RetryPolicy
from vllm_ascend_pd.router.settings import FLAGS, Settings

TOKEN = "a-word-of-sixteen-characters"

# setting: (words of the command line, the value that they give, impossible values). Listed here, so that a flag that is
# added, removed, or checked less, fails a test.
GIVEN: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "workers": ("--workers 2", 2, ("0", "-1")),
    "host": ("--host 10.0.0.1", "10.0.0.1", ()),
    "port": ("--port 9000", 9000, ("-1", "65536")),
    "worker_port": ("--worker-port 9001", 9001, ("-1", "65536")),
    "advertise_host": ("--advertise-host pd.example", "pd.example", ("http://x:1",)),
    "grace_s": ("--grace 1.5", 1.5, ("0", "-1", "inf")),
    "prefill": ("--prefill a:1 b:2", ("a:1", "b:2"), ("a:0",)),
    "decode": ("--decode a:1 b:2", ("a:1", "b:2"), ("a:0",)),
    "instances_file": ("--instances engines.yaml", "engines.yaml", ()),
    "prefill_service": ("--prefill-service pd-prefill", "pd-prefill", ()),
    "decode_service": ("--decode-service pd/pd-decode:http", "pd/pd-decode:http", ()),
    "kubernetes_api": ("--kubernetes-api http://127.0.0.1:8001", "http://127.0.0.1:8001", ()),
    "prefill_allowed": ("--prefill-allowed 10.0.0.0/8", ("10.0.0.0/8",), ("10.0.0.0/33",)),
    "without_prefill": ("--without-prefill refuse", "refuse", ()),
    "prefix_tokens": ("--prefix-tokens 0", 0, ("-1",)),
    "kv_events": ("--kv-events 5557", ("5557",), ("0",)),
    "decode_alone": ("--decode-alone-tokens 64", 64, ("-1",)),
    "retry": ("--attempts 1", RetryPolicy(1), ("0",)),
    "circuit": ("--circuit-failures 1", CircuitPolicy(1), ("0",)),
    "probe_every_s": ("--probe-every 0.01", 0.01, ("0.009", "0", "nan")),
    "connect_timeout_s": ("--connect-timeout 1e-3", 0.001, ("0", "nan")),
    "first_byte_timeout_s": ("--first-byte-timeout 1e-3", 0.001, ("0", "inf")),
    "prefill_timeout_s": ("--prefill-timeout 1e-3", 0.001, ("0", "-1")),
    "idle_timeout_s": ("--idle-timeout 1e-3", 0.001, ("0", "-inf")),
    "resume_tokens": ("--resume-tokens 0", 0, ("-1",)),
    "resume_bytes": ("--resume-mib 1", 1 << 20, ("-1",)),
    "resume_seeded": ("--no-resume-seeded", False, ()),
    "canary": ("--no-canary", False, ()),
    "max_running": ("--max-running 1", 1, ("0",)),
    "max_waiting": ("--max-waiting 0", 0, ("-1",)),
    "max_wait_s": ("--max-wait 0", 0.0, ("-1", "nan")),
    "max_body_bytes": ("--max-body-mib 1", 1 << 20, ("0",)),
    "admin_token": ("--admin-token-file {tmp}/token", TOKEN, ("/nowhere/token",)),
    "engine_token": ("--engine-token-file {tmp}/token", TOKEN, ("/nowhere/token",)),
    "client_tokens": ("--client-token-file {tmp}/token", (TOKEN,), ("/nowhere/token",)),
    "lend_engine_token": ("", None, ()),
    "tls_cert": ("", None, ("c.pem",)),
    "tls_key": ("", None, ()),
    "engine_ca": ("", None, ("/nowhere/ca.pem",)),
    "deployment": ("--deployment blue", "blue", ()),
    "trace_dir": ("--trace-dir {tmp}", "{tmp}", ("/dev/null/traces",)),
    "otlp_traces_endpoint": ("--otlp-traces-endpoint http://c:4318", "http://c:4318", ()),
}
# test_tls.py has the certificates, test_metaserver_keys.py the key, without which it cannot be lent
FILES = ("tls_cert", "tls_key", "engine_ca", "lend_engine_token")


def made(setting: str, words: str) -> Settings:
    """Return the settings of the subcommand that has the flag."""
    sidecar = ["sidecar", "--decode", "d:1", *(["--prefill-allowed", "p"] if setting != "prefill_allowed" else [])]
    start = sidecar if FLAGS[setting].only == "sidecar" else ["metaserver"]
    return settings_of(parser().parse_args([*start, *words.split()]))


def test_the_list_of_this_test_is_complete() -> None:
    assert GIVEN.keys() == FLAGS.keys()
    assert len({flag.name for flag in FLAGS.values()}) == len(FLAGS)


def test_without_flags_everything_has_its_declared_default() -> None:
    assert settings_of(parser().parse_args(["metaserver"])) == Settings()
    sidecar = settings_of(parser().parse_args(["sidecar", "--decode", "d:1", "--prefill-allowed", "p"]))
    assert sidecar == Settings(sidecar=True, canary=False, decode=("d:1",), prefill_allowed=("p",))


@pytest.mark.parametrize("setting", [name for name in GIVEN if name not in FILES])
def test_a_flag_changes_its_setting_and_no_other(setting: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    words, value, _ = GIVEN[setting]
    value = value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value
    settings = made(setting, words.replace("{tmp}", str(tmp_path)))
    assert getattr(settings, setting) == value != getattr(Settings(), setting)
    without = made("prefill_allowed", "--prefill-allowed p") if FLAGS[setting].only == "sidecar" else Settings()
    assert settings == dataclasses.replace(without, **{setting: value})


@pytest.mark.parametrize(("setting", "value"), [(name, bad) for name, (_, _, wrong) in GIVEN.items() for bad in wrong])
def test_an_impossible_value_is_refused_by_the_name_of_its_flag(setting: str, value: str) -> None:
    flag = FLAGS[setting].name
    with pytest.raises(ConfigError) as caught:
        made(setting, f"{flag}={value}")
    assert (flag in caught.value.sentence and caught.value.code == "PD-CONF-003") or value in caught.value.sentence
    assert caught.value.remedy


def test_a_choice_is_checked_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        made("without_prefill", "--without-prefill hope")
    assert "local" in capsys.readouterr().err
