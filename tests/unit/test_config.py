# SPDX-License-Identifier: Apache-2.0
"""PushConfig: every key, every invalid value, and the page that documents it."""

from __future__ import annotations

import dataclasses
import difflib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd import config as module
from vllm_ascend_pd.config import PushConfig, reference
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.settings import reference as flags_reference

ROOT = Path(__file__).parents[2]
GROUPS = {f.name: f.default for f in dataclasses.fields(PushConfig) if dataclasses.is_dataclass(f.default)}
DECLARED = {f.name: (group, f) for group, default in GROUPS.items() for f in dataclasses.fields(default)}  # type: ignore[arg-type]

# key: (another valid value, values of a wrong type, values out of range). Listed here, so that a key that is added,
# removed, or checked less, fails a test.
NO_TEXT: tuple[Any, ...] = (1, True, None, ["x"])
NO_FLAG: tuple[Any, ...] = (1, 0, "true", None)
NO_WHOLE: tuple[Any, ...] = (1.5, "1", True, None)
NO_NUMBER: tuple[Any, ...] = ("1", True, None, [1])
NAN, INF = float("nan"), float("inf")
KEYS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "side_channel_host": ("10.0.0.1", NO_TEXT, ()),
    "side_channel_port": (5000, NO_WHOLE, (-1, 65536, 10**400)),
    "advertise_host": ("10.0.0.1", NO_TEXT, ()),
    "secret_file": ("/s", NO_TEXT, ()),
    "secret_file_previous": ("/p", NO_TEXT, ()),
    "allow_unauthenticated": (True, NO_FLAG, ()),
    "metaserver_urls": (["http://h:1"], ("http://h:1", 1, None, [1], {"a": 1}), ()),
    "metaserver_max_connections": (3000, NO_WHOLE, (0, 100_001)),
    "metaserver_max_queue": (5, NO_WHOLE, (0, 1_000_001)),
    "metaserver_connect_timeout_s": (2, NO_NUMBER, (0, 121, NAN, INF)),
    "tls_ca_file": ("/ca", NO_TEXT, ()),
    "tls_cert_file": ("/c", NO_TEXT, ()),
    "tls_key_file": ("/k", NO_TEXT, ()),
    "tls_verify": (False, NO_FLAG, ()),
    "hold_sources": (64, NO_WHOLE, (-1, 100_001)),
    "hold_share": (0.5, NO_NUMBER, (-0.1, 1.1, NAN)),
    "bootstrap_port": (8998, NO_WHOLE, (-1, 65536)),
    "prefill_listeners": (["10.0.0.1", "p.example:5600"], ("10.0.0.1", 1, None, [1]), ()),
    "transport": ("memory", NO_TEXT, ("nixl", "")),
    "mooncake_protocol": ("tcp", NO_TEXT, ("TCP", "nvlink")),
    "model_version": ("r2", NO_TEXT, ()),
    "transfer_timeout_s": (40, NO_NUMBER, (4.9, 111, NAN)),
    "max_descriptors": (100, NO_WHOLE, (0, 65536)),
    "fuse_layers": (1, NO_WHOLE, (0, 65)),
    "first_token": ("off", NO_TEXT, ("on", "")),
    "first_token_wait_s": (1, NO_NUMBER, (-0.1, 10.5, NAN)),
    "verify": ("full", NO_TEXT, ("yes",)),
    "regroup": ("never", NO_TEXT, ("on",)),
    "regroup_min_span": (4096, NO_WHOLE, (0, -5)),
    "regroup_kernels": ("own", NO_TEXT, ("kernels",)),
    "staging_slots": (8, NO_WHOLE, (0, 257)),
    "staging_destinations": (8, NO_WHOLE, (0, 257)),
    "lease_s": (10, NO_NUMBER, (0.1, 121, NAN)),
    "margin_s": (1, NO_NUMBER, (0, 61)),
    "ready_timeout_s": (10, NO_NUMBER, (0.1, 601)),
    "stall_timeout_s": (10, NO_NUMBER, (0.1, 3601)),
    "recv_deadline_s": (100, NO_NUMBER, (0.4, 86401, INF)),
    "meet_s": (10, NO_NUMBER, (0.1, 3601)),
    "hold_s": (10, NO_NUMBER, (0.4, 3601)),
    "preempt_drain_s": (0, NO_NUMBER, (-1, 61)),
    "resend_first_s": (0.1, NO_NUMBER, (0, 11)),
    "resend_max_s": (4, NO_NUMBER, (0, 61)),
    "quiet_extra_s": (2, NO_NUMBER, (-0.1, 61)),
    "trace_dir": ("/t", NO_TEXT, ()),
    "patient": (False, NO_FLAG, ()),
}
NEEDS = {"secret_file_previous": {"secret_file": "/s"}, "tls_key_file": {"tls_cert_file": "/c"}}


