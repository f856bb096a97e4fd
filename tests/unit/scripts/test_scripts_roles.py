# SPDX-License-Identifier: Apache-2.0
"""prefill.sh, decode.sh, metaserver.sh: flags, environment and defaults become one command; --dry-run shows it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.config import ChannelConfig, MetaserverConfig, PushConfig, reference
from vllm_ascend_pd.router.command import settings_of
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.settings import reference as flags_reference

ROOT = Path(__file__).resolve().parents[3]
ROLES = ("prefill", "decode", "metaserver")
ENGINES = ("prefill", "decode")


def run(script: str, *flags: str, device: str = "cpu", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PD_")}
    # `python3` is this one: a shim that looks for one first takes most of a dry run's time.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = clean | {"PATH": path, "PD_PYTHON": "/some/python", "PD_DEVICE": device} | environment
    words = [str(ROOT / "scripts" / f"{script}.sh"), *flags]
    return subprocess.run(words, env=env, check=False, capture_output=True, text=True, timeout=240)


class DryRun:
    """Parse what --dry-run printed: environment, interpreter, arguments."""

    def __init__(self, line: str) -> None:
        words = shlex.split(line)
        self.environment = {}
        if words[0] == "env":
            words.pop(0)
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                self.environment[name] = value
        self.python, self.module = words[0], words[2]
        self.words = words[3:]
        if self.module == "vllm.entrypoints.cli.main":
            assert self.words.pop(0) == "serve" and not self.words[0].startswith("-"), "the model"

    def value(self, flag: str) -> str | None:
        return self.words[self.words.index(flag) + 1] if flag in self.words else None

    @property
    def kv_transfer_config(self) -> Any:
        return json.loads(self.value("--kv-transfer-config"))

    @property
    def push_config(self) -> PushConfig:
        return PushConfig.parse(self.kv_transfer_config["kv_connector_extra_config"])


def dry(script: str, *flags: str, **environment: str) -> DryRun:
    done = run(script, "--dry-run", *flags, **environment)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return DryRun(line)


@pytest.mark.parametrize("role", ROLES)
def test_help_names_every_flag_with_its_variable_and_default(role: str) -> None:
    done = run(role, "--help")
    assert done.returncode == 0
    flags = re.findall(r"^  --([a-z-]+)(.*)\n +\S.*\n(?: +\[(.*)\]\n)?", done.stdout, re.MULTILINE)
    assert len(flags) > 4
    for name, value, described in flags:
        assert not value or re.fullmatch(r"PD_[A-Z_]+, default: \S.*", described), name


@pytest.mark.ci
@pytest.mark.parametrize("role", ROLES)
def test_every_variable_that_help_names_does_what_its_flag_does(role: str) -> None:
    text = run(role, "--help").stdout
    settings = re.findall(r"^  --([a-z-]+) VALUE.*\n.*\n +\[(PD_[A-Z_]+), default", text, re.MULTILINE)
    special = {
        "eager": "off",
        "policy": "fail",
        "verify": "full",
        "set": "lease_s=9",
        "kv-bytes": "12345",
        "experts": "on",
        "graph-mode": "PIECEWISE",
        "speculative": '{"method": "mtp"}',
    }
    model = () if role == "metaserver" else ("--model", "some-model")
    plain = dry(role, *model)
    for flag, variable in settings:
        value = special.get(flag, "4321")
        by_flag = dry(role, *model, f"--{flag}", value, device="npu" if flag == "devices" else "cpu")
        by_variable = dry(role, *model, **{variable: value}, device="npu" if flag == "devices" else "cpu")
        if flag == "model":  # a flag that is always given overrides the variable
            continue
        assert vars(by_flag) == vars(by_variable), flag
        assert vars(by_flag) != vars(plain), f"--{flag} changes nothing"


@pytest.mark.parametrize("role", ENGINES)
def test_a_flag_wins_over_the_environment(role: str) -> None:
    variable = {"prefill": "PD_P_TP", "decode": "PD_D_TP"}[role]
    assert dry(role, "--model", "m", "--tp", "4", **{variable: "2"}).value("--tensor-parallel-size") == "4"


@pytest.mark.parametrize(
    ("role", "flags", "complaint"),
    [
        ("prefill", ["--model", "m", "--no-such-flag", "1"], "unknown flag --no-such-flag"),
        ("prefill", ["--model"], "--model needs a value"),
        ("prefill", ["--tp", "2"], "--model is required"),
        ("prefill", ["--model", "m", "--tp", "two"], "--tp two"),
        ("prefill", ["--model", "m", "stray"], "unexpected argument stray"),
        ("prefill", ["--model", "m", "--dry-run=1"], "--dry-run takes no value"),
        ("prefill", ["--model", "m", "--graph-mode", "FULL_DECODE_ONLY"], "for prefill NONE or PIECEWISE is wanted"),
        ("decode", ["--model", "m", "--graph-mode", "or"], "--graph-mode or"),
        ("decode", ["--model", "m", "--graph-mode", "FULL", "--eager", "on"], "--graph-mode goes without --eager on"),
        ("decode", ["--model", "m", "--speculative", "mtp"], "--speculative mtp: a JSON object is wanted"),
        ("decode", ["--model", "m", "--headless"], "--headless is for further ranks"),
        ("decode", ["--model", "m", "--experts", "yes"], "--experts yes"),
        ("decode", ["--model", "m", "--dp-rank", "1", "--dp-size-local", "2"], "--dp-rank is one rank"),
        ("decode", ["--model", "m", "--policy", "hope"], "--policy hope"),
        ("decode", ["--model", "m", "--set", "lease_s"], "--set lease_s"),
        ("metaserver", ["--port", "http"], "--port http"),
    ],
)
def test_a_wrong_flag_is_named_and_nothing_starts(role: str, flags: Sequence[str], complaint: str) -> None:
    done = run(role, *flags)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not done.stdout


def test_prefill_is_a_producer_and_decode_a_consumer_with_its_metaservers() -> None:
    prefill = dry("prefill", "--model", "m").kv_transfer_config
    assert prefill["kv_connector"] == "AscendPushConnector"
    assert prefill["kv_role"] == "kv_producer"
    decode = dry("decode", "--model", "m", "--metaserver", "http://a:1", "--metaserver=http://b:2")
    assert decode.kv_transfer_config["kv_role"] == "kv_consumer"
    assert decode.kv_transfer_config["kv_load_failure_policy"] == "recompute"
    assert decode.push_config.metaserver.metaserver_urls == ("http://a:1", "http://b:2")


@pytest.mark.parametrize("role", ENGINES)
def test_the_connector_accepts_the_configuration_that_the_flags_make(role: str, tmp_path: Path) -> None:
    port_flags = ("--side-channel-port", "7000") if role == "decode" else ()
    config = dry(
        role, "--model", "m", "--secret-file", str(tmp_path / 'odd "name"'), "--verify", "full", "--trace-dir", "relative",
        *port_flags, "--mooncake-protocol", "tcp", "--set", "lease_s=10", "--set", "regroup=never",
        "--set", "patient=false",
    ).push_config  # fmt: skip
    assert config.channel.secret_file == str(tmp_path / 'odd "name"')
    assert config.wire.verify == "full"
    assert Path(config.observe.trace_dir).is_absolute(), "engines change their directory"
    assert config.channel.side_channel_port == (7000 if port_flags else 0)
    assert config.timers.lease_s == 10.0
    assert config.regroup.regroup == "never"
    assert config.observe.patient is False


@pytest.mark.parametrize("role", ENGINES)
def test_what_follows_two_dashes_goes_to_vllm_as_it_is(role: str) -> None:
    command = dry(role, "--model", "m", "--", "--max-num-seqs", "4", "--dry-run", "--help", "two words")
    assert command.words[-5:] == ["--max-num-seqs", "4", "--dry-run", "--help", "two words"]


@pytest.mark.parametrize("role", ENGINES)
def test_cpu_engines_get_the_settings_without_which_they_fail(role: str) -> None:
    command = dry(role, "--model", "m")
    assert command.module == "vllm.entrypoints.openai.api_server"
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert command.environment["OMP_NUM_THREADS"] == "1"
    assert "--enforce-eager" in command.words
    assert int(command.value("--kv-cache-memory-bytes")) > 0
    assert command.value("--dtype") == "float32"
    assert dry(role, "--model", "m", "--dtype", "bfloat16").value("--dtype") == "bfloat16"


@pytest.mark.parametrize("role", ENGINES)
def test_npu_engines_keep_vllm_ascends_own_choices(role: str) -> None:
    command = dry(role, "--model", "m", "--devices", "2,3", device="npu")
    assert command.environment == {"VLLM_HOST_IP": "127.0.0.1", "ASCEND_RT_VISIBLE_DEVICES": "2,3"}
    assert "--enforce-eager" not in command.words
    assert command.value("--kv-cache-memory-bytes") is command.value("--dtype") is None
    assert command.value("--compilation-config") is None


def test_cpu_pipeline_stages_use_the_eager_compilation_backend_instead_of_enforce_eager() -> None:
    command = dry("prefill", "--model", "m", "--pp", "2")
    assert "--enforce-eager" not in command.words
    assert json.loads(command.value("--compilation-config")) == {"mode": 2, "backend": "eager"}


RANKS = [
    ("--dp 4", {"data_parallel_size": 4}),
    (
        "--dp 32 --dp-size-local 16 --dp-start-rank 16 --dp-address 10.0.0.1 --dp-rpc-port 13345 --experts on",
        {
            "data_parallel_size": 32,
            "data_parallel_size_local": 16,
            "data_parallel_start_rank": 16,
            "data_parallel_address": "10.0.0.1",
            "data_parallel_rpc_port": 13345,
            "data_parallel_hybrid_lb": True,
            "enable_expert_parallel": True,
        },
    ),
    (
        "--dp 32 --dp-rank 3 --dp-address 10.0.0.1 --experts on",
        {"data_parallel_size": 32, "data_parallel_rank": 3, "data_parallel_hybrid_lb": False, "enable_expert_parallel": True},
    ),
    (
        "--dp 4 --dp-size-local 2 --dp-address 10.0.0.1",
        {"data_parallel_size_local": 2, "data_parallel_start_rank": None, "data_parallel_hybrid_lb": False, "headless": False},
    ),
    (
        "--dp 4 --dp-size-local 2 --dp-start-rank 2 --dp-address 10.0.0.1 --headless",
        {"data_parallel_size_local": 2, "data_parallel_start_rank": 2, "data_parallel_hybrid_lb": False, "headless": True},
    ),
]  # fmt: skip


def understood_by_vllm(command: DryRun) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(command.words)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    RANKS,
    ids=[
        "one server",
        "a server for each host",
        "a server for each rank",
        "one server for two hosts",
        "the other host",
    ],
)
@pytest.mark.parametrize("role", ENGINES)
def test_vllms_own_parser_understands_the_ranks(role: str, flags: str, wanted: dict[str, Any]) -> None:
    parsed = understood_by_vllm(dry(role, "--model", "m", *flags.split()))
    assert {name: getattr(parsed, name) for name in wanted} == wanted


def test_a_host_without_a_server_is_started_by_the_command_that_knows_what_headless_means() -> None:
    """The API server's own module accepts the flag too, but still starts a server."""
    flags = ["--dp", "4", "--dp-size-local", "2", "--dp-start-rank", "2", "--dp-address", "10.0.0.1"]
    assert dry("decode", "--model", "m", *flags, "--headless").module == "vllm.entrypoints.cli.main"
    assert dry("decode", "--model", "m", *flags).module == "vllm.entrypoints.openai.api_server"


