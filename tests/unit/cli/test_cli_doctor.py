# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd doctor`: each problem that would show later is named with its remedy, and a pair really transfers."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.support.process import free_port
from unit.channel.kit import AnsweringListener
from unit.cli.published import written
from unit.router.cluster import cluster
from vllm_ascend_pd.admission import listening_offsets
from vllm_ascend_pd.cli.__main__ import main
from vllm_ascend_pd.cli.checkup import host, npu, pair
from vllm_ascend_pd.cli.checkup.check import FAILURE, GOOD, NOTE, WARNING, Check
from vllm_ascend_pd.cli.checkup.line import Broken, Line, dial
from vllm_ascend_pd.config import ChannelConfig, MetaserverConfig, PushConfig
from vllm_ascend_pd.observe.tally import PREFIX
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.shared.loop import LoopThread

ROOT = Path(__file__).parents[3]
DOCTOR = [sys.executable, "-m", "vllm_ascend_pd.cli", "doctor"]
LOOPBACK = "127.0.0.1"
needs_mooncake = pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="Mooncake is not installed")
MODEL = {"num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048, "num_hidden_layers": 3}


def doctor(*words: str, process: bool = False) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Run the doctor; return its exit code and the checks by name.

    A process of its own takes seconds to import vLLM, so it is for the tests that need one.
    """
    if process:
        done = subprocess.run(
            [*DOCTOR, *words, "--json"], cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
            code = main(["doctor", *words, "--json"])
        out, err = stdout.getvalue(), stderr.getvalue()
    assert "Traceback" not in err, err
    report = json.loads(out)
    assert report["good"] is (code == 0)
    by_name: dict[str, list[dict[str, str]]] = {}
    for check in report["checks"]:
        by_name.setdefault(check["name"], []).append(check)
    return code, by_name


@contextmanager
def listening(*words: str, calls: int = 1) -> Iterator[str]:
    """Start a doctor that listens, in a process of its own; yield its address."""
    command = [*DOCTOR, "--listen", f"{LOOPBACK}:0", "--calls", str(calls), *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].strip("`")
    finally:
        process.terminate()
        _, said = process.communicate(timeout=30)
        assert "Traceback" not in said, said


def secret_file(directory: Path, name: str = "secret", fill: str = "x") -> str:
    file = directory / name
    file.write_text(fill * 40)
    file.chmod(0o600)
    return str(file)


# ---- one host


def test_this_host_is_good_and_each_check_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and not [line for line in lines if line.startswith(FAILURE)]
    names = {line.split()[1] for line in lines}
    assert {"python", "versions", "mooncake", "compiled", "ports", "open", "shared", "clock", "secret", "npu"} <= names


def test_what_would_not_work_makes_the_exit_code_and_names_a_remedy(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    Path(secret).chmod(0o644)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        code, report = doctor("--ports", str(taken.getsockname()[1]), "--secret-file", secret)
    assert code == 1
    assert report["ports"][0]["level"] == FAILURE and "cannot be bound" in report["ports"][0]["says"]
    assert report["secret file"][0]["level"] == FAILURE and "PD-SEC-001" in report["secret file"][0]["says"]
    assert all(check["remedy"] for checks in report.values() for check in checks if check["level"] == FAILURE)


def test_the_engines_configuration_is_read_as_the_engine_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"secret_file": secret_file(tmp_path), "kv_port": 1},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    code, report = doctor("--kv-transfer-config", f"@{file}", process=True)
    assert code == 0 and report["secret file"][0]["level"] == GOOD
    said = [check["says"] for check in report["configuration"]]
    assert any("kv_port" in words for words in said) and any("metaserver_urls" in words for words in said)
    assert main(["doctor", "--kv-transfer-config", '{"kv_connector_extra_config": {"secret_fil": ""}}']) == 1
    assert "secret_file" in capsys.readouterr().out
    assert main(["doctor", "--kv-transfer-config", "{"]) == 2
    assert main(["doctor", "--peer", "nowhere"]) == 2


OURS = {"kv_connector": "AscendPushConnector", "kv_role": "kv_producer"}
EVERYWHERE = {**OURS, "kv_connector_extra_config": {"side_channel_host": "0.0.0.0", "allow_unauthenticated": True}}
SIZED = {**OURS, "kv_connector_extra_config": {"prefill": {"tp_size": 2}}}
RANKED = {**OURS, "kv_connector_extra_config": {"prefill": {"dp_size": 8}}}
HOLDING = {**OURS, "kv_connector_extra_config": {"hold_sources": 4, "mooncake_protocol": "tcp"}}


@pytest.mark.parametrize(
    ("given", "words", "says"),
    [
        ({**OURS, "kv_role": "both"}, [], "PD-CONF-004: kv_role = 'both' cannot be used with this connector."),
        ({"kv_role": "kv_both"}, [], "PD-CONF-004: kv_role = 'kv_both' cannot be used with this connector."),
        ({"kv_connector": "AscendPushConnector"}, [], "PD-CONF-004: kv_role = None"),
        ({**OURS, "kv_connector": "NixlConnector"}, [], "PD-CONF-003: kv_connector = 'NixlConnector' is impossible"),
        (EVERYWHERE, [], "PD-CONF-003: side_channel_host = '0.0.0.0'"),
        (OURS, ["--tp", "2", "--dcp", "2"], "PD-CONF-005: Context parallelism without vllm-ascend"),
        (SIZED, ["--tp", "4"], "PD-CONF-006: prefill.tp_size = 2 in the configuration, but this engine runs with 4"),
        (RANKED, ["--dp", "4"], "PD-CONF-006: prefill.dp_size = 8 in the configuration, but this engine runs with 4"),
    ],
)
def test_what_the_engine_would_refuse_is_a_failure_in_the_engines_own_words(
    given: dict[str, Any], words: list[str], says: str
) -> None:
    code, report = doctor("--kv-transfer-config", json.dumps(given), *words)
    failures = [check for checks in report.values() for check in checks if check["level"] == FAILURE]
    assert code == 1 and len(failures) == 1
    assert failures[0]["says"].startswith(says) and failures[0]["remedy"]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_configuration_that_the_engine_takes_is_good(role: str) -> None:
    """Also with the predecessor's sizes, if the engine's own are not given."""
    extra = {"prefill": {"tp_size": 4}, "decode": {"tp_size": 2}}
    code, report = doctor(
        "--kv-transfer-config", json.dumps({**OURS, "kv_role": role, "kv_connector_extra_config": extra})
    )
    assert code == 0 and report["connector"][0]["level"] == report["admission"][0]["level"] == GOOD


def test_a_part_of_a_configuration_can_be_checked_and_is_said_to_be_no_whole() -> None:
    code, report = doctor("--kv-transfer-config", "{}")
    assert code == 0 and report["connector"][0]["level"] == WARNING and "admission" not in report


def test_the_model_line_says_which_layers_keep_what(tmp_path: Path) -> None:
    _, report = doctor("--only-configuration", "--model", written(tmp_path, "Qwen3-Next"))
    assert "2 KV heads × 256, 48 layers (12 with attention, 36 with a state)" in report["model"][0]["says"]
    _, report = doctor("--only-configuration", "--model", written(tmp_path, "gpt-oss-120b"))
    assert "36 layers (18 with a window of 128 tokens)" in report["model"][0]["says"]


UNDESCRIBED = {
    "compressed latents": {**MODEL, "compress_ratios": [0, 4, 128], "sliding_window": 128},
    "chunks": {**MODEL, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"]},
    "Mamba-2 alone": {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "num_hidden_layers": 64},
    "GPT-2": {"n_head": 12, "n_layer": 12, "n_embd": 768},
}


@pytest.mark.parametrize("config", UNDESCRIBED.values(), ids=UNDESCRIBED)
def test_a_model_that_the_reader_cannot_describe_is_left_to_the_engine(config: dict[str, Any], tmp_path: Path) -> None:
    """The start scripts look so before a start."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, report = doctor("--only-configuration", "--model", str(tmp_path))
    assert code == 0 and report["model"][0]["level"] == NOTE and "the engine decides" in report["model"][0]["says"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        (json.dumps({**MODEL, "mamba_d_state": 16}), "PD-CONF-005: A model with recurrent states"),
    ],
)
def test_a_model_that_cannot_be_read_or_is_refused_is_a_failure(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    code, report = doctor("--only-configuration", "--model", str(tmp_path))
    assert code == 1 and report["model"][0]["level"] == FAILURE and says in report["model"][0]["says"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--kv-transfer-config", "@missing"], "'@missing'"),
        (["--kv-transfer-config", '{"kv_connector_extra_config": []}'], "kv_connector_extra_config = []"),
        (["--kv-transfer-config", '["kv_role"]'], "not an object"),
        (["--ports", "8000", "70000"], "--ports = 70000"),
        (["--ports", "-1"], "--ports = -1"),
        (
            ["--ranks", "4", "--kv-transfer-config", '{"kv_connector_extra_config": {"side_channel_port": 65535}}'],
            "side_channel_port = 65535",
        ),
        (["--ranks", "0"], "--ranks = 0"),
        (["--dp", "0"], "--dp = 0"),
        (["--dp-size-local", "2"], "--dp-size-local = 2"),
        (["--dp", "4", "--dp-start-rank", "4"], "--dp-start-rank = 4"),
        (["--dp", "4", "--dp-start-rank", "2", "--dp-size-local", "3"], "--dp-start-rank = 2"),
        (
            [
                "--dp",
                "4",
                "--tp",
                "2",
                "--kv-transfer-config",
                '{"kv_connector_extra_config": {"side_channel_port": 65530}}',
            ],
            "side_channel_port = 65530",
        ),
        (["--tp", "0"], "--tp = 0"),
        (["--dcp", "0"], "--dcp = 0"),
        (["--listen", "--model", "{model}", "--tp", "4", "--dcp", "2"], "--dcp = 2"),
        (["--listen", "--model", "{model}", "--interleave", "16"], "--interleave = 16"),
        (["--listen", "--model", "{model}", "--tp", "3"], "--tp = 3"),
        (["--block-size", "-1"], "--block-size = -1"),
        (["--listen", "--calls", "-1"], "--calls = -1"),
        (["--host", ".."], "--host = '..'"),
        (["--listen", "..:70"], "--listen = '..'"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_with_the_remedy(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert main(["doctor", *(str(tmp_path) if word == "{model}" else word for word in words)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("PD-CONF-003") and named in printed.err
    assert not printed.out and printed.err.count("\n") == 1


def test_the_last_port_there_is_can_be_the_last_ranks(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"kv_connector_extra_config": {"side_channel_port": 65534}}')
    _, report = doctor("--ranks", "2", "--kv-transfer-config", f"@{file}")
    assert len(report["ports"]) == 2


@pytest.mark.parametrize(("role", "each"), [("kv_consumer", 4), ("kv_producer", 1)])
def test_the_ports_of_a_hosts_data_parallel_ranks_are_those_that_its_engine_takes(role: str, each: int) -> None:
    """Ranks 2 and 3 of four, TP 2 and PP 2. On P the scheduler of each rank listens, for prompts that P holds."""
    base = free_port(count=16)
    given = {**HOLDING, "kv_role": role}
    given["kv_connector_extra_config"] = {"side_channel_port": base, "hold_sources": 4 * (role == "kv_producer")}
    words = ("--dp", "4", "--dp-start-rank", "2", "--tp", "2", "--pp", "2")
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "cp_kv_cache_interleave_size": 1}
    ranks = [listening_offsets(SimpleNamespace(**parallel, data_parallel_index=rank)) for rank in (2, 3)]
    wanted = [port for ports in ranks for port in ports] if role == "kv_consumer" else [2, 3]
    with socket.create_server((LOOPBACK, base + wanted[-1])):
        code, report = doctor("--kv-transfer-config", json.dumps(given), *words)
    assert len(wanted) == 2 * each and [check["says"].split()[0] for check in report["ports"]] == [
        f"{LOOPBACK}:{base + port}" for port in wanted
    ]
    assert code == 1 and [check["level"] for check in report["ports"]] == [GOOD] * (2 * each - 1) + [FAILURE]


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        ({"vllm": "0.32.0", "torch": "2.13.0"}, GOOD),
        ({"vllm": "0.23.0", "torch": "2.10.0", "vllm-ascend": "0.23.0.post1", "torch_npu": "2.10.0.post4"}, GOOD),
        ({"vllm": "0.23.0", "torch": "2.10.0", "vllm-ascend": "0.23.0", "torch_npu": "2.10.0.post4"}, GOOD),
        ({"vllm": "0.23.0", "torch": "2.13.0", "vllm-ascend": "0.23.0.post1", "torch_npu": "2.13.0"}, FAILURE),
        ({"vllm": "0.23.0", "torch": "2.10.0", "vllm-ascend": "0.18.0", "torch_npu": "2.10.0.post4"}, FAILURE),
        ({"vllm": "0.30.0", "torch": "2.10.0", "vllm-ascend": "0.30.0rc2", "torch_npu": "2.10.0.post4"}, GOOD),
        ({"vllm": "0.30.0", "torch": "2.10.0", "vllm-ascend": "0.23.0", "torch_npu": "2.10.0.post4"}, FAILURE),
        ({"vllm": "0.28.0", "torch": "2.12.0"}, WARNING),
        ({"vllm": "", "torch": "2.13.0"}, FAILURE),
    ],
)
def test_releases_that_do_not_belong_together_are_distinguished(versions: Mapping[str, str], level: str) -> None:
    check = host.known_pair(versions)
    assert check.level == level
    if versions.get("torch_npu") == "2.13.0":
        assert "torch 2.10.0" in check.remedy and "torch_npu 2.10.0.post4" in check.remedy


def test_a_decode_engine_that_peers_cannot_reach_is_warned() -> None:
    push = PushConfig(metaserver=MetaserverConfig(metaserver_urls=("http://10.0.0.9:8000",)))
    (check,) = host.settings(host.HostOptions(push, role="kv_consumer"))
    assert check.level == WARNING and "cannot reach 127.0.0.1" in check.says and "VLLM_HOST_IP" in check.remedy
    assert not list(host.settings(host.HostOptions(push, role="kv_consumer", host="10.0.0.2")))


def test_ports_of_the_ascend_transport_are_refused_on_an_npu_host() -> None:
    assert host.port_is_free(LOOPBACK, 20100, on_npu=True).level == FAILURE
    assert host.port_is_free(LOOPBACK, 16000, on_npu=True).level == FAILURE


def test_before_a_start_a_missing_secret_and_a_misspelt_key_are_named(tmp_path: Path) -> None:
    config: dict[str, Any] = {"kv_connector": "AscendPushConnector", "kv_role": "kv_producer"}
    missing = config | {"kv_connector_extra_config": {"secret_file": str(tmp_path / "none")}}
    code, checks = doctor("--only-configuration", "--kv-transfer-config", json.dumps(missing))
    assert code == 1 and "PD-SEC-001" in checks["secret file"][0]["says"] and "admission" not in checks
    misspelt = json.dumps(config | {"kv_connector_extra_conf": {}})
    with redirect_stderr(io.StringIO()) as said:
        assert main(["doctor", "--only-configuration", "--kv-transfer-config", misspelt]) == 2
    assert "kv_connector_extra_conf" in said.getvalue() and "'kv_connector_extra_config'" in said.getvalue()


@pytest.mark.parametrize(
    ("span", "reserved", "level"),
    [("32768 60999", "", WARNING), ("36000 60999", "", GOOD), ("32768 60999", "20000-35999", GOOD),
     ("32768 60999", "8080,32768-35999", GOOD), ("32768 60999", "20000-30000", WARNING)],
)  # fmt: skip
def test_ports_that_the_kernel_gives_away_are_looked_at(tmp_path: Path, span: str, reserved: str, level: str) -> None:
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text(span.replace(" ", "\t") + "\n")
    (folder / "ip_local_reserved_ports").write_text(reserved + "\n")
    assert host.ephemeral(tmp_path).level == level


def test_an_allocator_with_which_vllm_refuses_connectors_is_named() -> None:
    refused, npu, none = (
        host.allocator(environ)
        for environ in (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:native,expandable_segments:True"},
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
            {},
        )
    )
    assert (refused.level, npu.level, none.level) == (FAILURE, GOOD, GOOD)


def test_a_list_of_plugins_names_this_package() -> None:
    given = ({}, {"VLLM_PLUGINS": "ascend,ascend_pd"}, {"VLLM_PLUGINS": "ascend"}, {"VLLM_PLUGINS": ""})
    assert [host.plugins(environ).level for environ in given] == [GOOD, GOOD, FAILURE, FAILURE]


def test_a_host_of_the_metaserver_is_not_asked_for_engines() -> None:
    code, report = doctor("--metaserver-host", "--ports", str(free_port()))
    assert code == 0 and report.keys() == {"packages", "ports", "open files", "clock"}


def test_changes_to_vllm_that_are_off_are_named_with_what_that_costs() -> None:
    tried, older, ascend = (
        host.hooks(*versions) for versions in (("0.32.0", ""), ("0.29.0", ""), ("0.30.0", "0.26.0"))
    )
    assert (tried.level, older.level, ascend.level) == (GOOD, WARNING, WARNING)
    assert "standstill: off, because vLLM 0.29.0 was not tried" in older.says
    assert "first token: off, because vllm-ascend 0.26.0 was not tried" in ascend.says


@pytest.mark.parametrize("versions", [("0.23.0", "0.23.0.post1"), ("0.31.0", "")])
def test_a_release_that_was_tried_with_some_changes_has_the_others_off(versions: tuple[str, str]) -> None:
    check = host.hooks(*versions)
    assert check.level == WARNING
    assert all(f"{change}: off" in check.says for change in ("grammars", "answers that go on"))
    assert "first token of a D with drafts: off" in check.says
    assert "first token: off" not in check.says and "standstill: off" not in check.says


def test_a_wrong_key_ends_the_check_before_a_start_without_an_import_of_vllm() -> None:
    """An import of vLLM takes many seconds, at each start of a deployment that is being set up."""
    text = json.dumps(
        {"kv_connector": "AscendPushConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"timeout": 1}}
    )
    program = (
        "import sys; from vllm_ascend_pd.cli.__main__ import main;"
        "code = main(['doctor', '--only-configuration', '--kv-transfer-config', sys.argv[1]]);"
        "print(code, sorted({'torch', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, text], capture_output=True, text=True, check=True, timeout=120
    )
    first, last = done.stdout.splitlines()
    assert first.startswith("FAILURE  configuration") and "timeout" in first and last == "1 []"


def test_limits_that_are_too_low_are_named(tmp_path: Path) -> None:
    levels = [next(iter(host.limits((1024, hard)))).level for hard in (1024, 20_000, 1 << 20, -1)]
    assert levels == [FAILURE, WARNING, GOOD, GOOD]
    assert list(host.limits(shm=tmp_path / "missing"))[1].level == FAILURE


def test_no_secret_beyond_this_host_is_a_failure() -> None:
    asked = host.HostOptions(host="10.0.0.1")
    assert host.secret(asked).level == FAILURE and "PD-SEC-002" in host.secret(asked).says
    open_ = PushConfig(channel=ChannelConfig(allow_unauthenticated=True))
    assert host.secret(dataclasses.replace(asked, push=open_)).level == WARNING


def test_metaservers_of_the_allow_list_are_called() -> None:
    with cluster(prefill=0, decode=0) as c, socket.socket() as unused:
        unused.bind((LOOPBACK, 0))
        urls = (str(c.http.base_url), "http://{}:{}".format(*unused.getsockname()), "https://10.0.0.1:1")
        push = PushConfig(metaserver=MetaserverConfig(metaserver_urls=urls))
        levels = [check.level for check in host.metaservers(host.HostOptions(push))]
    assert levels == [GOOD, WARNING, NOTE]


@pytest.mark.parametrize(("seconds", "level"), [((), GOOD), ((0,), GOOD), ((0, 7), FAILURE)])
def test_a_running_engine_is_asked_whether_a_revocation_does_not_end(seconds: tuple[int, ...], level: str) -> None:
    lines = [f'{PREFIX}revoking_seconds{{engine="{rank}",model_name="m"}} {n}.0' for rank, n in enumerate(seconds)]
    text = "\n".join(["# HELP other words", 'vllm:other{engine="0"} 3.0', *lines, ""])
    with foreign_server(f"HTTP/1.0 200 OK\r\n\r\n{text}".encode()) as port:
        code, report = doctor("--engine", f"http://{LOOPBACK}:{port}")
    assert {name: [check["level"] for check in checks] for name, checks in report.items()} == {"revocation": [level]}
    assert code == (level == FAILURE)
    assert level == GOOD or "for 7 s" in report["revocation"][0]["says"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp//nothing"])
def test_a_running_engine_that_does_not_answer_is_a_failure(url: str) -> None:
    code, report = doctor("--engine", url)
    assert code == 1 and [check["level"] for check in report["engine"]] == [FAILURE]


@contextmanager
def foreign_server(words: bytes) -> Iterator[int]:
    """Yield a port on which the first caller gets these bytes, whatever it sends."""
    with socket.create_server((LOOPBACK, 0)) as server:

        def answer() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(1000)
                caller.sendall(words)

        thread = threading.Thread(target=answer, name="foreign-server")
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


def test_an_address_of_the_allow_list_that_speaks_no_http_is_a_warning() -> None:
    with foreign_server(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        push = PushConfig(metaserver=MetaserverConfig(metaserver_urls=(f"http://{LOOPBACK}:{port}",)))
        (check,) = host.metaservers(host.HostOptions(push))
    assert check.level == WARNING and "SSH-2.0" in check.says


# ---- a host with NPUs, as its files look


def npu_host(root: Path, devices: int = 2, hccn: str = "address_0=10.0.0.1\naddress_1=10.0.0.2\n") -> Path:
    (root / "dev").mkdir(parents=True)
    for name in ("davinci_manager", *(f"davinci{i}" for i in range(devices))):
        (root / "dev" / name).touch()
    (root / "etc").mkdir()
    (root / "etc/hccn.conf").write_text(hccn)
    (root / "opt/cann").mkdir(parents=True)
    (root / "opt/cann/version.cfg").write_text("runtime_running_version=[9.1.0:9.1.0]\n")
    return root


def npu_checks(root: Path, **environ: str) -> dict[str, Check]:
    asked = host.HostOptions(on_npu=True, environ={"ASCEND_HOME_PATH": "/opt/cann", **environ})
    return {check.name: check for check in npu.checks(asked, root)}


def test_an_npu_host_that_has_everything_is_good(tmp_path: Path) -> None:
    root = npu_host(tmp_path)
    assert npu.present(root)
    checks = npu_checks(root, ASCEND_CONNECT_TIMEOUT="3000", ASCEND_TRANSFER_TIMEOUT="10000", HCCL_IF_IP=LOOPBACK)
    assert {name: check.level for name, check in checks.items()} == {
        "npu": GOOD, "cann": GOOD, "hccn.conf": GOOD, "links": NOTE, "net health": NOTE, "tls": NOTE,
        "super pod": NOTE, "environment": GOOD, "network": GOOD,
    }  # fmt: skip


def test_an_npu_without_an_address_or_a_file_is_named(tmp_path: Path) -> None:
    root = npu_host(tmp_path, hccn="address_0=10.0.0.1\n")
    assert "NPU 1" in npu_checks(root)["hccn.conf"].says
    (root / "etc/hccn.conf").unlink()
    assert npu_checks(root)["hccn.conf"].level == FAILURE
    assert npu_checks(root, ASCEND_HOME_PATH="")["cann"].level == FAILURE


@pytest.mark.parametrize(
    ("number", "level"), [("9.1.0", GOOD), ("9.1.1", GOOD), ("9.0.1", WARNING), ("8.3.0", FAILURE)]
)
def test_cann_is_compared_with_what_vllm_ascend_is_released_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, level: str
) -> None:
    root = npu_host(tmp_path)
    (root / "opt/cann/version.cfg").write_text(f"runtime_running_version=[{number}:{number}]\n")
    assert npu_checks(root)["cann"].level == GOOD  # no known pair names the CANN of this vLLM
    monkeypatch.setattr(npu, "version", lambda *names: "0.23.0")
    check = npu_checks(root)["cann"]
    assert check.level == level and number in check.says
    assert level == GOOD or "9.1.0" in check.remedy


def test_the_known_pair_is_the_examples_image_and_the_readmes_row() -> None:
    compose = (ROOT / "examples/docker-compose/compose.yaml").read_text()
    (image,) = set(re.findall(r"quay\.io/ascend/vllm-ascend:v(\S+)\n", compose))
    (row,) = (row for row in host.KNOWN if row.get("vllm-ascend") == image.partition("rc")[0])
    for readme in ("README.md", "README.zh-CN.md"):
        cells = f"| {row['vllm']} | {image} | {row['torch']} | {row['cann']} |"
        assert cells in (ROOT / readme).read_text()


@pytest.mark.parametrize(
    ("environ", "level", "says"),
    [
        ({}, NOTE, "eth0, eth1"),
        ({"HCCL_SOCKET_IFNAME": "eth1", "HCCL_IF_IP": LOOPBACK}, GOOD, LOOPBACK),
        ({"HCCL_SOCKET_IFNAME": "eth"}, GOOD, "no other"),
        ({"HCCL_SOCKET_IFNAME": "=eth1,bond0"}, GOOD, "no other"),
        ({"HCCL_SOCKET_IFNAME": "^eth0"}, GOOD, "no other"),
        ({"GLOO_SOCKET_IFNAME": "bond0"}, FAILURE, "bond0"),
        ({"TP_SOCKET_IFNAME": "data"}, FAILURE, "TP_SOCKET_IFNAME"),
        ({"HCCL_IF_IP": "198.51.100.7"}, FAILURE, "no address of this host"),
    ],
)
def test_the_network_that_hccl_takes_is_one_of_this_host(environ: dict[str, str], level: str, says: str) -> None:
    check = npu.network(environ, ("lo", "eth0", "eth1"))
    assert check.level == level and says in check.says


def test_a_link_that_is_down_is_named(tmp_path: Path) -> None:
    with_tool(npu_host(tmp_path), npu.TOOL)
    said = {"0": "link status: UP\n", "1": "link status: DOWN\n"}
    levels = [check.level for check in npu.links(tmp_path, [0, 1], lambda words: said[words[2]])]
    assert levels == [GOOD, FAILURE]


def with_tool(root: Path, name: str) -> Path:
    (root / name).parent.mkdir(parents=True)
    (root / name).touch()
    return root


def test_an_npu_whose_own_probe_finds_no_network_is_named(tmp_path: Path) -> None:
    """Words of the vendor's manual; no NPU has said them here."""

    def check(*statuses: str) -> Check:
        return npu.health(tmp_path, [0, 1], lambda words: f"net health status: {statuses[int(words[2])]}\n")

    assert check("Success", "Success").level == NOTE, "hccn_tool is not here"
    with_tool(tmp_path, npu.TOOL)
    assert check("Success", "Success").level == GOOD
    assert check("Success", "Receive timeout").level == WARNING
    assert check("Init", "Receive timeout").says == "NPU 0: Init, NPU 1: Receive timeout"
    assert npu.health(tmp_path, [0], lambda _: "cmd execution failed").level == NOTE
    assert npu.health(tmp_path, [], lambda _: "").level == NOTE


def test_the_super_pod_of_a_host_is_said_and_others_have_none(tmp_path: Path) -> None:
    rows = {"SDID": 16777216, "Super Pod Size": 384, "Super Pod ID": 3, "Server Index": 4}
    said = "".join(f"\t{name:<30} : {value}\n" for name, value in rows.items())
    assert npu.super_pod(tmp_path, lambda _: said).level == NOTE, "npu-smi is not here"
    with_tool(tmp_path, npu.SMI)
    check = npu.super_pod(tmp_path, lambda words: said if words[1:4] == ["info", "-t", "spod-info"] else "")
    assert check.level == GOOD and check.says.startswith("3, server 4 ")
    other = npu.super_pod(tmp_path, lambda _: "This device does not support querying spod-info.\n")
    assert other.level == GOOD and other.says.startswith("none")
    failed = npu.super_pod(tmp_path, lambda _: "dcmi module initialize failed. ret is -8005\n")
    assert failed.level == NOTE and "ret is -8005" in failed.says


def test_npus_have_one_tls_switch(tmp_path: Path) -> None:
    """As hccn_tool prints it; no NPU has said it here."""

    def check(*switches: str) -> Check:
        line = "dev_id:{}, tls switch[{}](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset)\n"
        return npu.tls(tmp_path, [0, 1], lambda words: line.format(words[2], switches[int(words[2])]))

    assert check("0", "0").level == NOTE, "hccn_tool is not here"
    with_tool(tmp_path, npu.TOOL)
    assert check("0", "0").level == check("1", "1").level == GOOD
    assert check("0", "1").level == FAILURE and "NPU 0: 0, NPU 1: 1" in check("0", "1").says
    assert npu.tls(tmp_path, [0, 1], lambda _: "cmd execution failed").level == NOTE


def test_mooncakes_timeouts_must_end_before_the_package_gives_up(tmp_path: Path) -> None:
    root = npu_host(tmp_path)
    assert npu_checks(root)["environment"].level == GOOD  # value that the package sets
    assert npu_checks(root, ASCEND_TRANSFER_TIMEOUT="33000")["environment"].level == FAILURE
    assert npu_checks(root, ASCEND_CONNECT_TIMEOUT="soon")["environment"].level == FAILURE
    good = {"ASCEND_CONNECT_TIMEOUT": "3000", "ASCEND_TRANSFER_TIMEOUT": "10000"}
    both = {"ASCEND_BUFFER_POOL": "4:8", "ASCEND_USE_ASYNC_TRANSFER": "1"}
    assert npu_checks(root, **good, **both)["environment"].level == FAILURE


# ---- a pair


@needs_mooncake
def test_two_mebibytes_are_written_and_checked_both_ways(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    flags = ["--secret-file", secret_file(tmp_path), "--model", str(tmp_path)]
    with listening(*flags, "--tp", "2") as address:
        code, report = doctor("--peer", address, *flags, "--tp", "8", "--dcp", "2")
    assert code == 0, report
    assert "signed" in report["side channel"][0]["says"]
    assert "TP 8 × DCP 2 here and TP 2 there" in report["cache"][0]["says"]
    for way in ("write there", "write back"):
        assert report[way][0]["level"] == GOOD and "2 MiB with the right checksum" in report[way][0]["says"]
    assert report["clocks"][0]["level"] == GOOD


@needs_mooncake
def test_caches_that_do_not_fit_are_shown_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with listening("--model", str(tmp_path), "--dtype", "fp32") as address:
        code, report = doctor("--peer", address, "--model", str(tmp_path))
    assert code == 1
    said = " ".join(check["says"] for check in report["cache"])
    assert "PD-GEO-001" in said and "dtype" in said


def test_another_secret_is_distinguished_from_none_and_from_no_listener(tmp_path: Path) -> None:
    with listening("--secret-file", secret_file(tmp_path), calls=3) as address:
        _, other = doctor("--peer", address, "--secret-file", secret_file(tmp_path, "other", "y"))
        _, none = doctor("--peer", address)
        assert "PD-SEC-003" in other["side channel"][0]["says"] and "PD-SEC-003" in none["side channel"][0]["says"]
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        code, none = doctor("--peer", "{}:{}".format(*free.getsockname()))
    assert code == 1 and "cannot be reached" in none["side channel"][0]["says"]
    assert "--listen" in none["side channel"][0]["remedy"]


def test_an_engines_side_channel_answers_the_doctors_greeting() -> None:
    """A listener as in a decode worker."""
    loop, answering = LoopThread("answering"), AnsweringListener()
    try:
        endpoint = loop.call(answering.listener.start(), 10)
        checks = {
            check.name: check for check in pair.call(pair.DoctorSide(host.HostOptions(), None), LOOPBACK, endpoint.port)
        }
    finally:
        loop.call(answering.listener.close(), 10)
        loop.stop()
    assert checks["side channel"].level == GOOD
    assert checks["write"].level == NOTE and "an engine answers" in checks["write"].says


def test_a_port_that_is_no_side_channel_is_said_to_be_none() -> None:
    with foreign_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        (check,) = pair.call(pair.DoctorSide(host.HostOptions(), None), LOOPBACK, port)
    assert check.level == FAILURE and "side channel's port" in check.remedy


def test_a_wrong_checksum_and_a_failed_write_are_failures() -> None:
    right = pair.WriteResult("", "a", 0.01)
    assert pair.judged("write", right, "a").level == GOOD
    assert pair.judged("write", right, "b").level == FAILURE
    assert pair.judged("write", pair.WriteResult("the write failed", "a", 1.0), "a").level == FAILURE


def test_what_another_doctor_says_is_one_line_of_this_ones() -> None:
    ours = pair.DoctorSide(host.HostOptions(), None).facts()
    theirs = pair.Facts(**{**_fields(ours), "vllm": "1\nok       write               good\x1b[2K"})
    lines = [check.line() for check in pair.differences(ours, theirs)]
    assert any("ok       write" in line for line in lines) and all(line.isprintable() for line in lines)


def test_what_differs_between_two_hosts_is_shown_with_both_values() -> None:
    ours = pair.DoctorSide(host.HostOptions(), None).facts()
    theirs = pair.Facts(**{**_fields(ours), "package": "9.9", "vllm": "0.1", "protocol": "ascend"})
    differences = {(check.level, check.says.split(" ")[0]) for check in pair.differences(ours, theirs)}
    assert {(FAILURE, "package"), (FAILURE, "protocol"), (WARNING, "vllm")} <= differences
    assert not [check for check in pair.differences(ours, ours) if check.level == FAILURE]


def test_a_forged_frame_ends_the_conversation() -> None:
    secrets = Secrets(b"x" * 40)
    ours, theirs = socket.socketpair()
    one, other = Line(ours), Line(theirs)
    greeting = threading.Thread(target=other.greet_as_listener, args=(secrets,), name="listener")
    greeting.start()
    one.greet_as_dialer(secrets)
    greeting.join()
    one.say(pair.ReadResult("fine"))
    assert other.receive(pair.ReadResult, 5.0).digest == "fine"
    ours.sendall((44).to_bytes(4, "big") + bytes([2]) + os.urandom(43))
    with pytest.raises(Broken):
        other.receive(pair.ReadResult, 5.0)
    one.close()
    other.close()


def test_a_silent_peer_costs_seconds_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ascend_pd.cli.checkup import line

    monkeypatch.setattr(line, "GREETING_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as silent:
        called = dial(LOOPBACK, silent.getsockname()[1])
        with pytest.raises(Broken, match="no answer within"):
            called.greet_as_dialer(None)
        called.close()


def _fields(facts: pair.Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


def test_an_unknown_key_is_one_failure_and_the_other_checks_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "kv_connector": "AscendPushConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"lesae_s": 2},
    }
    assert main(["doctor", "--kv-transfer-config", json.dumps(given)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if line.startswith("FAILURE")]
    assert "PD-CONF-001: Unknown key 'lesae_s'" in failed and "lease_s" in failed
    assert {"python", "versions", "clock", "admission"} <= {line.split()[1] for line in lines}


def test_json_nested_without_end_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kv-transfer-config", "[" * 100_000]) == 2
    assert capsys.readouterr().err.startswith("PD-CONF-003")