def value_of(parsed: PushConfig, key: str) -> Any:
    return getattr(getattr(parsed, DECLARED[key][0]), key)


def test_the_list_of_this_test_is_complete() -> None:
    assert set(KEYS) == set(DECLARED)


@pytest.mark.parametrize("key", DECLARED)
def test_a_default_is_in_its_range(key: str) -> None:
    declared = DECLARED[key][1]
    declared.metadata["setting"].check(key, declared.default)


def test_without_keys_everything_has_its_default() -> None:
    parsed = PushConfig.parse({})
    assert parsed == PushConfig()
    assert all(value_of(parsed, key) == declared.default for key, (_, declared) in DECLARED.items())


@pytest.mark.parametrize("key", KEYS)
def test_a_valid_value_is_taken(key: str) -> None:
    value = KEYS[key][0]
    parsed = PushConfig.parse({key: value, **NEEDS.get(key, {})})
    taken = value_of(parsed, key)
    assert taken == (tuple(value) if isinstance(value, list) else value)
    assert taken != DECLARED[key][1].default
    assert type(taken) is type(DECLARED[key][1].default)
    others = {k: value_of(parsed, k) for k in KEYS if k != key and k not in NEEDS.get(key, {})}
    assert others == {k: value_of(PushConfig(), k) for k in others}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, wrong, _) in KEYS.items() for value in wrong])
def test_a_wrong_type_is_named_with_the_key_the_value_and_the_default(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse({key: value, **NEEDS.get(key, {})})
    error = caught.value
    assert error.code == "PD-CONF-002"
    assert key in error.sentence and repr(value) in error.sentence and key in error.remedy


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, _, wrong) in KEYS.items() for value in wrong])
def test_an_impossible_value_is_named_with_what_is_possible(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse({key: value})
    error = caught.value
    assert error.code == "PD-CONF-003"
    assert key in error.sentence and repr(DECLARED[key][1].default) in error.remedy
    setting = DECLARED[key][1].metadata["setting"]
    bounds = [repr(choice) for choice in setting.choices] or [
        f"{bound:.10g}" for bound in (setting.low, setting.high) if bound is not None
    ]
    assert all(bound in error.remedy for bound in bounds), error


def test_a_models_version_is_short_since_each_reservation_carries_it() -> None:
    assert PushConfig.parse({"model_version": "x" * 64}).wire.model_version == "x" * 64
    with pytest.raises(ConfigError, match=r"model_version.* longer than 64") as caught:
        PushConfig.parse({"model_version": "x" * 65})
    assert caught.value.code == "PD-CONF-003"


@pytest.mark.parametrize(
    "key", [key for key, (_, declared) in DECLARED.items() if declared.metadata["setting"].low is not None]
)
def test_the_borders_of_a_range_are_inside(key: str) -> None:
    declared = DECLARED[key][1]
    for border in (declared.metadata["setting"].low, declared.metadata["setting"].high):
        if border is not None:
            # Keys that are compared with each other get values that allow both bounds.
            beside = {
                "resend_first_s": 0.01,
                "resend_max_s": 60,
                "lease_s": 120,
                "quiet_extra_s": 0,
                "transport": "memory",
                "ready_timeout_s": 0.2,
            }
            value_of(PushConfig.parse({**beside, key: border}), key)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("side_chanel_port", "side_channel_port"), ("lease", "lease_s"), ("metaserver_url", "metaserver_urls"),
     ("Verify", "verify"), ("prefil", "prefill"), ("", None), ("zzz", None), (7, None)],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest(key: Any, nearest: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse({key: 1})
    assert caught.value.code == "PD-CONF-001" and repr(key) in caught.value.sentence
    assert nearest is None or repr(nearest) in caught.value.remedy


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"resend_first_s": 3, "resend_max_s": 2}, "resend_max_s"),
        ({"lease_s": 0.5, "resend_first_s": 0.2}, "lease_s"),
        ({"recv_deadline_s": 3, "ready_timeout_s": 30}, "recv_deadline_s"),
        ({"transfer_timeout_s": 110, "quiet_extra_s": 10.5}, "transfer_timeout_s"),
        ({"quiet_extra_s": 1.9}, "quiet_extra_s"),
        ({"secret_file_previous": "/p"}, "secret_file_previous"),
        ({"tls_key_file": "/k"}, "tls_key_file"),
    ],
)
def test_values_that_do_not_go_together_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse(keys)
    assert caught.value.code == "PD-CONF-003" and named in caught.value.sentence and caught.value.remedy