def test_the_vllm_command_starts_an_engine_where_there_is_one() -> None:
    command = dry("decode", "--model", "m", device="npu")
    assert command.module == "vllm.entrypoints.cli.main" and understood_by_vllm(command).model_tag == "m"


def test_a_pipeline_on_d_under_vllm_ascend_schedules_one_step_at_a_time() -> None:
    ahead = {
        (role, pp): understood_by_vllm(dry(role, "--model", "m", "--pp", pp, device="npu")).async_scheduling
        for role in ENGINES
        for pp in ("1", "2")
    }
    assert [of for of, value in ahead.items() if value is False] == [("decode", "2")]


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize(("role", "mode"), [("prefill", "PIECEWISE"), ("decode", "FULL_DECODE_ONLY")])
def test_vllms_own_parser_understands_draft_and_graphs(role: str, mode: str, device: str) -> None:
    draft = '{"method": "deepseek_mtp", "num_speculative_tokens": 2}'
    command = dry(role, "--model", "m", "--speculative", draft, "--graph-mode", mode, device=device)
    parsed = understood_by_vllm(command)
    assert parsed.speculative_config == json.loads(draft)
    assert parsed.compilation_config.cudagraph_mode.name == mode


def test_graphs_and_what_a_cpu_needs_are_one_compilation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    command = dry("prefill", "--model", str(tmp_path), "--pp", "2", "--graph-mode", "NONE")
    compilation = understood_by_vllm(command).compilation_config
    assert command.words.count("--compilation-config") == 1
    assert (compilation.cudagraph_mode.name, compilation.backend) == ("NONE", "eager")
    assert compilation.custom_ops == ["-rotary_embedding"]


def test_mla_models_on_cpu_run_without_the_rotary_kernel_that_is_wrong_for_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}, indent=2))
    command = dry("prefill", "--model", str(tmp_path))
    assert json.loads(command.value("--compilation-config")) == {"custom_ops": ["-rotary_embedding"]}
    assert command.value("--attention-backend") == "CPU_MLA", "the same on every processor, with or without AMX"
    assert command.environment["HF_HUB_OFFLINE"] == "1"
    both = dry("prefill", "--model", str(tmp_path), "--pp", "2")
    assert json.loads(both.value("--compilation-config")).keys() == {"mode", "backend", "custom_ops"}
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": None}))
    assert dry("prefill", "--model", str(tmp_path)).value("--compilation-config") is None


@pytest.mark.parametrize("role", ENGINES)
def test_without_flags_an_engine_has_the_declared_defaults(role: str) -> None:
    address = ChannelConfig(side_channel_host="127.0.0.1")
    urls = MetaserverConfig(metaserver_urls=("http://127.0.0.1:8000",) if role == "decode" else ())
    assert dry(role, "--model", "m").push_config == PushConfig(channel=address, metaserver=urls)


def test_without_flags_a_metaserver_has_the_declared_defaults() -> None:
    settings = settings_of(parser().parse_args(dry("metaserver").words))
    assert settings == Settings(prefill=("http://127.0.0.1:8001",), decode=("http://127.0.0.1:8002",))