BAD_URLS = ["", "h:1", "ftp://h:1", "http://", "http://:1", "http://h:1/v1", "http://h:1?x=1", "http://h:1#x", "http://u:p@h:1",
            "http://h:99999", "http://h:0", "http://h:one", "http://[::1", "//h:1", "http:///x"]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_what_is_not_scheme_host_and_port_is_no_metaserver(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse({"metaserver_urls": ["http://good:1", url]})
    assert caught.value.code == "PD-CONF-003" and repr(url) in caught.value.sentence


@pytest.mark.parametrize("url", ["http://h:1", "https://h", "http://h:1/", "http://[::1]:80", "HTTP://H:1"])
def test_an_origin_is_a_metaserver(url: str) -> None:
    assert PushConfig.parse({"metaserver_urls": (url,)}).metaserver.metaserver_urls == (url,)


@pytest.mark.parametrize("listener", ["p:0", ":5600", "p:one", "p:99999", ""])
def test_what_is_neither_host_nor_host_and_port_is_no_listener(listener: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse({"prefill_listeners": ["10.0.0.1", listener]})
    assert caught.value.code == "PD-CONF-003" and repr(listener) in caught.value.sentence


def test_what_is_unsafe_is_off_until_it_is_asked_for() -> None:
    defaults = PushConfig()
    assert defaults.metaserver.tls_verify and not defaults.channel.allow_unauthenticated
    assert defaults.metaserver.metaserver_urls == (), "no metaserver is called that was not named"
    assert defaults.meet.prefill_listeners == () and not defaults.meet.hold_sources


def test_the_quiet_time_is_the_transports_and_the_extra() -> None:
    assert PushConfig.parse({"transfer_timeout_s": 7, "quiet_extra_s": 3}).quiet_s == 10
    assert PushConfig().quiet_s == 40


# -- the predecessor's keys


def test_the_predecessors_sizes_are_kept_for_the_check() -> None:
    sizes = {"prefill": {"tp_size": 4, "dp_size": 1}, "decode": {"tp_size": 2}}
    assert PushConfig.parse(sizes).sizes == sizes


@pytest.mark.parametrize(
    "value", [4, "4", None, [4], {"tp_size": 0}, {"tp_size": "4"}, {"tp_size": True}, {"tp_size": -1}]
)
def test_the_predecessors_sizes_are_checked(value: Any) -> None:
    for side in ("prefill", "decode"):
        with pytest.raises(ConfigError) as caught:
            PushConfig.parse({side: value})
        assert caught.value.code == "PD-CONF-002" and side in caught.value.sentence


def test_the_predecessors_other_keys_are_listed_as_ignored() -> None:
    theirs = {
        "use_ascend_direct": True,
        "ascend_local_comm_res_path": "",
        "tls_config": {},
        "send_type": "PUT",
        "kv_port": "1",
    }
    parsed = PushConfig.parse({**theirs, "lease_s": 9})
    assert set(parsed.ignored) == set(theirs) and parsed.timers.lease_s == 9


# -- what the configuration is used as


def test_a_configuration_cannot_be_changed_and_crosses_processes() -> None:
    parsed = PushConfig.parse({"lease_s": 9, "decode": {"tp_size": 2}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.timers.lease_s = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(parsed)) == parsed


def test_an_error_crosses_processes_with_its_code_and_values() -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.parse({"lease": 1})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.code, str(copy)) == (ConfigError, "PD-CONF-001", str(caught.value))


# -- the page


def test_the_documented_table_is_the_code() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = f"{reference()}\n{flags_reference()}"
    documented = [line for line in page.splitlines() if line.startswith("|")]
    differences = "\n".join(
        difflib.unified_diff(documented, table.splitlines(), "docs/configuration.md", "code", lineterm="")
    )
    assert not differences, (
        f"python -m vllm_ascend_pd.config and …router.settings print the tables to paste:\n{differences}"
    )
    for key in (*module.CHECKED_SIZES, *module.IGNORED):
        assert f"`{key}`" in page


def test_the_table_has_a_line_for_each_key_with_its_default_and_owner() -> None:
    lines = {line.split("`")[1]: line for line in reference().splitlines()[2:]}
    assert list(lines) == list(DECLARED)
    for key, line in lines.items():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 5 and cells[2] in ("P", "D", "P, D") and len(cells[3]) > 5, key
    assert '`"mooncake"`' in lines["transport"] and "`false`" in lines["allow_unauthenticated"]
    assert "1–1000000" in lines["metaserver_max_queue"] and "1 or more" in lines["regroup_min_span"]


def test_the_module_prints_the_table() -> None:
    command = [sys.executable, "-m", "vllm_ascend_pd.config"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.strip() == reference()