@pytest.mark.parametrize(("role", "count"), [("prefill", 5), ("decode", 6), ("metaserver", 4)])
def test_what_is_declared_in_the_package_is_not_said_again_in_a_table(role: str, count: int) -> None:
    """--help has default and meaning of a setting from its declaration, through the tables of docs/configuration.md."""
    table = flags_reference() if role == "metaserver" else reference()
    cells = [[cell.strip().replace("`", "") for cell in line.split("|")] for line in table.splitlines()[2:]]
    declared = {
        name.removeprefix("--").replace("_", "-"): (meaning, default) for _, name, default, _, meaning, *_ in cells
    }
    shown = re.findall(
        r"^  --([a-z-]+)[^\n]*\n +([^\n]*)\n +\[PD_[A-Z_]+, default: ([^\]]*)\]", run(role, "--help").stdout, re.M
    )
    described = {name: (meaning, default) for name, meaning, default in shown if name in declared}
    assert len(described) == count
    for name, (meaning, default) in described.items():
        has_own_default = name in ("prefill", "decode")  # the script has addresses where the program has none
        assert meaning == declared[name][0].removesuffix(" (metaserver only)") and (
            has_own_default or default == (declared[name][1].strip('"') or "not set")
        ), name


def test_the_metaservers_own_parser_accepts_what_the_script_makes() -> None:
    engines = ("--prefill", "http://a:1", "--prefill", "http://b:2", "--decode", "http://c:3")
    command = dry("metaserver", *engines, "--port", "9000")
    parsed = parser().parse_args(command.words)
    assert command.module == "vllm_ascend_pd.cli"
    assert (parsed.prefill, parsed.decode, parsed.port) == (["http://a:1", "http://b:2"], ["http://c:3"], 9000)


@pytest.mark.parametrize(
    ("role", "flags", "config", "reason"),
    [
        ("prefill", ("--set", "lesae_s=3"), {}, "PD-CONF-001: Unknown key 'lesae_s'"),
        ("decode", ("--set", "lesae_s=3"), {}, "PD-CONF-001: Unknown key 'lesae_s'"),
        ("prefill", (), {"mamba_d_state": 16}, "PD-CONF-005: A model with recurrent states (mamba_d_state)"),
        ("decode", (), {"mamba_d_state": 16}, "PD-CONF-005: A model with recurrent states (mamba_d_state)"),
        (
            "decode",
            ("--pp", "2", "--speculative", '{"method": "mtp"}'),
            {},
            "PD-CONF-005: A draft model with pipeline parallelism",
        ),
        (
            "prefill",
            ("--speculative", '{"method": "medusa"}'),
            {},
            "PD-CONF-005: Speculative decoding with medusa",
        ),
    ],
)
def test_what_an_engine_would_refuse_is_the_last_line_before_anything_starts(
    role: str, flags: Sequence[str], config: dict[str, int], reason: str, tmp_path: Path
) -> None:
    full = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({**full, **config}))
    done = run(role, "--no-setup", "--model", str(tmp_path), *flags, PD_PYTHON=sys.executable)
    assert done.returncode == 1 and not done.stdout
    assert reason in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
